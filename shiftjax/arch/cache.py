"""What the layers of a model keep of every token, entry by entry. No JAX.

Who allocates, moves, counts or prices a cache asks here; what its numbers mean attention alone
knows. `ModelConfig.caches` are those of a model, `Layout.caches` what one device has of them: one
where all layers have KV heads alike, else one for each shape of heads.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

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


class LayerCache(NamedTuple):
    """The layers of a model, or of a stage of it, that keep alike; they share arrays of a pool."""

    spec: CacheSpec
    layers: tuple[int, ...]  # of the stage, in their order
    first: int = 0  # how many of the model's such layers are in earlier stages
    heads: int = 0  # which of `ModelConfig.head_shapes` they have

    @property
    def numbers(self) -> int:
        """Numbers of a token in all of them."""
        return len(self.layers) * self.spec.numbers


def layers_of_pools(
    caches: Sequence[LayerCache], num_pools: int
) -> list[tuple[LayerCache, tuple[int, ...]]]:
    """Return what each pool holds, where there are so many at most: a cache, and its layers there.

    All pools but the last of a cache hold equally many layers, as few as that allows. Raises
    ValueError where a cache would have no pool.
    """
    if num_pools < len(caches):
        raise ValueError(f"{num_pools} pools cannot hold {len(caches)} kinds of caches.")
    counts, each = [len(cache.layers) for cache in caches], 1
    while sum(-(-count // each) for count in counts) > num_pools:
        each += 1
    return [
        (cache, cache.layers[first : first + each])
        for cache in caches
        for first in range(0, len(cache.layers), each)
    ]


def keys_and_values(num_heads: int, head_dim: int) -> CacheSpec:
    """Return the spec of attention over heads, which devices split."""
    return CacheSpec(tuple(Entry(name, num_heads, head_dim, "kv_heads") for name in "kv"))
