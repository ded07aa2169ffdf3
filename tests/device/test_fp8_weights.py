"""Matrices as e4m3 codes: the numbers of an independent implementation, and of every mode."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from engines import RandomPolicy, checkpoint, make, run, tokens
from harness import forward
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from oracle import numpy_fp8, numpy_llama
from spent import thorough

from shiftjax.arch.formats import Formats
from shiftjax.core.request import SamplingParams
from shiftjax.models.products import quantise
from shiftjax.parallel.grid import Mode

FP8 = Formats("fp8", "float32", "float32")
PROMPT = [5, 17, 99, 3, 42, 7, 7, 121, 64, 30, 11, 150]
FLOATS = st.floats(-1e4, 1e4, width=32)


@settings(deadline=None)
@given(arrays.arrays(np.float32, (3, 8), elements=FLOATS))
def test_codes_are_those_of_another_implementation(x):
    codes, scale = (np.asarray(each) for each in quantise(jnp.asarray(x)))
    assert codes.dtype == ml_dtypes.float8_e4m3fn
    most = np.abs(x).max(axis=-1)
    close = most > 1e-20
    np.testing.assert_array_equal(scale[close], most[close] * np.float32(1 / 448))
    got = codes.astype(np.float64) * scale[:, None]
    np.testing.assert_allclose(got[close], numpy_fp8.rounded(x)[close], rtol=1e-6)
    assert (np.abs(got - x) <= np.maximum(np.abs(x) / 16, most[:, None] / 2**18) + 1e-20).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_gives_none(bad):
    x = np.ones((2, 4), np.float32)
    x[0, 1] = bad
    codes, scale = (np.asarray(each) for each in quantise(jnp.asarray(x)))
    with np.errstate(invalid="ignore"):
        values = codes.astype(np.float32) * scale[:, None]
    assert not np.isfinite(values[0].sum()) and (values[1] == 1).all()


@pytest.mark.parametrize(("sp", "tp"), [(1, 1), (2, 2), (1, 4), *thorough((4, 1))])
def test_logits_are_those_of_the_same_codes_in_numpy(sp, tp):
    directory, config, tensors = checkpoint(num_attention_heads=8, num_key_value_heads=4)
    with numpy_fp8.quantised(o=16, down=8):
        expected = numpy_llama.forward(config, tensors, PROMPT)["logits"]
    plain = numpy_llama.forward(config, tensors, PROMPT)["logits"]
    for mode in dict.fromkeys((Mode(sp, sp), Mode(sp, 1))):
        _, logits, _ = forward(directory, PROMPT, sp, tp, mode, "alias", formats=FP8)
        far = np.abs(logits - expected).max(axis=-1)
        # Where a number lies at the border of two codes, float32 and float64 may differ.
        assert np.median(far) < 1e-3 and (logits.argmax(-1) == expected.argmax(-1)).all()
        assert np.abs(logits - plain).max() > 10 * np.median(far)


@pytest.mark.thorough
@pytest.mark.parametrize(("sp", "tp", "controls"), [(4, 2, {}), (3, 2, {"shift_weights": "slice"})])
def test_tokens_do_not_depend_on_the_mode_or_the_batch(sp, tp, controls):
    directory, *_ = checkpoint()
    built = make(directory, sp, tp, controls=controls, quantization="fp8", num_blocks=42)
    prompts = [PROMPT[i:] + PROMPT[: i + 3] for i in range(8)]
    sampling = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * len(prompts)
    texts = []
    for seed in range(2):
        built.engine.policy = RandomPolicy(seed)
        built.engine.flush_prefix_cache()
        events = run(built.engine, prompts, sampling)
        texts.append([tokens(events[i, 0]) for i in range(len(prompts))])
    assert texts[0] == texts[1] and built.engine.stats().steps_by_mode.keys() >= {"base", "shift"}
