"""A KV cache of e4m3 codes: the numbers of an independent implementation, whatever serves them."""

import numpy as np
import pytest
from engines import (
    RandomPolicy,
    build_tiny,
    crowd,
    make,
    run,
    scaled_checkpoint,
    tokens,
)
from fleet_histories import play, requests_of
from harness import forward
from oracle import numpy_fp8, numpy_llama

from shiftjax.arch.formats import Formats
from shiftjax.core.request import SamplingParams
from shiftjax.drafts.speculation import DraftStats
from shiftjax.fleet.regrouping import Fleet
from shiftjax.host_tier.host_stats import HostStats
from shiftjax.parallel.grid import Mode
from shiftjax.phases.resharding import ReshardingState
from shiftjax.weights.huggingface import HuggingFaceSource
from shiftjax.weights.kv_scales import identify_scales

FP8_KV = Formats("float32", "fp8", "float32")
PROMPT = [5, 17, 99, 3, 42, 7, 7, 121, 64, 30, 11, 150]
LATE = {"model_type": "llama_swiftkv", "num_hidden_layers": 3, "num_key_value_layers": 1}


def greedy(prompts, num_tokens, **overrides):
    """What NumPy makes of prompts with the same codes."""
    _, config, tensors = scaled_checkpoint(**overrides)
    with numpy_fp8.cached():
        return [numpy_llama.greedy(config, tensors, prompt, num_tokens) for prompt in prompts]


@pytest.mark.parametrize(
    ("sp", "tp", "model"),
    [(1, 1, {}), (2, 2, {}), (3, 2, {}), (2, 1, LATE)],
    ids=["alone", "a padded KV head", "replicated KV heads", "late layers"],
)
def test_logits_are_those_of_the_same_codes_in_numpy(sp, tp, model):
    directory, config, tensors = scaled_checkpoint(**model)
    with numpy_fp8.cached():
        expected = numpy_llama.forward(config, tensors, PROMPT)["logits"]
    plain = numpy_llama.forward(config, tensors, PROMPT)["logits"]
    for mode in dict.fromkeys((Mode(sp, sp), Mode(sp, 1))):
        _, logits, _ = forward(directory, PROMPT, sp, tp, mode, "alias", formats=FP8_KV)
        np.testing.assert_allclose(logits, expected, atol=1e-3)
        assert np.abs(logits - plain).max(axis=-1).min() > 0.05


def served(built, prompts, seed, num_tokens=12):
    """Greedy tokens of every prompt, from steps in modes drawn at random."""
    built.engine.policy = RandomPolicy(seed)
    one = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    events = run(built.engine, prompts, [one] * len(prompts))
    return [tokens(events[i, 0]) for i in range(len(prompts))]


@pytest.mark.thorough
def test_whatever_moves_codes_changes_no_token():
    """Chunks, drafts, preemption by swap, prefixes out of the host tier; all that again."""
    directory, *_ = scaled_checkpoint()
    prompts = crowd(3, count=6)
    options = {"preemption": "swap", "host_memory": "300KB", "num_blocks": 28, "max_model_len": 96}
    options |= {"speculation": "ngram", "controls": {"fixed_drafts": True}}
    built = make(directory, 2, 1, kv_cache_dtype="fp8", **options)
    name = identify_scales(HuggingFaceSource(directory))
    assert built.deployment.budgets.kv == f"fp8 {name}"
    expected = greedy(prompts, 12)
    assert served(built, prompts, 0) == served(built, prompts, 1) == expected
    stats = built.engine.stats()
    assert stats.steps_by_mode.keys() >= {"base", "shift"}
    assert stats.num_preemptions["swap"] > 0 and stats.find(HostStats).num_restored_bytes > 0
    assert stats.num_prefix_hit_tokens > 0 and stats.find(DraftStats).num_accepted > 0


@pytest.mark.thorough
def test_codes_go_from_a_layout_to_another():
    """Prompts are computed by tensor parallelism, decoded in stages; blocks go by the host."""
    directory, *_ = scaled_checkpoint()
    prompts = crowd(3, count=6)
    sizes = {"num_blocks": 28, "max_model_len": 96, "host_memory": "300KB"}
    built = build_tiny(directory, phases="tp2:pp2", kv_cache_dtype="fp8", **sizes)
    assert served(built, prompts, 0) == greedy(prompts, 12)
    assert built.engine.stats().find(ReshardingState).num_switches > 0


@pytest.mark.thorough
def test_codes_move_with_the_sequences_of_a_fleet():
    """Blocks of a unit hold the tokens of two blocks of a group of two, in half the heads."""
    model = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    directory, *_ = scaled_checkpoint(**model)
    options = {"fleet_widths": (1, 2), "fleet_policy": "context", "num_blocks": 30}
    built = make(
        directory, None, 1, whole=True, fleet=True, devices=2, kv_cache_dtype="fp8", **options
    )
    requests = requests_of(1)[:10]
    found, _ = play(built, requests, 2)
    for request in [one for one in requests if one.sampling.is_greedy][:3]:
        prompt, most = list(request.prompt_token_ids), request.sampling.max_tokens
        (expected,) = greedy([prompt], most, **model)
        assert tokens(found[request.request_id, 0]) == expected
    assert built.engine.topology.find(Fleet).stats.num_moved_sequences > 0


@pytest.mark.thorough
def test_tokens_of_quantised_weights_and_kv_do_not_depend_on_the_mode():
    """Of the KV heads one is padding: there are 3, for 4 devices."""
    directory, *_ = scaled_checkpoint(num_hidden_layers=1)
    options = {"quantization": "fp8", "kv_cache_dtype": "fp8", "num_blocks": 42}
    built = make(directory, 2, 2, **options)
    prompts, texts = [PROMPT[i:] + PROMPT[: i + 3] for i in range(6)], []
    for seed in range(2):
        built.engine.flush_prefix_cache()
        texts.append(served(built, prompts, seed))
    assert texts[0] == texts[1]
    assert built.engine.stats().steps_by_mode.keys() >= {"base", "shift"}
