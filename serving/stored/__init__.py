"""What is kept of clients between requests: responses, conversations, files, batches. No JAX."""
