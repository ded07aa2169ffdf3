"""APIs of others, read as chats and written from the same pieces. No JAX."""
