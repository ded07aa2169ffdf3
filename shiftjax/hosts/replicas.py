"""Groups of one engine on several hosts, each inside one of them: who has which. No JAX.

The leader schedules all groups, its own and those of followers: it sends a follower the calls of
its groups' steps, and gets their results. So no step waits for the network in its middle, and a
host that is gone takes its groups alone along: their requests are computed again on others, from
the tokens that they have. A host that comes back joins with empty groups.
"""

import json
import logging
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from shiftjax.core.lane import Lane, least_loaded
from shiftjax.core.request import Request, StepPlan
from shiftjax.core.tier import Offload, Restore, UnitRestore
from shiftjax.core.topology import Topology
from shiftjax.fleet.handover import start_anew
from shiftjax.hosts.calls import Hosts
from shiftjax.metric import Metric, counter, gauge
from shiftjax.parallel.grid import Group

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<IQIIII")  # group, number, bytes of moves, of a step; rows; what is wanted
_COUNTS = struct.Struct("<III")  # guesses, sequences, tokens
RESET_ROWS = 0xFFFFFFFF  # where a call rebuilds the pools of its group


class HostGoneError(RuntimeError):
    """A host that has groups of the engine is gone: what they computed is lost."""


class Call(NamedTuple):
    """What a follower does for one of its groups."""

    group: int  # its place among those of its host
    number: int  # of the call in its group
    moves: "Moves | None" = None  # between devices and host memory, before the step
    step: bytes = b""  # of `hosts.calls.Recent`; b"": none
    num_rows: int = 0
    wants_top: bool = False
    num_guesses: int = 0
    num_seqs: int = 0
    num_tokens: int = 0
    resets: bool = False


class Moves(NamedTuple):
    """The copies of a plan; see `core.request.StepPlan`."""

    dropped: list[int]
    offloads: list[Offload]
    restores: list[Restore]
    prefetches: list[int]
    unit_restores: list[UnitRestore]


def moves_of(plan: StepPlan) -> Moves | None:
    """Return the copies of a plan, and empty its `dropped`; None: there are none."""
    moves = Moves(
        list(plan.dropped), plan.offloads, plan.restores, plan.prefetches, plan.unit_restores
    )
    plan.dropped.clear()
    return moves if any(moves) else None


def encode(call: Call) -> bytes:
    """Return the bytes of a call."""
    moves = b"" if call.moves is None else json.dumps(call.moves).encode()
    rows = RESET_ROWS if call.resets else call.num_rows
    head = _HEAD.pack(
        call.group, call.number, len(moves), len(call.step), rows, int(call.wants_top)
    )
    counts = _COUNTS.pack(call.num_guesses, call.num_seqs, call.num_tokens)
    return b"".join([head, counts, moves, call.step])


def decode(data: bytes) -> Call:
    """Undo `encode`. Raises ValueError for what is no call."""
    try:
        group, number, num_moves, num_step, rows, wants_top = _HEAD.unpack_from(data)
        counts = _COUNTS.unpack_from(data, _HEAD.size)
        at = _HEAD.size + _COUNTS.size
        if len(data) != at + num_moves + num_step:
            raise ValueError("it is cut off")
        told = json.loads(data[at : at + num_moves]) if num_moves else None
        moves = None if told is None else _moves(*told)
    except (struct.error, TypeError, ValueError) as error:
        raise ValueError(f"these {len(data)} bytes are no call: {error}") from None
    call = Call(group, number, moves, data[at + num_moves :], 0, bool(wants_top), *counts)
    resets = rows == RESET_ROWS
    return call._replace(num_rows=0 if resets else rows, resets=resets)


def _moves(
    dropped: list[int],
    offloads: list[Any],
    restores: list[Any],
    prefetches: list[int],
    unit_restores: list[Any],
) -> Moves:
    units = [
        UnitRestore([(extent, unit) for extent, unit in units], blocks, size)
        for units, blocks, size in unit_restores
    ]
    outs = [Offload(*each) for each in offloads]
    return Moves(dropped, outs, [Restore(*each) for each in restores], prefetches, units)


@runtime_checkable
class Replicas(Hosts, Protocol):
    """The hosts as the leader of such an engine sees them."""

    def call(self, rank: int, data: bytes) -> None:
        """Tell a follower to do a call, without waiting. Raises HostGoneError."""
        ...

    def generation(self, rank: int) -> int:
        """How often a follower has come and can compute; 0: it is not here."""
        ...

    def listen(self, rank: int, hear: Callable[[bytes], None], gone: Callable[[], None]) -> None:
        """Have results of a follower heard, on any thread, and that it is gone."""
        ...


@runtime_checkable
class Remote(Protocol):
    """A runner whose group is on another host."""

    def begin(self) -> None:
        """The host has come anew: it knows of nothing that was sent before."""
        ...


@dataclass(frozen=True)
class ReplicaState:
    """What `/metrics` and tools are told of the hosts."""

    hosts: int
    here: int
    num_lost: int  # hosts, since the start
    num_recomputed: int  # sequences, as their host was lost


class HostGroups(Topology):
    """The groups of all hosts, each open while its host is here.

    `host_of` tells the ranks of the groups on other hosts than the leader's, whose runners are
    `Remote`.
    """

    def __init__(self, lanes: Sequence[Lane], host_of: Mapping[Group, int], hosts: Replicas):
        super().__init__(lanes)
        self._lanes, self._host_of, self._hosts = lanes, host_of, hosts
        self._known = {rank: hosts.generation(rank) for rank in range(1, hosts.num)}
        self._num_lost = self._num_recomputed = 0
        for lane in lanes:
            rank = host_of.get(lane.group, 0)
            if rank and not self._known[rank]:
                lane.state = "idle"

    def turn(
        self,
        queue: Callable[[int], list[Request]],
        num_queued: int,
        num_seen: int,
        now: float,
    ) -> None:
        """Close groups of hosts that are gone, open those of hosts that have come."""
        for rank, known in self._known.items():
            if self._hosts.generation(rank) != known:
                self._renew(rank, now)

    def lane_for(self, request: Request) -> Lane | None:
        """Return the lane that a request loads least."""
        return least_loaded([lane for lane in self._lanes if lane.state == "open"], request)

    def absorbs(self, lane: Lane, error: Exception) -> bool:
        """Compute again what a host had that is gone."""
        if not isinstance(error, HostGoneError):
            return False
        self._renew(self._host_of[lane.group], lane.progress_at)
        return True

    def states(self) -> Iterable[ReplicaState]:
        """Return how many hosts are here, and what has become of others."""
        here = 1 + sum(map(bool, self._known.values()))
        yield ReplicaState(self._hosts.num, here, self._num_lost, self._num_recomputed)

    def check(self) -> None:
        """Nobody has requests whose host is gone. Raises RuntimeError."""
        for lane in self._lanes:
            if lane.state == "idle" and (lane.scheduler.requests or lane.in_flight):
                raise RuntimeError(f"{lane.group} is of a host that is gone, but has requests.")

    def _renew(self, rank: int, now: float) -> None:
        """A host is gone, has come, or both."""
        lanes = [lane for lane in self._lanes if self._host_of.get(lane.group) == rank]
        if self._known[rank]:
            self._close(rank, lanes)
        self._known[rank] = self._hosts.generation(rank)
        if self._known[rank]:
            logger.info("host %d has come: %d groups of it are open", rank, len(lanes))
            for lane in lanes:
                assert isinstance(lane.runner, Remote)
                lane.runner.begin()
                lane.state, lane.last_mode, lane.progress_at = "open", None, now

    def _close(self, rank: int, lanes: Sequence[Lane]) -> None:
        """Have the requests of a host that is gone begin anew in other groups."""
        self._num_lost += 1
        requests = []
        for lane in lanes:
            lane.state, lane.awaited = "idle", None
            lane.in_flight.clear()
            for name in list(lane.scheduler.requests):
                requests.append(lane.scheduler.detach(name))
                for sequence in requests[-1]:
                    lane.scheduler.tables.leave_tier(sequence)
                    self._num_recomputed += sequence.num_computed_tokens > 0
        targets = [lane for lane in self._lanes if lane.state == "open"]
        requests.sort(key=lambda siblings: siblings[0].order)
        start_anew(lanes, targets, requests)
        for lane in lanes:
            lane.scheduler.tables.clear_cache()
        words = "host %d is gone: %d requests of it begin again in other groups"
        logger.warning(words, rank, len(requests))


def metrics(state: ReplicaState | None) -> Iterator[Metric]:
    """What `/metrics` has of it; None: no host has groups of its own."""
    if state is None:
        return
    yield gauge("hosts", "Hosts that the engine has, this one included.", state.here)
    yield counter("hosts_lost", "Hosts that have gone.", state.num_lost)
    text = "Sequences that were computed again, as their host was gone."
    yield counter("lost_host_sequences", text, state.num_recomputed)
