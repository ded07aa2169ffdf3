"""The sizes that steps are padded to. No JAX."""

from collections.abc import Iterable
from typing import NamedTuple

from shiftjax.parallel.layout import Layout, round_up

SMALLEST_TOKENS = 8  # fewer rows are no faster: a decode step is bound by reading the weights


class Bucket(NamedTuple):
    """The padded size of a step: tokens, and logit rows (which also caps its sequences)."""

    tokens: int
    rows: int

    def holds(self, tokens: int, rows: int) -> bool:
        """Whether a step of so many tokens and logit rows fits."""
        return self.tokens >= tokens and self.rows >= rows


def doubling(max_tokens: int) -> tuple[int, ...]:
    """Return token counts that double from `SMALLEST_TOKENS` up to `max_tokens`."""
    sizes, size = [], SMALLEST_TOKENS
    while size < max_tokens:
        sizes.append(size)
        size *= 2
    return (*sizes, max_tokens)


def make_buckets(sizes: Iterable[int], max_rows: int, layout: Layout) -> list[Bucket]:
    """Return a bucket per token count, padded so that P devices can split tokens and rows.

    Rows are padded like tokens: the LM head of one row alone is ten times slower on a CPU. For
    the same reason BASE never leaves a device with a single token.
    """
    devices, rows = layout.num_devices, max(max_rows, SMALLEST_TOKENS)
    least = 2 * layout.sp if layout.sp > 1 else 1
    buckets = [
        Bucket(round_up(max(n, least), devices), round_up(min(n, rows), devices)) for n in sizes
    ]
    return list({bucket.tokens: bucket for bucket in buckets}.values())
