"""One group of devices at work, and waiting for the first of several. No JAX."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shiftjax.core.policy import Policy
from shiftjax.core.request import Request, Runner, StepPlan
from shiftjax.core.scheduler import Scheduler
from shiftjax.parallel.grid import Group, Mode

if TYPE_CHECKING:
    from shiftjax.costs.group_costs import GroupCosts

LEAST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 50e-6, 1e-3  # between looks at several groups

# To compute a token takes 15 us, to read a held one for each of 400 answered tokens 2 us
# (Llama-70B and its KV in FP8 on 8 H200, at 60% of the FLOP/s and 85% of the bytes/s).
FOUND = 8
FIRST_UNIT = Group(0, 1)


class Flight(NamedTuple):
    """A step that has been given to the devices."""

    plan: StepPlan
    mode: Mode
    handle: Any
    is_ahead: bool = False  # given while the step before was in flight, so planning was hidden
    last_mode: Mode | None = None  # what its mode was chosen after; None: its group had no step
    num_waiting: int = 0  # sequences that were not in it, lacking room

    @property
    def has_proposals(self) -> bool:
        """Whether it is not known how many tokens its sequences will have."""
        return self.plan.num_proposals > 0


class Failure(NamedTuple):
    """A step that could not be given to the devices; no plan: not even that could be made."""

    plan: StepPlan | None
    error: Exception
    has_proposals: bool = False


@dataclass(slots=True)
class Lane:
    """One group of devices at work: its sequences, its runner, its steps in flight.

    `in_flight` are at most one for each micro-batch and one more, the oldest first; `modes` are
    those of the group, base first. Where a `Topology` opens and closes lanes, `state` is

        open      it takes requests and steps
        leaving   it steps, but takes no request, and will close when it has none left
        closing   it plans no step, and will give way when none is in flight
        paused    another group has its devices; its sequences wait with their blocks
        idle      other groups have its units; it steps not, though sequences may wait in it
    """

    scheduler: Scheduler
    runner: Runner
    modes: tuple[Mode, ...]
    in_flight: deque[Flight | Failure] = field(default_factory=deque)
    awaited: Flight | Failure | None = None  # not in flight any more: its results are waited for
    group: Group = FIRST_UNIT
    policy: Policy | None = None  # that chooses its modes; None: the engine's
    costs: "GroupCosts | None" = None  # of its steps, as decisions believe; None: unknown
    state: Literal["open", "leaving", "closing", "paused", "idle"] = "open"
    last_mode: Mode | None = None
    progress_at: float = 0.0  # when its last step ended, or one began with nothing in flight

    @property
    def steps(self) -> bool:
        """Whether it may plan a step."""
        return self.state in ("open", "leaving")

    @property
    def commits_first(self) -> bool:
        """Whether a step has to be committed before the next of its micro-batch is planned."""
        lookahead = self.scheduler.lookahead
        return lookahead.commits_first or any(flight.has_proposals for flight in self.in_flight)

    def has_room(self, overlap: bool) -> bool:
        """Whether one more may be in flight: one for each micro-batch, with `overlap` one more."""
        if self.in_flight and isinstance(self.in_flight[-1], Failure):
            return False
        return len(self.in_flight) < self.scheduler.config.num_micro_batches + overlap

    def last_handle(self, micro_batch: int) -> Any:
        """The handle of the youngest step in flight of a micro-batch; None: there is none."""
        for flight in reversed(self.in_flight):
            if isinstance(flight, Flight) and flight.plan.micro_batch == micro_batch:
                return flight.handle
        return None

    @property
    def is_ready(self) -> bool:
        """Whether the oldest step in flight can be committed without waiting."""
        oldest = self.in_flight[0]
        return isinstance(oldest, Failure) or self.runner.is_ready(oldest.handle)

    def end_step(self, flight: Flight, now: float) -> float:
        """The oldest step has ended: returns its seconds, which whoever predicts them learns."""
        seconds, self.progress_at = now - self.progress_at, now
        scheduler = self.scheduler
        for each in (scheduler.lookahead, scheduler.sizes, scheduler.tables.tier):
            each.learn_step(flight.plan, flight.mode, seconds, flight.is_ahead)
        return seconds


def load_of(lane: Lane, num_more: int = 0) -> tuple[bool, int]:
    """Sorts groups: those with room first, then by the tokens that a unit holds and will hold.

    With `num_more` that would come.
    """
    scheduler = lane.scheduler
    held = scheduler.num_held_tokens + scheduler.num_waiting_tokens
    return scheduler.is_full, (held + num_more) // lane.group.width


def least_loaded(lanes: Sequence[Lane], request: Request) -> Lane:
    """Return the lane that a request loads least: those with room first, see `load_of`.

    A token of the prompt that a lane has cached makes up for `FOUND` that it holds.
    """
    roomy = [lane for lane in lanes if not lane.scheduler.is_full]
    if len(roomy) < 2:  # the first that waits costs no search
        return min(lanes, key=load_of)
    hashes: list[bytes] = []  # which lanes of one `hash_size` share

    def order(lane: Lane) -> tuple[bool, int]:
        known = lane.scheduler.tables.num_known_tokens(request, hashes)
        return load_of(lane, len(request.prompt_token_ids) - FOUND * known)

    return min(roomy, key=order)


def poll(is_over: Callable[[], bool]) -> None:
    """Sleep until it is: looks often at first, then whenever a sixteenth more time has passed."""
    start = time.monotonic()
    while not is_over():
        waited = time.monotonic() - start
        time.sleep(min(max(waited / 16, LEAST_PAUSE_SECONDS), MOST_PAUSE_SECONDS))


def wait_for_one(lanes: Sequence[Lane]) -> None:
    """Wait until the oldest step of one of these lanes is ready."""
    poll(lambda: any(lane.is_ready for lane in lanes))
