"""Programs that use experts as in modes of their own: what they hold, move, and give."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from echo_pools import Told
from engines import MOE, RandomPolicy, checkpoint, make, run, tokens
from harness import held_bytes
from oracle import numpy_llama
from spent import exhaustive, thorough

from pallas_kernels.grouped_work import sort_pairs
from shiftjax.arch.presets import PRESETS
from shiftjax.build import Built
from shiftjax.core.request import Event, Request, SamplingParams
from shiftjax.device.programs import CompileCounter
from shiftjax.fleet.fleet_policy import Wish
from shiftjax.fleet.regrouping import Fleet
from shiftjax.models.experts import deal
from shiftjax.parallel.arrangements import equal_groups
from shiftjax.parallel.grid import Mode, Use
from shiftjax.parallel.layout import Layout

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
STEM = [(7 * i) % 190 + 3 for i in range(45)]  # longer than a step
PROMPTS = [[*STEM, 9, i] for i in range(3)] + [[5, 17, 99], STEM[:20], [8] * 30]


def expected(config: dict, tensors: dict, prompts: list[list[int]], count: int) -> list[list[int]]:
    return [numpy_llama.greedy(config, tensors, prompt, count) for prompt in prompts]


def texts(built: Built, seed: int) -> list[list[int]]:
    """In modes drawn at random; twice, so that the second time prefixes are found."""
    built.engine.policy = RandomPolicy(seed)
    events = run(built.engine, PROMPTS, [GREEDY] * len(PROMPTS))
    return [tokens(events[i, 0]) for i in range(len(PROMPTS))]


# ------------------------------------------------------------------ who computes a pair


@pytest.mark.parametrize("place", ["random", "one expert", "few"])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_pairs_are_dealt_out_in_equal_parts(count, place):
    """Each of them to one device, and so that every expert's rows lie together."""
    rng = np.random.default_rng(count)
    experts = rng.integers(0, 7, (33, 3)).astype(np.int32)  # 6: another device's
    experts[:, 0] = 2 if place == "one expert" else experts[:, 0]
    experts[2 if place == "few" else 33 :] = 6
    routed, computed = sort_pairs(jnp.asarray(experts), 6), np.zeros(experts.shape, int)
    sizes = []
    for nth in range(count):
        own, is_own = deal(routed, experts.shape, count, jnp.int32(nth))
        row, each = np.asarray(own.row), np.asarray(own.sizes)
        mine = row[: each.sum()]
        assert sorted(mine) == np.flatnonzero(np.asarray(is_own).reshape(-1)).tolist()
        assert (experts.reshape(-1)[mine] == np.repeat(np.arange(6), each)).all()
        computed += np.asarray(is_own)
        sizes.append(int(each.sum()))
    assert (computed == (experts < 6)).all()
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("sp", "tp", "stored"),
    [(8, 1, 8), (8, 1, 4), (4, 2, 4), (4, 2, 2), (2, 4, 2), (6, 1, 6), (6, 1, 3), (1, 8, 1)],
)
def test_every_expert_of_every_token_is_on_one_device_or_dealt_among_some(sp, tp, stored):
    """By the rows of the layout: groups that have a token split all experts among them."""
    layout = Layout(PRESETS["tiny-qwen3-moe"], sp, tp, experts_sp=stored)
    num, devices = layout.num_experts, layout.num_devices
    for mode in layout.modes:
        for used in layout.expert_modes(mode):
            rows = layout.shard_rows("experts", used)
            own = [layout.shard_offset("experts", used, j) for j in range(devices)]
            kept = num // layout.ways(layout.least_split)
            firsts = [j // stored * kept + own[j] for j in range(devices)]
            assert firsts == [j // used.sp * rows for j in range(devices)]
            # Devices that have a token: those of its place among `mode.sp`, and who share experts.
            apart = min(mode.sp, used.sp)
            for place in range(apart):
                group = [j for j in range(devices) if j % apart == place]
                held = np.zeros(num, int)
                for j in group:
                    held[firsts[j] : firsts[j] + rows] += 1
                assert (held == max(1, used.sp // mode.sp)).all()


# ------------------------------------------------------------------ what programs hold


@pytest.fixture(scope="module")
def chosen():
    """An engine whose programs choose: two sizes of steps, a mesh with a mode between."""
    directory, config, tensors = checkpoint(**MOE)
    built = make(directory, 4, 2, num_blocks=90, token_buckets=[8, 32])
    return built, config, tensors


def uses_of(runner: Any) -> set[tuple[Mode, Use]]:
    return {
        (mode, runner.step.use_in(mode, program.bucket[:2]))
        for program in runner.programs
        for mode in program.steps
    }


@pytest.mark.costs(20)
def test_programs_that_choose_give_the_tokens_of_the_oracle(chosen):
    """With chunks, prefix hits and switches; none compiles or takes memory."""
    built, config, tensors = chosen
    (runner,) = built.runners
    want = expected(config, tensors, PROMPTS, 12)
    texts(built, 0)  # modes that the policy does not want are compiled when they are asked for
    assert len({used.experts for _, used in uses_of(runner)}) > 1
    told = [text for name, text in built.experts.items() if name.startswith("base, ")]
    assert told and all("(fewest bytes a layer: " in text for text in told)
    held = held_bytes([a for use in uses_of(runner) for a in runner.memory.params(*use)])
    counter = CompileCounter()
    counter.start()
    assert [texts(built, seed) for seed in (1, 2)] == [want] * 2
    counter.stop()
    assert counter.count == 0
    arrays = [a for use in uses_of(runner) for a in runner.memory.params(*use)]
    assert held_bytes(arrays) == held


def test_experts_of_every_use_are_views_and_biases_are_shared(chosen):
    runner = chosen[0].runners[0]
    layout, declared = runner.step.layout, runner.step.model.declared
    stored = runner.memory.params(layout.base, Use(layout.least_split))
    assert layout.least_split.sp > 1
    for use in uses_of(runner):
        views = 0
        for weight, whole, part in zip(declared, stored, runner.memory.params(*use), strict=True):
            shards = {shard.device: shard.data for shard in whole.addressable_shards}
            for shard in part.addressable_shards if weight.split == "experts" else ():
                owner = shards[shard.device]
                offset = shard.data.unsafe_buffer_pointer() - owner.unsafe_buffer_pointer()
                assert 0 <= offset <= owner.nbytes - shard.data.nbytes, weight.name
                views += shard.data.nbytes < owner.nbytes
        assert (views > 0) == (use[1].experts != layout.least_split)


# ------------------------------------------------------------------ beside other features

OTHERS = {
    "stages": {"sp": 2, "tp": 2, "pp": 2},
    "drafts": {"sp": 2, "tp": 2, "speculation": "suffix"},
    "slices": {"sp": 2, "tp": 2, "controls": {"experts_as": 2, "shift_weights": "slice"}},
    "copies": {"sp": 2, "tp": 2, "controls": {"experts_as": 2, "shift_weights": "replicate"}},
    "gathered": {"sp": 2, "tp": 2, "weights": "gather"},
    "codes": {"sp": 4, "tp": 1, "quantization": "fp8"},
    "between": {"sp": 4, "tp": 1, "controls": {"experts_as": 2}},
}
IN_CI = {"between", "stages", "codes"}


@pytest.mark.costs(12)
@pytest.mark.parametrize(
    "name",
    ["between", *thorough("stages", "codes"), *exhaustive(*sorted(OTHERS.keys() - IN_CI))],
)
def test_tokens_beside_other_features(name):
    directory, config, tensors = checkpoint(**MOE)
    options = {"num_blocks": 90} | OTHERS[name]
    built = make(directory, options.pop("sp"), options.pop("tp"), **options)
    got = [texts(built, seed) for seed in (0, 1)]
    want = expected(config, tensors, PROMPTS, 12) if name != "codes" else got[1]
    assert got == [want] * 2


@pytest.mark.costs(15)
@pytest.mark.parametrize("experts", ["auto", *exhaustive("whole", "all")])
def test_a_request_that_moves_through_a_fleet_gets_its_tokens(experts):
    directory, config, tensors = checkpoint(**MOE)
    built = make(directory, None, 1, fleet=True, devices=2, experts=experts)
    engine, policy, counter = built.engine, Told(), CompileCounter()
    engine.topology.find(Fleet).policy = policy
    events = list[Event]()
    engine.add_request(Request("moves", STEM[:20], replace(GREEDY, max_tokens=24)))
    counter.start()
    for turn in range(40):
        if turn % 8 == 4:  # from a unit to both, and back
            policy.wishes = [Wish(equal_groups(2, 2 if turn % 16 == 4 else 1), "told", "move")]
        events += engine.step(float(turn))
        engine.check()
    counter.stop()
    assert tokens(events) == numpy_llama.greedy(config, tensors, STEM[:20], 24)
    assert engine.topology.find(Fleet).stats.num_moved_sequences >= 2
    assert counter.count == 0
    least = {runner.step.layout.least_split.sp for runner in built.runners}
    assert least == (
        {1} if experts == "all" else {runner.step.layout.sp for runner in built.runners}
    )
