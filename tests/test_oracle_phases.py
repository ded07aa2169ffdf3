"""Prompts and decodes in a configuration each: the tokens are those of a static deployment."""

import gc
from collections import Counter

import jax
import pytest
from engines import build_tiny, checkpoint, crowd, fail_once, make, run, tokens
from harness import held_bytes
from oracle import numpy_llama
from spent import exhaustive

from shiftjax import LLM
from shiftjax.arch.formats import formats_of
from shiftjax.build import Built
from shiftjax.core.request import SamplingParams
from shiftjax.costs.memory import kv_token_bytes, weight_bytes
from shiftjax.device.programs import CompileCounter
from shiftjax.host_tier.host_stats import HostStats
from shiftjax.phases.resharding import Resharding, ReshardingState

pytestmark = pytest.mark.thorough

OUTPUT_TOKENS = 12
# The decode phase has blocks for fewer sequences than it could step; prompts take several chunks.
SIZES = {"num_blocks": 28, "max_model_len": 96, "token_buckets": [16], "prefix_caching": True}
SIZES |= {"max_num_batched_tokens": 16}
PAIRS = {
    "dp2pp2:dp2tp2": {"num_blocks": 25, "host_memory": "300KB"},
    "tp4:pp4": {"host_memory": "150KB"},
}
NUM_LAYERS = 4


@pytest.fixture(scope="module", params=["dp2pp2:dp2tp2", *exhaustive("tp4:pp4")])
def phased(request) -> Built:
    """An engine in phases, whose host tier holds some four prompts."""
    directory, _, _ = checkpoint(num_hidden_layers=NUM_LAYERS)
    sizes = SIZES | PAIRS[request.param]
    return build_tiny(directory, whole=True, phases=request.param, **sizes)


@pytest.fixture(scope="module")
def static() -> Built:
    """The same model on one device."""
    directory, _, _ = checkpoint(num_hidden_layers=NUM_LAYERS)
    return make(directory, 1, 1, whole=True, **SIZES)


def sampling(seed: int, **others) -> SamplingParams:
    """Greedy for every other seed."""
    draw = {"temperature": 1.1, "top_p": 0.9, "seed": seed} if seed % 2 else {"temperature": 0}
    return SamplingParams(**{"max_tokens": OUTPUT_TOKENS, "ignore_eos": True, **draw, **others})


def test_tokens_are_those_of_a_static_deployment(phased, static):
    """Greedy and drawn, over several switches, with whatever a scheduler does."""
    prompts = crowd(1, 16)
    each = [sampling(i) for i in range(len(prompts))]
    each[3], each[4] = sampling(3, n=3), sampling(4, max_tokens=1)
    each[5], each[6] = sampling(5, frequency_penalty=1.5, logprobs=2), sampling(6, max_tokens=30)
    counter = CompileCounter()
    counter.start()
    events = run(phased.engine, prompts, each)
    counter.stop()
    expected = run(static.engine, prompts, each)
    assert events.keys() == expected.keys()
    for key, want in expected.items():
        assert tokens(events[key]) == tokens(want), key
        assert events[key][-1].finish_reason == want[-1].finish_reason
    stats = phased.engine.stats()
    assert counter.count == 0
    assert stats.find(ReshardingState).num_switches >= 4 and stats.num_failed_steps == 0
    assert stats.num_preemptions["swap"] > 0 and stats.num_prefix_hit_tokens > 0
    assert stats.find(HostStats).num_restored_bytes > 0 and stats.kv_usage == 0


def live_bytes(engine: Built | LLM) -> Counter:
    """What devices hold when all copies are made; a host tier's extents lie elsewhere."""
    for runner in engine.runners:
        runner.memory.settle()
    gc.collect()
    arrays = [a for a in jax.live_arrays() if a.sharding.memory_kind != "pinned_host"]
    return Counter(held_bytes(arrays))


def test_devices_hold_no_more_after_switches_than_after_the_start(phased):
    """Weights, pools, and what steps and copies have left."""
    held = {}
    for seed in range(3):
        run(phased.engine, crowd(seed, 6), [sampling(i) for i in range(6)])
        assert phased.engine.topology.find(Resharding).phase == "decode"
        held[seed] = live_bytes(phased)
    assert held[0] == held[1] == held[2]


def test_a_failure_in_one_phase_leaves_what_is_parked(phased, static, monkeypatch):
    """The pools of a stage are made anew; requests of the step end, others go on."""
    runner = phased.runners[-1]
    fail_once(monkeypatch, runner)
    prompts, each = crowd(5, 12), [sampling(i) for i in range(12)]
    events = run(phased.engine, prompts, each)
    expected = run(static.engine, prompts, each)
    ended = {key for key, some in events.items() if some[-1].error_code == "step_failed"}
    assert ended and len(ended) < len(prompts)
    for key in expected.keys() - ended:
        assert tokens(events[key]) == tokens(expected[key])


def test_a_model_in_phases_from_its_name_to_its_tokens(monkeypatch):
    """And a load that fails: what it was is raised, requests end, devices hold nothing."""
    directory, config, tensors = checkpoint(num_hidden_layers=NUM_LAYERS)
    options = {"block_size": 4, "dtype": "float32", "max_num_seqs": 6, "cache_dir": "none"}
    options |= SIZES | {"devices": 4, "host_memory": "1MB"}
    llm = LLM(str(directory), phases="pp4:tp4", **options)
    prompts, greedy = crowd(8, 6), sampling(0)
    outputs = llm.generate(prompts, greedy)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = numpy_llama.greedy(config, tensors, prompt, OUTPUT_TOKENS)
        assert list(output.outputs[0].token_ids) == expected
    stats = llm.stats()
    assert stats["compiles_after_warmup"] == 0 and stats["phases"]["num_switches"] == 1
    assert stats["mesh"] == "prefill dp=1 pp=4 sp=1 tp=1; decode dp=1 sp=1 tp=4"

    def fail(*_):
        raise MemoryError("no room for the weights")

    held, decode = live_bytes(llm), llm.runners[-1]
    monkeypatch.setattr("shiftjax.phases.exchange_device.load_weights", fail)
    with pytest.raises(MemoryError, match="no room"):
        llm.generate(prompts, greedy)
    assert not llm.engine.has_work()
    llm.engine.check()
    layout, formats = decode.step.layout, formats_of("float32")
    tokens_held = SIZES["num_blocks"] * options["block_size"]
    lost = weight_bytes(layout, formats) + tokens_held * kv_token_bytes(layout, formats)
    assert held - live_bytes(llm) == dict.fromkeys(decode.step.mesh.devices.flat, lost)
    llm.close()
