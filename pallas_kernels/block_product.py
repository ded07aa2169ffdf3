"""Products of e4m3 codes with a scale for every block of inputs, for Hopper, in Mosaic GPU.

Plain numbers of few rows are multiplied by the same loop, without scales. A stage of shared memory
is a block of the contraction, whose sums are scaled as they are added: what e4m3 on Hopper wants
anyway, as its instructions keep 14 bits of a sum.

    few rows     D^T: 128 channels by 16 to 64 rows, weights on the long side of an instruction
    many rows    D: 128 rows by 128 channels

What comes out is one of

    numbers      [tokens, channels]
    codes        and their scales, of each row and 128 channels: what the next product takes
    sums         [splits, channels, rows] float32, of parts of the contraction: to be added up

of one matrix; of several, joined: their channels follow each other (q, k, v); or of gate and up,
activated. Three warpgroups: one fetches (`block_fetch`), two compute. Where a cluster has an item,
its first thread block adds up what the others have, in their order, and writes what comes out.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Int, Num

from pallas_kernels.block_added import Sums, added_steps
from pallas_kernels.block_fetch import fetch
from pallas_kernels.block_finish import Worker, finish
from pallas_kernels.block_problem import (
    CLUSTER,
    CLUSTERS,
    FEW_ROWS,
    MANY_ROWS,
    SEGMENT,
    BlockCodes,
    BlockConfig,
    BlockMatrix,
    Inputs,
    Item,
    Problem,
    Result,
    block_config,
    block_of,
    can_be_many,
    count_items,
    make_problem,
    read_item,
    shared_memory,
    steps_of,
)
from pallas_kernels.grouped_split import CHANNELS, PART, PLAIN_BLOCKS, WARPGROUPS
from pallas_kernels.mosaic import FP8, WGMMA, Accumulator
from pallas_kernels.product_ring import run_warpgroups


class Beside(NamedTuple):
    """What rows have beside the numbers that matrices multiply."""

    added: Num[Any, "tokens matrices_width"] | None = None  # what their factors multiply
    group: Int[Any, " tokens"] | None = None  # whose channels a row keeps, of `Result.groups`


NUMBERS = Result()
NOTHING = Beside()
PLAIN = jnp.bfloat16, jnp.float16
ROWS = 8  # of which there is a multiple: a tile of shared memory, as the copy engine has them


def block_product(
    x: BlockCodes,
    matrices: tuple[BlockMatrix, ...],
    result: Result = NUMBERS,
    config: BlockConfig | None = None,
    beside: Beside = NOTHING,
) -> Any:
    """Return the product with one matrix, with several, joined, or with gate and up.

    An array `[tokens, channels]`; `BlockCodes` if the result is quantised; or, if the config has
    splits, float32 `[splits, channels, rows]`, where every matrix has whole blocks of 128 channels
    and rows are those of tiles. Raises ValueError for what the kernel cannot do.
    """
    if wrong := wrong_block(x, matrices, result, config, beside):
        raise ValueError("block_product: " + "; ".join(wrong))
    tokens = x.values.shape[0]
    x, added, group = _padded(x), beside.added, beside.group
    if config is None:
        config = block_config(x, matrices, result)
    if added is not None:
        added = jnp.pad(added, ((0, -tokens % ROWS), (0, 0)))
    if group is not None:
        group = jnp.pad(group, (0, -tokens % config.rows))
    whole = tuple(whole_channels(matrix) for matrix in matrices)
    inputs = Inputs(x, whole, added=added, group=group)
    problem = make_problem(inputs, config, result)
    out = run_product(problem, inputs)
    if result.quantised:
        return BlockCodes(out[0][:tokens], out[1][:, :tokens])
    if config.splits > 1:
        return out[0]
    return out[0][0, : problem.channels, :tokens].T if problem.is_turned else out[0][:tokens]


def wrong_block(
    x: BlockCodes,
    matrices: tuple[BlockMatrix, ...],
    result: Result = NUMBERS,
    config: BlockConfig | None = None,
    beside: Beside = NOTHING,
) -> list[str]:
    """Say what the kernel cannot do."""
    last = _wrong_result(x, matrices, result, config)
    last += _wrong_beside(x, matrices, result, config, beside)
    if x.scale is None:
        return _wrong_plain(x, matrices) + last
    wrong, (steps, _), inputs = [], x.scale.shape, x.values.shape[1]
    for matrix in matrices:
        values, block, own = matrix.values, block_of(x, matrix), matrix.inputs
        if x.values.dtype != FP8 or values.dtype != FP8:
            wrong.append(f"x of {x.values.dtype} and weights of {values.dtype}: must be codes")
        if block is None or block % SEGMENT or not SEGMENT <= block <= PART:
            wrong.append(f"{own} inputs are not {steps} blocks of 32, 64, 96 or 128")
        elif -(-own // block) != steps or -(-inputs // block) != steps:
            wrong.append(f"x of {inputs} inputs, weights of {own}, {steps} scales of a token")
        if inputs % SEGMENT or own % SEGMENT:
            wrong.append(f"{inputs} and {own} inputs must be multiples of {SEGMENT}")
        wrong += _wrong_scales(matrix, steps)
    return wrong + last


def _wrong_beside(
    x: BlockCodes,
    matrices: tuple[BlockMatrix, ...],
    result: Result,
    config: BlockConfig | None,
    beside: Beside,
) -> list[str]:
    """Say what it cannot do with matrices of low rank, and with groups of channels."""
    wrong, (tokens, num) = [], (x.values.shape[0], len(matrices))
    rows = max(tokens, 0 if config is None else config.rows)
    if (beside.added is not None or result.groups) and rows > FEW_ROWS[-1]:
        wrong.append(f"{rows} rows are more than {FEW_ROWS[-1]}, beside which something is added")
    if result.groups and (beside.group is None or result.quantised or result.gate is not None):
        wrong.append("groups are of numbers, and every row has one")
    factors = [matrix.factor for matrix in matrices]
    if beside.added is None:
        return wrong + ["there is nothing for factors"] * any(f is not None for f in factors)
    dtype, width = beside.added.dtype, beside.added.shape[1] // num
    if dtype not in PLAIN or width % ROWS or beside.added.shape != (tokens, num * width):
        words = f"must be {tokens} x {num} times a multiple of {ROWS}, of 16 bits"
        wrong.append(f"what factors multiply, {beside.added.shape} of {dtype}, {words}")
    is_row = len(matrices[0].values.shape) == 3
    for matrix in matrices:
        wanted = (width, matrix.outputs) if is_row else (matrix.outputs, width)
        if matrix.factor is None or (matrix.factor.shape, matrix.factor.dtype) != (wanted, dtype):
            wrong.append(f"a factor must be {wanted} of {dtype}")
    return wrong


def _wrong_plain(x: BlockCodes, matrices: tuple[BlockMatrix, ...]) -> list[str]:
    """Say what it cannot do with numbers."""
    wrong, (tokens, inputs), dtype = [], x.values.shape, x.values.dtype
    if tokens > FEW_ROWS[-1]:
        wrong.append(f"{tokens} rows of plain numbers are more than {FEW_ROWS[-1]}")
    for matrix in matrices:
        block = block_of(x, matrix)
        if dtype not in PLAIN or matrix.values.dtype != dtype:
            wrong.append(f"x of {dtype} and weights of {matrix.values.dtype}: must be of 16 bits")
        if block not in PLAIN_BLOCKS or matrix.inputs != inputs:
            wrong.append(f"{inputs} and {matrix.inputs} inputs must be multiples of 64")
    return wrong


def _wrong_result(
    x: BlockCodes, matrices: tuple[BlockMatrix, ...], result: Result, config: BlockConfig | None
) -> list[str]:
    """Say which channels and results it has not, and what of a config is wrong."""
    outs, steps = [matrix.outputs for matrix in matrices], steps_of(x, matrices[0]) or 1
    least = CHANNELS if result.groups is None else ROWS
    wrong = [f"{out} outputs must be a multiple of {least}" for out in outs if out % least]
    kinds = {len(matrix.values.shape) for matrix in matrices}
    kinds |= {matrix.blocks is None for matrix in matrices}
    if len(kinds) > 2:
        wrong.append("matrices are of different kinds")
    if result.gate is not None and (len(outs) != 2 or outs[0] != outs[1]):
        wrong.append("gate and up are two matrices of as many outputs")
    elif result.gate is None and any(out % PART for out in outs[:-1]):
        wrong.append(f"{outs} outputs of joined matrices: all but the last are multiples of {PART}")
    if result.quantised and result.gate is None and len(outs) > 1:
        wrong.append(f"codes are of one result, not of {outs}")
    return wrong if config is None else wrong + _wrong_config(steps, matrices, result, config)


def _wrong_scales(matrix: BlockMatrix, steps: int) -> list[str]:
    if matrix.blocks is None:
        return []
    wanted = (-(-matrix.outputs // PART), steps)
    wanted = wanted[::-1] if len(matrix.values.shape) == 3 else wanted
    if matrix.blocks.shape == wanted:
        return []
    return [f"scales {matrix.blocks.shape} are not of {PART} outputs and a block: {wanted}"]


def _wrong_config(
    steps: int, matrices: tuple[BlockMatrix, ...], result: Result, config: BlockConfig
) -> list[str]:
    wrong = []
    if config.rows not in (*FEW_ROWS, MANY_ROWS):
        wrong.append(f"tiles of {config.rows} rows; there are {FEW_ROWS} and {MANY_ROWS}")
    cuts = config.splits * config.cluster
    if steps % cuts:
        wrong.append(f"{cuts} splits of {steps} steps: they must divide them")
    if cuts > 1 and config.rows == MANY_ROWS:
        wrong.append(f"splits of tiles of {MANY_ROWS} rows")
    if config.cluster not in (1, *CLUSTERS) or (config.cluster > 1 and config.splits > 1):
        wrong.append(f"clusters of {config.cluster} thread blocks; there are {CLUSTERS}, or splits")
    if config.splits > 1 and (result.quantised or result.gate is not None):
        wrong.append("sums of parts of a contraction can be neither activated nor quantised")
    if not can_be_many(matrices, result) and config.rows == MANY_ROWS:
        words = "not of numbers; with scales of blocks gates spill"
        wrong.append(f"tiles of {MANY_ROWS} rows: {words}")
    return wrong


def _padded(x: BlockCodes) -> BlockCodes:
    """Return rows whose number the copy engine takes; those that are added are zeros."""
    rest = -x.values.shape[0] % ROWS
    if not rest:
        return x
    scale = None if x.scale is None else jnp.pad(x.scale, ((0, 0), (0, rest)))
    return BlockCodes(jnp.pad(x.values, ((0, rest), (0, 0))), scale)


def whole_channels(matrix: BlockMatrix) -> BlockMatrix:
    """Return a matrix whose numbers of channels end with a block of them."""
    rest = -matrix.outputs % PART
    if not rest:
        return matrix

    def padded(numbers: Any) -> Any:
        if numbers is None:
            return None
        return jnp.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, rest)])

    return matrix._replace(scale=padded(matrix.scale), bias=padded(matrix.bias))


def run_product(problem: Problem, inputs: Inputs) -> list[jax.Array]:
    """Launch the kernel; return what `block_product` does, codes and scales as two arrays."""
    arrays, tree = jax.tree.flatten(inputs)
    result = problem.result
    gated = "product" if result.gate is None else "gated"
    name = f"block_{gated}_{'few' if problem.few else 'many'}"
    cluster: dict[str, Any] = {}
    if problem.cluster > 1:
        cluster = {"cluster": (problem.cluster,), "cluster_names": (CLUSTER,)}
    return plgpu.kernel(
        functools.partial(_kernel, problem, tree),
        out_type=out_type(problem),
        scratch_types=[shared_memory(problem)],
        grid=(problem.num_blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name=name if inputs.tiles is None else f"grouped_{gated}",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=result.interpret,
        **cluster,
    )(*arrays)


def out_type(problem: Problem) -> list[jax.ShapeDtypeStruct]:
    """Return what comes out; last what clusters add up, which nobody reads afterwards."""
    made = _made(problem)
    if problem.cluster > 1:
        made.append(jax.ShapeDtypeStruct(problem.sums_shape, jnp.float32))
    return made


def _made(problem: Problem) -> list[jax.ShapeDtypeStruct]:
    tokens, channels, result = problem.tokens, problem.channels, problem.result
    if problem.is_turned:
        parts = problem.parts if problem.splits > 1 else 1
        shape = problem.splits, parts * problem.columns * PART, problem.tiles * problem.rows
        return [jax.ShapeDtypeStruct(shape, jnp.float32)]
    if not result.quantised:
        return [jax.ShapeDtypeStruct((tokens, channels), result.dtype)]
    # Scales of whole tiles: those of a tile are one piece of memory, which the copy engine writes
    # whole. Where rows ended in a tile, it would write over the next column's.
    rows = max(tokens, problem.tiles * problem.rows)
    return [
        jax.ShapeDtypeStruct((tokens, channels), FP8),
        jax.ShapeDtypeStruct((problem.columns, rows), jnp.float32),
    ]


def _kernel(problem: Problem, tree: Any, *refs: Any) -> None:
    *arrays, shared = refs
    inputs, out = jax.tree.unflatten(tree, arrays[: tree.num_leaves]), arrays[tree.num_leaves :]

    def compute(me: jax.Array) -> None:
        _compute(Worker(problem, inputs, tuple(out), shared, me))

    run_warpgroups(compute, lambda: fetch(problem, inputs, shared), WARPGROUPS)


def _compute(worker: Worker) -> None:
    """Multiply this block's items, one after the other."""
    problem, inputs = worker.problem, worker.inputs

    def run_item(nth: jax.Array, added: jax.Array) -> jax.Array:
        item = read_item(problem, inputs, nth)
        finish(worker, item, _multiply(worker, item, nth * problem.steps), added)
        return added + added_steps(problem, item) if problem.added else added

    lax.fori_loop(0, count_items(problem, inputs), run_item, jnp.int32(0))
    if not problem.is_turned:
        plgpu.wait_smem_to_gmem(0)


def _multiply(worker: Worker, item: Item, before: jax.Array) -> Sums:
    """Return the sums of an item; `before` steps came before."""
    problem, shared = worker.problem, worker.shared
    stages, mine = jnp.int32(problem.stages), pl.ds(worker.me * CHANNELS, CHANNELS)
    rows_axis = 1 - worker.channels_axis

    def run_step(k: jax.Array, carry: tuple[Sums, tuple[Any, ...]]) -> tuple[Sums, Any]:
        sums, scales = carry
        upcoming = scales
        if problem.few:  # scales are read a step before they are needed
            upcoming = _block_scales(worker, item, k + 1)
        else:  # of many rows products take as long, and registers are full
            scales = _block_scales(worker, item, k)
        slot = lax.rem(before + k, stages)
        plgpu.barrier_wait(shared.full.at[slot])
        row = None
        if shared.x_scale is not None:
            own = pl.ds(0, problem.rows) if problem.few else mine
            here = shared.x_scale.at[slot, own]
            row = plgpu.load(here, layout=WGMMA.reduce(1 - rows_axis), optimized=False)

        def add(total: jax.Array, product: jax.Array, scale: Any) -> jax.Array:
            if row is None:
                return total + product
            factor = row if scale is None else row * scale
            return total + product * lax.broadcast_in_dim(factor, problem.shape, [rows_axis])

        added: list[jax.Array] = []
        for some in _together(problem):
            products = _products(worker, slot, some)
            pairs = zip(some, products, strict=True)
            added += [add(sums[part], product, scales[part]) for part, product in pairs]
        plgpu.commit_smem()  # scales were read before others are copied there
        plgpu.barrier_arrive(shared.free.at[slot])
        return tuple(added), upcoming

    empty = plgpu.layout_cast(jnp.zeros(problem.shape, jnp.float32), WGMMA)
    first: tuple[Any, ...] = (None,) * problem.parts
    if problem.few:
        first = _block_scales(worker, item, jnp.int32(0))
    return lax.fori_loop(0, problem.steps, run_step, ((empty,) * problem.parts, first))[0]


def _together(problem: Problem) -> list[tuple[int, ...]]:
    """Return the parts whose products are in registers together: of many rows one at a time."""
    parts = tuple(range(problem.parts))
    return [parts] if problem.few else [(part,) for part in parts]


def _products(worker: Worker, slot: jax.Array, parts: tuple[int, ...]) -> Sums:
    """Return the products of a block of inputs, of some parts."""
    problem, (weights, x, *_) = worker.problem, worker.shared
    mine = pl.ds(worker.me * CHANNELS, CHANNELS)

    def own(part: int) -> Any:  # channels of weights first
        if problem.is_plain and problem.is_row_parallel:
            return weights[part].at[slot, pl.ds(0, problem.block), mine].transpose((1, 0))
        return weights[part].at[slot, mine]

    def multiply(*totals: Any) -> Sums:
        for total, part in zip(totals, parts, strict=True):
            if problem.few:
                plgpu.wgmma(total, own(part), x.at[slot].transpose((1, 0)))
            else:
                plgpu.wgmma(total, x.at[slot, mine], weights[part].at[slot].transpose((1, 0)))
        return tuple(total[...] for total in totals)

    return pl.run_scoped(multiply, *[Accumulator(problem.shape, jnp.float32)] * len(parts))


def _block_scales(worker: Worker, item: Item, k: jax.Array) -> tuple[Any, ...]:
    """Return the scale of 128 channels and a block of inputs, of each part; None: it is 1.

    Past the last block it is that of the last.
    """
    problem, matrices = worker.problem, worker.inputs.matrices
    if matrices[0].blocks is None:
        return (None,) * problem.parts
    step = item.split * problem.steps + (jnp.minimum(k, problem.steps - 1) if problem.few else k)

    def read(i: int) -> jax.Array:
        column, blocks = item.column, matrices[i].blocks
        assert blocks is not None, "all parts have scales of blocks, or none"
        if len(problem.outs) > 1:
            first, end = problem.firsts[i : i + 2]
            column = jnp.clip(column - first, 0, end - first - 1)
        if item.expert is not None:
            return blocks[item.expert, column, step]
        place = (step, column) if problem.is_row_parallel else (column, step)
        return blocks[place]

    if len(problem.outs) == 1:
        return tuple(read(part) for part in range(problem.parts))
    value = read(0)
    for i, first in enumerate(problem.firsts[1:-1], 1):
        value = jnp.where(item.column >= first, read(i), value)
    return (value,)
