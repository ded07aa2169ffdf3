"""Engines whose weights change, and the tokens that each version of them would say."""

import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np
from engines import checkpoint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import numpy_llama
from safetensors.numpy import save_file

from shiftjax.core.request import SamplingParams

PROMPTS = [[5, 17, 99, 3, 42, 7, 7, 121, 64, 30, 11, 150][i:] * (1 + i % 3) for i in range(5)]
NUM_TOKENS = 8
OPTIONS = {  # of a `LLM`
    "dtype": "float32",
    "max_model_len": 64,
    "block_size": 4,
    "num_blocks": 60,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "token_buckets": [16],
    "cache_dir": "none",
}
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def other_weights(seed: int, **overrides) -> dict[str, np.ndarray]:
    """Tensors for the model of `checkpoint(**overrides)`, by another seed."""
    *_, tensors = checkpoint(**overrides)
    if not seed:
        return tensors
    rng = np.random.default_rng(seed)
    return {
        name: rng.permutation(array.reshape(-1)).reshape(array.shape)
        for name, array in tensors.items()
    }


def expected(tensors: dict, prompt: list[int], num: int = NUM_TOKENS, **overrides) -> list[int]:
    """Greedy tokens of these weights, by the oracle."""
    _, config, _ = checkpoint(**overrides)
    return numpy_llama.greedy(config, tensors, prompt, num)


def spread(tensors: dict[str, np.ndarray], num_devices: int) -> dict[str, jax.Array]:
    """The tensors as a trainer may hold them: split over a mesh of its own, in either dimension."""
    mesh = Mesh(np.array(jax.devices()[:num_devices][::-1]).reshape(-1, 2), ("x", "y"))
    found = {}
    for number, (name, array) in enumerate(sorted(tensors.items())):
        spec: list[str | None] = [None] * array.ndim
        axis = number % array.ndim
        if array.shape[axis] % mesh.shape["x"] == 0:
            spec[axis] = "x"
        found[name] = jax.device_put(array, NamedSharding(mesh, P(*spec)))
    return found


def directory_of(tensors: dict[str, np.ndarray], **overrides) -> Path:
    """A checkpoint with the model of `checkpoint(**overrides)` and these weights."""
    source, *_ = checkpoint(**overrides)
    directory = Path(tempfile.mkdtemp(prefix="shiftjax-test-"))
    shutil.copy(source / "config.json", directory)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
