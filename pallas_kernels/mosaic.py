"""What all kernels have in common: types, layouts of registers and shared memory, scales of fp8."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

FP8 = jnp.float8_e4m3fn
LOG2_E = math.log2(math.e)
LOWEST = -1e30  # a logit that is not seen: finite, so that differences are never NaN
COLUMNS = 64  # of a tile of shared memory: 128 bytes of 16-bit numbers, what a swizzle spans
WGMMA = plgpu.Layout.WGMMA
Accumulator = plgpu.WGMMAAccumulatorRef


def columns_of(width: int) -> int:
    """Return the columns of a tile of shared memory for rows of `width`: all are of whole tiles."""
    return COLUMNS if width % COLUMNS == 0 else COLUMNS // 2


def swizzled(shape: tuple[int, ...], dtype: DTypeLike, columns: int | None = None) -> Any:
    """Shared memory laid out for TMA and matrix instructions, without bank conflicts.

    `columns` are those of a tile, which both operands of an instruction must have in common.
    """
    columns = columns or columns_of(shape[-1])
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    width = columns * jnp.dtype(dtype).itemsize
    swizzle = plgpu.SwizzleTransform(width)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def filled(shape: tuple[int, ...], value: float | jax.Array, layout: Any = WGMMA) -> jax.Array:
    """Return registers that hold `value`."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def store(ref: Any, values: jax.Array) -> None:
    """Store registers where the access is not the best: part lines of the cache, strided rows."""
    if hasattr(plgpu, "store"):  # from JAX 0.12 on that has to be asked for
        plgpu.store(ref, values, optimized=False)
    else:
        ref[...] = values


def head_scales(
    k_scale: ArrayLike, v_scale: ArrayLike, kv_heads: int
) -> tuple[tuple[float, float], Float[Array, "2 kv_heads"] | None]:
    """Return the scales as numbers to compile in, or as an array with those of every KV head.

    Numbers cost no launch. Where there is an array, the numbers are 1.
    """
    if isinstance(k_scale, float | int) and isinstance(v_scale, float | int):
        return (float(k_scale), float(v_scale)), None
    scales = [jnp.asarray(x, jnp.float32) for x in (k_scale, v_scale)]
    return (1.0, 1.0), jnp.stack([jnp.broadcast_to(x, kv_heads) for x in scales])
