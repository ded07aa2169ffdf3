"""Mesh axes, modes and sharding; Ulysses sequence parallelism."""
