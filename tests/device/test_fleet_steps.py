"""A fleet on devices: whatever groups come and go, requests get what they would get without."""

import random

import jax
import numpy as np
import pytest
from echo_pools import Told
from engines import checkpoint, make

from shiftjax.build import Built
from shiftjax.control.fleet_policy import Wish
from shiftjax.control.request import Event, Request, SamplingParams
from shiftjax.device.programs import CompileCounter
from shiftjax.parallel.fleet import Arrangement, all_groups, bound, equal_groups

KINDS = ("move", "move", "soft", "hard", "sequential")
SHAPES = {  # name: tensors, units and tp, widths
    "3-heads": ({}, 8, 1, (1, 2, 8)),
    "4-heads-tp2": ({"num_attention_heads": 8, "num_key_value_heads": 4}, 4, 2, (1, 2, 4)),
    "8-heads-window": (
        {"num_attention_heads": 8, "num_key_value_heads": 8, "sliding_window": 24},
        8,
        1,
        (1, 4, 8),
    ),
}


@pytest.fixture(scope="module", params=SHAPES)
def built(request) -> Built:
    overrides, units, tp, widths = SHAPES[request.param]
    directory, *_ = checkpoint(**overrides)
    return make(
        directory,
        None,
        tp,
        fleet=True,
        devices=units * tp,
        fleet_widths=widths,
        fleet_policy="context",
        num_blocks=64,
        shift_threshold=16,  # so the larger bucket is compiled in both modes
    )


def prompts_of(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    shared = [rng.randrange(3, 199) for _ in range(40)]
    found = []
    for number in range(10):
        prompt = shared[: rng.choice([0, 0, 16, 33])]
        prompt = prompt + [rng.randrange(3, 199) for _ in range(rng.randrange(1, 40))]
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            seed=number,
            max_tokens=rng.randrange(8, 40),
            ignore_eos=True,
            logprobs=2,
            n=rng.choice([1, 1, 2]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            top_p=rng.choice([1.0, 0.9]),
        )
        found.append((prompt, sampling))
    return found


def random_arrangement(rng: random.Random, units: int, widths: tuple[int, ...]) -> Arrangement:
    found = equal_groups(units, widths[0])
    groups = all_groups(units, widths)
    for group in rng.sample(groups, rng.randrange(1, len(groups))):
        if all(other.width <= group.width for other in found if other.overlaps(group)):
            found = bound(found, group)
    return found


class AnyCompiled:
    """A mode drawn at random from those in which a plan's step is compiled."""

    def __init__(self, runner, rng: random.Random):
        self.runner, self.random = runner, rng

    def choose(self, plan, modes, num_waiting, last_mode):
        return self.random.choice(list(self.runner.program_for(plan).steps))


def play(built: Built, requests, seed: int | None, kinds=KINDS) -> dict[tuple[str, int], list]:
    """Serve requests that come one by one; with a seed, groups change at random."""
    engine, rng = built.engine, random.Random(seed)
    policy, widths = Told(), built.deployment.widths
    engine.fleet.policy = policy
    for lane in engine.lanes:
        lane.policy = AnyCompiled(lane.runner, rng)
        lane.scheduler.tables.device.clear_cache()
    todo = [Request(str(i), *each) for i, each in enumerate(requests)]
    found: dict[tuple[str, int], list[Event]] = {}
    turn = 0
    while todo or engine.has_work():
        if todo and (seed is None or rng.random() < 0.5):
            engine.add_request(todo.pop(0))
        if seed is not None and rng.random() < 0.25:
            wished = random_arrangement(rng, built.deployment.grid.units, widths)
            policy.wishes = [Wish(wished, "told", rng.choice(kinds))]
        for event in engine.step(float(turn)):
            found.setdefault((event.request_id, event.index), []).append(event)
        engine.check()
        turn += 1
    return found


def assert_same(found, wanted) -> None:
    assert found.keys() == wanted.keys()
    for name, events in wanted.items():
        tokens = [[t for e in each for t in e.token_ids] for each in (found[name], events)]
        assert tokens[0] == tokens[1], name
        logprobs = [[p.logprob for e in each for p in e.logprobs] for each in (found[name], events)]
        np.testing.assert_allclose(logprobs[0], logprobs[1], atol=2e-4)


def test_tokens_are_those_of_a_run_that_never_switched(built):
    requests = prompts_of(random.Random(1))
    wanted = play(built, requests, None)
    assert built.engine.fleet.history == type(built.engine.fleet.history)()
    counter = CompileCounter()
    counter.start()
    for seed in range(1, 4):
        assert_same(play(built, requests, seed), wanted)
    counter.stop()
    fleet = built.engine.fleet
    assert fleet.stats.num_moved_sequences > 20 and fleet.stats.failed_changes.total() == 0
    assert counter.count == 0


def test_weights_stay_where_they_are_and_memory_does_not_grow(built):
    engine, fleet = built.engine, built.engine.fleet
    policy, units = Told(), built.deployment.grid.units
    fleet.policy = policy

    def addresses() -> list[int]:
        return [
            shard.data.unsafe_buffer_pointer()
            for runner in built.runners
            for arrays in runner.memory._by_mode.values()
            for array in arrays
            for shard in array.addressable_shards
        ]

    before = addresses()
    engine.add_request(
        Request("a", [5, 6, 7, 8], SamplingParams(max_tokens=100, ignore_eos=True, temperature=0))
    )
    counts = []
    for turn in range(60):
        wide = built.deployment.widths[turn % len(built.deployment.widths)]
        policy.wishes = [Wish(equal_groups(units, wide), "told", "move")]
        engine.step(float(turn))
        if turn >= 20:
            counts.append(len(jax.live_arrays()))
    engine.abort("a")
    while engine.has_work():
        engine.step(100.0)
    assert addresses() == before
    assert max(counts[20:]) <= max(counts[:20])
