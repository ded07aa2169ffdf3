"""The streaming part of decode attention: one persistent thread block for each worker and KV head.

A thread block has two warpgroups. One keeps a ring of K and V tiles in shared memory full by TMA,
across jobs, so that the memory never waits for arithmetic. The other computes, transposed,

    S = K q^T      [kv_tile, rows]     rows: the query heads of a KV head, padded to 8
    O = V^T P      [head_dim, rows]      for 64 of head_dim, or multiples of them: `Shape.products`

because one side of a Hopper matrix instruction is 64 and the other may be 8: tokens and head_dim go
to the long side, and the softmax of a row runs down it. Tiles of fp8 are first widened to float16,
which holds e4m3 exactly.

Of latents (MLA) a tile of K is one of V, too: there is one ring. Thread blocks then have groups of
heads in the place of a KV head.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.decode_compute import compute
from pallas_kernels.decode_memory import load
from pallas_kernels.decode_terms import Q_SLOTS, Buffers, Inputs, Shape
from pallas_kernels.mosaic import FP8, columns_of, swizzled

REDUCTION_BYTES = 2048  # scratch of maxima and sums over the four warps
COMPUTE, MEMORY = 0, 1  # the warpgroups


def run_jobs(shape: Shape, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Return of every job the output, normalised, and the base-2 log of the sum of exponentials.

    `[kv_heads, jobs, shape.result_rows, rows]` and `[kv_heads, jobs, rows]`, float32; what belongs
    to no job is not written.
    """
    kv_heads, jobs = inputs.q.shape[1], inputs.job_row.shape[0]
    arrays, tree = jax.tree.flatten(inputs)
    run = plgpu.kernel(
        functools.partial(_decode_kernel, shape, tree),
        out_type=(
            jax.ShapeDtypeStruct((kv_heads, jobs, shape.result_rows, shape.rows), jnp.float32),
            jax.ShapeDtypeStruct((kv_heads, jobs, shape.rows), jnp.float32),
        ),
        scratch_types=_buffers(shape, inputs.kv.k_pool.dtype)._asdict(),
        grid=(inputs.worker_first.shape[0] - 1, kv_heads),
        grid_names=("worker", "kv_head"),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="decode_attention",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=REDUCTION_BYTES
        ),
        interpret=shape.options.interpret,
    )
    return run(*arrays)


def _buffers(shape: Shape, kv_dtype: DTypeLike) -> Buffers:
    tile, head_dim, dtype = shape.kv_tile, shape.head_dim, shape.dtype
    ring = swizzled((shape.stages, tile, head_dim), kv_dtype)
    wide = swizzled((tile, head_dim), dtype) if kv_dtype == FP8 else None
    has_v = shape.options.values_in_keys is None
    full = plgpu.Barrier(num_arrivals=tile // shape.copy_tokens, num_barriers=shape.stages)
    free, of_q = (plgpu.Barrier(num_barriers=n) for n in (shape.stages, Q_SLOTS))
    return Buffers(
        q=swizzled((Q_SLOTS, shape.rows, head_dim), dtype),
        k=ring,
        v=ring if has_v else None,
        p=swizzled((shape.rows, tile), dtype, columns_of(head_dim)),
        wide_k=wide,
        wide_v=wide if has_v else None,
        q_full=of_q,
        q_free=of_q,
        k_full=full,
        k_free=free,
        v_full=full if has_v else None,
        v_free=free if has_v else None,
    )


def _decode_kernel(shape: Shape, tree: Any, *refs: Any, **scratch: Any) -> None:
    inputs, (out, lse), buffers = jax.tree.unflatten(tree, refs[:-2]), refs[-2:], Buffers(**scratch)
    warpgroup = lax.axis_index("warpgroup")
    pl.when(warpgroup == COMPUTE)(lambda: compute(shape, inputs, out, lse, buffers))
    pl.when(warpgroup == MEMORY)(lambda: load(shape, inputs, buffers))
