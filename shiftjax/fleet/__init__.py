"""Groups of devices of several widths over the same units, which come and go."""
