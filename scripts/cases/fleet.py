"""Groups that come and go under running requests: are the tokens the same, and what does it cost?

    python scripts/bench.py fleet --quick --seed 1
    python scripts/bench.py fleet [--counts 1 8 32 64] [--contexts 64 256]

`--quick` serves the same requests three times, on one fleet of 8 virtual devices and a tiny random
model in float32: never switching, then with groups that change at random (any arrangement, any
kind of switching), then with moves alone, each of them awaited, so that it can be timed.

Without it: seconds to bind 8 units with N running requests of a context, and to release them,
beside computing the same contexts again (what a fleet without moves would do).

`shiftjax mesh run` serves a trace by static deployments and by fleets, side by side;
`shiftjax bench startup` times the start of a fleet.

The physics. Virtual devices share the cores of one machine. So this can show whether tokens are the
same, and how a move compares with computing again (both are work of the same cores). It cannot show
what wide groups are for: eight devices compute no faster here than one, and links cost nothing but
copies. Those relations are the simulator's (`shiftjax mesh simulate`).
"""

import argparse
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import jax

from shiftjax.build import Built, build
from shiftjax.config import EngineConfig
from shiftjax.core.engine import Engine
from shiftjax.core.request import Request, SamplingParams, SequenceState
from shiftjax.device.programs import CompileCounter
from shiftjax.fleet.fleet_policy import FixedArrangement, FleetView, Wish
from shiftjax.fleet.handover import Copy, Crossing, Mover
from shiftjax.fleet.regrouping import Fleet
from shiftjax.fleet.stats import Turn
from shiftjax.parallel.arrangements import Arrangement, equal_groups, possible_widths
from shiftjax.parallel.grid import Group
from shiftjax.settings import make_virtual_devices
from shiftjax.weights.locate import open_source, resolve_model

Row = dict[str, Any]
Tokens = Mapping[tuple[str, int], Sequence[int]]  # by request and continuation
UNITS, BLOCK_SIZE = 8, 16
TOKEN_IDS = range(3, 250)  # of made-up prompts; every model has them
KINDS = ("move", "move", "soft", "hard", "sequential")  # of switching, at random
SWITCH_TOKENS = 200  # of output, more than there are steps before a switch has been timed
OPTIONS = {
    "--quick": False,
    "--seed": 0,
    "--requests": (24, "of --quick"),
    "--model": "random:smollm2-135m",
    "--dtype": "bfloat16",
    "--rounds": 3,
    "--counts": [1, 8, 32, 64],
    "--contexts": [64, 256],
}

# ---------------------------------------------------------------------- engines


def start(model: str, units: int, **options: Any) -> Built:
    """Return a fleet of so many virtual devices, one a unit, that forms groups of all widths."""
    own = {"devices": units, "tp": 1, "fleet": True, "fleet_policy": "load", "bind_at": 0.25}
    own |= {"release_at": 1.0, "policy": "threshold", "shift_threshold": 32}
    own["cache_dir"] = "none"  # what a CPU compiles can be loaded on other units, what it reads not
    config = EngineConfig.from_options(model=model, **own, **options)
    make_virtual_devices(config)
    return build(config, open_source(resolve_model(model), seed=0), lambda *_: None)


def fleet_of(engine: Engine) -> Fleet:
    """Return the fleet of an engine that was started with one."""
    fleet = engine.topology.find(Fleet)
    assert fleet is not None
    return fleet


def form(engine: Engine, arrangement: Arrangement) -> None:
    """Let these groups be formed; what runs goes along."""
    fleet = fleet_of(engine)
    fleet.policy = FixedArrangement(arrangement)
    fleet.begin(Wish(arrangement, "bench", "move"), time.monotonic())
    while fleet.arrangement != arrangement:
        engine.step(time.monotonic())


@dataclass
class Wandering:
    """Groups that change at random, in a `share` of the times that the policy is asked."""

    widths: Sequence[int]
    random: random.Random
    kinds: Sequence[str] = KINDS
    share: float = 0.25
    widens: ClassVar[bool] = True

    def width_for(self, request: Request) -> int:
        """Return 1: any group will do."""
        return 1

    def arrange(self, view: FleetView) -> Wish | None:
        """Return some arrangement and some kind of switching, or None."""
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
        jax.block_until_ready([runner.memory.pools for runner in self.built.runners])


# ---------------------------------------------------------------------- quick


def quick(seed: int, num_requests: int, units: int = UNITS) -> Row:
    """Return what random histories of binds and releases give, beside a run without switches."""
    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 32, "token_buckets": [8, 32]}
    sizes |= {"num_blocks": 64, "block_size": 4, "max_model_len": 128}
    built = start("random:tiny", units, dtype="float32", **sizes)
    engine, fleet = built.engine, fleet_of(built.engine)
    requests = random_requests(seed, num_requests)
    fleet.policy = FixedArrangement(fleet.arrangement)
    wanted = texts(engine, requests)
    counter, mover, equal = CompileCounter(), fleet.mover, []
    first = 0
    counter.start()
    for history, kinds in enumerate((KINDS, ("move",))):
        if history:  # the second one is timed
            fleet.mover = WaitingMover(mover, built)
        engine.flush_prefix_cache()
        fleet.policy = Wandering(possible_widths(units), random.Random(f"{seed}/{history}"), kinds)
        first = len(fleet.history)
        equal.append(share_equal(texts(engine, requests), wanted))
    counter.stop()
    timed = bind_seconds(list(fleet.history)[max(0, first - 1) :])
    return {
        "seed": seed,
        "tokens_equal": min(equal),
        "tokens": sum(map(len, wanted.values())),
        "moves": fleet.stats.num_moved_sequences,
        "recomputed": fleet.stats.num_recomputed_sequences,
        "binds": fleet.stats.binds.total(),
        "releases": fleet.stats.releases.total(),
        "compiles_after_warmup": counter.count,
        "bind_milliseconds_p50": 1e3 * statistics.median(timed) if timed else None,
    }


def bind_seconds(turns: Sequence[Turn]) -> list[float]:
    """Return seconds of the changes that have brought sequences along into a wider group."""
    return [
        turn.host_seconds
        for before, turn in pairwise(turns)
        if turn.num_sequences and len(turn.arrangement) < len(before.arrangement)
    ]


def random_requests(seed: int, num: int) -> list[Request]:
    """Return greedy and seeded ones, some with two continuations or a common beginning."""
    rng = random.Random(seed)
    shared = rng.choices(TOKEN_IDS, k=40)
    requests = []
    for number in range(num):
        prompt = shared[: rng.choice([0, 0, 16, 33])] + rng.choices(TOKEN_IDS, k=rng.randint(1, 40))
        temperature, top_p = rng.choice([0.0, 1.0]), rng.choice([1.0, 0.9])
        penalty, n, most = rng.choice([1.0, 1.2]), rng.choice([1, 1, 2]), rng.randint(8, 40)
        how: dict[str, Any] = {
            "temperature": temperature,
            "top_p": top_p,
            "repetition_penalty": penalty,
        }
        sampling = SamplingParams(seed=number, n=n, max_tokens=most, ignore_eos=True, **how)
        requests.append(Request(str(number), prompt, sampling))
    return requests


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


def share_equal(found: Tokens, wanted: Tokens) -> float:
    """Return the share of tokens that are in both at the same place; 1.0: all, and no other."""
    total = same = 0
    for name in {*found, *wanted}:
        one, other = found.get(name, ()), wanted.get(name, ())
        total += max(len(one), len(other))
        same += sum(a == b for a, b in zip(one, other, strict=False))
    return same / total if total else 1.0


# ---------------------------------------------------------------------- switch


def switch(args: argparse.Namespace) -> Iterator[Row]:
    """Bind and release with running requests, and compute the same contexts again."""
    most = max(args.contexts) + SWITCH_TOKENS
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "token_buckets": [8, 64, 256]}
    sizes |= {"num_blocks": 1 + 64 * -(-most // BLOCK_SIZE), "block_size": BLOCK_SIZE}
    built = start(args.model, UNITS, dtype=args.dtype, max_model_len=1024, **sizes)
    fleet = fleet_of(built.engine)
    fleet.mover = WaitingMover(fleet.mover, built)
    for context in args.contexts:
        for num in args.counts:
            rounds = [switch_once(built.engine, num, context) for _ in range(args.rounds + 1)]
            medians = {n: statistics.median(r[n] for r in rounds[1:]) for n in rounds[0]}
            ratio = medians["recompute_seconds"] / medians["bind_seconds"]
            yield {"sequences": num, "context": context, **medians, "ratio": ratio}


def switch_once(engine: Engine, num: int, context: int) -> Row:
    """Return seconds of a bind, a release, and of computing the contexts again in the group."""
    fleet, wide = fleet_of(engine), equal_groups(UNITS, UNITS)
    form(engine, equal_groups(UNITS, 1))
    engine.flush_prefix_cache()
    sampling = SamplingParams(temperature=0.0, max_tokens=SWITCH_TOKENS, ignore_eos=True)
    for number in range(num):
        prompt = random.Random(number).choices(TOKEN_IDS, k=context)
        engine.add_request(Request(str(number), prompt, sampling))
    step_until(engine, lambda: all_have(engine, num, lambda s: s.num_output_tokens > 0))
    form(engine, wide)
    bind = fleet.history[-1]
    fleet.lost(fleet.lanes[wide[0]])
    begin = time.perf_counter()
    needed = {s.order: len(s.token_ids) for s in held(engine)}
    step_until(engine, lambda: all_have(engine, num, lambda s: len(s.token_ids) > needed[s.order]))
    recompute = time.perf_counter() - begin
    form(engine, equal_groups(UNITS, 1))
    release = fleet.history[-1]
    for number in range(num):
        engine.abort(str(number))
    step_until(engine, lambda: not engine.has_work())
    return {
        "bind_seconds": bind.host_seconds,
        "release_seconds": release.host_seconds,
        "recompute_seconds": recompute,
        "bind_moved": bind.num_sequences,  # the others found no room, and were computed again
        "release_moved": release.num_sequences,
    }


def held(engine: Engine) -> list[SequenceState]:
    """Return all sequences that are not finished."""
    requests = [lane.scheduler.requests.values() for lane in engine.lanes]
    return [sequence for each in requests for siblings in each for sequence in siblings]


def all_have(engine: Engine, num: int, what: Callable[[SequenceState], bool]) -> bool:
    """Whether something holds of all `num` sequences, none of them queued."""
    found = held(engine)
    return len(found) == num and all(map(what, found))


def step_until(engine: Engine, is_over: Callable[[], bool]) -> None:
    """Step the engine until something holds; at least once."""
    engine.step(time.monotonic())
    while not is_over():
        engine.step(time.monotonic())


def measure(args: argparse.Namespace) -> Generator[Row, None, Row | None]:
    """Yield a row for each switch; `--quick` fails where tokens differ."""
    if not args.quick:
        yield from switch(args)
        return None
    row = quick(args.seed, args.requests)
    yield row
    return row | {"failures": ["tokens differ"] if row["tokens_equal"] < 1.0 else []}
