"""A third tier for KV blocks, in files: what falls out of host memory, also after a restart."""
