"""The control plane: requests, scheduling, policies and the loop. No JAX."""
