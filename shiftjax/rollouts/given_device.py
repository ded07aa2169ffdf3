"""Weights that are given to a running engine: a tree, pairs, or files, as named tensors.

Names and shapes are those of Hugging Face's checkpoints, `model.layers.0.self_attn.q_proj.weight`
`[out, in]`, as all sources have them; or a tree has those of a trainer (`trainer_trees_device.py`).
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.weights import LM_HEAD
from shiftjax.rollouts.trainer_trees_device import in_checkpoint_names
from shiftjax.weights.errors import CheckpointError
from shiftjax.weights.locate import open_source, resolve_model
from shiftjax.weights.safetensors_file import read_header, read_range
from shiftjax.weights.source import TensorInfo, TensorSource, bounds, is_ignored, is_kv_scale

Array = jax.Array | np.ndarray
Pairs = Iterator[tuple[str, Array]]


def open_given(given: Any, config: ModelConfig) -> TensorSource | Mapping[str, Array] | Pairs:
    """Return a checkpoint's source, or the tensors of anything else, one after the other.

    `given` is the path of a checkpoint or of a safetensors file, an iterable of (name, array), or
    a tree: what is nested in it has the names along its path, joined by dots.

    Raises CheckpointError for a path where there is neither, and as `in_checkpoint_names` does.
    """
    if isinstance(given, str | Path):
        path = Path(given)
        if path.suffix == ".safetensors":
            headers = read_header(path)
            return ((name, read_range(name, info, ())) for name, info in headers.items())
        return open_source(resolve_model(str(given)))
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        return in_checkpoint_names(dict(_flat(given)), config)
    return iter(given)


def _flat(tree: Any) -> Pairs:
    """Yield the arrays of a tree with their names; those of `flax.nnx` variables lose `.value`."""
    for path, array in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"), array


class Tensors:
    """A `TensorSource` of a few tensors that are there as arrays."""

    location = "the update"

    def __init__(self, config: ModelConfig, arrays: Mapping[str, Array]):
        self.config, self._arrays = config, arrays
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(array.shape, np.dtype(array.dtype), self.location)
            for name, array in arrays.items()
        }

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """See `TensorSource.read`."""
        return np.array(np.asarray(self._arrays[name])[bounds(self.tensors[name], index)])


def is_unused(name: str, config: ModelConfig) -> bool:
    """Whether an update may have a tensor of this name that the model takes from elsewhere."""
    is_tied = name == LM_HEAD and config.tie_word_embeddings
    return is_tied or is_ignored(name) or is_kv_scale(name)


def check_shapes(shapes: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError for tensors that no model of this kind has, or has in other shapes."""
    problems = []
    for name, array in shapes.items():
        if name not in expected:
            problems.append(f"the update: tensor {name}: expected no such tensor")
        elif tuple(array.shape) != expected[name]:
            words = f"expected shape {list(expected[name])}, found {list(array.shape)}"
            problems.append(f"the update: tensor {name}: {words}")
    if problems:
        raise CheckpointError(*problems)


def check_tensors(
    arrays: Iterable[tuple[str, Array]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise CheckpointError as `check_shapes` does, and for numbers that are not finite."""
    shapes, checks = dict[str, Any](), dict[str, jax.Array]()
    for name, array in arrays:  # one after the other: they may be made only when they are asked for
        shapes[name] = jax.ShapeDtypeStruct(array.shape, array.dtype)
        checks[name] = jnp.isfinite(array).all()
    check_shapes(shapes, expected)
    bad = [name for name, is_finite in checks.items() if not bool(is_finite)]
    if bad:
        raise CheckpointError(f"the update: tensor {bad[0]}: expected finite values, found others")
