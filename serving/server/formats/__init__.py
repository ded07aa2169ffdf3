"""How models write what they say: calls of tools, reasoning, answers in a form. No JAX."""
