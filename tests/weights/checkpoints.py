"""Tiny checkpoints written without our own writers."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.formats import DTYPES
from shiftjax.arch.presets import PRESETS
from shiftjax.arch.weights import expected_tensors
from shiftjax.weights.hf_config import to_json
from shiftjax.weights.source import TensorSource

TINY = PRESETS["tiny"]


def random_tensors(config: ModelConfig = TINY, dtype: str = "float32") -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        name: generator.standard_normal(shape).astype(DTYPES[dtype])
        for name, shape in expected_tensors(config).items()
    }


def write_config(directory: Path, config: ModelConfig = TINY) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(to_json(config, "float32")))


def write_single(directory: Path, tensors: dict[str, np.ndarray]) -> Path:
    write_config(directory)
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_shards(directory: Path, tensors: dict[str, np.ndarray]) -> Path:
    """Two shards, cut in the middle, and their index."""
    write_config(directory)
    names = list(tensors)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    weight_map = {}
    for number, half in enumerate(halves, 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in half}, directory / file)
        weight_map |= dict.fromkeys(half, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def edit_json(path: Path, **changes: object) -> None:
    """Set fields of a JSON file; a field set to `...` is removed."""
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))


def assert_same(source: TensorSource, tensors: dict[str, np.ndarray]) -> None:
    """Names, dtypes, shapes and every bit agree."""
    assert set(source.tensors) == set(tensors)
    for name, expected in tensors.items():
        found = source.read(name)
        assert source.tensors[name].dtype == found.dtype == expected.dtype
        assert source.tensors[name].shape == found.shape == expected.shape
        assert found.tobytes() == expected.tobytes(), name


RANGES = ((slice(0, 0),), (slice(3, 7),), (slice(1, 2), slice(33, 50)), (slice(None), slice(5)))


def assert_ranges(source: TensorSource) -> None:
    """Every range of every tensor equals the same slice of the whole tensor."""
    for name in source.tensors:
        whole = source.read(name)
        for wanted in RANGES:
            index = wanted[: whole.ndim]
            part = source.read(name, index)
            assert part.flags.c_contiguous
            assert part.dtype == whole.dtype
            np.testing.assert_array_equal(part, whole[index], err_msg=f"{name} {index}")
