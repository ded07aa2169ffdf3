"""What an engine is made of: requests, scheduler, blocks, policies, the loop. No JAX."""
