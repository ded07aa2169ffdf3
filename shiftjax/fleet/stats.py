"""What a fleet counts, and what it remembers of its changes. No JAX."""

from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from shiftjax.metric import STEP_BUCKETS, Histogram
from shiftjax.parallel.arrangements import Arrangement, Change


class Turn(NamedTuple):
    """A change of groups that has been made."""

    seconds: float  # when, by the clock of the engine
    arrangement: Arrangement  # since then
    reason: str
    kind: str
    num_sequences: int  # that went along
    num_recomputed: int
    host_seconds: float
    change: Change


@dataclass(slots=True)
class FleetStats:
    """Counters since the start; widths are units."""

    binds: Counter[tuple[int, str, str]] = field(default_factory=Counter)  # width, kind, reason
    releases: Counter[int] = field(default_factory=Counter)  # width of the group that went
    num_moved_sequences: int = 0
    num_recomputed_sequences: int = 0
    moved_blocks: Counter[str] = field(default_factory=Counter)  # bind, release; narrow blocks
    moved_bytes: Counter[str] = field(default_factory=Counter)  # the same, on all devices
    num_compacted_blocks: int = 0
    num_adopted_blocks: int = 0  # of new groups, with prefixes that those before had kept
    # of the host, in a change
    move_seconds: Histogram = field(default_factory=lambda: Histogram(STEP_BUCKETS))
    paused_seconds: float = 0.0  # of groups, added up
    failed_changes: Counter[str] = field(default_factory=Counter)  # by reason

    @property
    def num_changes(self) -> int:
        """All that have been made."""
        return self.binds.total() + self.releases.total()

    def copy(self) -> "FleetStats":
        """As of now: what is counted later does not show."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        kinds = Counter, Histogram
        return replace(self, **{n: v.copy() for n, v in values.items() if isinstance(v, kinds)})
