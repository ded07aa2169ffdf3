"""Names and shapes, completeness, ranges, finite values."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import TINY, assert_ranges, random_tensors, write_config, write_single
from safetensors.numpy import save_file

from shiftjax.arch.presets import PRESETS
from shiftjax.arch.weights import expected_tensors
from shiftjax.weights.hf_config import parse_config
from shiftjax.weights.huggingface import HuggingFaceSource
from shiftjax.weights.random import RandomSource
from shiftjax.weights.source import (
    CheckpointError,
    TensorInfo,
    bounds,
    check_complete,
    check_finite,
    row_ranges,
)
from shiftjax.weights.typed_fields import read_json

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
TENSORS = json.loads((CONFIGS / "tensors.json").read_text())
PUBLISHED_PARAMETERS = {  # model cards, millions
    "smollm2-135m": 134.5,
    "llama-3.2-1b": 1236,
    "llama-3.1-8b": 8030,
    "llama-3.3-70b": 70_554,
    "llama-3.1-405b": 405_853,
    "mistral-7b-v0.3": 7248,
    "qwen2.5-0.5b": 494,
    "qwen2.5-32b": 32_764,
    "qwen3-0.6b": 596,
    "qwen3-8b": 8191,
    "qwen3-32b": 32_762,
}


def test_projections_of_the_original_are_tolerated_in_late_layers_and_said_once(tmp_path, caplog):
    config = replace(TINY, architecture="llama_swiftkv", num_kv_layers=1)
    tensors = random_tensors(config)
    more = {f"model.layers.1.self_attn.{n}_proj.weight": np.ones((2, 2), "f4") for n in "qkv"}
    write_config(tmp_path, config)
    save_file(tensors | more, tmp_path / "model.safetensors")
    with caplog.at_level("INFO"):
        check_complete(HuggingFaceSource(tmp_path))
    (record,) = caplog.records
    assert "3 tensors are not used: late layers (from 1 on) have q, k, v" in record.getMessage()
    early = "model.layers.0.self_attn.q_proj_swiftkv.weight"
    save_file(tensors | {early: np.ones(2, "f4")}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{early}: expected no such tensor"):
        check_complete(HuggingFaceSource(tmp_path))


@pytest.mark.parametrize("name", TENSORS)
def test_expected_tensors_are_those_of_transformers(name):
    path = CONFIGS / f"{name}.json"
    config = parse_config(read_json(path), name, str(path))
    assert expected_tensors(config) == {key: tuple(shape) for key, shape in TENSORS[name].items()}


@pytest.mark.parametrize(("name", "millions"), PUBLISHED_PARAMETERS.items())
def test_presets_have_the_published_number_of_parameters(name, millions):
    shapes = expected_tensors(PRESETS[name]).values()
    assert sum(int(np.prod(shape)) for shape in shapes) == pytest.approx(millions * 1e6, rel=1e-3)


def test_presets_are_named_after_themselves():
    assert {name for name, config in PRESETS.items() if config.name == name} == {
        config.name for config in PRESETS.values()
    }


def test_complete_source_passes(tmp_path):
    tensors = random_tensors()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    tensors["model.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    source = HuggingFaceSource(write_single(tmp_path, tensors))
    check_complete(source)


def test_every_problem_is_named_at_once(tmp_path):
    tensors = random_tensors()
    del tensors["model.norm.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = np.ones((1, 1), np.float32)
    tensors["model.layers.1.self_attn.q_proj.weight"] = np.ones((64, 63), np.float32)
    source = HuggingFaceSource(write_single(tmp_path, tensors))
    with pytest.raises(CheckpointError) as caught:
        check_complete(source)
    missing, extra, shape = caught.value.problems
    file = tmp_path / "model.safetensors"
    assert missing == f"{tmp_path}: tensor model.norm.weight: expected shape [64], found nothing"
    assert extra.startswith(f"{file}: tensor model.layers.2.mlp.up_proj.weight: expected no such")
    assert shape == (
        f"{file}: tensor model.layers.1.self_attn.q_proj.weight: "
        "expected shape [64, 64], found [64, 63]"
    )


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (None, None),
        ((255, 63), "found other values in rows 0 to 256"),
        ("shape", r"expected shape \[256, 64\], found \[255, 64\]"),
    ],
)
def test_head_beside_tied_embeddings_must_be_a_copy(tmp_path, change, error):
    config = replace(TINY, tie_word_embeddings=True)
    tensors = random_tensors(config)
    head = tensors["model.embed_tokens.weight"].copy()
    if change == "shape":
        head = head[:-1]
    elif change:
        head[change] += 1
    write_config(tmp_path, config)
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    source = HuggingFaceSource(tmp_path)
    if error is None:
        check_complete(source)
    else:
        with pytest.raises(CheckpointError, match=error):
            check_complete(source)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_counted(dtype, bad):
    array = random_tensors(dtype=dtype)["model.embed_tokens.weight"]
    check_finite("e", array, "f")
    array[[3, 200], [0, 63]] = bad
    with pytest.raises(CheckpointError, match=r"f: tensor e: .* found 2 NaN or infinite of 16384"):
        check_finite("e", array, "f")


def test_bounds_refuses_what_is_no_range():
    info = TensorInfo((4, 6), np.dtype(np.float32), "f")
    assert bounds(info, (slice(1, None),)) == (slice(1, 4), slice(0, 6))
    for index in [(slice(0, 5),), (slice(0, 4, 2),), (slice(-2, 4),), (slice(None),) * 3]:
        with pytest.raises(ValueError, match="index"):
            bounds(info, index)


@pytest.mark.parametrize("most_bytes", [1, 24, 50, 95, 96, 1000])
def test_row_ranges_cover_every_row_once(most_bytes):
    info = TensorInfo((4, 6), np.dtype(np.float32), "f")
    rows = [row for (part,) in row_ranges(info, most_bytes) for row in range(part.start, part.stop)]
    assert rows == [0, 1, 2, 3]
    longest = max(part.stop - part.start for (part,) in row_ranges(info, most_bytes))
    assert longest == max(1, min(4, most_bytes // 24))


def test_random_ranges_agree_with_whole_tensors():
    for name in ("tiny", "tiny-qwen2", "tiny-qwen3"):
        assert_ranges(RandomSource(PRESETS[name], seed=7))


def test_random_weights_have_the_promised_scale():
    source = RandomSource(PRESETS["tiny-qwen2"], seed=1)
    matrix = source.read("model.layers.0.mlp.down_proj.weight")
    assert matrix.shape == (64, 128)
    assert matrix.std() == pytest.approx(128**-0.5, rel=0.05)
    assert abs(matrix.mean()) < 0.01
    assert (source.read("model.norm.weight") == 1).all()
    assert 0.01 < source.read("model.layers.0.self_attn.q_proj.bias").std() < 0.03


def test_random_weights_depend_on_seed_and_name():
    name, other = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    first = RandomSource(TINY, seed=0).read(name)
    assert (RandomSource(TINY, seed=0).read(name) == first).all()
    for different in (RandomSource(TINY, seed=1).read(name), RandomSource(TINY).read(other)):
        assert abs(np.corrcoef(first.ravel(), different.ravel())[0, 1]) < 0.05
    with pytest.raises(ValueError, match="seed"):
        RandomSource(TINY, seed=-1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_random_source_is_complete(dtype):
    source = RandomSource(TINY, dtype=dtype)
    check_complete(source)
    assert all(str(source.read(name).dtype) == dtype for name in source.tensors)
