"""Rows for a grouped product: collected into tiles as they are, or as codes.

On Hopper the copy engine fetches no rows by a list of indices (gather4 is Blackwell's), and Mosaic
writes single rows only where memory is not tiled, which matrix instructions need: so the rows of x
are collected once, before the product. Both kernels work on the tiles that the step has; in XLA
they would work on all that a step could have, a device's own pairs and the others'.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float8e4m3fn, Float32, Int32

from pallas_kernels.grouped_work import Tiles, count_tiles
from pallas_kernels.mosaic import FP8
from pallas_kernels.norm_codes import BLOCK, load_piece, pieces_of, put_codes

COLLECTED = 8  # rows that a thread block collects at a time
COLUMNS = 64  # of a box: the copy engine takes 256 at most along an axis, so rows are two axes
MOST_COLUMNS = 256 * COLUMNS


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


def collect_codes(
    x: Float[Array, "tokens width"], token: Int32[Array, "tiles rows"], tiles: Tiles, launch: Launch
) -> tuple[Float8e4m3fn[Array, "places width"], Float32[Array, "blocks places"]]:
    """Return e4m3 codes of x[token], and the scale of each row and block of inputs.

    As `models/products.quantise_blocks`; tiles that the step does not have are not written.
    """
    (tokens, width), places = x.shape, token.size
    blocks = -(-width // BLOCK)
    cut = (blocks, BLOCK) if width % BLOCK == 0 else (width,)
    codes, scales = plgpu.kernel(
        functools.partial(_codes_kernel, token.shape[1], launch.num_blocks),
        out_type=(
            jax.ShapeDtypeStruct((places, *cut), FP8),
            jax.ShapeDtypeStruct((blocks, places), jnp.float32),
        ),
        grid=(launch.num_blocks,),
        grid_names=("block",),
        kernel_name="grouped_collect",
        interpret=launch.interpret,
    )(tiles.ends, token.reshape(-1), x.reshape(tokens, *cut))
    return codes.reshape(places, width), scales


def _codes_kernel(
    rows: int, num_blocks: int, ends: Any, token: Any, x: Any, codes: Any, scales: Any
) -> None:
    pieces = list(pieces_of(math.prod(x.shape[1:])))

    def collect(nth: jax.Array, _: None) -> None:
        place = _begin_of(nth, num_blocks, 1)
        source = token[place]
        loaded = [load_piece(x, piece, source) for piece in pieces]  # all are under way together
        for piece, numbers in zip(pieces, loaded, strict=True):
            put_codes((codes, scales), piece, place, numbers.astype(jnp.float32))

    lax.fori_loop(0, _count(count_tiles(ends) * rows, num_blocks), collect, None)


def _begin_of(nth: jax.Array, num_blocks: int, size: int) -> jax.Array:
    """Return the first row of the part number `nth` of this thread block."""
    return (lax.axis_index("block") + nth * num_blocks) * size


def _count(parts: jax.Array, num_blocks: int) -> jax.Array:
    """Return how many of `parts` this thread block has."""
    blocks = jnp.int32(num_blocks)
    return lax.div(parts - lax.axis_index("block") + blocks - 1, blocks)
