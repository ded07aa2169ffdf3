"""A KV cache of e4m3 codes: the numbers of an independent implementation, in every mode."""

import numpy as np
import pytest
from engines import RandomPolicy, checkpoint, crowd, make, run, tokens
from harness import forward
from oracle import numpy_fp8, numpy_llama

from shiftjax.arch.formats import Formats
from shiftjax.control.request import SamplingParams
from shiftjax.parallel.grid import Mode

FP8_KV = Formats("float32", "fp8", "float32")
PROMPT = [5, 17, 99, 3, 42, 7, 7, 121, 64, 30, 11, 150]


@pytest.mark.parametrize(("sp", "tp"), [(1, 1), (2, 2), (4, 1), (1, 4)])
def test_logits_are_those_of_the_same_codes_in_numpy(sp, tp):
    directory, config, tensors = checkpoint(num_attention_heads=8, num_key_value_heads=4)
    with numpy_fp8.cached():
        expected = numpy_llama.forward(config, tensors, PROMPT)["logits"]
    plain = numpy_llama.forward(config, tensors, PROMPT)["logits"]
    for mode in dict.fromkeys((Mode(sp, sp), Mode(sp, 1))):
        _, logits, _ = forward(directory, PROMPT, sp, tp, mode, "alias", formats=FP8_KV)
        np.testing.assert_allclose(logits, expected, atol=1e-3)
        assert np.abs(logits - plain).max(axis=-1).min() > 0.05


def served(built, prompts, seed):
    """Greedy tokens of every prompt, 12 each, from steps in modes drawn at random."""
    built.engine.policy = RandomPolicy(seed)
    sampling = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * len(prompts)
    events = run(built.engine, prompts, sampling)
    assert built.engine.stats().steps_by_mode.keys() >= {"base", "shift"}
    return [tokens(events[i, 0]) for i in range(len(prompts))]


def test_greedy_tokens_of_all_modes_are_those_of_the_same_codes_in_numpy():
    """Chunked prompts beside decodes; then all again, of what is cached of them."""
    directory, config, tensors = checkpoint()
    prompts = crowd(3, count=5)
    built = make(directory, 2, 1, kv_cache_dtype="fp8")
    with numpy_fp8.cached():
        expected = [numpy_llama.greedy(config, tensors, prompt, 12) for prompt in prompts]
    assert served(built, prompts, 0) == served(built, prompts, 1) == expected
    assert built.engine.stats().num_prefix_hit_tokens > 0
    assert expected != [numpy_llama.greedy(config, tensors, prompt, 12) for prompt in prompts]


def test_tokens_of_quantised_weights_and_kv_do_not_depend_on_the_mode():
    """Of the KV heads one is padding: there are 3, for 4 devices."""
    directory, *_ = checkpoint()
    options = {"quantization": "fp8", "kv_cache_dtype": "fp8", "num_blocks": 42}
    built = make(directory, 2, 2, **options)
    prompts, texts = [PROMPT[i:] + PROMPT[: i + 3] for i in range(6)], []
    for seed in range(2):
        built.engine.flush_prefix_cache()
        texts.append(served(built, prompts, seed))
    assert texts[0] == texts[1]
