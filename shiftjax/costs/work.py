"""What a step computes, in the sums that its costs are made of. No JAX."""

from typing import NamedTuple


class Work(NamedTuple):
    """What a step computes, summed over its sequences."""

    num_tokens: int
    num_rows: int  # logit rows
    num_sequences: int
    context_tokens: int  # that decodes read, their own token included
    chunk_context_tokens: int  # that prompt chunks read
    attention_pairs: int  # (query, key) pairs of prompt chunks
    num_decodes: int = 0  # tokens that attend one by one, drafts among them; all others: chunks

    @classmethod
    def decode(cls, num_sequences: int, context: int) -> "Work":
        """One token of each of `num_sequences` sequences with this context."""
        n = num_sequences
        return cls(n, n, n, n * context, 0, 0, n)

    @classmethod
    def prefill(cls, num_tokens: int, start: int = 0) -> "Work":
        """A chunk of one prompt after `start` tokens, sampling its last row."""
        n = num_tokens
        return cls(n, 1, 1, 0, start + n, n * start + n * (n + 1) // 2)

    def within(self, window: int | None) -> "Work":
        """The same where a token attends to no more than the last `window`, itself included.

        From the means: exact where all decodes have one context, and all chunks one size and start.
        """
        if window is None:
            return self
        decodes = max(1, self.num_decodes)
        context = min(self.context_tokens, decodes * window)
        tokens = self.num_tokens - self.num_decodes
        if not self.attention_pairs or not tokens:
            return self._replace(context_tokens=context)
        mean = self.chunk_context_tokens / tokens  # (start + size) / size
        size = (self.attention_pairs / tokens - 0.5) / (mean - 0.5)
        start = size * (mean - 1)
        free = min(size, max(0.0, window - start))  # tokens that see all that came before
        pairs = free * start + free * (free + 1) / 2 + (size - free) * window
        return self._replace(
            context_tokens=context,
            chunk_context_tokens=round(tokens / size * min(start + size, size + window - 1)),
            attention_pairs=round(tokens / size * pairs),
        )
