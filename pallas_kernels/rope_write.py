"""From the product with q, k and v to attention in one launch, for Hopper GPUs.

    heads   of the product: the parts of its contraction added up, a bias added, q and k normed
    q       rotated, in the type and at the place where the attention kernels read it
    k, v    k rotated, both written into their slots of the paged pool, as numbers or as codes

XLA takes three to five launches for as much, each of which moves less than a start costs. A thread
block is one warpgroup and takes one head of a tile of tokens: a warp has a token, its lanes
neighbouring columns. A head is in three pieces: the halves that rotate against each other, and what
a rotary embedding is too narrow for. Every result is rounded where the model's own operations are.

Parts of a contraction come channels first, as `block_product` gives them, or tokens first. The
former are turned through shared memory, once, as numbers of the model's type.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from pallas_kernels.call import KVScales
from pallas_kernels.head_terms import Given, Projected
from pallas_kernels.kv_write import Blocks, stored
from pallas_kernels.mosaic import (
    FP8,
    TMA_ALIGNMENT,
    apart,
    scales_in_memory,
    scales_of_head,
    staged_rows,
    store,
)

WARPS, LANES = 4, 32
TILES = 16, 8, 4  # tokens of a thread block
MOST_FEW = 64  # tokens
NUMBERS = "bfloat16", "float16"
Halves = tuple[jax.Array, ...]  # the pieces of a head, [tokens of a tile, columns]


class HeadNorm(NamedTuple):
    """RMS norm of every head, as `norm_codes.NormKind` has it."""

    eps: float
    offset: bool = False  # the weight is 1 more than what is stored
    in_float32: bool = False  # rounded after the weight is applied, and not before


class Heads(NamedTuple):
    """What is compiled in."""

    q: int  # query heads
    kv: int
    head_dim: int
    dtype: DTypeLike  # of the model's numbers
    q_dtype: DTypeLike  # of what the attention kernels read
    q_rows: int  # of a KV head, with those that are filled up with zeros
    norm: HeadNorm | None = None

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q // self.kv

    @property
    def channels(self) -> int:
        """Of q, k and v."""
        return (self.q + 2 * self.kv) * self.head_dim


class Target(NamedTuple):
    """Where keys and values go; see `kv_write.write_kv`."""

    pool: tuple[Blocks, Blocks]
    slots: Int32[Array, " tokens"]
    scales: KVScales = (1.0, 1.0)
    first: Int32[Array, ""] | None = None


class Arrays(NamedTuple):
    """The kernel's arrays in global memory; None is what this call does without."""

    values: tuple[Any, ...]
    given: Given
    slots: Any
    scales: Any
    first: Any


class Problem(NamedTuple):
    """What is fixed when the kernel is compiled, of a call."""

    heads: Heads
    tile: int  # tokens
    pieces: tuple[tuple[int, int], ...]  # of a head: first column, columns
    turned: bool
    scales: KVScales | None  # where they are numbers


class Scratch(NamedTuple):
    """Shared memory."""

    summed: Any  # [tokens, head_dim]; None: nothing is turned
    q: Any  # [tokens, head_dim]
    kv: Any  # [tokens, 1 or more, head_dim]: tokens begin where TMA may read


def rope_write(
    projected: Projected, given: Given, target: Target, heads: Heads, interpret: Any = False
) -> tuple[Float[Array, "tokens q_heads head_dim"], tuple[Blocks, Blocks]]:
    """Return the queries, and the pool with keys and values written, in place if it is donated.

    Queries are those of each KV head, one after the other, `q_rows` each. Tokens whose slot is in
    the null block 0 are padding; nothing is written for them. Raises ValueError for what the kernel
    cannot do.
    """
    half = 0 if given.rope is None else given.rope[0].shape[1]
    wrong = wrong_heads(heads, half, target.pool[0].dtype)
    if wrong := wrong + _wrong_call(projected, given, target, heads):
        raise ValueError("rope_write: " + "; ".join(wrong))
    tokens = target.slots.shape[0]
    tile = tile_of(tokens, projected, heads.head_dim * target.pool[0].dtype.itemsize)
    tiles = -(-tokens // tile)
    arrays = _arrays(projected, given, target, tiles * tile)
    problem = Problem(
        heads,
        tile,
        pieces_of(heads.head_dim, half),
        projected.turned,
        target.scales if isinstance(target.scales, tuple) else None,
    )
    leaves, tree = jax.tree.flatten(apart(arrays))
    pool = tuple(jax.new_ref(blocks) for blocks in target.pool)
    q_heads = heads.kv * heads.q_rows
    q = plgpu.kernel(
        functools.partial(_kernel, problem, tree),
        out_type=jax.ShapeDtypeStruct((tiles * tile, q_heads, heads.head_dim), heads.q_dtype),
        scratch_types=_scratch(problem, target.pool[0].dtype)._asdict(),
        grid=(tiles, q_heads + 2 * heads.kv),
        grid_names=("tile", "head"),
        kernel_name="rope_write",
        interpret=interpret,
    )(*leaves, *pool)
    return q[:tokens], (pool[0][...], pool[1][...])


def wrong_heads(heads: Heads, half: int, kv_dtype: DTypeLike) -> list[str]:
    """Say which heads the kernel has not, of which twice `half` numbers rotate."""
    wrong, width = [], heads.head_dim
    if width < 2 * LANES or any(size % LANES for _, size in pieces_of(width, half)):
        wrong.append(f"head_dim {width}, of which {2 * half} rotate: not in pieces of {LANES}")
    if jnp.dtype(heads.dtype).name not in NUMBERS:
        wrong.append(f"heads of {jnp.dtype(heads.dtype)}: must be {' or '.join(NUMBERS)}")
    if heads.q % heads.kv or heads.q_rows < heads.group:
        wrong.append(f"{heads.q} query heads in {heads.kv} groups of {heads.q_rows}")
    if jnp.dtype(kv_dtype) not in (jnp.dtype(heads.dtype), jnp.dtype(FP8)):
        wrong.append(f"a pool of {jnp.dtype(kv_dtype)}")
    return wrong


def _wrong_call(projected: Projected, given: Given, target: Target, heads: Heads) -> list[str]:
    """Say what else is wrong with a call."""
    wrong: list[str] = []
    is_one = isinstance(target.scales, tuple) and target.scales == (1, 1)
    if target.pool[0].dtype != FP8 and not is_one:
        wrong.append(f"scales are for pools of {jnp.dtype(FP8)} only")
    if projected.is_split:
        channels = projected.values[0].shape[1 if projected.turned else 2]
        if len(projected.values) != 1 or channels < heads.channels:
            wrong.append(f"parts of {channels} channels, not {heads.channels}")
    elif projected.turned or len(projected.values) not in (1, 3):
        wrong.append("numbers are those of q, k and v, or of all, tokens first")
    if (given.norms is None) != (heads.norm is None):
        wrong.append("norms without weights, or weights without norms")
    return wrong


def tile_of(tokens: int, projected: Projected, row_bytes: int) -> int:
    """Return the tokens of a thread block; of few there are many blocks, with few parts each.

    Eight or more tokens make the compiler swizzle what is staged. It takes the second half of a
    row of over 128 bytes for the beginning of a pattern, which it is not (jax 0.11.2 on an H200).
    """
    sizes = TILES[1:] if projected.turned else TILES if tokens > MOST_FEW else TILES[2:]
    sizes = sizes if row_bytes <= TMA_ALIGNMENT else TILES[2:]
    return next((size for size in sizes if tokens % size == 0), TILES[-1])


def pieces_of(head_dim: int, half: int) -> tuple[tuple[int, int], ...]:
    """Cut a head: the halves that rotate, and the rest; where nothing rotates, only that."""
    pieces = ((0, half), (half, half), (2 * half, head_dim - 2 * half))
    return tuple(piece for piece in pieces if piece[1])


def _arrays(projected: Projected, given: Given, target: Target, tokens: int) -> Arrays:
    """Return the kernel's arrays, filled up to whole tiles: slots are then in the null block."""

    def padded(x: Any, axis: int = 0) -> Any:
        added = max(0, tokens - x.shape[axis])
        return jnp.pad(x, [(0, added * (i == axis)) for i in range(x.ndim)]) if added else x

    axis = (2 if projected.turned else 1) if projected.is_split else 0
    values = tuple(padded(each, axis) for each in projected.values)
    rope = None if given.rope is None else (padded(given.rope[0]), padded(given.rope[1]))
    first = None if target.first is None else target.first.reshape(1)
    scales = scales_in_memory(target.scales)
    return Arrays(values, given._replace(rope=rope), padded(target.slots), scales, first)


def _scratch(problem: Problem, kv_dtype: DTypeLike) -> Scratch:
    tile, width, heads = problem.tile, problem.heads.head_dim, problem.heads
    room = staged_rows(1, width * jnp.dtype(kv_dtype).itemsize)
    return Scratch(
        plgpu.SMEM((tile, width), heads.dtype) if problem.turned else None,
        plgpu.SMEM((tile, width), heads.q_dtype),
        plgpu.SMEM((tile, room, width), kv_dtype),
    )


def _kernel(problem: Problem, tree: Any, *refs: Any, **scratch: Any) -> None:
    """Do a head of a tile of tokens: the first of the grid are queries, then keys, then values."""
    arrays, pool, q = jax.tree.unflatten(tree, refs[:-3]), refs[-3:-1], refs[-1]
    work = Work(problem, arrays, Scratch(**scratch), lax.axis_index("tile") * problem.tile)
    head, q_heads = lax.axis_index("head"), q.shape[1]
    pl.when(head < q_heads)(lambda: _put_query(work, head, q))
    for i, blocks in enumerate(pool):
        first = q_heads + i * problem.heads.kv
        is_mine = (head >= first) & (head < first + problem.heads.kv)
        pl.when(is_mine)(functools.partial(_put_kv, work, i, head - first, blocks))


class Work(NamedTuple):
    """What a thread block works with."""

    problem: Problem
    arrays: Arrays
    scratch: Scratch
    begin: jax.Array  # its first token

    @property
    def tokens(self) -> Any:
        """Those of its tile."""
        return pl.ds(self.begin, self.problem.tile)


def _put_query(work: Work, head: jax.Array, out: Any) -> None:
    """Write a query head, or zeros behind those of a KV head."""
    heads, staged = work.problem.heads, work.scratch.q
    rows, group = jnp.int32(heads.q_rows), jnp.int32(heads.group)
    place = lax.rem(head, rows)

    def stage(pieces: Halves) -> None:
        for (first, size), piece in zip(work.problem.pieces, pieces, strict=True):
            staged[:, pl.ds(first, size)] = piece.astype(staged.dtype)

    def stage_head() -> None:
        local = lax.div(head, rows) * group + place
        stage(_rotated(work, _normed(work, 0, _head(work, 0, local))))

    def stage_zeros() -> None:
        shapes = ((work.problem.tile, size) for _, size in work.problem.pieces)
        empty = (jnp.zeros(shape, jnp.float32) for shape in shapes)
        stage(tuple(plgpu.layout_cast(x, layout_of(x.shape[1])) for x in empty))

    if heads.q_rows == heads.group:
        stage_head()
    else:
        pl.when(place < group)(stage_head)
        pl.when(place >= group)(stage_zeros)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staged, out.at[work.tokens, head])
    plgpu.wait_smem_to_gmem(0)


def _put_kv(work: Work, i: int, head: jax.Array, blocks: Any) -> None:
    """Write a head of keys (0), or of values (1), into the slots of its tokens."""
    arrays, staged = work.arrays, work.scratch.kv
    slots = [arrays.slots[work.begin + token] for token in range(work.problem.tile)]
    pieces = _head(work, 1 + i, head)
    if i == 0:
        pieces = _rotated(work, _normed(work, 1, pieces))
    scale = scales_of_head(work.problem.scales or arrays.scales, arrays.scales, head)[i]
    for (first, size), piece in zip(work.problem.pieces, pieces, strict=True):
        staged[:, 0, pl.ds(first, size)] = stored(piece, staged.dtype, scale)
    plgpu.commit_smem()
    block_size, origin = jnp.int32(blocks.shape[2]), 0 if arrays.first is None else arrays.first[0]
    for token, slot in enumerate(slots):
        block, offset = lax.div(slot, block_size), lax.rem(slot, block_size)

        @pl.when(block > 0)
        def _(token: int = token, block: Any = block, offset: Any = offset) -> None:
            target = blocks.at[origin + block, pl.ds(head, 1), offset]
            plgpu.copy_smem_to_gmem(staged.at[token, pl.ds(0, 1)], target)

    plgpu.wait_smem_to_gmem(0)


def _head(work: Work, which: int, head: jax.Array) -> Halves:
    """Return the pieces of a head of q, k or v, as the product rounds them, with its bias."""
    problem, values = work.problem, work.arrays.values
    heads, own = problem.heads, values[which if len(values) == 3 else 0]
    place = head
    if len(values) == 1:
        place = head + (0, heads.q, heads.q + heads.kv)[which]
    column = place * heads.head_dim
    if problem.turned:
        _turn(work, own, column)
    found = []
    for first, size in problem.pieces:
        layout = layout_of(size)
        if problem.turned:
            here = work.scratch.summed.at[:, pl.ds(first, size)]
            piece = plgpu.load(here, layout=layout, optimized=False)
        else:
            columns = pl.ds(column + first, size)
            here = own.at[work.tokens, columns] if len(own.shape) == 2 else own.at[:, work.tokens]
            if len(own.shape) == 2:
                piece = plgpu.load(here, layout=layout, optimized=False)
            else:
                piece = _sum(here.at[:, :, columns], layout).astype(heads.dtype)
        if work.arrays.given.biases is not None:
            bias = work.arrays.given.biases[which]
            bias = _of_columns(bias, pl.ds(head * heads.head_dim + first, size), piece.shape)
            piece = (piece.astype(jnp.float32) + bias).astype(heads.dtype)
        found.append(piece)
    return tuple(found)


def _sum(parts: Any, layout: Any) -> jax.Array:
    """Add up the parts of a contraction, one after the other."""
    loaded = [
        plgpu.load(parts.at[i], layout=layout, optimized=False) for i in range(parts.shape[0])
    ]
    return functools.reduce(jnp.add, loaded)


def _turn(work: Work, parts: Any, column: jax.Array) -> None:
    """Add up parts of a head whose channels come first; its numbers are then in shared memory."""
    heads, summed = work.problem.heads, work.scratch.summed
    here = parts.at[:, pl.ds(column, heads.head_dim), work.tokens]
    total = _sum(here, turned_layout(work.problem.tile)).astype(heads.dtype)
    store(summed.transpose((1, 0)), total)
    plgpu.commit_smem()


def _of_columns(weights: Any, columns: Any, shape: tuple[int, ...]) -> jax.Array:
    """Return weights of columns, float32, for every token."""
    layout = layout_of(shape[1]).reduce(0)
    read = plgpu.load(weights.at[columns], layout=layout, optimized=False)
    return lax.broadcast_in_dim(read.astype(jnp.float32), shape, [1])


def _normed(work: Work, which: int, pieces: Halves) -> Halves:
    """Apply the norm of q, or of k, to a head, as `models.layers.rms_norm`."""
    heads, norms = work.problem.heads, work.arrays.given.norms
    if heads.norm is None or norms is None:
        return pieces
    kind, found = heads.norm, []
    wide = [piece.astype(jnp.float32) for piece in pieces]
    squares = functools.reduce(jnp.add, [jnp.sum(x * x, axis=1) for x in wide])
    gain = lax.rsqrt(squares * (1 / heads.head_dim) + kind.eps)
    for (first, size), x in zip(work.problem.pieces, wide, strict=True):
        weight = _of_columns(norms[which], pl.ds(first, size), x.shape)
        weight = 1.0 + weight if kind.offset else weight
        normed = x * lax.broadcast_in_dim(gain, x.shape, [0])
        if not kind.in_float32:
            weight = weight.astype(heads.dtype).astype(jnp.float32)
            normed = normed.astype(heads.dtype).astype(jnp.float32)
        found.append((normed * weight).astype(heads.dtype))
    return tuple(found)


def _rotated(work: Work, pieces: Halves) -> Halves:
    """Rotate the halves of a head against each other (arXiv 2104.09864), in float32."""
    if work.arrays.given.rope is None:
        return pieces
    a, b, *rest = pieces
    tables = (table.at[work.tokens] for table in work.arrays.given.rope)
    layout = layout_of(a.shape[1])
    cos, sin = (plgpu.load(table, layout=layout, optimized=False) for table in tables)
    dtype, a, b = a.dtype, a.astype(jnp.float32), b.astype(jnp.float32)
    return (a * cos - b * sin).astype(dtype), (b * cos + a * sin).astype(dtype), *rest


def layout_of(columns: int) -> Any:
    """Registers of `[tokens, columns]`: a token a warp, neighbouring columns a lane."""
    tiling = plgpu.Tiling(((WARPS, columns), (columns // LANES,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def turned_layout(tile: int) -> Any:
    """Registers of `[columns, tokens]`: eight columns a warp, whose tokens four lanes have."""
    tiling = plgpu.Tiling(((WARPS * 8, tile), (8, tile), (tile // 4,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
