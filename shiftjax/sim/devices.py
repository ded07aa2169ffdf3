"""Virtual devices: clocks, and runners and a mover whose work takes its predicted seconds."""

import time
from collections.abc import Callable, MutableSequence, Sequence
from typing import NamedTuple

import numpy as np

from shiftjax.core.lane import FIRST_UNIT, Failure, Lane
from shiftjax.core.policy import work_of
from shiftjax.core.request import StepOutput, StepPlan
from shiftjax.costs.expert_modes import ExpertModes
from shiftjax.costs.group_costs import GroupCosts
from shiftjax.costs.work import Work
from shiftjax.fleet.handover import Copy, Crossing, calls
from shiftjax.fleet.move_costs import MoveCosts
from shiftjax.parallel.grid import Group, Mode
from shiftjax.sim.drafts import ModelledDrafting
from shiftjax.sim.host_link import HostLink

MAX_ROWS = 1 << 16


class Clock:
    """Virtual seconds, and when the next request will come."""

    def __init__(self) -> None:
        self._now = 0.0
        self.next_arrival = float("inf")
        self.seen_at = 0.0  # when the results that were fetched last were seen
        self.next_due = float("inf")  # when something that is no step will end

    @property
    def now(self) -> float:
        """What time it is."""
        return self._now

    @now.setter
    def now(self, now: float) -> None:
        self._now = now

    def __call__(self) -> float:
        """The time, as an engine reads it when it has fetched results."""
        return self.seen_at

    def wait_for_one(self, lanes: Sequence[Lane]) -> None:
        """Until the first of these groups has a step ready, a request comes, or KV is due."""
        self.now = max(self.now, min(self.next_arrival, self.next_due, *map(_ready_at, lanes)))

    def wait_for_all(self, lanes: Sequence[Lane]) -> None:
        """Until all of them have."""
        self.now = max(self.now, *map(_ready_at, lanes))


class WallClock(Clock):
    """Seconds that pass by themselves: to set the time is to wait until then."""

    def __init__(
        self,
        read: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        super().__init__()
        self._read, self._sleep = read, sleep

    @property
    def now(self) -> float:
        """What time it is."""
        return self._read()

    @now.setter
    def now(self, now: float) -> None:
        seconds = now - self._read()
        if seconds > 0:
            self._sleep(seconds)


class Units:
    """When the devices of each unit have done all that they were given; seconds."""

    def __init__(self, num_units: int = 1) -> None:
        self._idle_at = [0.0] * num_units

    def idle_at(self, group: Group) -> float:
        """When all devices of a group have done what they were given."""
        return max(self._idle_at[group.first : group.first + group.width])

    def occupy(self, group: Group, after: float, seconds: float) -> float:
        """Give a group work, which begins when all of its units are idle; when it will be done."""
        units = slice(group.first, group.first + group.width)
        done = max(after, self.idle_at(group)) + seconds
        self._idle_at[units] = [done] * group.width
        return done


def _ready_at(lane: Lane) -> float:
    flight = lane.in_flight[0]
    if isinstance(flight, Failure):
        raise flight.error
    return flight.handle.done


class Handle(NamedTuple):
    """A step in flight: when it will be done, in seconds, and the tokens of its rows."""

    done: float
    tokens: np.ndarray


class StepRecord(NamedTuple):
    """One step that ran."""

    done: float  # seconds
    device_seconds: float  # of all stages, one after the other
    num_tokens: int
    num_decodes: int
    mode: Mode


class CostRunner:
    """A `Runner` that computes nothing: a step takes its predicted seconds.

    The host's time passes while a step is prepared: on the clock, or, where replicas
    step together, beside it.
    The devices work through what they were given in order, those of groups that share `units` too;
    `fetch` waits for them. `tokens` makes up those of a plan's rows; by default they are all 0.
    `step_seconds` replaces the predictions, say by measured ones. `drafting` has taken more of the
    host's time.

    A step begins in a stage when it has ended in the stage before and the step before has ended in
    this one, and with a token in flight, when the last stage has sampled it.
    """

    def __init__(
        self,
        costs: GroupCosts,
        clock: Clock,
        *,
        group: Group = FIRST_UNIT,
        units: Units | None = None,
        drafting: ModelledDrafting | None = None,
        link: HostLink | None = None,
    ):
        self.costs, self.clock, self.drafting = costs, clock, drafting
        self.steps: MutableSequence[StepRecord] = []
        self.tokens: Callable[[StepPlan], np.ndarray] = lambda plan: self._zeros[: plan.num_rows]
        self.link = link  # None: there is no host tier
        self.waited_seconds = 0.0  # of first stages, for KV from the host
        self._own_host = costs.engine.replicas_in_step
        self._prepared_at = self._drafted_at = 0.0
        self.step_seconds: Callable[[StepPlan, Mode], float] | None = None
        self.group = group
        self._stages = [units or Units(), *(Units() for _ in costs.stages[1:])]
        self._last_mode: Mode | None = None
        self._zeros, self._finite = np.zeros(MAX_ROWS, np.int32), np.ones(MAX_ROWS, bool)

    def run(self, plan: StepPlan, mode: Mode, previous_handle: Handle | None) -> Handle:
        """Let the host's time pass and queue the step on the devices."""
        work = work_of(plan)
        host = self.costs.host_seconds(work) + self._drafting_seconds()
        self._prepared_at = max(self.clock.now, self._prepared_at) + host
        if not self._own_host:
            self.clock.now = self._prepared_at
        seconds = self._device_seconds(plan, mode, work)
        if self._last_mode not in (None, mode):
            seconds[0] += self.costs.engine.switch_seconds
        self._last_mode, done, group = mode, self._prepared_at, self.group
        if len(self._stages) > 1 and previous_handle and _has_pending(plan):
            done = max(done, previous_handle.done)  # a token comes from the last stage
        for number, (stage, each) in enumerate(zip(self._stages, seconds, strict=True)):
            done = max(done, self._move_blocks(plan, number, stage.idle_at(group)))
            done = stage.occupy(group, done, each)
            group = FIRST_UNIT  # later stages are nobody else's
        if plan.scheduled:
            num_decodes = plan.num_rowwise
            self.steps.append(StepRecord(done, sum(seconds), plan.num_tokens, num_decodes, mode))
        return Handle(done, self.tokens(plan))

    def _move_blocks(self, plan: StepPlan, stage: int, idle_at: float) -> float:
        """Start the plan's copies in a stage; when its step may begin there."""
        if self.link is None:
            return 0.0
        begin = self._prepared_at
        self._prepared_at, there = self.link.move(plan, stage, begin, idle_at)
        if not self._own_host:
            self.clock.now = self._prepared_at
        if plan.read_extents and not stage:
            self.waited_seconds += max(0.0, there - max(begin, idle_at))
        return there

    @property
    def expert_modes(self) -> ExpertModes:
        """As in which mode the steps of its first stage use experts."""
        return self.costs.stages[0].expert_modes

    @property
    def quiet_at(self) -> float:
        """When its devices and links have done all that they were given."""
        first, *later = self._stages
        copied = self.link.quiet_at if self.link else 0.0
        return max(first.idle_at(self.group), copied, *(s.idle_at(FIRST_UNIT) for s in later))

    def _device_seconds(self, plan: StepPlan, mode: Mode, work: Work) -> list[float]:
        """Of each stage; a plan of copies alone computes nothing."""
        if not plan.scheduled:
            return [0.0] * len(self._stages)
        if self.step_seconds is not None:
            return [self.step_seconds(plan, mode)]
        return self.costs.stage_seconds(mode, work)

    def _drafting_seconds(self) -> float:
        """Of the host since the step before."""
        if self.drafting is None:
            return 0.0
        before, self._drafted_at = self._drafted_at, self.drafting.seconds
        return self._drafted_at - before

    def is_ready(self, handle: Handle) -> bool:
        """Whether the step is done by now."""
        return handle.done <= self.clock.now

    def fetch(self, handle: Handle) -> StepOutput:
        """Wait until the step is done."""
        done, tokens = handle
        self.clock.now = max(self.clock.now, done)
        self.clock.seen_at = done if self._own_host else self.clock.now
        return StepOutput(tokens, self._finite[: len(tokens)])

    def reset(self) -> None:
        """Nothing is held that could be lost."""


def _has_pending(plan: StepPlan) -> bool:
    """Whether it reads a token that the host does not know."""
    return any(item.previous_row >= 0 for item in plan.scheduled)


class CostMover:
    """A `Mover` that moves nothing: it takes predicted seconds of the units concerned.

    The host dispatches each change as it prepares a step of no sequences, which is assumed, not
    measured.
    """

    def __init__(self, costs: MoveCosts, clock: Clock, units: Units, host_seconds: float):
        self.costs, self.clock = costs, clock
        self.num_bytes = 0  # received by a device, over all moves
        self.seconds = 0.0  # of devices, over all moves and copies
        self._units, self._host_seconds = units, host_seconds

    def move(self, crossing: Crossing) -> None:
        """Occupy the wide group's units for its calls."""
        ways = crossing.wide.width // crossing.narrow_width
        num_calls = sum(1 for _ in calls(crossing.pairs, ways, self.costs.blocks_per_call(ways)))
        self.num_bytes += num_calls * self.costs.call_bytes(ways)
        self._occupy(crossing.wide, num_calls * self.costs.call_seconds(ways))

    def compact(self, copy: Copy) -> None:
        """Occupy the group's units for copies in their memory."""
        self._occupy(copy.group, self.costs.copy_seconds(len(copy.blocks)))

    def _occupy(self, group: Group, seconds: float) -> None:
        self.clock.now += self._host_seconds
        self.seconds += seconds
        self._units.occupy(group, self.clock.now, seconds)
