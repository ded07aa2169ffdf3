"""What goes over the rows of a grouped product: collect them into tiles, and quantise them.

On Hopper the copy engine fetches no rows by a list of indices (gather4 is Blackwell's), and Mosaic
writes single rows only where memory is not tiled, which matrix instructions need: so the rows of x
are collected once, before the product. Both kernels work on the tiles that the step has; in XLA
they would work on all that a step could have, a device's own pairs and the others'.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.grouped_work import Tiles, count_tiles
from pallas_kernels.mosaic import FP8, store

COLLECTED = 8  # rows that a thread block collects at a time
COLUMNS = 64  # of a box: the copy engine takes 256 at most along an axis, so rows are two axes
MOST_COLUMNS = 256 * COLUMNS
QUANTISED = 4  # rows that a thread block quantises at a time: one for each warp
LANES = 32
BLOCKS_PER_CORE = 4
LARGEST_CODE = float(jnp.finfo(FP8).max)
LEAST_SCALED = 1e-20  # what is smaller than this in all of a row becomes zeros


class Launch(NamedTuple):
    """Launch parameters: the number of thread blocks, and interpreter settings."""

    num_blocks: int
    interpret: Any


def collect_rows(
    x: Float[Array, "tokens width"], token: Int32[Array, "tiles rows"], tiles: Tiles, launch: Launch
) -> Float[Array, "places width"]:
    """Return x[token], row by row; tiles that the step does not have are not written."""
    boxes = x.reshape(x.shape[0], -1, COLUMNS)
    shape = token.size, *boxes.shape[1:]
    collected = plgpu.kernel(
        functools.partial(_collect_kernel, token.shape[1], launch.num_blocks),
        out_type=jax.ShapeDtypeStruct(shape, x.dtype),
        scratch_types=dict(
            staged=plgpu.SMEM((COLLECTED, *boxes.shape[1:]), x.dtype),
            ready=plgpu.Barrier(num_arrivals=COLLECTED),
        ),
        grid=(launch.num_blocks,),
        grid_names=("block",),
        kernel_name="grouped_collect",
        interpret=launch.interpret,
    )(tiles.ends, token.reshape(-1), boxes)
    return collected.reshape(token.size, x.shape[1])


def _collect_kernel(
    rows: int,
    num_blocks: int,
    ends: Any,
    token: Any,
    x: Any,
    out: Any,
    *,
    staged: Any,
    ready: Any,
) -> None:
    def collect(nth: jax.Array, _: None) -> None:
        begin = _begin_of(nth, num_blocks, COLLECTED)
        tokens = [token[begin + i] for i in range(COLLECTED)]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the rows before
        for i, source in enumerate(tokens):
            plgpu.copy_gmem_to_smem(x.at[source], staged.at[i], ready)
        plgpu.barrier_wait(ready)
        plgpu.copy_smem_to_gmem(staged, out.at[pl.ds(begin, COLLECTED)])

    lax.fori_loop(0, _count(count_tiles(ends) * (rows // COLLECTED), num_blocks), collect, None)
    plgpu.wait_smem_to_gmem(0)


def quantise_rows(
    x: Float[Array, "places width"],
    gains: Float[Array, "tiles rows"] | None,
    tiles: Tiles,
    launch: Launch,
) -> tuple[Float[Array, "places width"], Float[Array, " places"]]:
    """Return e4m3 codes and the scale of every row, float32, which is times the row's gain.

    One scale for a whole row, as in `models/products.quantise`: neither tiles nor modes change it.
    """
    places, width = x.shape
    gains = jnp.ones(places, jnp.float32) if gains is None else gains.reshape(-1)
    codes, scales = plgpu.kernel(
        functools.partial(_quantise_kernel, places // tiles.rows.shape[0], launch.num_blocks),
        out_type=(
            jax.ShapeDtypeStruct((places, width), FP8),
            jax.ShapeDtypeStruct((places,), jnp.float32),
        ),
        grid=(launch.num_blocks,),
        grid_names=("block",),
        kernel_name="grouped_quantise",
        interpret=launch.interpret,
    )(tiles.ends, gains, x)
    return codes, scales


def _quantise_kernel(
    rows: int, num_blocks: int, ends: Any, gains: Any, x: Any, codes: Any, scales: Any
) -> None:
    width = x.shape[1]
    vector = next(n for n in (8, 4, 2) if width % (n * LANES) == 0)
    columns = vector * LANES
    tiling = plgpu.Tiling(((QUANTISED, columns), (vector,)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)

    def quantise(nth: jax.Array, _: None) -> None:
        here = pl.ds(_begin_of(nth, num_blocks, QUANTISED), QUANTISED)

        def load(k: jax.Array) -> jax.Array:
            part = x.at[here, pl.ds(k * columns, columns)]
            return plgpu.load(part, layout=layout, optimized=False).astype(jnp.float32)

        def widen(k: jax.Array, most: jax.Array) -> jax.Array:
            return jnp.maximum(most, jnp.abs(load(k)))

        nothing = plgpu.layout_cast(jnp.full((QUANTISED, columns), 0, jnp.float32), layout)
        most = lax.fori_loop(0, width // columns, widen, nothing).max(axis=1)
        scale = jnp.maximum(most, LEAST_SCALED) * (1 / LARGEST_CODE)

        def convert(k: jax.Array, _: None) -> None:
            scaled = load(k) / lax.broadcast_in_dim(scale, (QUANTISED, columns), [0])
            store(codes.at[here, pl.ds(k * columns, columns)], scaled.astype(FP8))

        lax.fori_loop(0, width // columns, convert, None)
        gain = plgpu.load(gains.at[here], layout=layout.reduce(1), optimized=False)
        store(scales.at[here], scale * gain)

    lax.fori_loop(0, _count(count_tiles(ends) * (rows // QUANTISED), num_blocks), quantise, None)


def _begin_of(nth: jax.Array, num_blocks: int, size: int) -> jax.Array:
    """Return the first row of the part number `nth` of this thread block."""
    return (lax.axis_index("block") + nth * num_blocks) * size


def _count(parts: jax.Array, num_blocks: int) -> jax.Array:
    """Return how many of `parts` this thread block has."""
    blocks = jnp.int32(num_blocks)
    return lax.div(parts - lax.axis_index("block") + blocks - 1, blocks)
