"""Engines of a fleet as its benchmark runs them: static deployments and fleets are one, in turn.

Every static deployment is an arrangement of the same units: DP is all of them apart, SP x TP and TP
are one group whose policy of modes is fixed. So one engine is all of them in turn, with the same
weights, pools and compiled steps, and a comparison compares arrangements alone.
"""

import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, ClassVar, NamedTuple

import jax

from shiftjax.build import Built, build
from shiftjax.config import EngineConfig
from shiftjax.core.engine import Engine
from shiftjax.core.policy import FixedPolicy, Policy, make_policy
from shiftjax.core.request import Event, Request, RequestMetrics, SamplingParams
from shiftjax.fleet.fleet_policy import FixedArrangement, FleetPolicy, FleetView, Wish
from shiftjax.fleet.handover import Copy, Crossing, Mover
from shiftjax.fleet.regrouping import Fleet
from shiftjax.parallel.arrangements import Arrangement, equal_groups
from shiftjax.parallel.grid import Group
from shiftjax.settings import make_virtual_devices
from shiftjax.sim.columns import percentiles
from shiftjax.sim.trace import TraceRequest, on_off_times, requests_at
from shiftjax.weights.locate import open_source, resolve_model

UNITS, WIDTHS = 8, (1, 2, 4, 8)
TOKEN_IDS = range(3, 250)  # of made-up prompts; every model has them
KINDS = ("move", "move", "soft", "hard", "sequential")  # of switching, at random
THRESHOLD = 32  # tokens of a step, beyond which a wide group splits tokens

# ---------------------------------------------------------------------- engines


def start(model: str, num_blocks: int, units: int = UNITS, **options: Any) -> Built:
    """A fleet of so many virtual devices, one a unit, that forms groups of all widths."""
    config = EngineConfig.from_options(
        model=model,
        devices=units,
        tp=1,
        fleet=True,
        num_blocks=num_blocks,
        cache_dir="none",  # what a CPU compiles can be loaded on other units, what it reads not
        policy="threshold",
        shift_threshold=THRESHOLD,
        **({"fleet_policy": "load", "bind_at": 0.25, "release_at": 1.0} | options),
    )
    make_virtual_devices(config)
    return build(config, open_source(resolve_model(model), seed=0), lambda *_: None)


def compile_all(built: Built) -> None:
    """Compile the steps of the widest group in every mode that a deployment of `SIDES` takes."""
    lane = fleet_of(built.engine).lanes[Group(0, UNITS)]
    runner = next(runner for runner in built.runners if runner is lane.runner)
    for program, mode in product(runner.programs, lane.modes):
        runner.compiled(program, mode)


def fleet_of(engine: Engine) -> Fleet:
    """The fleet of an engine that was started with one."""
    fleet = engine.topology.find(Fleet)
    assert fleet is not None
    return fleet


def form(engine: Engine, arrangement: Arrangement, kind: str = "move") -> None:
    """Let these groups be formed; what runs goes along."""
    fleet = fleet_of(engine)
    fleet.policy = FixedArrangement(arrangement)
    fleet.begin(Wish(arrangement, "bench", kind), time.monotonic())
    while fleet.arrangement != arrangement:
        engine.step(time.monotonic())


class Side(NamedTuple):
    """A deployment: groups of one width and a policy of modes; width 0: groups come and go."""

    width: int
    modes: Policy


SIDES: Mapping[str, Side] = {
    "DP 8": Side(1, FixedPolicy(0)),
    "SP 2 x TP 4": Side(UNITS, FixedPolicy(2)),
    "TP 8": Side(UNITS, FixedPolicy(-1)),
    "shift": Side(UNITS, make_policy("threshold", THRESHOLD)),
    "fleet": Side(0, make_policy("threshold", THRESHOLD)),
}


def become(engine: Engine, side: Side, policy: FleetPolicy) -> None:
    """Make an idle engine this deployment; `policy` is that of the fleet."""
    form(engine, equal_groups(UNITS, side.width or UNITS))
    engine.flush_prefix_cache()
    for lane in engine.lanes:
        lane.policy = side.modes
    if not side.width:
        fleet_of(engine).policy = policy


@dataclass
class Wandering:
    """Groups that change at random, in a `share` of the times that the policy is asked."""

    widths: Sequence[int]
    random: random.Random
    kinds: Sequence[str] = KINDS
    share: float = 0.25
    widens: ClassVar[bool] = True

    def width_for(self, request: Request) -> int:
        """Any."""
        return 1

    def arrange(self, view: FleetView) -> Wish | None:
        """Some arrangement or none, and some kind of switching."""
        if self.random.random() > self.share:
            return None
        whole = equal_groups(view.units, max(self.widths))
        groups = [part for group in whole for part in self._parts(group)]
        return Wish(tuple(groups), "random", self.random.choice(self.kinds))

    def _parts(self, group: Group) -> list[Group]:
        is_least = group.width == min(self.widths)
        if is_least or (group.width in self.widths and self.random.random() < 0.5):
            return [group]
        return [part for half in group.halves() for part in self._parts(half)]


@dataclass
class WaitingMover:
    """Waits for every move, so that the seconds of a change are those of host and devices."""

    mover: Mover
    built: Built

    def move(self, crossing: Crossing) -> None:
        """Move and wait."""
        self.mover.move(crossing)
        self._wait()

    def compact(self, copy: Copy) -> None:
        """Copy and wait."""
        self.mover.compact(copy)
        self._wait()

    def _wait(self) -> None:
        for runner in self.built.runners:
            jax.block_until_ready(runner.memory.pools)


# ---------------------------------------------------------------------- requests


def random_requests(seed: int, num: int) -> list[Request]:
    """Greedy and seeded ones, some with two continuations, some with a common beginning."""
    rng = random.Random(seed)
    shared = rng.choices(TOKEN_IDS, k=40)
    requests = []
    for number in range(num):
        prompt = shared[: rng.choice([0, 0, 16, 33])] + rng.choices(TOKEN_IDS, k=rng.randint(1, 40))
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            seed=number,
            n=rng.choice([1, 1, 2]),
            max_tokens=rng.randint(8, 40),
            ignore_eos=True,
        )
        requests.append(Request(str(number), prompt, sampling))
    return requests


def request_of(number: int, each: TraceRequest, priority: int = 0) -> Request:
    """A request of a trace, greedy and of exactly its length."""
    most = each.num_output_tokens
    sampling = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
    prompt = [TOKEN_IDS[token] for token in each.prompt(number, len(TOKEN_IDS))]
    return Request(str(number), prompt, sampling, each.arrival_seconds, priority)


def quiet_burst_quiet(
    seconds: float, quiet: float, burst: float, prompt: int, output: int, seed: int
) -> list[TraceRequest]:
    """Thirds of one length: quiet requests per second, then those of a burst, then quiet again."""
    third = seconds / 3
    times = on_off_times(quiet, burst, 2 * third, third, seconds, seed)
    return requests_at(times, prompt, output, seed=seed)


# ---------------------------------------------------------------------- runs


def texts(engine: Engine, requests: Sequence[Request]) -> dict[tuple[str, int], list[int]]:
    """Serve requests that come one a turn: the tokens of every continuation. Time is turns."""
    found: dict[tuple[str, int], list[int]] = {}
    todo, turn = deque(requests), 0
    while todo or engine.has_work():
        if todo:
            engine.add_request(todo.popleft())
        for event in engine.step(float(turn)):
            found.setdefault((event.request_id, event.index), []).extend(event.token_ids)
        engine.check()
        turn += 1
    return found


def share_equal(
    found: Mapping[tuple[str, int], Sequence[int]], wanted: Mapping[tuple[str, int], Sequence[int]]
) -> float:
    """The share of wanted tokens that were found at their place; 1.0: all, and no other."""
    total = sum(max(len(found.get(name, ())), len(tokens)) for name, tokens in wanted.items())
    total += sum(len(tokens) for name, tokens in found.items() if name not in wanted)
    same = sum(
        one == other
        for name, tokens in wanted.items()
        for one, other in zip(found.get(name, ()), tokens, strict=False)
    )
    return same / total if total else 1.0


@dataclass
class Served:
    """What became of the requests of a trace."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_refused: int = 0
    num_failed: int = 0
    metrics: dict[str, RequestMetrics] = field(default_factory=dict)

    def hear(self, events: Sequence[Event]) -> None:
        """Count tokens and keep the metrics of what has ended."""
        for event in events:
            self.num_tokens += len(event.token_ids)
            self.num_failed += event.error is not None
            if event.metrics is not None and event.error is None:
                self.metrics[event.request_id] = event.metrics

    def row(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Columns of all requests, or of some: seconds and tokens per second."""
        chosen = [m for name, m in self.metrics.items() if names is None or name in names]
        firsts = [m.ttft_seconds for m in chosen if m.ttft_seconds is not None]
        laters = [m.tpot_seconds for m in chosen if m.tpot_seconds is not None]
        row: dict[str, Any] = {"requests": len(chosen), "refused": self.num_refused}
        row |= {"failed": self.num_failed}
        row |= percentiles("ttft", firsts) | percentiles("tpot", laters)
        return row | {"output_tokens_per_second": self.num_tokens / self.seconds}


def serve(engine: Engine, requests: Sequence[Request], widest: int = UNITS) -> Served:
    """Serve requests when they arrive, in seconds of the clock.

    Those that need a wider group than there will ever be, `widest`, are refused.
    """
    fleet, served, begin = fleet_of(engine), Served(), time.monotonic()
    todo = deque(sorted(requests, key=lambda request: request.arrival_seconds))
    while todo or engine.has_work():
        now = time.monotonic()
        while todo and todo[0].arrival_seconds <= now - begin:
            request = todo.popleft()
            if fleet.needs.width_of(request) > widest:
                served.num_refused += 1
                continue
            engine.add_request(replace(request, arrival_seconds=begin + request.arrival_seconds))
        if engine.has_work():
            served.hear(engine.step(now))
        else:
            time.sleep(0.002)
    served.seconds = time.monotonic() - begin
    return served
