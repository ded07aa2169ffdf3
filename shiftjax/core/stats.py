"""What an engine tells of itself: counters, gauges, and the steps that have ended. No JAX."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shiftjax.core.lane import Flight, Lane
from shiftjax.core.request import Request


@dataclass(frozen=True)
class EngineStats:
    """Counters since the start and gauges of now, summed over groups.

    `num_waiting` counts sequences without blocks, those of requests in the front queue included.
    `kv_usage` is the share of blocks that block tables hold. `parts` are the counters and states
    of what is plugged in, by their type: see `find`.
    """

    num_running: int
    num_waiting: int
    num_waiting_tokens: int  # of their prompts
    kv_usage: float
    steps: dict[tuple[str, int], int]  # by mode, and by units of the group
    mode_switches: dict[tuple[str, str], int]  # (from, to)
    num_failed_steps: int
    num_preemptions: dict[str, int]  # recompute, swap
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int  # in both tiers
    parts: Mapping[type, Any]

    def find[T](self, kind: type[T]) -> T | None:
        """Return the state of this type, or None if nothing that has one is plugged in."""
        return self.parts.get(kind)

    @property
    def steps_by_mode(self) -> dict[str, int]:
        """Steps of groups of all widths."""
        totals: dict[str, int] = {}
        for (mode, _), count in self.steps.items():
            totals[mode] = totals.get(mode, 0) + count
        return totals


class EndedStep(NamedTuple):
    """A step whose results are there."""

    mode: str  # its label
    seconds: float
    num_tokens: int
    begun: dict[str, float]  # requests of which it computed prompts: when they were first scheduled
    num_prompt_tokens: int  # of its tokens


def stats_of(
    lanes: Sequence[Lane],
    queued: Collection[Request],
    states: Iterable[Any],
    steps: Mapping[tuple[str, int], int],
    mode_switches: Mapping[tuple[str, str], int],
    num_failed_steps: int,
) -> EngineStats:
    """Return the stats of lanes and the queue before them; `states` are those of the topology."""
    schedulers = [lane.scheduler for lane in lanes]
    used = sum(e.scheduler.num_used_blocks * e.group.width for e in lanes)
    have = [lane for lane in lanes if lane.state not in ("idle", "paused")]
    usable = sum(e.scheduler.tables.device.num_usable_blocks * e.group.width for e in have)
    preemptions = sum((Counter(s.num_preemptions) for s in schedulers), Counter())
    waiting = [(r.sampling.n, len(r.prompt_token_ids)) for r in queued]
    return EngineStats(
        num_running=sum(len(scheduler.running) for scheduler in schedulers),
        num_waiting=sum(n for n, _ in waiting)
        + sum(len(s.waiting) + len(s.parked) for s in schedulers),
        num_waiting_tokens=sum(n * num_tokens for n, num_tokens in waiting)
        + sum(scheduler.num_waiting_tokens for scheduler in schedulers),
        kv_usage=used / usable,
        steps=dict(steps),
        mode_switches=dict(mode_switches),
        num_failed_steps=num_failed_steps,
        num_preemptions={kind: preemptions[kind] for kind in ("recompute", "swap")},
        num_prefix_query_tokens=sum(s.tables.num_prefix_query_tokens for s in schedulers),
        num_prefix_hit_tokens=sum(s.tables.num_prefix_hit_tokens for s in schedulers),
        parts=_parts(lanes, states),
    )


def _parts(lanes: Sequence[Lane], states: Iterable[Any]) -> dict[type, Any]:
    """States by their type; what is plugged into lanes counts for each, so it is summed."""
    parts: dict[type, Any] = {type(state): state for state in states}
    for lane in lanes:
        for state in lane.scheduler.states():
            kind = type(state)
            parts[kind] = parts[kind] + state if kind in parts else state
    return parts


def ended_step(flight: Flight, seconds: float) -> EndedStep:
    """Return what is told of a step whose results are there; `seconds` is what it took."""
    plan = flight.plan
    chunks = [item.sequence for item in plan.chunks]
    num_prompt_tokens = sum(item.num_tokens for item in plan.chunks)
    begun = {
        each.request.request_id: each.first_scheduled_seconds
        for each in chunks
        if each.first_scheduled_seconds is not None
    }
    return EndedStep(flight.mode.label, seconds, plan.num_tokens, begun, num_prompt_tokens)
