"""The paged KV cache: block accounting and device memory."""
