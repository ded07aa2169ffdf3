"""What a step computes, in the sums that its costs are made of. No JAX."""

from typing import NamedTuple

from pallas_kernels.window import Chunk, Window


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

    def within(self, window: Window | None) -> "Work":
        """The same where tokens see no further back than a window.

        From the means: exact where all decodes have one context, and all chunks one size and start.
        Decodes beyond the first chunk (`Chunk`) are taken to see half of one, as they do on
        average: where in theirs they are, sums do not tell.
        """
        if window is None:
            return self
        if isinstance(window, Chunk):
            return self._within_chunks(window.tokens)
        decodes = max(1, self.num_decodes)
        context = min(self.context_tokens, decodes * window)
        tokens = self.num_tokens - self.num_decodes
        if not self.attention_pairs or not tokens:
            return self._replace(context_tokens=context)
        size, start = self._mean_chunk(tokens)
        free = min(size, max(0.0, window - start))  # tokens that see all that came before
        pairs = free * start + free * (free + 1) / 2 + (size - free) * window
        return self._replace(
            context_tokens=context,
            chunk_context_tokens=round(tokens / size * min(start + size, size + window - 1)),
            attention_pairs=round(tokens / size * pairs),
        )

    def _within_chunks(self, chunk: int) -> "Work":
        context = self.context_tokens
        if context > self.num_decodes * chunk:
            context = self.num_decodes * (chunk + 1) // 2
        tokens = self.num_tokens - self.num_decodes
        if not self.attention_pairs or not tokens:
            return self._replace(context_tokens=context)
        size, start = (round(each, 6) for each in self._mean_chunk(tokens))  # as whole as they are
        read = start % chunk + size  # from where the chunk of the first token begins
        pairs = _pairs_in_chunks(start + size, chunk) - _pairs_in_chunks(start, chunk)
        return self._replace(
            context_tokens=context,
            chunk_context_tokens=round(tokens / size * read),
            attention_pairs=round(tokens / size * pairs),
        )

    def _mean_chunk(self, tokens: int) -> tuple[float, float]:
        """Return the size and the start of the chunks of prompts, which have so many tokens."""
        mean = self.chunk_context_tokens / tokens  # (start + size) / size
        size = (self.attention_pairs / tokens - 0.5) / (mean - 0.5)
        return size, size * (mean - 1)


def _pairs_in_chunks(end: float, chunk: int) -> float:
    """Return how many keys the first `end` tokens of a context see, all together."""
    whole, rest = divmod(end, chunk)
    return (whole * chunk * (chunk + 1) + rest * (rest + 1)) / 2
