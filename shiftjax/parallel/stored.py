"""Weights as devices store them: padded for a layout, matrices perhaps as codes. No JAX.

A quantised matrix is `codes` (e4m3) and a `scale` for each output channel, float32: a number is its
code times the scale. Checkpoints with scales of square blocks, 128 x 128, keep these. How it is
stored follows from the way that devices split it; `blocks.py` says which inputs are a block:

    column-parallel   codes [*out, in], scale [*out], both split by outputs
    row-parallel      codes [in / block, out, block] split by blocks, scale [out] on every device
    experts           codes [experts, out, in], scale [experts, out], both split by experts
    input scales      [1], of checkpoints that have them; else every token and block has its own

    square blocks     of `rows` outputs, which are 128 where heads and widths are multiples of it:
    column-parallel   scale [*out / rows, in / 128], the last of inputs perhaps ragged
    row-parallel      scale [in / block, out / rows], split as the codes
    experts           scale [experts, out / rows, in / 128]

Heads that are several blocks are a dimension more: codes [heads, blocks, out, block]. Widths of
MLPs are padded so that each device has whole blocks: a shard of any mode is some of them, and
nothing that is stored depends on the devices but the padding. The contraction is the innermost
dimension: what the fp8 instructions of GPUs want, and nothing is transposed in a step. Codes of
four bits: `four_bits.py`.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

import numpy as np

from shiftjax.arch.config import Codes, ModelConfig
from shiftjax.arch.formats import FORMATS, Formats
from shiftjax.arch.lora import factors_of
from shiftjax.arch.weights import Axis, Weight, kv_scales_of, read_axis, weights_of
from shiftjax.options import ConfigError
from shiftjax.parallel.blocks import BLOCK, block_of_width
from shiftjax.parallel.four_bits import can_be_packed, num_inputs, packed_parts
from shiftjax.parallel.layout import Layout

SCALE = "_scale"  # after the name of what it scales
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


def plain_weights(layout: Layout, formats: Formats) -> tuple[Weight, ...]:
    """Every weight of the layout's model as it is stored before matrices become codes.

    With codes of eight bits, MLPs are padded so that devices have whole blocks.
    """
    return tuple(layout.stored(weight) for weight in _split_as(layout, formats))


def _split_as(layout: Layout, formats: Formats) -> Iterable[Weight]:
    """Every weight of the layout's model, unpadded, with the axes by which devices split it."""
    weights = weights_of(layout.model)
    if formats.has_codes_of_inputs:
        return map(_in_whole_blocks, weights)
    return weights


def _in_whole_blocks(weight: Weight) -> Weight:
    if weight.split not in _MLPS:
        return weight
    axis = Axis(weight.split, whole=block_of_width(weight.shape[0]))
    return weight._replace(axes=(str(axis), *weight.axes[1:]))


@lru_cache(64)  # every row of a plan asks several times
def stored_weights(layout: Layout, formats: Formats) -> tuple[Weight, ...]:
    """Every weight of the layout's model as devices store it, in the order of the model's.

    With the scales of a KV cache of codes, and the factors of adapters. Raises ConfigError for four
    bits that the checkpoint has not, and where a shard would cut a group of them, or a block.
    """
    stored: list[Weight] = []
    for plain in plain_weights(layout, formats):
        if is_quantised(plain, layout.model, formats):
            stored += quantised(plain, layout, formats)
        else:
            stored.append(plain)
    if FORMATS[formats.kv].has_scales:
        stored += [layout.stored(scales) for scales in kv_scales_of(layout.model)]
    if (slots := layout.model.lora) is not None:
        stored += map(layout.stored, factors_of(_split_as(layout, formats), slots))
    return tuple(stored)


def quantised(plain: Weight, layout: Layout, formats: Formats) -> tuple[Weight, ...]:
    """The codes of a stored matrix, their scale, and that of its inputs where there is one."""
    codes = codes_in(layout.model, formats)
    if FORMATS[formats.weights].is_packed:
        if codes is None:
            words = f"{layout.model.name}: the checkpoint has no {formats.weights}"
            raise ConfigError([f"{words}, and none is made of other numbers: use fp8, or none"])
        return packed_parts(plain, layout, codes, SCALE)
    of_blocks = 0 if codes is None or codes.are_made_anew else codes.rows_of_scale
    parts = _codes_and_scale(plain, layout, of_blocks)
    if codes is None or not codes.have_input_scales:
        return parts
    return *parts, Weight(f"{plain.name}{INPUTS}", (1,), (None,), plain.source, "input_scale")


def _codes_and_scale(plain: Weight, layout: Layout, rows: int) -> tuple[Weight, Weight]:
    """Codes and scale of a stored matrix; `rows` outputs share a scale of blocks, 0: of channels.

    Raises ConfigError where a shard would cut a block.
    """
    codes = plain._replace(kind="codes")
    scale = plain._replace(name=f"{plain.name}{SCALE}", kind="scale", transposed=False)
    if not plain.transposed:
        if not rows:
            return codes, scale._replace(shape=plain.shape[:-1], axes=plain.axes[:-1])
        *outer, outputs, inputs = plain.shape
        shape, axes = (*outer, outputs // rows, -(-inputs // BLOCK)), plain.axes
        if not outer:
            assert axes[0] is not None
            axes = str(read_axis(axes[0])._replace(rows=rows)), *axes[1:]
        return codes, scale._replace(shape=shape, axes=axes)
    shape, axis = _row_parallel(plain, layout)
    *blocks, outputs, _ = shape
    axes = axis, *(None,) * (len(shape) - 1)
    codes = codes._replace(shape=shape, axes=axes)
    if not rows:
        return codes, scale._replace(shape=(outputs,), axes=(None,))
    return codes, scale._replace(shape=(*blocks, outputs // rows), axes=axes[:-1])


def _row_parallel(plain: Weight, layout: Layout) -> tuple[tuple[int, ...], str]:
    """Return the shape of codes of a row-parallel matrix, and what its first dimension counts."""
    *rows, outputs = plain.shape
    assert plain.axes[0] is not None
    axis = read_axis(plain.axes[0])
    if axis.name != "heads":
        shape = rows[0] // axis.whole, outputs, axis.whole
        return shape, str(axis._replace(rows=axis.whole))
    num_heads, head_dim = rows
    block, heads = layout.of_axis(plain.axes[0])[0].heads_of_block
    if heads == 1:
        parts = () if head_dim == block else (head_dim // block,)
        return (num_heads, *parts, outputs, block), plain.axes[0]
    if num_heads % (heads * layout.padded_for):
        words = f"{plain.name}: {layout.padded_for} devices have {num_heads} heads of {head_dim}"
        why = f"which cuts blocks of {heads} heads that share a scale"
        raise ConfigError([f"{words}, {why}: use other degrees, or --quantization none"])
    return (num_heads // heads, outputs, block), str(axis._replace(rows=heads))


def dtype_of(weight: Weight, formats: Formats) -> np.dtype:
    """What a stored weight is made of."""
    if weight.kind in FLOAT32:
        return np.dtype(np.float32)
    if weight.kind == "zeros":
        return np.dtype(np.uint8)
    if weight.kind == "scales":
        return FORMATS[formats.weights].scale
    return FORMATS[formats.weights if weight.kind == "codes" else formats.activations].dtype
