"""Guesses of the next tokens, which a step verifies: made, rated and chosen on the host. No JAX."""
