"""Groups that come and go under running requests: are the tokens the same, and what does it cost?

    python scripts/bench.py fleet --quick --seed 1
    python scripts/bench.py fleet [--cases switch burst priority context startup]

`--quick` serves the same requests three times, on one fleet of 8 virtual devices and a tiny random
model in float32: never switching, then with groups that change at random (any arrangement, any
kind of switching), then with moves alone, each of them awaited, so that it can be timed. The cases:

    switch     seconds to bind 8 units with N running requests of a context, and to release them,
               beside computing the same contexts again (what a fleet without moves would do)
    burst      quiet, burst, quiet (or `--trace FILE`), by static deployments and a fleet in turn
    priority   few urgent requests among many; the fleet binds all units for the urgent ones
    context    some prompts fit no unit's pool; the fleet binds as many units as hold them
    startup    seconds until ready, cold and warm, by `fleet_widths`, beside static SP 8 and DP 8

All deployments of a case are one engine in turn (`fleet_runs.py`), so rounds interleave them.

The physics. Virtual devices share the cores of one machine. So this can show whether tokens are the
same, how a move compares with computing again (both are work of the same cores), who waits for
whom, which requests are served at all, and start-up. It cannot show what wide groups are for: eight
devices compute no faster here than one, so a quiet time gains nothing by binding, and links cost
nothing but copies. Those relations are the simulator's (`shiftjax mesh simulate`).
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from cases.fleet_runs import (
    KINDS,
    SIDES,
    UNITS,
    WIDTHS,
    Served,
    WaitingMover,
    Wandering,
    become,
    compile_all,
    fleet_of,
    form,
    quiet_burst_quiet,
    random_requests,
    request_of,
    serve,
    share_equal,
    start,
    texts,
)

from serving.bench.offline import startup
from shiftjax.build import Built
from shiftjax.config import EngineConfig
from shiftjax.core.engine import Engine
from shiftjax.core.request import Request, SequenceState
from shiftjax.device.programs import CompileCounter
from shiftjax.fleet.fleet_policy import FixedArrangement, NeedPolicy
from shiftjax.fleet.stats import Turn
from shiftjax.parallel.arrangements import equal_groups, possible_widths
from shiftjax.parallel.grid import Group
from shiftjax.sim.trace import TraceRequest, load_trace, poisson

Row = dict[str, Any]
BLOCK_SIZE = 16
URGENT = -1  # a priority
SWITCH_TOKENS = 200  # of output, more than there are steps before a switch has been timed
LONG_TOKENS = 3  # times what a unit's pool holds: the prompt of a long request

# ---------------------------------------------------------------------- quick


def quick(seed: int, num_requests: int, units: int = UNITS) -> Row:
    """Random histories of binds and releases beside a run that never switches."""
    built = start(
        "random:tiny",
        64,
        units,
        dtype="float32",
        block_size=4,
        max_model_len=128,
        max_num_seqs=6,
        max_num_batched_tokens=32,
        token_buckets=[8, 32],
    )
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
    """Seconds of the changes that have brought sequences along into a wider group."""
    return [
        turn.host_seconds
        for before, turn in pairwise(turns)
        if turn.num_sequences and len(turn.arrangement) < len(before.arrangement)
    ]


# ---------------------------------------------------------------------- switch


def switch(built: Built, args: argparse.Namespace) -> Iterator[Row]:
    """Bind and release with running requests, and the same contexts computed again."""
    fleet = fleet_of(built.engine)
    fleet.mover = WaitingMover(fleet.mover, built)
    for context in args.contexts:
        for num in args.counts:
            rounds = [switch_once(built.engine, num, context) for _ in range(args.rounds + 1)]
            medians = {n: statistics.median(r[n] for r in rounds[1:]) for n in rounds[0]}
            ratio = medians["recompute_seconds"] / medians["bind_seconds"]
            yield {"sequences": num, "context": context, **medians, "ratio": ratio}


def switch_once(engine: Engine, num: int, context: int) -> Row:
    """Seconds of one bind, one release, and of computing the contexts again in the wide group."""
    fleet, wide = fleet_of(engine), equal_groups(UNITS, UNITS)
    form(engine, equal_groups(UNITS, 1))
    engine.flush_prefix_cache()
    lengths = TraceRequest(0.0, context, SWITCH_TOKENS)
    requests = [request_of(number, lengths) for number in range(num)]
    for request in requests:
        engine.add_request(request)
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
    for request in requests:
        engine.abort(request.request_id)
    step_until(engine, lambda: not engine.has_work())
    return {
        "bind_seconds": bind.host_seconds,
        "release_seconds": release.host_seconds,
        "recompute_seconds": recompute,
        "bind_moved": bind.num_sequences,  # the others found no room, and were computed again
        "release_moved": release.num_sequences,
    }


def held(engine: Engine) -> list[SequenceState]:
    """All sequences that are not finished."""
    requests = [lane.scheduler.requests.values() for lane in engine.lanes]
    return [sequence for each in requests for siblings in each for sequence in siblings]


def all_have(engine: Engine, num: int, what: Callable[[SequenceState], bool]) -> bool:
    """Whether something holds of all `num` sequences, none of them queued."""
    found = held(engine)
    return len(found) == num and all(map(what, found))


def step_until(engine: Engine, is_over: Callable[[], bool]) -> None:
    """Turns of the engine until something holds; at least one."""
    engine.step(time.monotonic())
    while not is_over():
        engine.step(time.monotonic())


# ---------------------------------------------------------------------- traces


def by_turns(
    built: Built, requests: Sequence[Request], args: argparse.Namespace, policy: Any, names: Any
) -> Iterator[Row]:
    """The same requests by every deployment, rounds interleaved: `names` are of rows and ids."""
    fleet = fleet_of(built.engine)
    compile_all(built)
    for number in range(args.rounds):
        for name, side in SIDES.items():
            become(built.engine, side, policy)
            before = len(fleet.history), fleet.stats.num_moved_sequences
            served: Served = serve(built.engine, requests, side.width or UNITS)
            counts = {
                "changes": len(fleet.history) - before[0],
                "moved": fleet.stats.num_moved_sequences - before[1],
            }
            for label, ids in names.items():
                row = {"round": number, "deployment": name, "of": label}
                yield row | served.row(ids) | counts


def burst(built: Built, args: argparse.Namespace) -> Iterator[Row]:
    """A quiet time, a burst, a quiet time; or what a file has."""
    trace = quiet_burst_quiet(
        args.seconds, args.quiet, args.burst, args.prompt_tokens, args.output_tokens, args.seed
    )
    if args.trace:
        trace = load_trace(args.trace)
    requests = [request_of(number, each) for number, each in enumerate(trace)]
    return by_turns(built, requests, args, fleet_of(built.engine).policy, {"all": None})


def priority(built: Built, args: argparse.Namespace) -> Iterator[Row]:
    """One of five requests is urgent; the fleet binds all units for it."""
    rate = (args.quiet + args.burst) / 2
    trace = poisson(rate, args.seconds / 2, args.prompt_tokens, args.output_tokens, args.seed)
    requests = [request_of(n, each, URGENT * (n % 5 == 4)) for n, each in enumerate(trace)]
    urgent = {request.request_id for request in requests if request.priority == URGENT}
    others = {request.request_id for request in requests} - urgent
    policy = NeedPolicy(WIDTHS, frozenset([URGENT]), UNITS)
    return by_turns(built, requests, args, policy, {"urgent": urgent, "others": others})


def context(built: Built, args: argparse.Namespace) -> Iterator[Row]:
    """One of six prompts is longer than what a unit's pool holds."""
    lane = fleet_of(built.engine).lanes[Group(0, 1)]
    blocks = lane.scheduler.tables.device
    most = LONG_TOKENS * blocks.num_usable_blocks * blocks.block_size
    trace = poisson(args.quiet, args.seconds / 2, args.prompt_tokens, args.output_tokens, args.seed)
    requests = [
        request_of(n, replace(each, num_prompt_tokens=most) if n % 6 == 2 else each)
        for n, each in enumerate(trace)
    ]
    longs = {r.request_id for r in requests if len(r.prompt_token_ids) == most}
    others = {request.request_id for request in requests} - longs
    return by_turns(built, requests, args, NeedPolicy(WIDTHS), {"long": longs, "others": others})


# ---------------------------------------------------------------------- start-up


def startups(args: argparse.Namespace) -> Iterator[Row]:
    """Seconds until ready: cold, then with what a start has left in the cache."""
    fleet = {"devices": UNITS, "tp": 1, "fleet": True, "fleet_policy": "load"}
    settings = {
        "SP 8": {"sp": UNITS, "tp": 1},
        "DP 8": {"dp": UNITS, "sp": 1, "tp": 1},
        "fleet 1,8": fleet | {"fleet_widths": [1, UNITS]},
        "fleet 1,2,4,8": fleet | {"fleet_widths": list(WIDTHS)},
    }
    rows = []
    for name, options in settings.items():
        config = EngineConfig.from_options(model=args.model, **options, **sizes(args, 128))
        found = startup(config, 1)
        row = {"deployment": name, "cold_seconds": found["cold"]["total_seconds"]}
        rows.append(row | {"warm_seconds": found["warm_best"]["total_seconds"]})
        ratios = {
            f"{kind}_of_sp": rows[-1][f"{kind}_seconds"] / rows[0][f"{kind}_seconds"]
            for kind in ("cold", "warm")
        }
        yield rows[-1] | ratios


# ---------------------------------------------------------------------- all


def sizes(args: argparse.Namespace, num_blocks: int) -> Row:
    """Budgets of the engines."""
    return {
        "num_blocks": num_blocks,
        "block_size": BLOCK_SIZE,
        "dtype": args.dtype,
        "max_model_len": args.max_model_len,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 256,
        "token_buckets": [8, 64, 256],
    }


CASES: dict[str, tuple[Callable[[Built, argparse.Namespace], Iterator[Row]], bool]] = {
    "switch": (switch, True),  # and whether a unit's pool is large
    "burst": (burst, True),
    "priority": (priority, True),
    "context": (context, False),
}


def run_case(name: str, args: argparse.Namespace) -> Iterator[Row]:
    """The rows of a case, on an engine of its own."""
    if name == "startup":
        return startups(args)
    run, is_large = CASES[name]
    most = max(args.contexts) + 64
    num_blocks = 1 + (
        64 * most // BLOCK_SIZE if is_large else args.max_model_len // 4 // BLOCK_SIZE
    )
    return run(start(args.model, **sizes(args, num_blocks)), args)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=24, help="of --quick")
    parser.add_argument("--cases", nargs="+", default=[*CASES, "startup"])
    parser.add_argument("--model", default="random:smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--trace", type=Path, help="of case burst, in a known format")
    parser.add_argument("--seconds", type=float, default=45.0, help="of a trace")
    parser.add_argument("--quiet", type=float, default=0.3, help="requests per second")
    parser.add_argument("--burst", type=float, default=3.0, help="requests per second")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=24)


def measure(args: argparse.Namespace) -> Generator[Row, None, Row | None]:
    """Yield the rows of the cases; `--quick` fails where tokens differ."""
    if args.quick:
        row = quick(args.seed, args.requests)
        yield row
        return row | {"failures": ["tokens differ"] if row["tokens_equal"] < 1.0 else []}
    for name in args.cases:
        for row in run_case(name, args):
            yield {"case": name} | row
    return None
