"""Number formats: their names, their bytes and the NumPy types that hold them. No JAX."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import ml_dtypes
import numpy as np

from shiftjax.arch.numerics import NumericsName


class Format(NamedTuple):
    """How a number is stored; with `has_scales`, in units of scales that are stored beside it.

    Numbers of four bits are codes, two in a byte, whose scales belong to groups of inputs. Inputs
    do not become codes: products are of widened weights.
    """

    name: str
    dtype: np.dtype
    has_scales: bool = False
    group: int = 0  # of four bits: inputs that share a scale, where no checkpoint says how many
    scale: np.dtype = np.dtype(np.float32)
    of_experts: bool = False  # the matrices of experts alone; others have the activations' format

    @property
    def is_packed(self) -> bool:
        """Whether two numbers share a byte, in groups."""
        return self.group > 0

    @property
    def num_bytes(self) -> float:
        """Bytes of a number; of four bits with its part of a scale, of others without."""
        if not self.is_packed:
            return self.dtype.itemsize
        return self.dtype.itemsize / 2 + self.scale.itemsize / self.group


_EVERY = (
    Format("float32", np.dtype(np.float32)),
    Format("bfloat16", np.dtype(ml_dtypes.bfloat16)),
    Format("float16", np.dtype(np.float16)),
    Format("fp8", np.dtype(ml_dtypes.float8_e4m3fn), has_scales=True),
    # OCP MX 1.0: e2m1 in units of a power of two, e8m0, for 32 inputs; gpt-oss has experts so.
    Format("mxfp4", np.dtype(np.uint8), True, 32, np.dtype(np.uint8), of_experts=True),
    # (code - zero) * scale, codes 0..15; zero is 8, or a number of the group.
    Format("int4", np.dtype(np.uint8), True, 128),
)
FORMATS = MappingProxyType({each.name: each for each in _EVERY})
DTYPES = MappingProxyType({each.name: each.dtype for each in _EVERY if not each.has_scales})
"""What can be loaded, computed in and written: formats that say their values by themselves."""
PACKED = tuple(each.name for each in _EVERY if each.is_packed)
"""Formats of weights alone, of four bits, which a checkpoint has; none are made of others."""
ALIASES = MappingProxyType({"fp8_e4m3": "fp8"})
"""Other names of formats, as vLLM has them."""
AUTO = "bfloat16"  # what dtype="auto" means, but for CPUs that are slow at it (device/cpu_probe.py)


@dataclass(frozen=True)
class Formats:
    """Number formats of a deployment, by name; products run in that of the weights if they can."""

    weights: str = AUTO  # of the matrices of the layers
    kv: str = AUTO
    activations: str = AUTO  # of embedding, LM head, norms and biases, too
    sums: NumericsName = "fast"  # of partial products over devices, a name of `numerics.py`

    @property
    def dense(self) -> str:
        """Format of the layers' matrices that are not experts'."""
        return self.activations if FORMATS[self.weights].of_experts else self.weights

    @property
    def has_codes_of_inputs(self) -> bool:
        """Whether products are of codes, so that activations become codes first."""
        return FORMATS[self.weights].has_scales and not FORMATS[self.weights].is_packed

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight of the layers, or of experts where these alone have the format."""
        return FORMATS[self.weights].num_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of a cached number."""
        return FORMATS[self.kv].dtype.itemsize

    @property
    def activation_bytes(self) -> int:
        """Bytes of an activation."""
        return FORMATS[self.activations].dtype.itemsize


def formats_of(weights: str = "auto", kv: str = "auto") -> Formats:
    """Return the formats of a model in `weights`: scaled ones are computed with in `AUTO`.

    `auto` is `AUTO` for weights, and the weights' format for KV, which may go by an alias; beside
    weights of four bits it is that of activations.
    """
    kv = ALIASES.get(kv, kv)
    weights = AUTO if weights == "auto" else weights
    activations = AUTO if FORMATS[weights].has_scales else weights
    own_kv = activations if FORMATS[weights].is_packed else weights
    return Formats(weights, own_kv if kv == "auto" else kv, activations)
