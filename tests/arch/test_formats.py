"""The number formats, and the options that name them."""

from typing import get_args, get_type_hints

import numpy as np
import pytest

from shiftjax.arch.formats import ALIASES, AUTO, DTYPES, FORMATS, PACKED, Formats, formats_of
from shiftjax.config import CacheOptions, ModelOptions


def test_the_options_offer_what_can_be_loaded():
    choices = {"auto", *DTYPES}
    assert set(get_args(get_type_hints(ModelOptions)["dtype"])) == choices
    of_kv = set(get_args(get_type_hints(CacheOptions)["kv_cache_dtype"]))
    assert of_kv == {"auto", *FORMATS, *ALIASES} - {*PACKED}


def test_formats_have_their_bytes_and_their_numpy_types():
    assert {name: each.num_bytes for name, each in FORMATS.items()} == {
        "float32": 4,
        "bfloat16": 2,
        "float16": 2,
        "fp8": 1,
        "mxfp4": 0.5 + 1 / 32,
        "int4": 0.5 + 4 / 128,
    }
    assert all(np.dtype(dtype).name == name for name, dtype in DTYPES.items())


@pytest.mark.parametrize(
    ("weights", "kv", "expected"),
    [
        ("float32", "auto", Formats("float32", "float32", "float32")),
        ("bfloat16", "float16", Formats("bfloat16", "float16", "bfloat16")),
        ("fp8", "auto", Formats("fp8", "fp8", AUTO)),
        ("float32", "fp8_e4m3", Formats("float32", "fp8", "float32")),
        ("int4", "auto", Formats("int4", AUTO, AUTO)),
        ("mxfp4", "fp8", Formats("mxfp4", "fp8", AUTO)),
    ],
)
def test_scaled_weights_are_computed_with_in_another_format(weights, kv, expected):
    assert formats_of(weights, kv) == expected


def test_experts_alone_may_have_a_format():
    of_experts, of_all = formats_of("mxfp4"), formats_of("int4")
    assert (of_experts.dense, of_all.dense, formats_of("fp8").dense) == (AUTO, "int4", "fp8")
    assert [each.has_codes_of_inputs for each in (of_all, formats_of("fp8"))] == [False, True]


def test_auto_is_the_quickest_and_for_kv_that_of_the_weights():
    assert formats_of() == Formats(AUTO, AUTO, AUTO)
    assert formats_of("auto", "float16") == Formats(AUTO, "float16", AUTO)
    assert formats_of("float16") == Formats("float16", "float16", "float16")
