"""One engine on the devices of several hosts."""
