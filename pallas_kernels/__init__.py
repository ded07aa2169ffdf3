"""Attention kernels for accelerators, and the plain reference that they are held against."""
