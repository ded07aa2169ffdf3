"""The gRPC front end: inference, health, reflection, and an administrator's listener."""
