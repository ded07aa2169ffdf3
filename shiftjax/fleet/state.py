"""What a fleet is doing, as values: for metrics, the page, `LLM.fleet()` and whoever reads them.

Taken between turns, by the thread of the engine; nothing of it changes afterwards. No JAX.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from shiftjax.core.lane import Lane
from shiftjax.fleet.stats import FleetStats, Turn
from shiftjax.metric import Metric, counter, gauge, histogram
from shiftjax.parallel.arrangements import Arrangement
from shiftjax.parallel.grid import Group

if TYPE_CHECKING:
    from shiftjax.fleet.regrouping import Fleet

NUM_CHANGES = 64  # the latest, that a state holds

REASONS = MappingProxyType(
    {
        "need": "a request needs a group this wide: its context, its class, or its min_width",
        "done": "the group that others had paused for has nothing to do any more",
        "unneeded": "no request needs a group this wide any more",
        "quiet": "few requests: together the units answer each of them sooner",
        "load": "many requests: units on their own serve more of them",
        "quicker": "a wider group is predicted to be quicker for all that is there",
        "throughput": "narrower groups are predicted to be quicker for all that is there",
    }
)
"""For people: why groups changed, by the reason that a policy gives."""


class GroupState(NamedTuple):
    """A group that has requests, or is of the arrangement."""

    group: Group
    state: str  # of its lane
    mode: str  # label of the mode of its last step; empty: it has made none
    num_running: int
    num_waiting: int
    kv_usage: float  # share of its blocks that block tables hold


@dataclass(frozen=True, slots=True)
class FleetState:
    """Groups, their load, counters, and the latest changes, the oldest first."""

    widths: tuple[int, ...]
    arrangement: Arrangement
    groups: tuple[GroupState, ...]
    changes: tuple[Turn, ...]
    num_prefix_hits_elsewhere: int  # sequences, whose prefix only groups of other widths have
    stats: FleetStats

    @property
    def num_paused_sequences(self) -> int:
        """Running sequences that keep their blocks while another group has their devices."""
        return sum(each.num_running for each in self.groups if each.state == "paused")


def state_of(fleet: "Fleet") -> FleetState:
    """The state of now."""
    lanes = sorted(fleet.lanes.values(), key=lambda lane: lane.group)
    latest = tuple(islice(reversed(fleet.history), NUM_CHANGES))[::-1]
    return FleetState(
        tuple(sorted({lane.group.width for lane in lanes})),
        fleet.arrangement,
        tuple(_group_state(lane) for lane in lanes if lane.state != "idle"),
        latest,
        sum(lane.scheduler.tables.num_prefix_hits_elsewhere for lane in lanes),
        fleet.stats.copy(),
    )


def _group_state(lane: Lane) -> GroupState:
    scheduler, mode = lane.scheduler, lane.last_mode
    return GroupState(
        lane.group,
        lane.state,
        "" if mode is None else mode.label,
        len(scheduler.running),
        len(scheduler.waiting),
        scheduler.num_used_blocks / scheduler.tables.device.num_usable_blocks,
    )


def metrics(fleet: FleetState | None) -> Iterator[Metric]:
    """What groups there are, and what their changes have taken; else an empty histogram."""
    stats = FleetStats() if fleet is None else fleet.stats
    yield histogram("move_seconds", "Host time of a change of groups.", stats.move_seconds)
    if fleet is None:
        return
    open_widths = [group.width for group in fleet.arrangement]
    groups = {(str(width),): open_widths.count(width) for width in fleet.widths}
    yield gauge("fleet_groups", "Groups by units.", groups, "width")
    binds = {(str(width), *why): count for (width, *why), count in stats.binds.items()}
    yield counter("fleet_binds", "Groups bound.", binds, "width", "kind", "reason")
    releases = {(str(width),): stats.releases[width] for width in fleet.widths[1:]}
    yield counter("fleet_releases", "Groups released.", releases, "width")
    failed = {(reason,): count for reason, count in stats.failed_changes.items()}
    yield counter("binds_failed", "Changes of groups that failed.", failed, "reason")
    moved = {(way,): stats.moved_bytes[way] for way in ("bind", "release")}
    yield counter("kv_moved_bytes", "Keys and values moved.", moved, "direction")
    text = "KV blocks copied to make room."
    yield counter("kv_compacted_blocks", text, stats.num_compacted_blocks)
    text = "Blocks with cached prefixes that changes of groups moved along."
    yield counter("prefix_blocks_adopted", text, stats.num_adopted_blocks)
    text = "Seconds that groups paused, of pauses that have ended."
    yield counter("paused_seconds", text, stats.paused_seconds)
    text = "Sequences of groups that pause."
    yield gauge("sequences_paused", text, fleet.num_paused_sequences)
    text = "Sequences whose prefix only groups of other widths have."
    yield counter("prefix_hits_elsewhere", text, fleet.num_prefix_hits_elsewhere)


def plain_state(state: FleetState, now: float) -> dict[str, Any]:
    """As plain data; `now` is by the clock of the engine, times are seconds before it."""
    return {
        "arrangement": shown_arrangement(state.arrangement),
        "widths": list(state.widths),
        "groups": [plain_group(each) for each in state.groups],
        "changes": [
            {"seconds_ago": now - turn.seconds} | plain_change(turn) for turn in state.changes
        ],
        **plain_counters(state),
    }


def page_part(state: FleetState) -> dict[str, Any]:
    """The groups of now, and the latest changes with their reasons, as plain data."""
    return {
        "arrangement": shown_arrangement(state.arrangement),
        "units": sum(group.width for group in state.arrangement),
        "widths": state.widths,
        "groups": [plain_group(each) for each in state.groups],
        "changes": [{"at": turn.seconds} | plain_change(turn) for turn in state.changes],
    }


def plain_counters(state: FleetState) -> dict[str, Any]:
    """Counters since the start, as plain data."""
    stats = state.stats
    return {
        "binds": [
            {"width": width, "kind": kind, "reason": reason, "count": count}
            for (width, kind, reason), count in sorted(stats.binds.items())
        ],
        "releases": dict(stats.releases),
        "failed_changes": dict(stats.failed_changes),
        "num_moved_sequences": stats.num_moved_sequences,
        "num_recomputed_sequences": stats.num_recomputed_sequences,
        "num_paused_sequences": state.num_paused_sequences,
        "kv_moved_bytes": dict(stats.moved_bytes),
        "num_compacted_blocks": stats.num_compacted_blocks,
        "num_adopted_blocks": stats.num_adopted_blocks,
        "move_seconds": stats.move_seconds.total,
        "paused_seconds": stats.paused_seconds,
    }


def plain_group(each: GroupState) -> dict[str, Any]:
    """A group as plain data."""
    values = each._asdict()
    group = values.pop("group")
    return {"first": group.first, "width": group.width, **values}


def plain_change(turn: Turn) -> dict[str, Any]:
    """A change as plain data, but for when it was."""
    wide = turn.change.wide
    return {
        "what": "bind" if turn.change.is_bind else "release",
        "first": wide.first,
        "width": wide.width,
        "from": shown_arrangement(turn.change.sources),
        "to": shown_arrangement(turn.change.targets),
        "arrangement": shown_arrangement(turn.arrangement),
        "kind": turn.kind,
        "reason": turn.reason,
        "why": REASONS.get(turn.reason, turn.reason),
        "num_sequences": turn.num_sequences,
        "num_recomputed": turn.num_recomputed,
        "host_seconds": turn.host_seconds,
    }


def shown_arrangement(groups: Arrangement) -> str:
    """Widths as the setting `fleet_policy` has them: 4+2+1+1."""
    return "+".join(str(group.width) for group in groups)
