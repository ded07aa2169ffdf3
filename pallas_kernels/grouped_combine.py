"""The end of grouped products whose contraction was cut: parts are added up, in their order.

The sums of gate and up before what a product that was not cut does with its own. A launch for that,
for the reasons that `decode_combine` gives: a thread block takes 64 channels of both and the rows
of a tile, so that few tiles are many thread blocks. The sums of down are added where XLA puts
pairs back into the order of tokens, which costs no launch.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from pallas_kernels.grouped_problem import Inputs, Item, Problem, Sums
from pallas_kernels.grouped_product import finish, place_of_sums
from pallas_kernels.grouped_split import CHANNELS, PARTS, WARPGROUPS
from pallas_kernels.mosaic import WGMMA, filled, swizzled

LOADED = 128  # numbers of a thread that are under way at once, at most


def combine_gated(problem: Problem, inputs: Inputs, sums: Sums) -> Float[Array, "rows channels"]:
    """Return silu(gate x) * up x; rows of tiles that the step does not have are not written."""
    arrays, tree = jax.tree.flatten((inputs._replace(x=None, weights=(), groups=()), sums))
    places = sums.shape[2] * problem.rows
    return plgpu.kernel(
        functools.partial(_combine_kernel, problem, tree),
        out_type=jax.ShapeDtypeStruct((places, problem.channels), problem.dtype),
        scratch_types=[swizzled((problem.rows, CHANNELS), problem.dtype)],
        grid=(sums.shape[2], problem.columns, WARPGROUPS),
        grid_names=("tile", "column", "half"),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="grouped_combine",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=problem.interpret,
    )(*arrays)


def _combine_kernel(problem: Problem, tree: Any, *refs: Any) -> None:
    *arrays, out, stage = refs
    inputs, sums = jax.tree.unflatten(tree, arrays)
    tile, half = lax.axis_index("tile"), lax.axis_index("half")
    item = Item(tile, lax.axis_index("column"), jnp.int32(0), inputs.tiles.expert[tile])

    def load(part: jax.Array, operand: int) -> jax.Array:
        place = place_of_sums(problem, sums, half, item._replace(part=part), operand)
        return plgpu.load(place, layout=WGMMA, optimized=False)

    @pl.when(tile < inputs.tiles.num_tiles)
    def _() -> None:
        added = add_parts(load, problem.parts, problem.rows)
        finish(problem, inputs, out, stage, half, item, added)
        plgpu.wait_smem_to_gmem(0)


def add_parts(
    load: Callable[[jax.Array, int], jax.Array], num_parts: int, rows: int
) -> tuple[jax.Array, ...]:
    """Return the sums of gate and up in a kernel, of [CHANNELS, rows] of each part and operand."""
    most = max(1, LOADED // (PARTS * rows // 2))
    at_once = max(n for n in range(1, most + 1) if num_parts % n == 0)

    def add(nth: jax.Array, added: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        parts = [nth * at_once + i for i in range(at_once)]
        loaded = [[load(part, operand) for part in parts] for operand in range(PARTS)]
        pairs = zip(loaded, added, strict=True)
        return tuple(functools.reduce(jnp.add, more, so_far) for more, so_far in pairs)

    nothing = (filled((CHANNELS, rows), 0.0),) * PARTS
    return lax.fori_loop(0, num_parts // at_once, add, nothing)


def add_down(
    sums: Sums, place: Int32[Array, " pairs"], channels: int, dtype: DTypeLike
) -> Float[Array, "pairs channels"]:
    """Return what down gives to the pairs, each in row place % rows of tile place // rows."""
    rows = sums.shape[-1]
    found = [part[0, place // rows, :channels, place % rows] for part in sums]
    return functools.reduce(jnp.add, found).astype(dtype)
