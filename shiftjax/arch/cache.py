"""What the layers of a model keep of every token, entry by entry. No JAX.

Who allocates, moves, counts or prices a cache asks here; what its numbers mean attention alone
knows. `ModelConfig.caches` are those of a model, `Layout.caches` what one device has of them: one
where all layers have KV heads alike, else one for each shape of heads.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pallas_kernels.window import Window, first_seen, tokens_of

if TYPE_CHECKING:  # NumPy takes longer to import than all of a command's help
    import numpy as np

    from shiftjax.arch.formats import Formats


class Entry(NamedTuple):
    """One array of a layer's cache: of each token so many rows of `width` numbers."""

    name: str
    rows: int
    width: int
    axis: str | None = None  # as whose rows devices split its own; None: each device has them all
    format: str | None = None  # by name; None: that of the deployment, `Formats.kv`

    @property
    def numbers(self) -> int:
        """Numbers of a token."""
        return self.rows * self.width

    def dtype(self, default: "np.dtype") -> "np.dtype":
        """What its numbers are stored as, where `default` is the deployment's type."""
        from shiftjax.arch.formats import FORMATS

        return FORMATS[self.format].dtype if self.format else default

    def pool_shape(self, num_blocks: int, block_size: int) -> tuple[int, int, int, int]:
        """Return the shape of blocks: the tokens of a row lie next to each other."""
        return num_blocks, self.rows, block_size, self.width


class CacheSpec(NamedTuple):
    """The entries of a layer, in the order of a pool's arrays."""

    entries: tuple[Entry, ...]

    @property
    def numbers(self) -> int:
        """Numbers of a token in a layer."""
        return sum(entry.numbers for entry in self.entries)

    def num_bytes(self, formats: "Formats") -> int:
        """Bytes of a token in a layer."""
        from shiftjax.arch.formats import FORMATS

        default = FORMATS[formats.kv].dtype
        return sum(entry.numbers * entry.dtype(default).itemsize for entry in self.entries)

    @property
    def alike(self) -> list[tuple[int, ...]]:
        """The places of entries that differ in their names alone: their arrays move together."""
        kinds = [entry._replace(name="") for entry in self.entries]
        return [
            tuple(place for place, other in enumerate(kinds) if other == kind)
            for kind in dict.fromkeys(kinds)
        ]


class CacheGroup(NamedTuple):
    """Layers that see equally far. Where a model has several, a block is of one group alone.

    Each group has a block table of its own, and loses the blocks that its layers see no more.
    """

    layers: tuple[int, ...]  # of the model, in their order
    window: Window | None  # how far back they see; None: no block of theirs is ever lost


class LayerCache(NamedTuple):
    """The layers of a model, or of a stage of it, that keep alike; they share arrays of a pool."""

    spec: CacheSpec
    layers: tuple[int, ...]  # of the stage, in their order
    first: int = 0  # how many of the model's such layers are in earlier stages
    heads: int = 0  # which of `ModelConfig.head_shapes` they have
    groups: tuple[CacheGroup, ...] = ()  # of its layers; none or one: a block is of all of them

    @property
    def numbers(self) -> int:
        """Numbers of a token in all of them."""
        return len(self.layers) * self.spec.numbers

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """The layers for which a block has each of its parts: one layer of every group.

        The last places of a model may lack those of groups with fewer layers.
        """
        if len(self.groups) < 2:
            return tuple((layer,) for layer in self.layers)
        most = max(len(group.layers) for group in self.groups)
        return tuple(
            tuple(group.layers[nth] for group in self.groups if nth < len(group.layers))
            for nth in range(most)
        )


def layers_of_pools(
    caches: Sequence[LayerCache], num_pools: int
) -> list[tuple[LayerCache, tuple[tuple[int, ...], ...]]]:
    """Return what each pool holds, where there are so many at most: a cache, and its places there.

    All pools but the last of a cache hold equally many places, as few as that allows. Raises
    ValueError where a cache would have no pool.
    """
    if num_pools < len(caches):
        raise ValueError(f"{num_pools} pools cannot hold {len(caches)} kinds of caches.")
    held, each = [cache.places for cache in caches], 1
    while sum(-(-len(places) // each) for places in held) > num_pools:
        each += 1
    return [
        (cache, places[first : first + each])
        for cache, places in zip(caches, held, strict=True)
        for first in range(0, len(places), each)
    ]


MOST_GROUPS = 8  # each costs a block table of every sequence, in every step


def groups_of(windows: Sequence[Window | None]) -> tuple[CacheGroup, ...]:
    """Return the cache groups of layers with these windows, those that see furthest first.

    A group has as many layers as there are that see furthest: these are the first group. Others
    may have fewer: their blocks have parts that nobody uses. Where that would be more than
    `MOST_GROUPS` groups, each has more layers.
    """
    kinds = sorted(dict.fromkeys(windows), key=lambda window: tokens_of(window) or float("inf"))
    layers = [tuple(n for n, own in enumerate(windows) if own == kind) for kind in kinds[::-1]]
    size = len(layers[0])
    while sum(-(-len(some) // size) for some in layers) > max(MOST_GROUPS, len(layers)):
        size += 1
    return tuple(
        CacheGroup(some[first : first + size], kind)
        for some, kind in zip(layers, kinds[::-1], strict=True)
        for first in range(0, len(some), size)
    )


def first_block(position: int, window: Window | None, block_size: int) -> int:
    """Return the first of a sequence's blocks that a token at `position` sees."""
    return max(0, first_seen(position, window)) // block_size


def blocks_kept(
    num_tokens: int, window: Window | None, block_size: int, step_tokens: int = 0
) -> int:
    """Return the most blocks that a group keeps of a sequence of so many tokens.

    While it decodes; or while prompts are computed, in steps of up to `step_tokens`.
    """
    num_blocks, seen = -(-num_tokens // block_size), tokens_of(window)
    if not seen:
        return num_blocks
    return min(num_blocks, -(-(seen + step_tokens) // block_size) + 1)


def longest_kept(
    num_blocks: int, windows: Sequence[Window | None], block_size: int, step_tokens: int
) -> int:
    """Return the tokens of the longest sequence that so many blocks hold, from its prompt on.

    `windows` are those of the cache groups; none: a block is of all layers, and all are kept.
    """

    def taken(num_tokens: int) -> int:
        kept = (blocks_kept(num_tokens, window, block_size, step_tokens) for window in windows)
        return sum(kept)

    if not any(windows):
        return num_blocks * block_size
    lengths = range(block_size, num_blocks * block_size + 1, block_size)
    return block_size * bisect_right(lengths, num_blocks, key=taken)


def keys_and_values(num_heads: int, head_dim: int) -> CacheSpec:
    """Return the spec of attention over heads, which devices split."""
    return CacheSpec(tuple(Entry(name, num_heads, head_dim, "kv_heads") for name in "kv"))
