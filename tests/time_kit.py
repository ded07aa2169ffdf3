"""Engines over audited echo runners on virtual seconds: who computes when, and who waits for whom.

Every step takes the seconds that a test says, and devices do one thing after the other, so every
second can be told by hand. Nothing sleeps, and no machine's speed matters.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from echo_kit import VOCAB_SIZE, Listener, make_request
from fleet_kit import make_fleet

from shiftjax.core.engine import Engine
from shiftjax.core.request import Request, StepPlan
from shiftjax.parallel.grid import Group
from shiftjax.sim.devices import Clock, Handle, Units
from shiftjax.sim.echo import EchoRunner
from shiftjax.sim.replay import serve

MOST_SECONDS = 300.0  # after which a test has gone wrong


class FiniteClock(Clock):
    """Virtual seconds, of which there are so many: what waits for ever does not hang a test."""

    @property
    def now(self) -> float:
        return self._now

    @now.setter
    def now(self, now: float) -> None:
        assert now < MOST_SECONDS, "somebody waits for ever"
        self._now = now


class Span(NamedTuple):
    """One step on the devices of a group; seconds."""

    begin: float
    end: float
    group: Group
    names: tuple[str, ...]  # of the requests that it computes

    def is_on(self, unit: int) -> bool:
        return self.group.first <= unit < self.group.first + self.group.width


class Delayed:
    """Around a runner: `run`, of a subclass, says in a `Handle` when a step is done."""

    def __init__(self, runner, clock: Clock):
        self.runner, self.clock = runner, clock

    def is_ready(self, handle):
        return handle.done <= self.clock.now

    def fetch(self, handle):
        self.clock.now = self.clock.seen_at = max(self.clock.now, handle.done)
        return self.runner.fetch(handle[1])

    def reset(self):
        self.runner.reset()


class TimedRunner(Delayed):
    """Around a runner: a step occupies the units of its group for `seconds(plan)`."""

    def __init__(self, runner, group: Group, clock: Clock, units: Units, seconds, spans):
        super().__init__(runner, clock)
        self.group, self.units = group, units
        self.seconds, self.spans = seconds, spans

    def run(self, plan, mode, previous):
        handle = self.runner.run(plan, mode, previous and previous[1])
        seconds = self.seconds(plan)
        done = self.units.occupy(self.group, self.clock.now, seconds)
        names = tuple(item.sequence.request.request_id for item in plan.scheduled)
        self.spans.append(Span(done - seconds, done, self.group, names))
        return Handle(done, handle)


class Played(NamedTuple):
    """What became of the requests of a test."""

    engine: Engine
    spans: list[Span]
    begins: dict[str, float]  # by request: when its first step began
    ends: dict[str, float]  # and when its last one ended
    listener: Listener

    def of(self, name: str) -> list[Span]:
        """The steps that computed something of a request, in their order."""
        return [span for span in self.spans if name in span.names]

    def gaps(self, name: str) -> list[float]:
        """Seconds that a request waited between its steps."""
        return [after.begin - before.end for before, after in pairwise(self.of(name))]


def play_fleet(
    requests: Sequence[Request],
    *,
    seconds: Callable[[StepPlan], float] = lambda plan: 1.0,
    units: int = 4,
    overlap: bool = False,
    fleet: dict | None = None,
    max_model_len: int = 76,
    **options,
) -> Played:
    """Serve requests in a fleet, each when it arrives, to the end."""
    clock, of_units, spans = FiniteClock(), Units(units), []
    settings = {"clock": lambda: 0.0} | (fleet or {})
    options |= {"overlap": overlap, "max_model_len": max_model_len}
    engine = make_fleet(units=units, clock=clock, fleet=settings, **options)
    engine.wait = clock.wait_for_one
    for lane in engine.lanes:
        lane.runner = TimedRunner(lane.runner, lane.group, clock, of_units, seconds, spans)
    listener = Listener()
    _, num_refused = serve(engine, clock, requests, lambda event: listener.hear([event]))
    assert not num_refused
    engine.check()
    spans.sort()
    names = [request.request_id for request in requests]
    begins = {name: min(span.begin for span in spans if name in span.names) for name in names}
    ends = {name: max(span.end for span in spans if name in span.names) for name in names}
    return Played(engine, spans, begins, ends, listener)


def of_tokens(name: str, num: int, arrival: float = 0.0, prompt=(1, 2, 3), **more) -> Request:
    """A request of so many steps: the first one computes its prompt."""
    return make_request(name, [*prompt], arrival, max_tokens=num, ignore_eos=True, **more)


class PacedRunner(EchoRunner):
    """Devices that take `seconds` for a step and do one after the other."""

    def __init__(self, clock: Clock, seconds: float):
        super().__init__(VOCAB_SIZE)
        self.clock, self.seconds, self.idle_at = clock, seconds, 0.0
        self.started: list[float] = []
        self.num_ended = 0
        self.fails_at: int | None = None  # number of the step whose results cannot be fetched

    def run(self, plan, mode, previous_handle):
        self.started.append(self.clock.now)
        assert len(self.started) - self.num_ended <= 2, "more than two steps in flight"
        self.idle_at = max(self.clock.now, self.idle_at) + self.seconds
        output = super().run(plan, mode, previous_handle and previous_handle[1])
        return Handle(self.idle_at, output)

    def is_ready(self, handle):
        return handle[0] <= self.clock.now

    def fetch(self, handle):
        self.clock.now = self.clock.seen_at = max(self.clock.now, handle[0])
        self.num_ended += 1
        if self.num_ended - 1 == self.fails_at:
            raise RuntimeError("this step failed")
        return handle[1]
