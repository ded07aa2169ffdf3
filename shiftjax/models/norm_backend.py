"""Which implementation adds to the residual stream and norms it: a table, as of attention.

    xla        XLA: every platform, every norm, every type
    pallas     one launch (`pallas_kernels/norm_codes.py`): Hopper GPUs, RMS norms of 16-bit numbers

Beside kernels that multiply codes, the launch gives codes where the next products read such.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.formats import FORMATS, Formats
from shiftjax.models.gpu_software import what_tracing_says
from shiftjax.models.products import Activations, Codes
from shiftjax.models.stream import Addend, Reduce, Stream
from shiftjax.parallel.layout import Layout

logger = logging.getLogger(__name__)
TRACED_ROWS = 8
Rows = Float[Array, "tokens hidden"]


class NormShape(NamedTuple):
    """The norms of a model's stream, as kernels see them."""

    width: int
    dtype: str  # of activations; a name of `arch.formats`
    eps: float
    offset: bool  # the weight is 1 more than what is stored
    in_float32: bool  # rounded after the weight, not before
    scale: float  # of what is added
    codes: bool  # some products read codes


class NormBackend(NamedTuple):
    """One implementation; a model's norm is bound in its function."""

    name: str
    # (stream, weight, reduce, codes) -> the new stream, and its norm as numbers or as codes;
    # None: the model's own operations
    add_norm: Callable[[Stream, Array, Reduce, bool], tuple[Rows, Activations]] | None = None
    gives_codes: bool = False  # where products read codes
    reason: str = ""  # why this one was chosen


XLA_NORMS = NormBackend("xla")


def norm_shape(model: ModelConfig, formats: Formats) -> NormShape | None:
    """Return the norms of a model; None: they are none of the kernel's."""
    if model.norm_centred:
        return None
    own = model.rms_norm_eps, model.norm_offset, model.norm_in_float32, model.residual_scale
    return NormShape(model.hidden_size, formats.activations, *own, formats.has_codes_of_inputs)


def pallas_norms(
    shape: NormShape, *, gives_codes: bool = False, interpret: Any = False
) -> NormBackend:
    """Return the kernel. Sums over devices are XLA's. `interpret` is for tests alone."""
    from pallas_kernels import norm_codes

    def add_norm(
        stream: Stream, weight: Array, reduce: Reduce, codes: bool
    ) -> tuple[Rows, Activations]:
        own = shape.eps, shape.offset, shape.in_float32, shape.scale
        kind = norm_codes.NormKind(*own, codes=codes)
        added = bias = None
        if (addend := stream.addend) is not None:
            added, bias = addend.summed(reduce), addend.bias
        total, normed = norm_codes.add_norm(stream.x, added, weight, kind, bias, interpret)
        return total, Codes(*normed) if isinstance(normed, tuple) else normed

    return NormBackend("pallas", add_norm, gives_codes)


def choose_norms(
    layout: Layout, formats: Formats, attention: str, *, gives_codes: bool = False
) -> NormBackend:
    """Return the kernel if `attention`, by name, are kernels and the model's norms allow it.

    With `gives_codes` products are kernels that read codes.
    """
    shape = norm_shape(layout.model, formats)
    if shape is None:
        return XLA_NORMS._replace(reason="the model's norms subtract a mean")
    if "pallas" not in attention:
        return XLA_NORMS._replace(reason=f"attention runs as {attention}")
    if shape.codes and not (gives_codes and shape.dtype == "bfloat16"):
        return XLA_NORMS._replace(reason="XLA makes codes, which it fuses with norms")
    if reason := why_not_normed(shape):
        logger.info("norms and what is added before them are XLA's: %s", reason)
        return XLA_NORMS._replace(reason=reason)
    return pallas_norms(shape, gives_codes=shape.codes)


def why_not_normed(shape: NormShape) -> str | None:
    """Return what the kernel cannot do, in its own words."""
    from pallas_kernels.norm_codes import wrong_norm

    dtype = FORMATS[shape.dtype].dtype
    x = jax.ShapeDtypeStruct((TRACED_ROWS, shape.width), dtype)
    weight = jax.ShapeDtypeStruct((shape.width,), dtype)
    if wrong := wrong_norm(x, x, weight):
        return "; ".join(wrong)
    add_norm = pallas_norms(shape).add_norm
    assert add_norm is not None

    def trace(x: Array, weight: Array) -> tuple[Rows, Activations]:
        return add_norm(Stream(x, Addend(x)), weight, lambda x, _: x, shape.codes)

    return what_tracing_says(lambda: jax.eval_shape(trace, x, weight))
