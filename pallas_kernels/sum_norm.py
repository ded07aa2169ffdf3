"""The sum over devices, what it is added to, and the norm of that: one launch, by the switch.

A switch with multicast (NVLink SHARP) reads a number of all devices and returns their sum. Each
device reads the sums of all rows, and nothing is sent afterwards. So a device's part is read once
for each device: that is least for few rows (`sum_sizes.most_rows`).

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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.mosaic import FP8, store
from pallas_kernels.norm_codes import (
    BLOCK,
    Arrays,
    NormKind,
    Outputs,
    Piece,
    Place,
    load_piece,
    norm_row,
)
from pallas_kernels.sum_sizes import MOST_ROWS, wrong_size


class Meeting(NamedTuple):
    """Where the devices of a sum meet."""

    axes: tuple[str, ...]  # all of the mesh: a switch adds up what all of its devices have
    counters: Any  # of `open_meetings`
    before: Float[Array, "rows width"]  # partial sums that peers may still read


class Given(NamedTuple):
    """What a kernel is given beside counters."""

    arrays: Arrays
    nth: Any  # [1]: which of the weights; None: the only one
    before: Any  # which it does not read


def wrong_sum(rows: int, width: int, dtype: Any) -> str | None:
    """Return why there is no kernel for such sums; None: there is."""
    if dtype != jnp.bfloat16:
        return f"activations are {jnp.dtype(dtype).name}, not bfloat16"
    return wrong_size(rows, width)


def open_meetings(axes: tuple[str, ...], rows: int, width: int) -> Meeting:
    """Return where devices meet for the first sum, so large; inside `shard_map`, from jax 0.12 on.

    Two launches: the zeros are a kernel's, because XLA would let other zeros of this shape be the
    same array (`plgpu.alloc_semaphore`). Before the second XLA lets the devices meet.
    """
    counter = plgpu.SemaphoreType.REGULAR(()).get_array_aval().dtype
    counters = jax.new_ref(lax.convert_element_type(_zeros(), counter), memory_space=plgpu.GMEM)

    def kernel(counters: Any, nothing: Any) -> None:
        del nothing  # it is never read; that it is made before the first sum is what counts
        meet(counters.at[0], axes)

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
    kind: NormKind,
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
    leaves, tree = jax.tree.flatten(Given(Arrays(stream, own, None, cut), nth, before))
    counters = () if meeting is None else (meeting.counters,)
    like = jax.ShapeDtypeStruct(stream.shape, x.dtype)
    made = Outputs(like, like, None)
    if kind.codes:
        scales = jax.ShapeDtypeStruct((blocks, rows), jnp.float32)
        made = Outputs(like, jax.ShapeDtypeStruct(stream.shape, FP8), scales)
    shapes, out_tree = jax.tree.flatten(made)
    axes = None if meeting is None else meeting.axes
    total, normed, *scales = plgpu.kernel(
        functools.partial(_kernel, (tree, out_tree), kind, axes),
        out_type=tuple(shapes),
        grid=(rows,),
        grid_names=("row",),
        kernel_name="sum_norm",
        compiler_params=plgpu.CompilerParams(skip_device_barrier=True),
        interpret=interpret,
    )(*leaves, *counters)
    return total.reshape(x.shape), normed.reshape(x.shape), *scales


def _kernel(
    trees: tuple[Any, Any], kind: NormKind, axes: tuple[str, ...] | None, *refs: Any
) -> None:
    tree, out_tree = trees
    ins, load_sum = list(refs[: -out_tree.num_leaves]), load_piece
    if axes is not None:
        meet(ins.pop().at[lax.axis_index("row")], axes)
        load_sum = functools.partial(sum_of_all, axes)
    given = jax.tree.unflatten(tree, ins)
    nth = 0 if given.nth is None else given.nth[0]
    out = jax.tree.unflatten(out_tree, refs[-out_tree.num_leaves :])
    row = lax.axis_index("row")
    norm_row(kind, given.arrays, out, Place(row, row, load_sum, store, nth))


def meet(counter: Any, axes: tuple[str, ...]) -> None:
    """Signal to all devices, this one too, and wait for as many signals."""
    plgpu.semaphore_signal_multicast(counter, collective_axes=axes)
    pl.semaphore_wait(counter, num_devices(axes))


def num_devices(axes: tuple[str, ...]) -> int:
    """Return how many devices axes of the mesh have."""
    return functools.reduce(lambda number, axis: number * lax.axis_size(axis), axes, 1)


def sum_of_all(axes: tuple[str, ...], ref: Any, piece: Piece, row: jax.Array) -> jax.Array:
    """Load a piece of what all devices have together."""
    both = plgpu.multimem_load_reduce(piece.of(ref, row), collective_axes=axes, reduction_op="add")
    return plgpu.layout_cast(both, piece.layout)
