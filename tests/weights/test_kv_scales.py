"""Scales of a KV cache as checkpoints have them: shapes, names of equal ones, what is refused."""

import numpy as np
import pytest
from checkpoints import TINY, random_tensors, write_single
from engines import checkpoint, make
from hypothesis import given
from hypothesis import strategies as st

from shiftjax.arch.weights import kv_scales_of
from shiftjax.weights.errors import CheckpointError
from shiftjax.weights.huggingface import HuggingFaceSource, save_huggingface
from shiftjax.weights.kv_scales import identify_scales, read_scale
from shiftjax.weights.source import TensorInfo, check_complete

NAMES = [name for weight in kv_scales_of(TINY) for name in weight.stacked]
FIRST = "model.layers.0.self_attn.k_scale"


class Scales:
    """A source of nothing but scales."""

    location, config = "somewhere", TINY

    def __init__(self, arrays):
        self.arrays = {name: np.asarray(array) for name, array in arrays.items()}
        self.tensors = {
            name: TensorInfo(array.shape, array.dtype, "a file")
            for name, array in self.arrays.items()
        }

    def read(self, name, index=()):
        return self.arrays[name][index]


def test_every_layer_has_a_scale_of_keys_and_one_of_values():
    assert NAMES[:2] == [FIRST, "model.layers.0.self_attn.v_scale"]
    assert len(NAMES) == 2 * TINY.num_layers


@pytest.mark.parametrize("shape", [(), (1,), (4,), (4, 1, 1)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_number_is_that_of_all_heads(shape, dtype):
    given = np.linspace(0.5, 2, 4 if shape and shape[0] == 4 else 1).reshape(shape).astype(dtype)
    scale = read_scale(Scales({FIRST: given}), FIRST, 4)
    assert (scale.dtype, scale.shape) == (np.float32, (4,))
    np.testing.assert_array_equal(scale, np.broadcast_to(given.reshape(-1), 4))
    np.testing.assert_array_equal(read_scale(Scales({}), FIRST, 4), np.ones(4))


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        ([1.0, 2.0, 3.0], "expected one number, or one for each of 4 KV heads, found 3"),
        ([], "expected one number, or one for each of 4 KV heads, found 0"),
        (0.0, "expected positive numbers, found 0.0"),
        (-0.5, "expected positive numbers, found -0.5"),
        (np.nan, "expected positive numbers, found nan"),
        ([1.0, np.inf, 1.0, 1.0], r"expected positive numbers, found \[ 1. inf  1.  1.\]"),
    ],
)
def test_what_is_no_scale_is_refused(scale, words):
    with pytest.raises(CheckpointError, match=rf"^a file: tensor {FIRST}: {words}$"):
        read_scale(Scales({FIRST: np.float32(scale)}), FIRST, 4)


POSITIVE = st.floats(2**-20, 2**20, width=32)


@given(st.lists(POSITIVE, min_size=len(NAMES), max_size=len(NAMES)), st.sampled_from(NAMES))
def test_equal_scales_have_equal_names_and_others_others(scales, changed):
    arrays = dict(zip(NAMES, np.float32(scales), strict=True))
    name = identify_scales(Scales(arrays))
    assert name == identify_scales(Scales({n: np.full(1, x) for n, x in arrays.items()}))
    assert name != identify_scales(Scales(arrays | {changed: np.float32(2) * arrays[changed]}))


def test_codes_without_scales_are_warned_of_once(caplog):
    name = identify_scales(Scales({}))
    (record,) = caplog.records
    assert f"{len(NAMES)} of {len(NAMES)} scales of an fp8 KV cache" in record.getMessage()
    assert FIRST in record.getMessage()
    caplog.clear()
    assert identify_scales(Scales(dict.fromkeys(NAMES, np.float32(1)))) == name
    assert caplog.records == []


def test_scales_are_no_strange_tensors_and_are_converted_too(tmp_path):
    scales = {FIRST: np.array(0.25, "f4"), NAMES[-1]: np.ones(TINY.num_kv_heads, np.float32)}
    source = HuggingFaceSource(write_single(tmp_path / "from", random_tensors() | scales))
    check_complete(source)
    (tmp_path / "to").mkdir()
    save_huggingface(source, tmp_path / "to")
    assert read_scale(HuggingFaceSource(tmp_path / "to"), FIRST, 2).tolist() == [0.25, 0.25]


def test_an_engine_refuses_scales_before_it_loads(monkeypatch):
    directory, *_ = checkpoint()
    loaded, words = [], "v_scale: expected positive"

    def refuse(source):
        raise CheckpointError(words)

    monkeypatch.setattr("shiftjax.local_deployment.identify_scales", refuse)
    monkeypatch.setattr("shiftjax.device.backend.place", lambda *_: loaded.append(1))
    with pytest.raises(CheckpointError, match=words):
        make(directory, 1, 1, kv_cache_dtype="fp8")
    assert loaded == []
