"""What both front ends share: the service, the engine thread, texts and schemas."""
