"""The gated MLPs of experts in e4m3 codes, by the kernel of block products: tiles have an expert.

    collect   codes of x[token] of every own pair, and their scales      (grouped_rows)
    gated     codes of silu(gate x) * up x: what down multiplies          (block_product)
    combine   with parts: their sums, before the silu                     (here)
    product   down h (and bias), times the pair's gain                    (block_product)

A scale is of a row and 128 inputs, and weights have one for each channel, or for each block of 128
channels and inputs. Experts are whole, so blocks are, wherever they are.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32

from pallas_kernels.block_finish import Worker, place_of_sums, write
from pallas_kernels.block_problem import (
    BlockCodes,
    BlockConfig,
    BlockMatrix,
    Inputs,
    Item,
    Problem,
    Result,
    can_be_many,
    make_problem,
    shared_memory,
)
from pallas_kernels.block_product import out_type, run_product, whole_channels, wrong_block
from pallas_kernels.gates import SILU, Gate
from pallas_kernels.grouped_combine import add_parts
from pallas_kernels.grouped_problem import GroupedConfig
from pallas_kernels.grouped_rows import Launch, collect_codes
from pallas_kernels.grouped_split import BLOCK, TILE_ROWS, WARPGROUPS
from pallas_kernels.grouped_work import ExpertWeights, Placed, Tiles, count_tiles
from pallas_kernels.mosaic import FP8, WGMMA
from pallas_kernels.norm_codes import wrong_rows


class Rows(NamedTuple):
    """The rows of all tiles: which tokens they are, and what their results are to be times."""

    tiles: Tiles
    placed: Placed
    token: Any  # [tiles, rows]
    gains: Any  # [tiles, rows] float32


def multiply_codes(
    x: Float[Array, "tokens hidden"],
    weights: ExpertWeights,
    rows: Rows,
    config: GroupedConfig,
    kind: tuple[Gate, Any],
) -> Float[Array, "pairs hidden"]:
    """Return what `grouped_mlp` does of weights in codes; `kind` are the gate and `interpret`."""
    (gate, interpret), (tiles, placed, token, gains) = kind, rows
    gated, down = matrices_of(weights)
    launch = Launch(config.collecting, interpret)
    codes = BlockCodes(*collect_codes(x, token, tiles, launch))
    result = Result(x.dtype, gate, quantised=True, interpret=interpret)
    first, second = (
        BlockConfig(config.rows, parts, config.num_blocks, config.stages) for parts in config.parts
    )
    inputs = Inputs(codes, gated, tiles)
    problem = make_problem(inputs, first, result)
    out = run_product(problem, inputs)
    if problem.splits > 1:
        out = combine_codes(problem, tiles, out[0])
    inputs = Inputs(BlockCodes(*out), down, tiles, gains)
    problem = make_problem(inputs, second, Result(x.dtype, interpret=interpret))
    (out,) = run_product(problem, inputs)
    if problem.splits == 1:
        return out[placed.place]
    found = [part[: x.shape[1], placed.place] for part in out]
    return functools.reduce(jnp.add, found).T.astype(x.dtype)


def matrices_of(
    weights: ExpertWeights,
) -> tuple[tuple[BlockMatrix, BlockMatrix], tuple[BlockMatrix]]:
    """Return gate and up, and down, as block products take them."""

    def one(name: str) -> BlockMatrix:
        values, scale = getattr(weights, name), getattr(weights, f"{name}_scale")
        own = (scale, None) if len(scale.shape) == 2 else (None, scale)
        return whole_channels(BlockMatrix(values, *own, getattr(weights, f"{name}_bias")))

    return (one("gate"), one("up")), (one("down"),)


def most_rows(weights: ExpertWeights) -> int:
    """Return the most rows of a tile for which registers are enough."""
    if weights.gate.dtype != FP8:  # which other kernels multiply
        return TILE_ROWS[-1]
    scale = weights.gate_scale
    has_squares = scale is not None and len(scale.shape) == 3
    gate = BlockMatrix(weights.gate, blocks=scale if has_squares else None)
    return TILE_ROWS[-1 if can_be_many((gate,), Result(gate=SILU)) else -2]


def wrong_experts(x: jax.Array, weights: ExpertWeights, config: GroupedConfig) -> list[str]:
    """Say what the kernels cannot do with weights in codes."""
    if weights.gate_scale is None:
        return [f"weights of {weights.gate.dtype} want scales"]
    make, num_tokens = jax.ShapeDtypeStruct, x.shape[0]

    def one(name: str) -> BlockMatrix:
        values, scale = getattr(weights, name), getattr(weights, f"{name}_scale")
        own = make(scale.shape[1:], scale.dtype)
        scales = (own, None) if len(own.shape) == 1 else (None, own)
        return BlockMatrix(make(values.shape[1:], values.dtype), *scales)

    def rows(width: int) -> BlockCodes:
        blocks = -(-width // BLOCK)
        return BlockCodes(make((num_tokens, width), FP8), make((blocks, num_tokens), jnp.float32))

    _, width, hidden = weights.gate.shape
    gated = wrong_block(rows(hidden), (one("gate"), one("up")), Result(gate=SILU, quantised=True))
    wrong = wrong_rows(x) + gated + wrong_block(rows(width), (one("down"),))
    if config.rows > (most := most_rows(weights)):
        wrong.append(f"tiles of {config.rows} rows: registers are for {most} with scales of blocks")
    return list(dict.fromkeys(wrong))


def combine_codes(
    problem: Problem, tiles: Tiles, sums: Float32[Array, "splits channels places"]
) -> list[jax.Array]:
    """Return codes of silu(gate x) * up x and their scales, of the scaled sums of parts."""
    whole = problem._replace(splits=1)
    shared = shared_memory(whole)._replace(weights=(), x=None, x_scale=None, full=None, free=None)
    return plgpu.kernel(
        functools.partial(_combine_kernel, problem),
        out_type=out_type(whole),
        scratch_types=[shared],
        grid=(problem.tiles, problem.columns),
        grid_names=("tile", "column"),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        kernel_name="grouped_combine",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=problem.result.interpret,
    )(tiles.ends, sums)


def _combine_kernel(problem: Problem, ends: Any, sums: Any, *refs: Any) -> None:
    *out, shared = refs
    tile, me = lax.axis_index("tile"), lax.axis_index("warpgroup")
    item = Item(tile, lax.axis_index("column"), jnp.int32(0), None)
    worker = Worker(
        problem._replace(splits=1), Inputs(BlockCodes(None, None), ()), tuple(out), shared, me
    )

    def load(split: jax.Array, part: int) -> jax.Array:
        place = place_of_sums(worker, sums, item._replace(split=split), part)
        return plgpu.load(place, layout=WGMMA, optimized=False)

    @pl.when(tile < count_tiles(ends))
    def _() -> None:
        write(worker, 0, item, add_parts(load, problem.splits, problem.rows))
        plgpu.wait_smem_to_gmem(0)
