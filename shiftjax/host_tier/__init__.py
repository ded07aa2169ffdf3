"""A second tier for KV blocks, in host memory."""
