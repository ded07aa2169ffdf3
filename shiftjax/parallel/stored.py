"""Weights as devices store them: padded for a layout, matrices perhaps as codes. No JAX.

A quantised matrix is `codes` (e4m3) and a `scale` for each output channel, float32: a number is its
code times the scale. How it is stored follows from the way that devices split it:

    column-parallel   codes [out, in], scale [out], both split by outputs
    row-parallel      codes [blocks, out, in / blocks], scale [out] on every device
    input scales      [1], of checkpoints that have them; else every token has its own in a step
    experts           codes [experts, out, in], scale [experts, out], both split by experts

A block is the part of the inputs that one device has where all of them split it, so a shard of any
mode is some whole blocks, and the contraction is the innermost dimension in both: what the fp8
instructions of GPUs want, and nothing is transposed in a step. Codes of four bits: `four_bits.py`.
"""

from dataclasses import replace

import numpy as np

from shiftjax.arch.config import Codes, ModelConfig
from shiftjax.arch.formats import FORMATS, Formats
from shiftjax.arch.weights import Weight, kv_scales_of, weights_of
from shiftjax.options import ConfigError
from shiftjax.parallel.four_bits import can_be_packed, num_inputs, packed_parts
from shiftjax.parallel.layout import Layout

SCALE = "_scale"  # after the name of what it scales
BLOCK = 128  # inputs of a product of codes that share a scale, where the model allows it
INPUTS = "_input_scale"  # after the name of the matrix whose inputs it scales
COPIED = ("bias", "scale", "norm", "head_norm", "kv_scale")  # small: modes have copies, not views
FLOAT32 = ("correction", "scale", "input_scale", "kv_scale")  # kinds, whatever the formats are
_MLPS = ("intermediate", "wide_intermediate", "shared_intermediate")
_SPLIT = ("heads", "kv_heads", *_MLPS, "experts")


def can_be_codes(weight: Weight, name: str = "fp8") -> bool:
    """Whether a weight can be stored as codes of a format: the matrices that devices split.

    Those that they hold whole are small: routers, and the projections of a speculator.
    """
    split = ("experts",) if FORMATS[name].of_experts else _SPLIT
    return weight.kind == "matrix" and weight.split in split


def codes_in(model: ModelConfig, formats: Formats) -> Codes | None:
    """Return the checkpoint's codes if they are of the weights' format; None: it has none such."""
    codes = model.codes
    return codes if codes is not None and codes.format == formats.weights else None


def with_packed_codes(model: ModelConfig, name: str) -> ModelConfig:
    """Return a model as a checkpoint with four bits might have it, if its own has no such."""
    if model.codes is not None and model.codes.format == name:
        return model
    codes = Codes(format=name, group=FORMATS[name].group)
    matrices = [each for each in weights_of(model) if can_be_codes(each, name)]
    plain = (each for each in matrices if not can_be_packed(num_inputs(each), codes))
    return replace(model, codes=replace(codes, plain=tuple(w.parts[0].source for w in plain)))


def is_quantised(weight: Weight, model: ModelConfig, formats: Formats) -> bool:
    """Whether a weight is stored as codes; what a checkpoint has plain beside codes stays so."""
    if not FORMATS[formats.weights].has_scales:
        return False
    codes = codes_in(model, formats)
    plain = codes.plain if codes else ()
    return can_be_codes(weight, formats.weights) and weight.parts[0].source not in plain


def stored_weights(layout: Layout, formats: Formats) -> tuple[Weight, ...]:
    """Every weight of the layout's model as devices store it, in the order of the model's.

    With the scales of a KV cache of codes. Raises ConfigError for four bits that the checkpoint has
    not, and where a shard would cut a group of them.
    """
    stored: list[Weight] = []
    for weight in weights_of(layout.model):
        plain = layout.stored(weight)
        if is_quantised(weight, layout.model, formats):
            stored += quantised(plain, layout, formats)
        else:
            stored.append(plain)
    if FORMATS[formats.kv].has_scales:
        stored += [layout.stored(scales) for scales in kv_scales_of(layout.model)]
    return tuple(stored)


def quantised(plain: Weight, layout: Layout, formats: Formats) -> tuple[Weight, ...]:
    """The codes of a stored matrix, their scale, and that of its inputs where there is one."""
    codes = codes_in(layout.model, formats)
    if FORMATS[formats.weights].is_packed:
        if codes is None:
            words = f"{layout.model.name}: the checkpoint has no {formats.weights}"
            raise ConfigError([f"{words}, and none is made of other numbers: use fp8, or none"])
        return packed_parts(plain, layout, codes, SCALE)
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
    if weight.kind == "zeros":
        return np.dtype(np.uint8)
    if weight.kind == "scales":
        return FORMATS[formats.weights].scale
    return FORMATS[formats.weights if weight.kind == "codes" else formats.activations].dtype
