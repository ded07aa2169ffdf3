"""Number formats: their names, their bytes and the NumPy types that hold them. No JAX."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import ml_dtypes
import numpy as np


class Format(NamedTuple):
    """How a number is stored; with `has_scales`, in units of scales that are stored beside it."""

    name: str
    dtype: np.dtype
    has_scales: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of a number, scales not counted."""
        return self.dtype.itemsize


_EVERY = (
    Format("float32", np.dtype(np.float32)),
    Format("bfloat16", np.dtype(ml_dtypes.bfloat16)),
    Format("float16", np.dtype(np.float16)),
    Format("fp8", np.dtype(ml_dtypes.float8_e4m3fn), has_scales=True),
)
FORMATS = MappingProxyType({each.name: each for each in _EVERY})
DTYPES = MappingProxyType({each.name: each.dtype for each in _EVERY if not each.has_scales})
"""What can be loaded, computed in and written: formats that say their values by themselves."""
ALIASES = MappingProxyType({"fp8_e4m3": "fp8"})
"""Other names of formats, as vLLM has them."""
AUTO = "bfloat16"  # what dtype="auto" means, but for CPUs that are slow at it (device/cpu_probe.py)


@dataclass(frozen=True)
class Formats:
    """Number formats of a deployment, by name; products run in that of the weights if they can."""

    weights: str = AUTO  # of the matrices of the layers
    kv: str = AUTO
    activations: str = AUTO  # of embedding, LM head, norms and biases, too

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight of the layers."""
        return FORMATS[self.weights].num_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of a cached number."""
        return FORMATS[self.kv].num_bytes

    @property
    def activation_bytes(self) -> int:
        """Bytes of an activation."""
        return FORMATS[self.activations].num_bytes


def formats_of(weights: str = "auto", kv: str = "auto") -> Formats:
    """Return the formats of a model in `weights`: scaled ones are computed with in `AUTO`.

    `auto` is `AUTO` for weights, and the weights' format for KV, which may go by an alias.
    """
    kv = ALIASES.get(kv, kv)
    weights = AUTO if weights == "auto" else weights
    activations = AUTO if FORMATS[weights].has_scales else weights
    return Formats(weights, weights if kv == "auto" else kv, activations)
