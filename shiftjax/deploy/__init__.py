"""From settings to a deployment: what is built, and what it takes. No JAX."""
