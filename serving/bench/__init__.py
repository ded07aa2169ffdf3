"""`shiftjax bench serve`: load on an OpenAI-compatible server, and what it felt like. No JAX."""
