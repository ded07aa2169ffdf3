"""Prompts and decodes in a configuration each: phases, and the change between them. No JAX.

Offline, prompts are computed best in other degrees of parallelism than decodes (Seesaw, arXiv
2503.06433). So the devices take turns: many prompts are computed in one configuration, and their
keys and values parked in host memory; then weights are loaded in the other one, and all that is
parked is decoded there, to its end.

    prefill   requests -> prefill lanes: chunks, first token, swapped out -> parked
    switch    when nothing runs and nothing more can be admitted: no prompt, or no room on the host
    decode    parked -> decode lanes, in order, as blocks come free; no new prompts
    switch    when all have ended and others wait

Sequences keep their tokens and their state of sampling, so a token does not depend on any of it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal, Protocol, get_args, runtime_checkable

from shiftjax.core import request as sequences
from shiftjax.core.lane import Lane, load_of
from shiftjax.core.request import Request, Status
from shiftjax.core.topology import Topology
from shiftjax.host_tier.extents import HostMemory
from shiftjax.metric import Metric, counter, gauge

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@runtime_checkable
class Exchange(Protocol):
    """What changes the configuration of the devices."""

    def load(self, phase: Phase) -> None:
        """Drop the weights and pools of the other phase's lanes, and load those of this one.

        Nothing is in flight. May return before the devices are done. What makes it fail is raised,
        and final: the engine is then of no more use.
        """
        ...


@dataclass(frozen=True)
class ReshardingState:
    """Counters since the start, and what is parked now."""

    phase: Phase
    num_switches: int
    switch_seconds: float  # of the host
    num_parked: int  # sequences that wait for the decode phase, or in it for blocks
    num_held_bytes: int  # of host memory, which sequences need or have reserved
    num_bytes: int  # the budget


def metrics(state: ReshardingState | None) -> Iterator[Metric]:
    """The phase, what changing it has taken, and what waits; nothing where there are no phases."""
    if state is None:
        return
    on = {(phase,): float(phase == state.phase) for phase in PHASES}
    yield gauge("phase", "1 for the phase that is on.", on, "phase")
    yield counter("phase_switches", "Changes of phase.", state.num_switches)
    text = "Seconds of the host that they took."
    yield counter("phase_switch_seconds", text, state.switch_seconds)
    text = "Sequences whose prompts are computed, and that wait to be decoded."
    yield gauge("sequences_parked", text, state.num_parked)
    text = "Bytes of the host that sequences need or have reserved."
    yield gauge("host_cache_held_bytes", text, state.num_held_bytes)


class Resharding(Topology):
    """Which phase the lanes of an engine are in. Prefill lanes' schedulers park.

    The devices are loaded for prefill. Lanes of the other phase are idle; there, requests may wait.
    """

    def __init__(
        self,
        lanes: Mapping[Phase, Sequence[Lane]],
        exchange: Exchange,
        memory: HostMemory,
        clock: Callable[[], float] = time.monotonic,
    ):
        decodes = {p: {lane.scheduler.admission.decodes for lane in lanes[p]} for p in PHASES}
        if decodes != {"prefill": {False}, "decode": {True}}:
            raise ValueError("Decode lanes must decode, and no others.")
        self.lanes, self.exchange, self.memory = lanes, exchange, memory
        self.phase: Phase = "prefill"
        self.num_switches = 0
        self.switch_seconds = 0.0
        self._clock = clock
        self._set_states()

    def lane_for(self, request: Request) -> Lane:
        """Return the prefill lane with the least load."""
        return min(self.lanes["prefill"], key=load_of)

    def idle(self, num_queued: int) -> None:
        """Change phases, if that helps; `num_queued` requests are in no lane yet."""
        here = [lane.scheduler for lane in self.lanes[self.phase]]
        if self.phase == "decode":
            waits = num_queued or any(e.scheduler.requests for e in self.lanes["prefill"])
            is_over = bool(waits) and not any(scheduler.requests for scheduler in here)
        else:
            takes_more = num_queued and not all(scheduler.is_full for scheduler in here)
            is_over = not takes_more and any(scheduler.parked for scheduler in here)
        if is_over:
            self._switch()

    def _switch(self) -> None:
        begin, old = self._clock(), self.lanes[self.phase]
        phase: Phase = "decode" if self.phase == "prefill" else "prefill"
        self.exchange.load(phase)
        self.phase = phase
        for source, name in _parked(old):
            target = min(self.lanes[phase], key=load_of)
            target.scheduler.attach(source.scheduler.detach(name))
        for lane in old:
            lane.scheduler.tables.reset([])  # its pools are no more
        self._set_states()
        self.num_switches += 1
        self.switch_seconds += self._clock() - begin

    def _set_states(self) -> None:
        for phase, lanes in self.lanes.items():
            for lane in lanes:
                lane.state = "open" if phase == self.phase else "idle"
                lane.last_mode, lane.progress_at = None, self._clock()

    def states(self) -> Iterable[ReshardingState]:
        """Return which phase it is in, and what is parked."""
        schedulers = {phase: [lane.scheduler for lane in self.lanes[phase]] for phase in PHASES}
        num_parked = sum(len(each.parked) for each in schedulers["prefill"])
        yield ReshardingState(
            self.phase,
            self.num_switches,
            self.switch_seconds,
            num_parked + sum(len(each.waiting) for each in schedulers["decode"]),
            self.memory.num_held_bytes,
            self.memory.num_bytes,
        )

    def check(self) -> None:
        """Conservation. Raises `RuntimeError` at the first breach."""
        for phase, lanes in self.lanes.items():
            for lane in lanes:
                is_on = phase == self.phase
                if not is_on and (lane.in_flight or lane.scheduler.running):
                    raise RuntimeError(f"A {phase} lane is at work in the other phase.")
                if lane.scheduler.requests and phase == "decode" and not is_on:
                    raise RuntimeError("Requests are left in a decode lane.")
                for siblings in lane.scheduler.requests.values():
                    _check_parked(siblings)
        computing = {s for lane in self.lanes["prefill"] for s in lane.scheduler.running}
        if not self.memory.reservations.keys() <= computing:
            raise RuntimeError("Room on the host is kept for sequences that no lane computes.")


def _parked(lanes: Sequence[Lane]) -> list[tuple[Lane, str]]:
    """The requests that are parked in these lanes, in their order."""
    found = [(s.order, lane, s.request.request_id) for lane in lanes for s in lane.scheduler.parked]
    unique = {name: lane for _, lane, name in sorted(found, key=itemgetter(0))}
    return [(lane, name) for name, lane in unique.items()]


def _check_parked(siblings: Sequence[sequences.SequenceState]) -> None:
    alive = {sibling.status for sibling in siblings} - {Status.FINISHED}
    if Status.PARKED in alive and len(alive) > 1:
        raise RuntimeError("A request is parked in part.")
