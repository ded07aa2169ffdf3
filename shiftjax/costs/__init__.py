"""What a step costs: machines, collectives, and the seconds of a step. No JAX."""
