"""The addition to the residual stream and its norm, as numbers or as codes, for Hopper GPUs.

    total   x + scale * (added + bias)      in the type of x, rounded as each operation is
    normed  its RMS norm, times a weight    in the type of x
    codes   of normed: e4m3, with a float32 scale for each row and BLOCK columns

One launch for what XLA makes up to four of: add, norm, largest number, codes. A thread block is one
warpgroup and takes one row, which stays in its registers, so that a row is read once. What a row
becomes depends on its width alone: the same bits beside whatever other rows.

A row is cut in pieces. Tiles of 8 and 4 blocks have 8 and 4 columns a thread. What is left is taken
block by block, by every warp alike; the last block may be half a block.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float8e4m3fn, Float32

from pallas_kernels.mosaic import FP8, code_scale, store
from pallas_kernels.sum_sizes import MOST_WIDTH

BLOCK, HALF = 128, 64
LANES, WARPS = 32, 4
TILES = 8, 4  # blocks
ROWS = "bfloat16", "float16"

Rows = Float[Array, "rows width"]
Codes = tuple[Float8e4m3fn[Array, "rows width"], Float32[Array, "blocks rows"]]


class NormKind(NamedTuple):
    """What is compiled in."""

    eps: float
    offset: bool = False  # the weight is 1 more than what is stored
    in_float32: bool = False  # rounded after the weight is applied, and not before
    scale: float = 1.0  # of what is added
    codes: bool = False


class Arrays(NamedTuple):
    """The kernel's arguments in global memory; None is what this call does without."""

    x: Any  # [rows, blocks, BLOCK], or [rows, width] where a block is cut
    added: Any  # as x
    bias: Any  # as x, one row
    weight: Any  # as x, one row


class Outputs(NamedTuple):
    """What it writes."""

    total: Any  # as x; None without something to add
    normed: Any  # as x
    scales: Any  # [blocks, rows] float32; None: numbers


class Piece(NamedTuple):
    """Columns of a row that are in registers at once: `blocks` of them, or a half (0)."""

    first: int  # block
    blocks: int

    @property
    def layout(self) -> Any:
        """Where its numbers are in the registers of a warpgroup."""
        if self.blocks == 8:  # two blocks a warp
            tiling = plgpu.Tiling(((8, BLOCK), (2, BLOCK), (8,)))
            return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
        if self.blocks == 4:
            tiling = plgpu.Tiling(((4, BLOCK), (4,)))
            return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
        columns = BLOCK if self.blocks else HALF
        tiling, alike = plgpu.Tiling(((columns,), (columns // LANES,))), plgpu.Replicated(WARPS)
        return plgpu.Layout.TILED(tiling, warp_dims=(alike,), lane_dims=(-2,), vector_dim=-1)

    def of(self, ref: Any, row: jax.Array | int) -> Any:
        """Return its part of a row of `Arrays` or `Outputs`."""
        if self.blocks > 1:
            return ref.at[row, pl.ds(self.first, self.blocks)]
        if len(ref.shape) == 3:
            return ref.at[row, self.first]
        return ref.at[row, pl.ds(self.first * BLOCK, BLOCK if self.blocks else HALF)]


Load = Callable[[Any, Piece, Any], jax.Array]  # of an array, a piece of a row


Put = Callable[[Any, jax.Array], None]  # to a part of an array


class Place(NamedTuple):
    """Where a thread block's row is, and how it is read and written."""

    row: Any  # of x and the new stream
    of_all: Any  # the same of what is added, and of the norm
    load_added: Load
    put: Put  # of the norm
    nth: Any = 0  # of the weights


def pieces_of(width: int) -> Iterator[Piece]:
    """Cut a row; one that ends inside of a block has no tiles."""
    first, blocks = 0, width // BLOCK
    for tile in TILES if width % BLOCK == 0 else ():
        while blocks - first >= tile:
            yield Piece(first, tile)
            first += tile
    yield from (Piece(block, 1) for block in range(first, blocks))
    if width % BLOCK:
        yield Piece(blocks, 0)


def wrong_norm(x: Any, added: Any, weight: Any) -> list[str]:
    """Say what the kernel cannot do."""
    width, wrong = x.shape[-1], wrong_rows(x)
    if added is not None and (added.dtype != x.dtype or added.shape != x.shape):
        wrong.append(f"{added.dtype}{added.shape} is added to {x.dtype}{x.shape}")
    if weight.shape != (width,):
        wrong.append(f"a weight of {weight.shape} for rows of {width}")
    return wrong


def wrong_rows(x: Any) -> list[str]:
    """Say what the kernel cannot do with rows."""
    width, wrong = x.shape[-1], []
    if x.dtype.name not in ROWS:
        wrong.append(f"rows of {x.dtype}: must be {' or '.join(ROWS)}")
    if width % HALF or width > MOST_WIDTH:
        wrong.append(f"rows of {width}: must be a multiple of {HALF}, and at most {MOST_WIDTH}")
    return wrong


def add_norm(
    x: Rows,
    added: Rows | None,
    weight: Float[Array, " width"],
    kind: NormKind,
    bias: Float[Array, " width"] | None = None,
    interpret: Any = False,
) -> tuple[Rows, Rows | Codes]:
    """Return the new stream and its norm: numbers, or codes with their scales.

    Raises ValueError for what the kernel cannot do.
    """
    if wrong := wrong_norm(x, added, weight):
        raise ValueError("add_norm: " + "; ".join(wrong))
    (rows, width), blocks = x.shape, -(-x.shape[1] // BLOCK)
    cut = (blocks, BLOCK) if width % BLOCK == 0 else (width,)

    def in_blocks(array: Any) -> Any:
        return None if array is None else array.reshape(-1, *cut)

    arrays, tree = jax.tree.flatten(Arrays(*map(in_blocks, (x, added, bias, weight))))
    like = jax.ShapeDtypeStruct((rows, *cut), x.dtype)
    codes = jax.ShapeDtypeStruct((rows, *cut), FP8)
    scales = jax.ShapeDtypeStruct((blocks, rows), jnp.float32)
    made = Outputs(None if added is None else like, codes if kind.codes else like, None)
    made = made._replace(scales=scales if kind.codes else None)
    shapes, out_tree = jax.tree.flatten(made)
    written = plgpu.kernel(
        functools.partial(_norm_kernel, kind, (tree, out_tree)),
        out_type=tuple(shapes),
        grid=(rows,),
        grid_names=("row",),
        kernel_name="add_norm_codes" if kind.codes else "add_norm",
        interpret=interpret,
    )(*arrays)
    out = jax.tree.unflatten(out_tree, written)
    total = x if added is None else out.total.reshape(x.shape)
    normed = out.normed.reshape(x.shape)
    return total, (normed, out.scales) if kind.codes else normed


def _norm_kernel(kind: NormKind, trees: tuple[Any, Any], *refs: Any) -> None:
    tree, out_tree = trees
    arrays = jax.tree.unflatten(tree, refs[: tree.num_leaves])
    row = lax.axis_index("row")
    place = Place(row, row, load_piece, store)
    norm_row(kind, arrays, jax.tree.unflatten(out_tree, refs[tree.num_leaves :]), place)


def norm_row(kind: NormKind, arrays: Arrays, out: Outputs, place: Place) -> None:
    """Do a thread block's row, in a kernel.

    All loads come before the first store: they are under way together.
    """
    pieces, rows = list(pieces_of(math.prod(arrays.x.shape[1:]))), []
    for piece, total in zip(pieces, totals(kind, arrays, place), strict=True):
        if out.total is not None:
            store(piece.of(out.total, place.row), total)
        rows.append(total.astype(jnp.float32))
    width = math.prod(arrays.x.shape[1:])
    gain = lax.rsqrt(_squares(pieces, rows) * (1 / width) + kind.eps)
    for piece, wide in zip(pieces, rows, strict=True):
        weight = load_piece(arrays.weight, piece, place.nth)
        normed = _weighted(kind, wide * gain, weight, arrays.x.dtype)
        if out.scales is None:
            place.put(piece.of(out.normed, place.of_all), normed)
        else:
            both, row = (out.normed, out.scales), place.of_all
            put_codes(both, piece, row, normed.astype(jnp.float32), place.put)


def totals(kind: NormKind, arrays: Arrays, place: Place) -> list[Float[Array, "..."]]:
    """Return the new stream of a row by pieces."""
    pieces = list(pieces_of(math.prod(arrays.x.shape[1:])))
    added: list[Any] = [None] * len(pieces)
    if arrays.added is not None:
        added = [place.load_added(arrays.added, piece, place.of_all) for piece in pieces]
    loaded = [load_piece(arrays.x, piece, place.row) for piece in pieces]
    each = zip(pieces, loaded, added, strict=True)
    return [_total(kind, arrays, piece, x, more) for piece, x, more in each]


def load_piece(ref: Any, piece: Piece, row: jax.Array | int) -> jax.Array:
    """Load a piece of a row from this device's memory."""
    return plgpu.load(piece.of(ref, row), layout=piece.layout, optimized=False)


def _total(
    kind: NormKind, arrays: Arrays, piece: Piece, x: jax.Array, added: jax.Array | None
) -> Float[Array, "..."]:
    """Return the new stream."""
    if added is None:
        return x
    added, dtype = added.astype(jnp.float32), x.dtype
    if arrays.bias is not None:
        bias = load_piece(arrays.bias, piece, 0).astype(jnp.float32)
        added = (added + bias).astype(dtype).astype(jnp.float32)
    if kind.scale != 1:
        added = (added * kind.scale).astype(dtype).astype(jnp.float32)
    return (x.astype(jnp.float32) + added).astype(dtype)


def _squares(pieces: list[Piece], rows: list[jax.Array]) -> Float32[Array, ""]:
    """Return the sum of squares of a row: piece on piece, then over threads."""
    by_kind: dict[int, jax.Array] = {}
    for piece, wide in zip(pieces, rows, strict=True):
        before = by_kind.get(piece.blocks)
        by_kind[piece.blocks] = wide * wide if before is None else before + wide * wide
    sums = (jnp.sum(each, axis=-1) for each in by_kind.values())
    return functools.reduce(
        jnp.add, (jnp.sum(each, axis=0) if each.ndim else each for each in sums)
    )


def _weighted(
    kind: NormKind, normed: jax.Array, weight: jax.Array, dtype: Any
) -> Float[Array, "..."]:
    """Return float32 numbers of unit size times the weight, as `models.layers.weighted`."""
    weight = weight.astype(jnp.float32)
    if kind.offset:
        weight = 1.0 + weight
    if kind.in_float32:
        return (normed * weight).astype(dtype)
    weight = weight.astype(dtype).astype(jnp.float32)
    return (normed.astype(dtype).astype(jnp.float32) * weight).astype(dtype)


def put_codes(
    out: tuple[Any, Any], piece: Piece, row: Any, values: jax.Array, put: Put = store
) -> None:
    """Write codes of a piece, in units of the largest number of each block, and these units."""
    codes, scales = out
    scale = code_scale(jnp.max(jnp.abs(values), axis=-1))
    if piece.blocks > 1:
        units = lax.broadcast_in_dim(scale, values.shape, [0])
        put(scales.at[pl.ds(piece.first, piece.blocks), row], scale)
    else:
        units = scale
        scales[piece.first, row] = scale
    put(piece.of(codes, row), (values / units).astype(FP8))
