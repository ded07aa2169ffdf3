"""The sum over devices, what it is added to, and the norm of that: one launch, by the switch.

A switch with multicast (NVLink SHARP) reads a number of all devices and returns their sum. Each
device reads the sums of all rows, and nothing is sent afterwards. So a device's part is read once
for each device: that is least for few rows (`most_rows`).

Devices meet once a sum. Each signals to all that its partial sums are written, by one store that
the switch copies, and waits until all have. Nobody waits for the end: what a device has read of its
peers it has read before it signals for the next sum. Until then their partial sums must stay, so
that the next sum is given those of the one before, as an operand that it does not read
(`Meeting.before`). XLA then keeps two buffers in turn. A program must end with a sum of XLA's that
depends on the last of these, because the next program writes where it likes.

The first sum must find all counters at zero: `open_meetings` is a launch before which XLA lets all
devices meet. Launches of `sum_norm` go without (`skip_device_barrier`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.mosaic import FP8

BLOCK = 128  # inputs that share a scale
LANES = 32
WARPS = 4
MOST_ROWS = 64  # a thread block each; all of them must be at work at once
# Of its partial sums that a device sends, in all: 5 us at the 450 GB/s of NVLink on Hopper. What
# is larger has fewer bytes to move as XLA does it, each device its share and then all of them.
MOST_SENT = 2 << 20
MOST_TILES = 16  # of a row, in registers
LARGEST = float(jnp.finfo(FP8).max)
LEAST = 1e-20  # of a block: what is smaller becomes zeros


class Norm(NamedTuple):
    """Root-mean-square norm, and what comes before and after it: what is compiled in."""

    eps: float
    scale: float = 1.0  # of what is added to the stream, rounded once
    in_float32: bool = False  # the norm is rounded after the weight is applied, not before
    has_offset: bool = False  # the weight is 1 less than what it stands for
    has_codes: bool = False  # the result are codes, and a scale for each block of inputs


class Meeting(NamedTuple):
    """Where the devices of a sum meet."""

    axes: tuple[str, ...]  # all of the mesh: a switch adds up what all of its devices have
    counters: Any  # of `open_meetings`
    before: Float[Array, "rows width"]  # partial sums that peers may still read


class Refs(NamedTuple):
    """The kernel's arrays; rows are cut into blocks of inputs. None is what this call lacks."""

    partial: Any  # [rows, blocks, BLOCK]
    x: Any
    weight: Any  # [norms, blocks, BLOCK]
    nth: Any  # [1]: which norm; None: the only one
    before: Any


def wrong_sum(rows: int, width: int, dtype: Any) -> str | None:
    """Return why there is no kernel for such sums; None: there is."""
    if dtype != jnp.bfloat16:
        return f"activations are {jnp.dtype(dtype).name}, not bfloat16"
    if rows > MOST_ROWS:
        return f"{rows} rows are more than {MOST_ROWS}"
    if width % (WARPS * BLOCK):
        return f"a hidden size of {width} is not a multiple of {WARPS * BLOCK}"
    if width // (BLOCK * _blocks_of_tile(width)) > MOST_TILES:
        return f"a hidden size of {width} is more than the registers of a thread block hold"
    return None


def most_rows(devices: int, width: int) -> int:
    """Return of how many bfloat16 rows a sum may be."""
    return min(MOST_ROWS, MOST_SENT // (devices * 2 * width))


def open_meetings(axes: tuple[str, ...], rows: int, width: int) -> Meeting:
    """Return where devices meet for the first sum, so large; inside `shard_map`, from jax 0.12 on.

    Two launches: the zeros are a kernel's, because XLA would let other zeros of this shape be the
    same array (`plgpu.alloc_semaphore`). Before the second XLA lets the devices meet.
    """
    counter = plgpu.SemaphoreType.REGULAR(()).get_array_aval().dtype
    counters = jax.new_ref(lax.convert_element_type(_zeros(), counter), memory_space=plgpu.GMEM)

    def kernel(counters: Any, nothing: Any) -> None:
        del nothing  # it is never read; that it is made before the first sum is what counts
        _meet(counters.at[0], axes)

    nothing = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, width), jnp.bfloat16),
        grid=(1,),
        grid_names=("once",),
        kernel_name="open_meetings",
    )(counters)
    return Meeting(axes, counters, nothing)


def _zeros() -> jax.Array:
    def kernel(zeros: Any) -> None:
        for i in range(MOST_ROWS):
            zeros[i] = jnp.int32(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((MOST_ROWS,), jnp.int32),
        grid=(1,),
        grid_names=("once",),
        kernel_name="zero_counters",
    )()


def sum_norm(
    partial: Float[Array, "rows width"],
    x: Float[Array, "rows width"],
    weight: tuple[Float[Array, " widths"], Int32[Array, ""] | None],
    norm: Norm,
    meeting: Meeting | None,
    interpret: Any = False,
) -> tuple[Float[Array, "rows width"], Float[Array, "rows width"], *tuple[Any, ...]]:
    """Return the stream `x` with the sum of all devices' `partial`, and its norm.

    The norm comes as numbers, or as codes [rows, width] and scales [blocks, rows]. `weight` is the
    norm's, or those of several norms one after the other, and which it is: XLA does not give memory
    that peers may read to a call before which it slices an operand. Without a `meeting` the sum is
    this device's part alone: so the rest can be run where there is no switch. Raises ValueError for
    what `wrong_sum` names.
    """
    rows, width = x.shape
    if words := wrong_sum(rows, width, x.dtype):
        raise ValueError(f"sum_norm: {words}")
    blocks = width // BLOCK
    own, stream = (one.reshape(rows, blocks, BLOCK) for one in (partial, x))
    cut, nth = weight[0].reshape(-1, blocks, BLOCK), weight[1]
    nth = None if nth is None else nth.reshape(1)
    before = None if meeting is None else meeting.before
    leaves, tree = jax.tree.flatten(Refs(own, stream, cut, nth, before))
    given = () if meeting is None else (meeting.counters,)
    shape = rows, blocks, BLOCK
    out: tuple[Any, ...] = (jax.ShapeDtypeStruct(shape, x.dtype),)
    if norm.has_codes:
        scale = jax.ShapeDtypeStruct((blocks, rows), jnp.float32)
        out = *out, jax.ShapeDtypeStruct(shape, FP8), scale
    else:
        out = *out, *out
    axes = None if meeting is None else meeting.axes
    total, values, *scales = plgpu.kernel(
        functools.partial(_kernel, tree, norm, axes),
        out_type=out,
        grid=(rows,),
        grid_names=("row",),
        kernel_name="sum_norm",
        compiler_params=plgpu.CompilerParams(skip_device_barrier=True),
        interpret=interpret,
    )(*leaves, *given)
    return total.reshape(x.shape), values.reshape(x.shape), *scales


def _kernel(tree: Any, norm: Norm, axes: tuple[str, ...] | None, *refs: Any) -> None:
    num_out = 3 if norm.has_codes else 2
    out, ins, row = refs[-num_out:], list(refs[:-num_out]), lax.axis_index("row")
    load_sum = _load
    if axes is not None:
        _meet(ins.pop().at[row], axes)
        load_sum = functools.partial(_sum_of_all, axes)
    arrays = jax.tree.unflatten(tree, ins)
    tiles, squares = _added(arrays, load_sum, norm, out[0], row)
    blocks, nth = arrays.x.shape[1], 0 if arrays.nth is None else arrays.nth[0]
    gain = lax.rsqrt(squares * (1 / (blocks * BLOCK)) + norm.eps)
    for here, tile in tiles:
        weight = _load(arrays.weight.at[nth, here]).astype(jnp.float32)
        if norm.has_offset:
            weight = 1.0 + weight
        normed = tile * gain
        if not norm.in_float32:
            normed, weight = (_rounded(one, arrays.x.dtype) for one in (normed, weight))
        normed = (normed * weight).astype(arrays.x.dtype)
        if norm.has_codes:
            _store_codes(normed, out[1:], here, row)
        else:
            _store(out[1].at[row, here], normed)


def _meet(counter: Any, axes: tuple[str, ...]) -> None:
    """Signal to all devices, this one too, and wait for as many signals."""
    plgpu.semaphore_signal_multicast(counter, collective_axes=axes)
    pl.semaphore_wait(counter, _num_devices(axes))


def _num_devices(axes: tuple[str, ...]) -> int:
    return functools.reduce(lambda number, axis: number * lax.axis_size(axis), axes, 1)


def _added(
    arrays: Refs, load_sum: Callable[[Any], jax.Array], norm: Norm, total: Any, row: jax.Array
) -> tuple[list[tuple[Any, jax.Array]], jax.Array]:
    """Store the stream with what is added to it; return it in tiles, and the sum of its squares.

    Every step is rounded as the layers round it.
    """
    blocks, dtype = arrays.x.shape[1], arrays.x.dtype
    size = _blocks_of_tile(blocks * BLOCK)
    places = [pl.ds(i * size, size) for i in range(blocks // size)]
    # All loads come before the first store: they are under way together.
    sums = [load_sum(arrays.partial.at[row, here]) for here in places]
    own = [_load(arrays.x.at[row, here]) for here in places]
    tiles, squares = [], jnp.float32(0)
    for here, added, stream in zip(places, sums, own, strict=True):
        wide = added.astype(jnp.float32)
        if norm.scale != 1:
            wide = _rounded(wide * norm.scale, dtype)
        both = (stream.astype(jnp.float32) + wide).astype(dtype)
        _store(total.at[row, here], both)
        tile = both.astype(jnp.float32)
        squares = squares + jnp.sum(jnp.sum(tile * tile, axis=1), axis=0)
        tiles.append((here, tile))
    return tiles, squares


def _sum_of_all(axes: tuple[str, ...], ref: Any) -> jax.Array:
    """Load a tile of what all devices have together."""
    both = plgpu.multimem_load_reduce(ref, collective_axes=axes, reduction_op="add")
    return plgpu.layout_cast(both, _layout(ref.shape[0]))


def _load(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=_layout(ref.shape[0]), optimized=False)


def _store(ref: Any, values: jax.Array) -> None:
    plgpu.store(ref, values, optimized=False)


def _rounded(values: jax.Array, dtype: Any) -> jax.Array:
    return values.astype(dtype).astype(jnp.float32)


def _store_codes(normed: jax.Array, out: tuple[Any, Any], here: Any, row: jax.Array) -> None:
    """Store codes and scales of a tile: the largest of a block gets the largest code."""
    codes, scales = out
    wide = normed.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=1), LEAST) * (1 / LARGEST)  # as the layers do
    code = wide / lax.broadcast_in_dim(scale, wide.shape, [0])
    _store(codes.at[row, here], code.astype(FP8))
    _store(scales.at[here, row], scale)


def _blocks_of_tile(width: int) -> int:
    """Return how many blocks a thread block has in registers as one tile."""
    return 2 * WARPS if width % (2 * WARPS * BLOCK) == 0 else WARPS


def _layout(blocks: int) -> Any:
    """Neighbouring numbers in a thread, 16 bytes or 8; a block in half a warp, or a whole one."""
    if blocks == WARPS:
        tiling = plgpu.Tiling(((WARPS, BLOCK), (BLOCK // LANES,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    tiling = plgpu.Tiling(((2 * WARPS, BLOCK), (2, BLOCK), (2 * BLOCK // LANES,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
