"""Sizes of steps, and the order of prompts, by what steps cost. No JAX."""
