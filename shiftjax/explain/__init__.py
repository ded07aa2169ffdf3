"""What steps, sizes and groups would have cost otherwise, told to who asks. No JAX."""
