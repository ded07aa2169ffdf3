"""Groups with roles: some compute prompts, others decode, and a policy may change who does what.

    prefill   takes requests and computes prompts; a sequence leaves with its first token
    decode    takes no request; decodes what prefill groups have computed
    mixed     does both, as groups do without roles

What DistServe (arXiv 2401.09670) and Splitwise (arXiv 2311.18677) do, inside one machine. A
sequence whose first token is committed is parked with its blocks. As soon as a group that decodes
has room it gets blocks there, and its KV is sent; it decodes when all of that has arrived. What the
other group has in its prefix cache is not sent. In simulations only.

A role is no more than two flags of a group, so changing it drains nothing:

    to decode    prompts that the group has begun or queued end here, and are decoded here
    to prefill   what decodes here is parked after its step, and sent to the others like a prompt
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from shiftjax.core.lane import Lane, load_of
from shiftjax.core.request import Request, SequenceState, Status
from shiftjax.core.topology import Topology
from shiftjax.phases.parking import has_begun

Role = Literal["prefill", "decode", "mixed"]
ASK_SECONDS = 0.05  # after which the policy is asked again


class Send(Protocol):
    """Sends the KV of a sequence between two groups."""

    num_bytes: float  # that all devices have received so far
    seconds: float  # in which links were busy with it

    def __call__(self, source: Lane, target: Lane, num_blocks: int) -> float:
        """Begin to send so many blocks; returns the time at which they will have arrived."""
        ...

    def receive(self, target: Lane, num_blocks: int) -> None:
        """Let the target's devices enter what has arrived."""
        ...


class RoleView(NamedTuple):
    """What a policy sees; tokens are of prompts that are not computed, by group."""

    now: float
    roles: Sequence[Role]
    num_running: Sequence[int]  # sequences that decode, or wait to be sent here or from here
    num_held_tokens: Sequence[int]
    num_prompts: Sequence[int]
    num_prompt_tokens: Sequence[int]
    num_queued: int  # requests that no group has, and their tokens
    num_queued_tokens: int
    num_seen: int  # requests that have come since the start


class RolePolicy(Protocol):
    """Says which group has which role."""

    def first(self) -> Sequence[Role]:
        """Return the roles at the start."""
        ...

    def arrange(self, view: RoleView) -> Sequence[Role] | None:
        """Return the roles that there shall be; None: as they are."""
        ...


@dataclass(frozen=True)
class FixedRoles:
    """The same roles all along."""

    roles: Sequence[Role]

    def first(self) -> Sequence[Role]:
        """Return them."""
        return self.roles

    def arrange(self, view: RoleView) -> None:
        """Return None: nothing changes."""


class RoleTurn(NamedTuple):
    """A change of roles."""

    seconds: float
    roles: tuple[Role, ...]


@dataclass
class RolesRun:
    """What has become of the roles."""

    turns: list[RoleTurn] = field(default_factory=list)  # the first is the start
    num_sent: int = 0  # sequences
    num_sent_blocks: int = 0
    num_kept_blocks: int = 0  # that the target had in its prefix cache
    num_sent_bytes: float = 0.0  # that devices have received
    send_seconds: float = 0.0  # in which links were busy


class _Sent(NamedTuple):
    """KV on its way; sorted by its arrival."""

    arrives: float
    number: int
    sequence: SequenceState
    target: Lane
    num_blocks: int


class Roles(Topology):
    """Which groups take requests, and which decode. Every request has one continuation."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        send: Send,
        policy: RolePolicy,
        due: Callable[[float], None] = lambda seconds: None,  # is told when KV will arrive next
    ):
        self.lanes, self.policy = lanes, policy
        self.roles: tuple[Role, ...] = tuple(policy.first())
        self.run = RolesRun()
        self.send, self._due = send, due
        self._on_way: list[_Sent] = []  # a heap
        self._asked_at = -math.inf
        self._take(self.roles, 0.0)

    @property
    def on_way(self) -> set[str]:
        """The ids of requests whose KV is being sent."""
        return {each.sequence.request.request_id for each in self._on_way}

    def turn(
        self,
        queue: Callable[[int], list[Request]],
        num_queued: int,
        num_seen: int,
        now: float,
    ) -> None:
        """Let those decode whose KV has arrived, send what there is room for, ask the policy."""
        while self._on_way and self._on_way[0].arrives <= now:
            sent = heapq.heappop(self._on_way)
            self.send.receive(sent.target, sent.num_blocks)
        if now - self._asked_at >= ASK_SECONDS:
            self._asked_at = now
            tokens = sum(len(each.prompt_token_ids) for each in queue(num_queued))
            wanted = self.policy.arrange(self._view(num_queued, tokens, num_seen, now))
            if wanted is not None and tuple(wanted) != self.roles:
                self._take(tuple(wanted), now)
        self._send_parked()
        self._due(self._on_way[0].arrives if self._on_way else math.inf)

    def lane_for(self, request: Request) -> Lane:
        """Return the group that would have computed its prompt first, of those that take it.

        Of groups that decode, too, the one with the least load.
        """
        takes = [e for e, role in zip(self.lanes, self.roles, strict=True) if role != "decode"]
        known = {id(lane): 0 for lane in takes}
        if len(takes) > 1:
            hashes: list[bytes] = []
            known = {id(e): e.scheduler.tables.num_known_tokens(request, hashes) for e in takes}

        def order(lane: Lane) -> tuple[bool, float]:
            width, saved = lane.group.width, known[id(lane)]
            if lane.scheduler.admission.decodes:
                is_full, load = load_of(lane)
                return is_full, load - saved / width
            return lane.scheduler.is_full, (_num_prompt_tokens(lane) - saved) / width

        return min(takes, key=order)

    def has_stepped(self, lane: Lane) -> None:
        """Park what has its first token, where nothing is decoded."""
        if not lane.scheduler.admission.decodes:
            for sequence in [each for each in lane.scheduler.running if has_begun(each)]:
                lane.scheduler.park(sequence)

    def check(self) -> None:
        """Check that who is parked waits, or is on the way. Raises RuntimeError."""
        on_way = self.on_way
        for sent in self._on_way:
            if sent.sequence.status is not Status.PARKED:
                raise RuntimeError("A sequence decodes whose KV has not arrived.")
            if sent.sequence not in sent.target.scheduler.parked:
                raise RuntimeError("A sequence is on its way to a group that does not expect it.")
        for lane in self.lanes:
            for sequence in lane.scheduler.parked:
                is_here = sequence.request.request_id not in on_way
                if is_here and not has_begun(sequence):
                    raise RuntimeError("A sequence is parked before its first token.")

    # ------------------------------------------------------------------ KV

    def _send_parked(self) -> None:
        """Let what is parked decode where it lies, or send it, in order, where that is done."""
        is_blocked = False
        for source, sequence in self._parked():
            if source.scheduler.admission.decodes:
                if self._has_place(source):
                    self._resume(sequence, source)
            elif not is_blocked:  # nobody is sent past one that has no room
                targets = self._targets(sequence)
                is_blocked = not any(self._begin(sequence, source, each) for each in targets)

    def _has_place(self, lane: Lane) -> bool:
        """Whether one more sequence may run in a group, beside those that are expected."""
        num_expected = sum(each.target is lane for each in self._on_way)
        scheduler = lane.scheduler
        return len(scheduler.running) + num_expected < scheduler.config.max_num_seqs

    def _parked(self) -> Iterator[tuple[Lane, SequenceState]]:
        on_way = self.on_way
        found = [
            (sequence.order, lane, sequence)
            for lane in self.lanes
            for sequence in lane.scheduler.parked
            if sequence.request.request_id not in on_way
        ]
        for _, lane, sequence in sorted(found, key=lambda each: each[0]):
            yield lane, sequence

    def _targets(self, sequence: SequenceState) -> list[Lane]:
        """Groups that decode and have a place for one more, the least loaded first."""
        lanes = [e for e in self.lanes if e.scheduler.admission.decodes and self._has_place(e)]

        def order(lane: Lane) -> float:
            device = lane.scheduler.tables.device
            has = 0
            for block_hash in sequence.block_hashes:
                if not device.is_indexed(block_hash):
                    break
                has += device.block_size
            return (lane.scheduler.num_held_tokens - has) / lane.group.width

        return sorted(lanes, key=order)

    def _begin(self, sequence: SequenceState, source: Lane, target: Lane) -> bool:
        """Give a sequence blocks of the target, and send its KV; False if there is no room."""
        old, registered = sequence.block_table, sequence.num_registered_blocks
        tables = target.scheduler.tables
        sequence.block_table = []
        config = target.scheduler.config
        if not tables.admit(sequence, math.ceil(config.watermark * config.num_blocks)):
            sequence.block_table, sequence.num_registered_blocks = old, registered
            return False
        name, kept = sequence.request.request_id, sequence.num_registered_blocks
        siblings = source.scheduler.detach(name)
        # Devices gather in order with their steps, so the next owner's step writes after that.
        source.scheduler.tables.device.release(old)
        target.scheduler.attach(siblings)
        target.scheduler.park(sequence)
        num_blocks = tables.device.blocks_for(sequence.num_computed_tokens) - kept
        arrives = self.send(source, target, num_blocks)
        sent = _Sent(arrives, self.run.num_sent, sequence, target, num_blocks)
        heapq.heappush(self._on_way, sent)
        self.run.num_sent += 1
        self.run.num_sent_blocks += num_blocks
        self.run.num_kept_blocks += kept
        self.run.num_sent_bytes, self.run.send_seconds = self.send.num_bytes, self.send.seconds
        return True

    def _resume(self, sequence: SequenceState, lane: Lane) -> None:
        """A sequence that is parked with its blocks decodes from now on."""
        siblings = lane.scheduler.detach(sequence.request.request_id)
        sequence.status = Status.RUNNING
        lane.scheduler.attach(siblings)

    # ------------------------------------------------------------------ roles

    def _take(self, roles: tuple[Role, ...], now: float) -> None:
        if len(roles) != len(self.lanes) or {*roles} in ({"prefill"}, {"decode"}):
            raise ValueError(f"{roles} are no roles of {len(self.lanes)} groups")
        self.roles = roles
        for lane, role in zip(self.lanes, roles, strict=True):
            lane.scheduler.admission.decodes = role != "prefill"
        self.run.turns.append(RoleTurn(now, roles))

    def _view(self, num_queued: int, tokens: int, num_seen: int, now: float) -> RoleView:
        schedulers = [lane.scheduler for lane in self.lanes]
        begun = [sum(map(_has_output, e.running)) + len(e.parked) for e in schedulers]
        return RoleView(
            now,
            self.roles,
            begun,
            [each.num_held_tokens for each in schedulers],
            [len(e.requests) - num for e, num in zip(schedulers, begun, strict=True)],
            [_num_prompt_tokens(lane) for lane in self.lanes],
            num_queued,
            tokens,
            num_seen,
        )


def _has_output(sequence: SequenceState) -> bool:
    return sequence.num_output_tokens > 0 or sequence.num_pending_tokens > 0


def _num_prompt_tokens(lane: Lane) -> int:
    """Tokens of prompts that a group has not computed."""
    scheduler = lane.scheduler
    begun = sum(max(0, s.num_prompt_tokens - s.num_computed_tokens) for s in scheduler.running)
    return scheduler.num_waiting_tokens + begun
