"""Attention's output as codes: e4m3, with a float32 scale for each token and head of BLOCK columns.

Kernels of attention write them where the next product reads codes, so that no launch makes them.
Numbers are first rounded to the type that they would leave in: codes have the bits that XLA makes
of those numbers (`models.products.quantise_blocks`), in every mode.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float8e4m3fn, Float32

from pallas_kernels.call import CodeKind
from pallas_kernels.mosaic import FP8, LARGEST_CODE, LEAST_SCALED, code_scale
from pallas_kernels.norm_codes import BLOCK

LEAST_SCALE = np.float32(LEAST_SCALED) * np.float32(1 / LARGEST_CODE)


class CodedHeads(NamedTuple):
    """Heads of tokens as codes."""

    values: Float8e4m3fn[Any, "tokens heads head_dim"]
    scale: Float32[Any, "heads tokens"]


Heads = Float[Array, "tokens heads head_dim"] | CodedHeads


def wrong_codes(head_dim: int) -> list[str]:
    """Say which heads cannot leave as codes."""
    if head_dim == BLOCK:
        return []
    return [f"codes of heads of {head_dim}: a head must be a block of {BLOCK}"]


def like_heads(x: Any, kind: CodeKind | None) -> Any:
    """Return the shapes of what leaves, for heads of the shape and type of `x`."""
    if kind is None:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    tokens, heads, _ = x.shape
    scale = jax.ShapeDtypeStruct((heads, tokens), jnp.float32)
    return CodedHeads(jax.ShapeDtypeStruct(x.shape, FP8), scale)


def no_heads(x: Any, kind: CodeKind | None) -> Heads:
    """Return zeros as they leave, for heads of the shape and type of `x`."""
    zeros = jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), like_heads(x, kind))
    if not isinstance(zeros, CodedHeads):
        return zeros
    assert kind is not None
    unit = LEAST_SCALE if kind.fixed is None else kind.fixed[0]
    return zeros._replace(scale=jnp.full_like(zeros.scale, unit))


def coded(
    values: jax.Array,
    dtype: Any,
    fixed: Any,
    axis: int,
    among: Callable[[jax.Array], jax.Array] = lambda most: most,
) -> tuple[Float8e4m3fn[Array, "..."], Float32[Array, "*rows"]]:
    """Return codes of a block of numbers in registers, and their scales.

    The block's columns are along `axis` of two. `fixed` is a reference to the scale of all, then
    one number is returned; None: one for each row. `among` makes the largest sizes of rows out of
    those of these columns, where other warpgroups have others of the block.
    """
    rounded = values.astype(dtype).astype(jnp.float32)
    if fixed is not None:
        unit = fixed[0].astype(jnp.float32)
        return jnp.clip(rounded / unit, -LARGEST_CODE, LARGEST_CODE).astype(FP8), unit
    scale = code_scale(among(jnp.max(jnp.abs(rounded), axis=axis)))
    return (rounded / lax.broadcast_in_dim(scale, values.shape, [1 - axis])).astype(FP8), scale
