"""A fleet: units that form groups, and groups that give way to others, while requests run. No JAX.

What shares a KV layout may change every step: that is a `Mode`. What changes the layout changes
here, at a safe point of the groups concerned, when no step of theirs is in flight:

    decide    a policy names an arrangement, and why
    close     the groups that have to go plan no more steps; those in flight are committed
    hand over their requests go to the groups that come, with their keys and values
    open      the new groups step at once: devices run what they are given in order

Kinds of switching, for binding groups into a wider one (a release always moves):

    move        running requests come along, nothing is recomputed
    sequential  the groups finish their requests first, taking no new ones (Flying Serving, F15)
    soft        the same, and what waits for the wide group already runs in an idle one (F16)
    hard        running requests pause with their blocks until the wide group is released (F17);
                after `max_pause_seconds` they take turns with it
    auto        move, unless a prediction says that waiting for the end is quicker

A step of the wide group and one of a paused group would find each other's devices busy, but not
each other's blocks: both layouts are valid at once, so taking turns is nothing but stepping.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shiftjax.core.lane import Lane, least_loaded
from shiftjax.core.limits import RequestLimits
from shiftjax.core.request import Request, SequenceState
from shiftjax.core.topology import Topology
from shiftjax.fleet.alternatives import Alternatives
from shiftjax.fleet.fleet_policy import FleetPolicy, Wish
from shiftjax.fleet.handover import Handover, Mover, hand_over, make_room, start_anew
from shiftjax.fleet.needs import Needs
from shiftjax.fleet.prefixes import adopt
from shiftjax.fleet.state import FleetState, state_of
from shiftjax.fleet.stats import FleetStats, Turn
from shiftjax.parallel.arrangements import Arrangement, Change, changes, check_arrangement
from shiftjax.parallel.grid import Group

MOST_VIEWED = 256  # requests of the queue that a policy looks at
MOST_REMEMBERED = 4096  # changes that `history` keeps
CLOSE_SECONDS = 30.0  # that groups may take until no step of theirs is in flight
MOST_FAILED_MOVES = 3  # in `FAILED_MOVES_SECONDS`; then requests are not moved any more
FAILED_MOVES_SECONDS = 600.0
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pending:
    """A change under way: its sources are closing, or finish what they have."""

    change: Change
    kind: str
    reason: str
    since: float
    closing_since: float = 0.0
    # Sources that have finished what they had; what they have now came early, for the wide group.
    finished: set[Group] = field(default_factory=set)


class SwitchRules(NamedTuple):
    """How groups change; seconds."""

    switch: str = "move"
    max_pause_seconds: float = 10.0  # the longest that requests wait for others to give way
    arrange_seconds: float = 0.05  # after which the policy is asked again
    kind_of_bind: Callable[[Change, Sequence[Request]], str] | None = None  # of auto; None: move
    block_bytes: int = 0  # of a block on the devices of a unit, in every layout
    clock: Callable[[], float] = time.perf_counter  # that measures the host's work


DEFAULT_RULES = SwitchRules()


class Fleet(Topology):
    """The groups of all widths over the same units, of which an arrangement is open.

    `lanes` are one for every group. `policy` says which shall be open; it is asked when a request
    has come or gone, and every `arrange_seconds` of the rules. `alternatives` sees what it sees.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        arrangement: Arrangement,
        policy: FleetPolicy,
        mover: Mover,
        limits: RequestLimits,
        rules: SwitchRules = DEFAULT_RULES,
        alternatives: Alternatives | None = None,  # None: costs are unknown
    ):
        self.lanes: Mapping[Group, Lane] = {lane.group: lane for lane in lanes}
        self.arrangement = arrangement
        self.limits = limits
        self.policy = policy
        self.mover = mover
        self.rules, self.alternatives = rules, alternatives
        self.is_draining = False
        self.stats = FleetStats()
        self.history: deque[Turn] = deque(maxlen=MOST_REMEMBERED)
        self._pending: list[_Pending] = []
        self._paused_at: dict[Group, float] = {}
        self._below: dict[Group, Arrangement] = {}  # what pauses below a group, and shall return
        self._failed_at: deque[float] = deque(maxlen=MOST_FAILED_MOVES)
        self._unproven: set[Group] = set()  # no step has shown yet that what it was handed is there
        self._asked_at = float("-inf")
        self._seen: tuple[int, ...] = ()
        self._units = sum(group.width for group in arrangement)
        for lane in lanes:
            lane.state = "open" if lane.group in arrangement else "idle"

    @property
    def policy(self) -> FleetPolicy:
        """What says which groups there shall be."""
        return self._policy

    @policy.setter
    def policy(self, policy: FleetPolicy) -> None:
        self._policy = policy
        self.needs = Needs(self.lanes.values(), policy, self.limits)

    # ------------------------------------------------------------------ a turn of the engine

    def turn(
        self, queue: Callable[[int], list[Request]], num_queued: int, num_seen: int, now: float
    ) -> None:
        """Between steps: make the changes that are due, and ask for others.

        Of the `num_queued` requests that no group has `queue` gives so many, those first that come
        first; `num_seen` grows with each that comes.
        """
        self._end_pauses(now)
        self._release_idle(now)
        self._reopen_late(now)
        if not self._pending and self._shall_ask(num_queued, num_seen, now):
            self._asked_at = now
            self._ask(queue(MOST_VIEWED), num_queued, num_seen, now)
        for pending in [each for each in self._pending if self._is_due(each, now)]:
            self._pending.remove(pending)
            self._make(pending, now)

    def _ask(self, queue: list[Request], num_queued: int, num_seen: int, now: float) -> None:
        """Let the policy say what there shall be; one that fails has no say this time."""
        try:
            open_now = [self.lanes[group] for group in self.arrangement]
            view = self.needs.view(open_now, queue, num_queued, now, num_seen)
            wish = self.policy.arrange(view)
            if self.alternatives is not None:
                self.alternatives.saw(view, wish)
            if wish is not None and wish.arrangement != self.arrangement:
                self.begin(wish, now, queue)
        except Exception as error:
            self.stats.failed_changes["policy"] += 1
            logger.error("The policy of the fleet failed; groups stay.", exc_info=error)

    def drain(self) -> None:
        """Nothing is bound any more; what pauses goes on."""
        self.is_draining = True
        self.rules = self.rules._replace(max_pause_seconds=0.0)

    def begin(self, wish: Wish, now: float, wanting: Sequence[Request] = ()) -> None:
        """Let groups close that a wished arrangement does not have, for those that want it."""
        check_arrangement(wish.arrangement, self._units)
        for wanted in changes(self.arrangement, wish.arrangement):
            change = self._after_pauses(wanted)
            kind = self._kind(change, wish, wanting)
            waits = kind in ("sequential", "soft")
            for group in change.sources:
                self.lanes[group].state = "leaving" if waits else "closing"
            self._pending.append(_Pending(change, kind, wish.reason, now))

    def _after_pauses(self, change: Change) -> Change:
        """What has to come first where groups pause below a source: its release to them."""
        for group in change.sources:
            below = self._below.get(group)
            if below is not None:
                return Change((group,), below)
        return change

    def lane_for(self, request: Request) -> Lane | None:
        """The group that shall have the first request of the queue; None: it has to wait."""
        width = self.needs.width_of(request)
        able = [e for e in self.lanes.values() if e.state == "open" and e.group.width >= width]
        for pending in self._pending:
            if pending.kind == "soft" and pending.change.wide.width >= width:
                able += self._idle_sources(pending, request)
        return least_loaded(able, request) if able else None

    def _idle_sources(self, pending: _Pending, request: Request) -> list[Lane]:
        """Groups with nothing left to do, where what waits for the wide one can already run."""
        fitting = self.needs.fitting_width(self.needs.num_kv_tokens(request))
        lanes = [self.lanes[each] for each in pending.change.sources if each.width >= fitting]
        return [e for e in lanes if e.state == "leaving" and not e.scheduler.requests]

    # ------------------------------------------------------------------ changes

    def _shall_ask(self, num_queued: int, num_seen: int, now: float) -> bool:
        seen = (
            num_queued,
            num_seen,
            sum(len(lane.scheduler.requests) for lane in self.lanes.values()),
        )
        if self.is_draining and not self._is_stuck(num_queued):
            return False
        if seen == self._seen and now - self._asked_at < self.rules.arrange_seconds:
            return False
        self._seen = seen
        return True

    def _is_stuck(self, num_queued: int) -> bool:
        """Whether requests wait, and no group works that could take them."""
        return num_queued > 0 and not any(each.scheduler.requests for each in self.lanes.values())

    def _reopen_late(self, now: float) -> None:
        """Groups whose steps do not end in time are not waited for: they go on as they were."""
        for pending in self._pending:
            if pending.closing_since and now - pending.closing_since > CLOSE_SECONDS:
                self._pending.remove(pending)
                self.stats.failed_changes["not_ready"] += 1
                for group in pending.change.sources:
                    self.lanes[group].state = "open"
                return

    def _kind(self, change: Change, wish: Wish, wanting: Sequence[Request]) -> str:
        if not change.is_bind:
            return "move"
        kind = wish.kind or self.rules.switch
        if kind == "auto":
            widest = max(group.width for group in change.sources)
            needing = [each for each in wanting if self.needs.width_of(each) > widest]
            choose = self.rules.kind_of_bind
            kind = choose(change, needing) if choose and needing else "move"
        if kind == "move" and wish.kind is None and len(self._failed_at) == MOST_FAILED_MOVES:
            return "hard"
        return kind

    def _is_due(self, pending: _Pending, now: float) -> bool:
        """Whether a change can be made now. What has waited long enough for others pauses them."""
        lanes = [self.lanes[group] for group in pending.change.sources]
        if pending.kind in ("sequential", "soft"):
            pending.finished.update(e.group for e in lanes if not e.scheduler.requests)
            if len(pending.finished) < len(lanes):
                if now - pending.since < self.rules.max_pause_seconds:
                    return False
                pending.kind = "hard"
        pending.closing_since = pending.closing_since or now
        for lane in lanes:
            lane.state = "closing"
        return not any(lane.in_flight for lane in lanes)

    def _make(self, pending: _Pending, now: float) -> None:
        """Hand over, and open the groups that come. Whatever goes wrong, nobody is lost."""
        begin, change = self.rules.clock(), pending.change
        sources, targets = (
            [self.lanes[group] for group in side] for side in (change.sources, change.targets)
        )
        requests = [each for lane in sources for each in lane.scheduler.requests.values()]
        stays = [group for group in self.arrangement if group not in change.sources]
        self.arrangement = tuple(sorted([*stays, *change.targets]))
        try:
            handover = self._hand_over(pending, sources, targets, now)
            for copy in handover.copies:
                self.mover.compact(copy)
            for crossing in handover.crossings(change):
                self.mover.move(crossing)
            self._unproven.update(change.targets if handover.moves else ())
        except Exception as error:
            logger.error("A move failed; its requests are computed again.", exc_info=error)
            handover = Handover(num_recomputed=sum(map(len, requests)))
            self._recover([*sources, *targets], targets, requests, now)
        for lane in targets:
            lane.state, lane.last_mode, lane.progress_at = "open", None, now
        seconds = self.rules.clock() - begin
        self._count(pending, handover, seconds)
        numbers = handover.num_sequences, handover.num_recomputed
        what = pending.reason, pending.kind
        self.history.append(Turn(now, self.arrangement, *what, *numbers, seconds, change))

    def _hand_over(
        self, pending: _Pending, sources: list[Lane], targets: list[Lane], now: float
    ) -> Handover:
        """Change queues and block tables; returns what the devices have to move."""
        change = pending.change
        if pending.kind == "hard":
            self._below[change.wide] = change.narrow
            return self._pause(pending, sources, targets[0], now)
        self._resume(targets, now)
        self._below.pop(change.wide, None)
        handover = hand_over(sources, targets, change)
        self.stats.num_adopted_blocks += adopt(sources, targets, change, handover)
        for lane in sources:
            lane.state = "idle"
        return handover

    def _recover(
        self,
        lanes: list[Lane],
        targets: list[Lane],
        requests: list[list[SequenceState]],
        now: float,
    ) -> None:
        """What was under way is lost, and the pools with it: all begin from their tokens."""
        below = [each for lane in targets for each in lane.scheduler.requests.values()]
        everybody = list({id(each): each for each in (*requests, *below)}.values())
        start_anew(lanes, targets, everybody)
        for lane in lanes:
            lane.state = "idle"
        for group in {lane.group for lane in lanes}:
            self._below.pop(group, None)
        self._resume(lanes, now)
        self.recompute(targets, now)

    def _count(self, pending: _Pending, handover: Handover, seconds: float) -> None:
        stats, change = self.stats, pending.change
        if change.is_bind:
            stats.binds[change.wide.width, pending.kind, pending.reason] += 1
        else:
            stats.releases[change.wide.width] += 1
        direction = "bind" if change.is_bind else "release"
        stats.moved_blocks[direction] += handover.num_narrow_blocks
        stats.moved_bytes[direction] += handover.num_unit_blocks * self.rules.block_bytes
        stats.num_moved_sequences += handover.num_sequences
        stats.num_recomputed_sequences += handover.num_recomputed
        stats.num_compacted_blocks += sum(len(copy.blocks) for copy in handover.copies)
        stats.move_seconds.observe(seconds)

    # ------------------------------------------------------------------ pauses

    def _pause(self, pending: _Pending, sources: list[Lane], wide: Lane, now: float) -> Handover:
        """Keep what groups have while another one has their devices, and make room for it.

        What has begun early, for the wide group, goes along.
        """
        copies = make_room(wide, sources, wide.scheduler.tables.device.num_usable_blocks // 2)
        early = [lane for lane in sources if lane.group in pending.finished]
        handover = hand_over(early, [wide], pending.change)
        handover.copies[:0] = copies
        for lane in sources:
            lane.state = "paused" if lane.scheduler.requests else "idle"
            if lane.state == "paused":
                self._paused_at[lane.group] = now
        return handover

    def _resume(self, targets: list[Lane], now: float) -> None:
        for lane in targets:
            since = self._paused_at.pop(lane.group, None)
            if since is not None:
                self.stats.paused_seconds += now - since

    def _end_pauses(self, now: float) -> None:
        """Groups that have paused long enough step again, beside the one that has their devices."""
        most = self.rules.max_pause_seconds
        over = [group for group, since in self._paused_at.items() if now - since >= most]
        lanes = [self.lanes[group] for group in over]
        self._resume(lanes, now)
        for lane in lanes:
            lane.state = "leaving"

    def _release_idle(self, now: float) -> None:
        """What pauses below a group that has nothing to do goes on at once."""
        for wide, below in self._below.items():
            lane = self.lanes[wide]
            if lane.state == "open" and not lane.scheduler.requests:
                lane.state = "closing"
                self._pending.append(_Pending(Change((wide,), below), "move", "done", now))

    # ------------------------------------------------------------------ failures

    def has_stepped(self, lane: Lane) -> None:
        """A step of a group has been committed: what it was handed is there."""
        self._unproven.discard(lane.group)

    def absorbs(self, lane: Lane, error: Exception) -> bool:
        """Compute again what a group was handed, if no step has shown yet that it is there."""
        if lane.group not in self._unproven:
            return False
        logger.error("A move failed; its requests are computed again.", exc_info=error)
        self.recompute([lane], lane.progress_at)
        return True

    def states(self) -> Iterable[FleetState]:
        """Return what the groups are doing now."""
        yield state_of(self)

    def recompute(self, lanes: Iterable[Lane], now: float) -> None:
        """What groups were handed is lost, and their pools: all starts again from its tokens."""
        self._failed_at.append(now)
        self.stats.failed_changes["move"] += 1
        if self._failed_at[0] < now - FAILED_MOVES_SECONDS:
            self._failed_at.popleft()
        if len(self._failed_at) == MOST_FAILED_MOVES:
            logger.warning("Moves keep failing: from now on groups pause instead (switch=hard).")
        for lane in lanes:
            self.lost(lane)
            lane.runner.reset()
            self._unproven.discard(lane.group)

    def lost(self, lane: Lane) -> None:
        """The pools of a group's devices are lost: everybody on them starts from the tokens."""
        for other in self.lanes.values():
            if other.group.overlaps(lane.group):
                other.in_flight.clear()
                if other.scheduler.requests:
                    other.scheduler.forget_all()

    def check(self) -> None:
        """Conservation. Raises RuntimeError at the first breach."""
        check_arrangement(self.arrangement, self._units)
        for group, lane in self.lanes.items():
            lane.scheduler.check()
            if lane.state == "idle" and (lane.scheduler.requests or lane.in_flight):
                raise RuntimeError(f"{group} is idle, but has requests.")
            if (lane.state == "open") and group not in self.arrangement:
                raise RuntimeError(f"{group} is open, but not in the arrangement.")
