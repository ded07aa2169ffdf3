"""APIs of others, read as chats or completions, and written from the same pieces. No JAX."""
