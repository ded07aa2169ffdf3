"""What all kernels have in common: types, layouts of registers and shared memory, scales of fp8."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.typing import DTypeLike
from jaxtyping import Float

from pallas_kernels.call import KVScales
from pallas_kernels.window import Window, first_seen

FP8 = jnp.float8_e4m3fn
LARGEST_CODE = float(jnp.finfo(FP8).max)
LEAST_SCALED = 1e-20  # a block whose numbers are all smaller becomes zeros
LOG2_E = math.log2(math.e)
LOWEST = -1e30  # a logit that is not seen: finite, so that differences are never NaN
TMA_ALIGNMENT = 128  # bytes of shared memory: where the copy engine may begin to read or write
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


def staged_rows(rows: int, row_bytes: int) -> int:
    """Return how many rows to make room for, so that TMA may read the next ones where they lie."""
    places = range(rows, rows + TMA_ALIGNMENT)
    return next(n for n in places if n * row_bytes % TMA_ALIGNMENT == 0)


def filled(shape: tuple[int, ...], value: float | jax.Array, layout: Any = WGMMA) -> jax.Array:
    """Return registers that hold `value`."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def apart(arrays: Any) -> Any:
    """Return a tree of arrays that are buffers of their own, for a call that writes in place.

    XLA makes one fusion of a call and of the slices that it reads, and the fusion forgets which
    operands the call writes (jaxlib 0.11.2 and 0.12). Equal slices are copied once a program.
    """
    return lax.optimization_barrier(arrays)


def store(ref: Any, values: jax.Array) -> None:
    """Store registers where the access is not the best: part lines of the cache, strided rows."""
    if hasattr(plgpu, "store"):  # from JAX 0.12 on that has to be asked for
        plgpu.store(ref, values, optimized=False)
    else:
        ref[...] = values


def code_scale(most: jax.Array) -> jax.Array:
    """Return what the codes of a block are in units of, whose largest number is `most`."""
    return jnp.maximum(most, LEAST_SCALED) * (1 / LARGEST_CODE)


def fence(interpret: Any) -> None:
    """Order what this thread has written before what it does next, for all of the GPU.

    The interpreter, which orders memory by barriers alone, has no word for it.
    """
    if interpret:
        return

    def order(_: Any) -> None:
        text, name = ir.StringAttr.get, "llvm.inline_asm"  # jax.extend has no dialect of it
        words: dict[str, Any] = {"asm_string": text("fence.acq_rel.gpu;"), "constraints": text("")}
        words |= {"has_side_effects": ir.UnitAttr.get()}
        ir.Operation.create(name, [ir.Type.parse("!llvm.void")], attributes=words)

    put: Any = plgpu.inline_mgpu()(order)
    put()


def oldest_seen(position: jax.Array, window: Window | None) -> jax.Array:
    """Return the first position that a token sees, in a kernel, where there is a window."""
    return jnp.maximum(first_seen(position, window, remainder), 0)


def remainder(x: jax.Array, tokens: int) -> jax.Array:
    """Return x modulo `tokens`, of what is not negative, in a kernel."""
    return lax.rem(x, jnp.full_like(x, tokens))


def scales_in_memory(scales: KVScales) -> Float[Any, "2 kv_heads"] | None:
    """Return what a kernel reads of the scales as it is, which costs no launch; None: numbers."""
    return None if isinstance(scales, tuple) else scales


def scales_of_head(scales: KVScales, in_memory: Any, head: jax.Array) -> tuple[Any, Any]:
    """Return those of K and of V, in a kernel: numbers that are compiled in, or read for a head."""
    return scales if isinstance(scales, tuple) else (in_memory[0, head], in_memory[1, head])
