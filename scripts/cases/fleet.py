"""What it costs that groups come and go under running requests, beside computing them again.

    python scripts/bench.py fleet [--counts 1 8 32 64] [--contexts 64 256]

Seconds to bind 8 units, one virtual device each, with N running requests of a context, and to
release them, beside computing the same contexts again (what a fleet without moves would do).

That tokens are the same, whatever groups do, is tested in `tests/device/test_fleet_steps.py`.
`shiftjax mesh run` serves a trace by static deployments and by fleets, side by side;
`shiftjax bench startup` times the start of a fleet.

The physics. Virtual devices share the cores of one machine. So this can show how a move compares
with computing again (both are work of the same cores). It cannot show what wide groups are for:
eight devices compute no faster here than one, and links cost nothing but copies. Those relations
are the simulator's (`shiftjax mesh simulate`).
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import jax
from cases.kit import Row, greedy, medians, random_engine

from shiftjax.arch.presets import PRESETS
from shiftjax.build import Built
from shiftjax.core.engine import Engine
from shiftjax.core.request import SequenceState
from shiftjax.fleet.fleet_policy import FixedArrangement, Wish
from shiftjax.fleet.handover import Copy, Crossing, Mover
from shiftjax.fleet.regrouping import Fleet
from shiftjax.parallel.arrangements import Arrangement, equal_groups

UNITS, BLOCK_SIZE = 8, 16
TOKEN_IDS = range(3, 250)  # of made-up prompts; every model has them
SWITCH_TOKENS = 200  # of output, more than there are steps before a switch has been timed
OPTIONS = {
    "--model": ("smollm2-135m", "a preset; its weights are random"),
    "--dtype": "bfloat16",
    "--rounds": 3,
    "--counts": [1, 8, 32, 64],
    "--contexts": [64, 256],
}


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


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Bind and release with running requests, and compute the same contexts again."""
    most = max(args.contexts) + SWITCH_TOKENS
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "token_buckets": [8, 64, 256]}
    sizes |= {"num_blocks": 1 + 64 * -(-most // BLOCK_SIZE), "block_size": BLOCK_SIZE}
    sizes |= {"devices": UNITS, "tp": 1, "fleet": True, "fleet_policy": "load", "bind_at": 0.25}
    sizes |= {"release_at": 1.0, "policy": "threshold", "shift_threshold": 32}
    sizes["cache_dir"] = "none"  # what a CPU compiles loads on other units, what it reads not
    sizes |= {"dtype": args.dtype, "max_model_len": most + BLOCK_SIZE}
    built = random_engine(PRESETS[args.model], **sizes)
    fleet = fleet_of(built.engine)
    fleet.mover = WaitingMover(fleet.mover, built)
    for context, num in product(args.contexts, args.counts):
        rounds = [switch_once(built.engine, num, context) for _ in range(args.rounds + 1)]
        row = medians(rounds[1:], 6)
        ratio = row["recompute_seconds"] / row["bind_seconds"]
        yield {"sequences": num, "context": context, **row, "ratio": ratio}


def switch_once(engine: Engine, num: int, context: int) -> Row:
    """Return seconds of a bind, a release, and of computing the contexts again in the group."""
    fleet, wide = fleet_of(engine), equal_groups(UNITS, UNITS)
    form(engine, equal_groups(UNITS, 1))
    engine.flush_prefix_cache()
    for number in range(num):
        prompt = random.Random(number).choices(TOKEN_IDS, k=context)
        engine.add_request(greedy(number, prompt, SWITCH_TOKENS))
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
