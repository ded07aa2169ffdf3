"""SwiftKV: late layers compute logit rows alone, and the tokens are those of the definition.

The oracle (tests/oracle/numpy_llama.py) computes every layer of every token, without a cache.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from engines import RandomPolicy, checkpoint, make, run, tokens
from harness import forward
from oracle import numpy_fp8, numpy_llama

from shiftjax.arch.formats import Formats
from shiftjax.core.engine import Engine
from shiftjax.core.lane import Lane
from shiftjax.core.request import Request, RequestError, SamplingParams
from shiftjax.core.scheduler import Scheduler
from shiftjax.parallel.grid import Mode

NUM_LAYERS = 3
PROMPT = list(range(3, 40))
TOLERANCE = 500 * np.finfo(np.float32).eps
BIASES = {"attention_bias": True, "mlp_bias": True}
# Layers with KV of their own, mode, strategy, what is changed.
FORWARDS = {
    "one early layer, base": (1, (2, 2), Mode(2, 2), "alias", BIASES),
    "one late layer, shift": (2, (2, 2), Mode(2, 1), "alias", {}),
    "one early layer, between": (1, (4, 2), Mode(4, 2), "alias", {}),
    "one late layer, sliced": (2, (3, 2), Mode(3, 3), "slice", BIASES),
    "no late layer": (3, (2, 1), Mode(2, 2), "alias", {}),
}


def swiftkv(num_kv_layers: int, **changes):
    """A tiny random checkpoint."""
    layers = {"num_hidden_layers": NUM_LAYERS, "num_key_value_layers": num_kv_layers}
    return checkpoint(model_type="llama_swiftkv", **layers, **changes)


@pytest.mark.parametrize("name", FORWARDS)
def test_logits_are_those_of_the_definition(name):
    num_kv_layers, mesh, mode, strategy, changes = FORWARDS[name]
    directory, config, tensors = swiftkv(num_kv_layers, **changes)
    expected = numpy_llama.forward(config, tensors, PROMPT)
    hidden, logits, _ = forward(directory, PROMPT, *mesh, mode, strategy)
    assert len(hidden) == 1 + num_kv_layers
    assert np.abs(logits - expected["logits"]).max() < TOLERANCE * np.abs(logits).max()


@pytest.mark.thorough
def test_codes_of_late_layers_are_those_of_the_definition():
    """A late layer's products are of codes, too, what makes its keys and values as well."""
    directory, config, tensors = swiftkv(1, num_attention_heads=8, num_key_value_heads=4)
    with numpy_fp8.quantised(o=16, down=8):
        expected = numpy_llama.forward(config, tensors, PROMPT)["logits"]
    formats = Formats("fp8", "float32", "float32")
    _, logits, _ = forward(directory, PROMPT, 2, 2, Mode(2, 2), "alias", formats=formats)
    far = np.abs(logits - expected).max(axis=-1)
    assert np.median(far) < 1e-3 and (logits.argmax(-1) == expected.argmax(-1)).all()


def test_all_modes_write_the_same_cache_in_late_layers():
    directory, _, _ = swiftkv(1)
    base, shift = (forward(directory, PROMPT, 2, 2, Mode(2, sp), "alias")[-1] for sp in (2, 1))
    for in_base, in_shift in zip(base[1:], shift[1:], strict=True):
        for pools in zip(in_base, in_shift, strict=True):
            a, b = (np.asarray(pool)[1:5] for pool in pools)  # full blocks; block 0 takes padding
            assert np.abs(a).max() > 0.1
            np.testing.assert_allclose(a, b, atol=2e-5)


# ------------------------------------------------------------------------- in the engine


@cache
def served():
    """An engine whose steps end chunks of prompts early, and of which prefixes are shared."""
    return make(swiftkv(1)[0], 2, 2, whole=True, token_buckets=[8, 64], max_num_batched_tokens=64)


def with_budget(num_tokens: int, seed: int) -> Engine:
    """An engine over the same programs, with steps of at most so many tokens."""
    built = served()
    (runner,) = built.runners
    runner.reset()
    seqs = min(built.deployment.max_num_seqs, num_tokens)
    few = replace(built.deployment, max_num_batched_tokens=num_tokens, max_num_seqs=seqs)
    lane = Lane(Scheduler(few.budgets), runner, runner.step.weights.modes)
    return Engine([lane], RandomPolicy(seed), few.limits, overlap=True, seed=0)


@pytest.mark.thorough
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_greedy_tokens_whatever_the_chunks_and_modes(budget):
    _, config, tensors = swiftkv(1)
    stem = [7 * i % 190 + 3 for i in range(21)]
    prompts = [stem[:2], stem, [*stem, 5, 6], [*stem[:9], 44], stem[:1]]
    engine = with_budget(budget, seed=budget)
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    for _ in range(2):  # the second time, prefixes are hit
        events = run(engine, prompts, [greedy] * len(prompts))
        for i, prompt in enumerate(prompts):
            assert tokens(events[i, 0]) == numpy_llama.greedy(config, tensors, prompt, 5)
    stats = engine.stats()
    assert stats.num_prefix_hit_tokens > 0
    assert min(stats.steps_by_mode.values()) > 0


@pytest.mark.thorough
def test_large_steps_come_with_few_rows_too():
    sizes = [program.bucket[:2] for program in served().runners[0].programs]
    assert sizes == [(8, 8), (64, 8)]  # max_num_seqs is 6: no size has more
    wide = replace(served().deployment, max_num_seqs=40)
    assert [bucket[:2] for bucket in wide.buckets] == [(8, 8), (64, 8), (64, 40)]


@pytest.mark.thorough
def test_what_needs_the_last_layers_of_a_prompt_is_refused():
    request = Request("r", [5, 6], SamplingParams(prompt_logprobs=1, max_tokens=0))
    with pytest.raises(RequestError, match="last layers for output tokens only"):
        served().engine.add_request(request)


def test_a_step_without_rows_leaves_the_late_layers_out():
    """Their output would not be read: it is that of the last early layer, as it went in."""
    directory, config, tensors = swiftkv(1)
    _, skipped, pools = forward(directory, PROMPT, 2, 1, Mode(2, 2), "alias", num_rows=0)
    early = numpy_llama.forward(config, tensors, PROMPT)["hidden_states"][1]
    normed = numpy_llama.rms_norm(early, tensors["model.norm.weight"], config["rms_norm_eps"])
    expected = normed @ tensors["model.embed_tokens.weight"].T
    # Padding rows are those of the first token.
    np.testing.assert_allclose(skipped, np.tile(expected[:1], (len(PROMPT), 1)), atol=1e-4)
    assert all(np.abs(np.asarray(x)[1:5]).max() > 0.1 for x in pools[-1])  # written all the same
