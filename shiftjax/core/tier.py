"""A second place for KV blocks, beside the pool of the devices: the seam for it. No JAX.

It counts in units: as many tokens as prefixes are hashed by, of which a block holds some whole
number. So groups with blocks of several sizes read what any of them wrote.
"""

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from shiftjax.core.blocks import CachedPrefix
from shiftjax.parallel.grid import Mode

if TYPE_CHECKING:  # plans are of this module's types
    from shiftjax.core.request import StepPlan

MOST_AHEAD = 8  # extents on the devices before their restore


@dataclass(slots=True, eq=False)
class Extent:
    """Blocks that one copy brings to the tier; `contents` of a unit is None where no hash leads."""

    number: int
    writer: "Tier"
    contents: list[CachedPrefix | None]
    num_bytes: int  # that it takes of the budget
    num_pins: int = 0
    is_proven: bool = False  # the step that came with the copy has ended


class Place(NamedTuple):
    """One unit in the tier."""

    extent: Extent
    unit: int


class Offload(NamedTuple):
    """Copy these device blocks to the tier, as an extent."""

    extent: int
    blocks: list[int]


class Restore(NamedTuple):
    """Copy row i of an extent to the i-th device block; the null block: it is not wanted."""

    extent: int
    blocks: list[int]


class UnitRestore(NamedTuple):
    """Copy units, `(extent, unit)`, one after the other to device blocks; the last may lack some.

    For extents of groups whose blocks have another size; a unit has `num_tokens`.
    """

    units: list[tuple[int, int]]
    blocks: list[int]
    num_tokens: int


class TierMoves(NamedTuple):
    """What a plan does with the tier: extents that go first, then copies out, then copies in.

    The runner empties `dropped`; what it has left there comes again with the next plan. Then it has
    `prefetches`, and no other extents, on their way to the devices for restores of later plans.
    """

    dropped: list[int]
    offloads: list[Offload]
    restores: list[Restore]
    prefetches: list[int]
    unit_restores: list[UnitRestore]


class Tier:
    """What one group has in a second place for KV blocks. This one has no room and holds nothing.

    Copies are collected while a plan is made; `finish` hands them over. `keeps_evicted` says
    whether it wants what falls out of the devices' prefix cache, and `fetches` whether it has
    blocks that are found only a while after somebody `awaits` them. Hashes are those of units, of
    `hash_size` tokens each.
    """

    hash_size: int = 0
    keeps_evicted: bool = False
    fetches: bool = False

    @property
    def is_offloading(self) -> bool:
        """Return whether there are copies for the plan that is made."""
        return False

    @property
    def has_prefixes(self) -> bool:
        """Return whether anything can be found by its hash."""
        return False

    def reserve(self, owner: Hashable, num_blocks: int) -> bool:
        """Keep room for blocks of a sequence until it is swapped out; False if there is none."""
        return True

    def could_reserve(self, num_blocks: int) -> bool:
        """Return whether there would be room for so many blocks if the tier were empty."""
        return True

    def cancel(self, owner: Hashable) -> None:
        """Keep no room for a sequence."""

    def match(
        self, hashes: Sequence[bytes], token_ids: list[int], start: int, limit: int
    ) -> list[Place]:
        """Return where the units of blocks `start` up to `limit` are, until a block is missing."""
        return []

    def find(self, block_hash: bytes, tokens: list[int]) -> Place | None:
        """Return where the block with this hash and these tokens is; counts as no query."""
        return None

    def knows(self, block_hash: bytes) -> bool:
        """Return whether a block may be found under this hash; counts as no query."""
        return False

    def extents_of(self, hashes: Iterable[bytes]) -> list[Extent]:
        """Return the extents of the units that come first, until one is missing.

        Those of other groups' sizes of blocks are left out: they cannot be prefetched.
        """
        return []

    def awaits(self, owner: Hashable, hashes: Iterable[bytes]) -> bool:
        """Return whether a sequence waits for blocks that the tier has to fetch from afar.

        `hashes` are of its units from the first block on that the devices lack; they are looked
        at once, until `cancel`.
        """
        return False

    def swap_out(
        self, blocks: Sequence[int], contents: Sequence[CachedPrefix | None]
    ) -> list[Place] | None:
        """Copy what a sequence has computed, for it alone, until `release`; None: no room."""
        return None

    def save(self, evicted: Sequence[tuple[int, CachedPrefix]]) -> None:
        """Copy blocks that the devices' prefix cache gives up."""

    def restore(self, places: Sequence[Place], blocks: Sequence[int]) -> None:
        """Copy units to device blocks: each takes as many as it holds, the last those left."""

    def release(self, places: Iterable[Place]) -> None:
        """Called when a sequence needs what it has swapped out no more."""

    def finish(self, *, is_planned: bool, wanted: Iterable[Extent] = ()) -> TierMoves:
        """Return the copies of the plan; without a plan none are made. `wanted`: to prefetch."""
        return TierMoves([], [], [], [], [])

    def prove(self, offloads: Iterable[Offload]) -> None:
        """Called when the step of a plan with these copies has ended."""

    def holds(self, places: Iterable[Place]) -> bool:
        """Return whether all of this is still there."""
        return False

    def reset(self, suspects: Collection[int] = ()) -> None:
        """Called when the pools of the group are lost; a failed step has read `suspects`."""

    def idle(self) -> None:
        """Called when no step is in flight, nor one to launch."""

    def learn_step(self, plan: "StepPlan", mode: Mode, seconds: float, is_hidden: bool) -> None:
        """Called with the seconds of a step; `is_hidden`: it was planned during another."""

    def close(self) -> None:
        """Called when no step will be planned any more."""

    def clear_cache(self) -> None:
        """Find nothing by its hash any more."""

    def check(self) -> None:
        """Check conservation. Raises RuntimeError at the first breach."""

    def states(self) -> Iterable[Any]:
        """Return counters that can be added to those of other groups."""
        return ()
