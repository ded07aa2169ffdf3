"""Layers in stages, each on devices of its own, give the tokens that one stage gives."""

import jax
import pytest
from engines import checkpoint, crowd, fail_once, make, run, tokens
from oracle import numpy_llama
from spent import exhaustive, thorough

from shiftjax.build import Built
from shiftjax.core.request import SamplingParams
from shiftjax.costs.memory import weight_bytes
from shiftjax.device import programs
from shiftjax.device.programs import CompileCounter
from shiftjax.phases import pipeline_device as pipeline

OUTPUT_TOKENS = 12
BUCKET = 32
# Steps of a prompt's chunk run in base, those of decodes in shift. The pool holds fewer sequences
# than want to run.
SIZES = {"num_blocks": 28, "max_model_len": 96, "token_buckets": [BUCKET], "shift_threshold": 10}
UNTIED = {"tie_word_embeddings": False}
ODD = {"hidden_size": 49, "head_dim": 8}  # no two devices can split it
SWAPS = {"preemption": "swap", "host_memory": "8MB"}

# Degrees, layers (that do not divide, where there is a third number), the model, what else.
CASES = {
    "pp2": ((2, 1, 1), 2, {}, {}),
    "pp2sp2tp2": ((2, 2, 2), 3, UNTIED, SWAPS),
    "pp4tp2": ((4, 1, 2), 4, ODD, {}),
    "pp4sp2": ((4, 2, 1), 7, {}, SWAPS),
}


@pytest.fixture(
    scope="module",
    params=["pp2", *thorough("pp4sp2"), *exhaustive("pp2sp2tp2", "pp4tp2")],
)
def staged(request):
    """An engine in stages, the config and tensors of its model, and where that is."""
    (pp, sp, tp), num_layers, model, options = CASES[request.param]
    directory, config, tensors = checkpoint(num_hidden_layers=num_layers, **model)
    return (
        make(directory, sp, tp, whole=True, pp=pp, **SIZES, **options),
        config,
        tensors,
        directory,
    )


def greedy(**others) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, **others)


def has_ended(got: list[int], expected: list[int]) -> bool:
    return got == expected[: len(got)] and len(got) < len(expected)


@pytest.mark.costs(10)
def test_greedy_tokens_equal_the_oracle(staged):
    """With chunks, prefix hits, preemption, abort and stop, and nothing is compiled meanwhile."""
    built, config, tensors, _ = staged
    prompts = crowd(1)
    expected = [numpy_llama.greedy(config, tensors, each, OUTPUT_TOKENS) for each in prompts]
    sampling = [greedy()] * len(prompts)
    sampling[5] = greedy(stop_token_ids=(expected[5][3],))
    counter, before = CompileCounter(), built.engine.stats()
    counter.start()
    events = run(built.engine, prompts, sampling, abort_at={6: 2})
    counter.stop()
    after = built.engine.stats()
    assert counter.count == 0
    for i, want in enumerate(expected):
        got = tokens(events[i, 0])
        assert has_ended(got, want) if i in (2, 5) else got == want, i
    assert events[2, 0][-1].finish_reason == "abort"
    assert events[5, 0][-1].finish_reason == "stop"
    kind = built.deployment.preemption
    assert after.num_preemptions[kind] > before.num_preemptions[kind]
    assert after.num_prefix_hit_tokens > before.num_prefix_hit_tokens
    assert len(prompts[2]) != BUCKET and max(map(len, prompts)) > BUCKET
    assert after.kv_usage == 0
    assert all(count > 0 for count in after.steps.values() if built.deployment.sp > 1)


def test_draws_are_those_of_one_stage(staged):
    """Whoever draws, and whatever else is in its steps; penalties count tokens in flight, too."""
    built, _, _, directory = staged
    alone = make(directory, 1, 1, whole=True, token_buckets=[BUCKET])
    prompts = crowd(2, 6)
    sampling = [
        SamplingParams(
            temperature=1.1, top_p=0.9, frequency_penalty=1.5, seed=i, max_tokens=OUTPUT_TOKENS
        )
        for i in range(len(prompts))
    ]
    got, expected = (run(one.engine, prompts, sampling) for one in (built, alone))
    for key, events in expected.items():
        assert tokens(got[key]) == tokens(events)


def test_what_crosses_a_boundary_is_tokens_times_hidden_times_width(staged, monkeypatch):
    """No device sends what another sends, too; each has as much, and nothing else travels."""
    built, config, _, _ = staged
    sent, send = [], pipeline.hand_over

    def hand_over(hidden, step, mode):
        arrived = send(hidden, step, mode)
        sent.append(
            [sum(part.data.nbytes for part in x.addressable_shards) for x in (hidden, arrived)]
        )
        assert len({part.data.nbytes for part in hidden.addressable_shards}) == 1
        assert len(hidden.sharding.device_set) == step.layout.num_devices
        assert hidden.sharding.device_set.isdisjoint(arrived.sharding.device_set)
        return arrived

    monkeypatch.setattr(pipeline, "hand_over", hand_over)
    before = sum(built.engine.stats().steps.values())
    run(built.engine, [[5, 6, 7]], [greedy()])
    num_steps = sum(built.engine.stats().steps.values()) - before
    pp, ways = built.deployment.pp, built.deployment.layout.num_devices
    width = -(-config["hidden_size"] // ways) * ways  # shift, of few tokens
    assert sent == [[BUCKET * width * 4] * 2] * (num_steps * (pp - 1))


def test_a_failure_in_one_stage_rebuilds_the_pools_of_all(staged, monkeypatch):
    """The requests of that step end with an error; all others are computed again, and right."""
    built, config, tensors, _ = staged
    runner = built.runners[built.deployment.pp // 2]
    fail_once(monkeypatch, runner)
    old = [array for stage in built.runners for pair in stage.memory.pools for array in pair]
    prompts = crowd(3, 12)
    events = run(built.engine, prompts, [greedy()] * len(prompts))
    new = [array for stage in built.runners for pair in stage.memory.pools for array in pair]
    assert not any(a is b for a, b in zip(old, new, strict=True))
    ended = {i for (i, _), each in events.items() if each[-1].error_code == "step_failed"}
    assert ended and len(ended) < len(prompts)
    for i, prompt in enumerate(prompts):
        if i not in ended:
            want = numpy_llama.greedy(config, tensors, prompt, OUTPUT_TOKENS)
            assert tokens(events[i, 0]) == want


def test_each_stage_has_its_part_of_the_weights_and_of_the_cache(staged):
    built, config, _, _ = staged
    devices: set[jax.Device] = set()
    counts: list[int] = []
    for stage, runner in zip(built.deployment.stages, built.runners, strict=True):
        memory = runner.memory
        mine = set(memory.mesh.devices.flat)
        assert devices.isdisjoint(mine)
        devices |= mine
        ((k, _),) = memory.pools
        counts.append(k.shape[0] // stage.num_blocks)
        assert counts[-1] == stage.layout.model.num_layers
        base = memory.params(runner.step.layout.base)
        first = next(iter(mine))
        held = sum(
            shard.data.nbytes
            for array in base
            for shard in array.addressable_shards
            if shard.device == first
        )
        formats = built.deployment.formats
        assert held == weight_bytes(stage.layout, formats)
    assert len(devices) == built.deployment.grid.num_devices
    assert sum(counts) == config["num_hidden_layers"]
    assert max(counts) - min(counts) <= 1


@pytest.mark.thorough
def test_stages_between_the_ends_share_one_program(monkeypatch, uncached):
    """Of four equal stages the second is compiled, and loaded on the devices of the third."""
    compiled, compile_it = [], programs.add_mode

    def add_mode(step, pool, program, mode):
        compiled.append(step.mesh.devices.flat[0].id)
        compile_it(step, pool, program, mode)

    monkeypatch.setattr(programs, "add_mode", add_mode)
    directory, config, tensors = checkpoint(num_hidden_layers=4)
    built: Built = make(directory, 1, 1, pp=4, dp=2, token_buckets=[BUCKET])
    assert sorted(compiled) == [0, 2, 6]
    events = run(built.engine, crowd(4, 6), [greedy()] * 6)
    for i, prompt in enumerate(crowd(4, 6)):
        assert tokens(events[i, 0]) == numpy_llama.greedy(config, tensors, prompt, OUTPUT_TOKENS)
    assert all(lane.scheduler.tables.num_prefix_query_tokens for lane in built.engine.lanes)


def test_as_many_steps_are_in_flight_as_there_are_stages(staged, monkeypatch):
    """Each takes the sequences of one micro-batch, whose last step it may have to read."""
    built, config, tensors, _ = staged
    (lane,), pp = built.engine.lanes, built.deployment.pp
    flying, taken = [], []
    start, fetch = lane.runner.run, lane.runner.fetch

    def started(plan, mode, previous):
        taken.append(plan.micro_batch)
        return start(plan, mode, previous)

    def fetched(handle):
        flying.append(1 + len(lane.in_flight))
        return fetch(handle)

    monkeypatch.setattr(lane.runner, "run", started)
    monkeypatch.setattr(lane.runner, "fetch", fetched)
    prompts = crowd(5, 5)
    events = run(built.engine, prompts, [greedy()] * len(prompts))
    for i, prompt in enumerate(prompts):
        assert tokens(events[i, 0]) == numpy_llama.greedy(config, tensors, prompt, OUTPUT_TOKENS)
    assert max(flying) == pp + 1  # the next is planned while so many are computed
    assert set(taken) == set(range(pp))
