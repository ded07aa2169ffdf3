"""The sizes that steps are padded to. No JAX."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout, round_up

SMALLEST_TOKENS = 8  # fewer rows are no faster where a step is bound by reading the weights
LEAST_GAIN = 0.2  # of its products' time, for which a size of its own is compiled
MANY_TOKENS = 64  # from here on a model whose late layers compute rows alone gains by few rows


class Bucket(NamedTuple):
    """The padded size of a step: tokens, logit rows, and sequences where they are fewer."""

    tokens: int
    rows: int
    max_seqs: int | None = None
    rows_alone: bool = False  # kernels: each token attends as a row; a larger bucket has tiles
    has_adapters: bool = False  # of some of its tokens

    @property
    def seqs(self) -> int:
        """Sequences: those of drafts have several rows."""
        return self.rows if self.max_seqs is None else self.max_seqs

    def holds(self, tokens: int, rows: int, seqs: int) -> bool:
        """Whether a step of so many tokens, logit rows and sequences fits."""
        return self.tokens >= tokens and self.rows >= rows and self.seqs >= seqs


HALVED_TOKENS = 512  # from which on steps take about as long as they have tokens


def doubling(max_tokens: int, few: Sequence[int] = (SMALLEST_TOKENS,)) -> tuple[int, ...]:
    """Return token counts up to `max_tokens`: `few`, ascending, and what doubles the last one."""
    sizes, size = [size for size in few if size < max_tokens], 2 * few[-1]
    while size < max_tokens:
        sizes.append(size)
        size *= 2
    return (*sizes, max_tokens)


def with_halfway(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return sizes and those halfway between two of at least `HALVED_TOKENS`, ascending."""
    halfway = {(a + b) // 2 for a, b in itertools.pairwise(sizes) if a >= HALVED_TOKENS}
    return tuple(sorted({*sizes, *halfway}))


def worthwhile(seconds: Mapping[int, float]) -> tuple[int, ...]:
    """Return the sizes of small steps, ascending, by the seconds of products of so many rows.

    Those that double from `SMALLEST_TOKENS` on belong to them in any case; smaller ones, and ones
    between two, where they take `LEAST_GAIN` less than the next larger.
    """
    regular = set(doubling(max(seconds)))
    kept: list[int] = []
    for size in sorted(seconds, reverse=True):
        if size in regular or seconds[size] < (1 - LEAST_GAIN) * seconds[kept[0]]:
            kept.insert(0, size)
    return tuple(kept)


def make_buckets(
    sizes: Iterable[int], max_seqs: int, layout: Layout, max_rows: int = 0, least_rows: int = 1
) -> list[Bucket]:
    """Return the buckets of every token count, padded so that P devices can split tokens and rows.

    `max_rows` are the logit rows of a step with drafts, if more than its sequences. A step of more
    tokens than that has chunks of prompts, of which few tokens are rows; large sizes up to there
    come with rows for their sequences alone, too, for prompts beside which nobody drafts.

    Rows are padded like tokens: the LM head of one row alone is ten times slower on a CPU. For
    the same reason BASE never leaves a device with a single token. Where layers compute rows
    alone, large sizes come with few rows, too: a prompt has one. A device has no fewer than
    `least_rows` of either in any mode.
    """
    devices = layout.num_devices
    seqs = round_up(max(max_seqs, SMALLEST_TOKENS), devices)
    sizes = sorted(sizes)
    widest = min((n for n in sizes if n >= max_rows), default=math.inf)  # that may be all rows
    least = layout.sp * max(least_rows, 2 if layout.sp > 1 else 1)
    buckets = [
        Bucket(
            round_up(max(n, least), devices),
            size := round_up(
                min(max(n, least_rows), max(seqs, max_rows) if n <= widest else seqs), devices
            ),
            min(size, seqs),
        )
        for n in sizes
    ]
    buckets = list({bucket.tokens: bucket for bucket in buckets}.values())
    large = [one for one in buckets if one.tokens >= MANY_TOKENS]
    few = [one._replace(rows=one.seqs) for one in large]  # where nobody drafts
    if layout.model.num_late_layers:
        few += [one._replace(rows=round_up(SMALLEST_TOKENS, devices)) for one in large]
    return sorted(_with_rows_alone({*buckets, *few}))


def _with_rows_alone(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Say which buckets do without tiles: every token is a row, and there is a way out.

    That is a larger bucket for as many rows and sequences, in which chunks of prompts that would
    read long contexts once for every token can go as tiles.
    """
    buckets = list(buckets)
    return [
        one._replace(
            rows_alone=one.rows == one.tokens
            and any(
                two.tokens > one.tokens and two.rows >= one.rows and two.seqs >= one.seqs
                for two in buckets
            )
        )
        for one in buckets
    ]


def also_with_adapters(wanted: Mapping[Bucket, list[Mode]]) -> dict[Bucket, list[Mode]]:
    """Return modes by bucket, of steps in which no token has an adapter, and of those with some."""
    others = {one._replace(has_adapters=True): modes for one, modes in wanted.items()}
    return {**wanted, **others}
