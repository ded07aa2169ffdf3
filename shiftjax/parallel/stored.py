"""Weights as devices store them: padded for a layout, matrices perhaps as 8-bit codes. No JAX.

A quantised matrix is `codes` (e4m3) and a `scale` for each output channel, float32: a number is its
code times the scale. How it is stored follows from the way that devices split it:

    column-parallel   codes [out, in], scale [out], both split by outputs
    row-parallel      codes [blocks, out, in / blocks], scale [out] on every device
    input scales      [1], of checkpoints that have them; else every token has its own in a step
    experts           codes [experts, out, in], scale [experts, out], both split by experts

A block is the part of the inputs that one device has where all of them split it, so a shard of any
mode is some whole blocks, and the contraction is the innermost dimension in both: what the fp8
instructions of GPUs want, and nothing is transposed in a step.
"""

import numpy as np

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.formats import FORMATS, Formats
from shiftjax.arch.weights import Weight, kv_scales_of, weights_of
from shiftjax.parallel.layout import Layout

SCALE = "_scale"  # after the name of what it scales
INPUTS = "_input_scale"  # after the name of the matrix whose inputs it scales
COPIED = ("bias", "scale", "norm", "head_norm", "kv_scale")  # small: modes have copies, not views
FLOAT32 = ("correction", "scale", "input_scale", "kv_scale")  # kinds, whatever the formats are
_MLPS = ("intermediate", "wide_intermediate", "shared_intermediate")
_SPLIT = ("heads", "kv_heads", *_MLPS, "experts")


def can_be_codes(weight: Weight) -> bool:
    """Whether a weight can be stored as codes: the matrices that devices split.

    Those that they hold whole are small: routers, and the projections of a speculator.
    """
    return weight.kind == "matrix" and weight.split in _SPLIT


def is_quantised(weight: Weight, model: ModelConfig) -> bool:
    """Whether a weight becomes codes where there are any; what a checkpoint has plain stays so."""
    plain = model.codes.plain if model.codes else ()
    return can_be_codes(weight) and weight.parts[0].source not in plain


def stored_weights(layout: Layout, formats: Formats) -> tuple[Weight, ...]:
    """Every weight of the layout's model as devices store it, in the order of the model's.

    With the scales of a KV cache of codes.
    """
    stored: list[Weight] = []
    for weight in weights_of(layout.model):
        plain = layout.stored(weight)
        if FORMATS[formats.weights].has_scales and is_quantised(weight, layout.model):
            stored += quantised(plain, layout)
        else:
            stored.append(plain)
    if FORMATS[formats.kv].has_scales:
        stored += [layout.stored(scales) for scales in kv_scales_of(layout.model)]
    return tuple(stored)


def quantised(plain: Weight, layout: Layout) -> tuple[Weight, ...]:
    """The codes of a stored matrix, their scale, and that of its inputs where there is one."""
    codes = layout.model.codes
    if codes is None or not codes.have_input_scales:
        return _codes_and_scale(plain, layout)
    inputs = Weight(f"{plain.name}{INPUTS}", (1,), (None,), plain.source, "input_scale")
    return *_codes_and_scale(plain, layout), inputs


def _codes_and_scale(plain: Weight, layout: Layout) -> tuple[Weight, Weight]:
    codes = plain._replace(kind="codes")
    scale = plain._replace(name=f"{plain.name}{SCALE}", kind="scale", transposed=False)
    if not plain.transposed:
        return codes, scale._replace(shape=plain.shape[:-1], axes=plain.axes[:-1])
    *_, outputs = plain.shape
    blocks = layout.padded_for
    shape = blocks, outputs, plain.num_elements // (blocks * outputs)
    codes = codes._replace(shape=shape, axes=("blocks", None, None))
    return codes, scale._replace(shape=(outputs,), axes=(None,))


def dtype_of(weight: Weight, formats: Formats) -> np.dtype:
    """What a stored weight is made of."""
    if weight.kind in FLOAT32:
        return np.dtype(np.float32)
    return FORMATS[formats.weights if weight.kind == "codes" else formats.activations].dtype
