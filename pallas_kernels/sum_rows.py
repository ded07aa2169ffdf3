"""The sum over devices in two shots, with the addition and the norm of a row on one device alone.

Each device has the residual stream of its own rows: as many as the others, in the order of devices.
It reads the sums of these rows from the switch, adds, norms, and stores the norm on all devices by
one store that the switch copies: of codes half the bytes. So every row is normed once, and a device
sends its part once, not once for each device (`sum_norm.py`).

Devices meet twice in a launch, each time as in `sum_norm.py`. At first each signals that its
partial sums are written, and that what it read of the last norm is read: a launch follows all that
came before it. In the end each signals that its rows are stored, and waits for those of all. A
counter of its own for each meeting keeps a quick device's next signal from being taken for a slow
one's last. After a launch nobody reads or writes its memory: buffers are free at once.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.mosaic import FP8, store
from pallas_kernels.norm_codes import (
    BLOCK,
    Arrays,
    NormKind,
    Outputs,
    Place,
    load_piece,
    norm_row,
    pieces_of,
    totals,
)
from pallas_kernels.sum_norm import meet, num_devices, sum_of_all
from pallas_kernels.sum_sizes import MOST_BLOCKS, blocks_of, wrong_rows

Rows = Float[Array, "rows width"]
Own = Float[Array, "own_rows width"]
MEETINGS = 2  # of a launch, each with a counter for every thread block


class Group(NamedTuple):
    """The devices that share the rows of a sum."""

    axes: tuple[str, ...]  # all of the mesh
    counters: Any  # of `open_rows`


class Alone(NamedTuple):
    """One device of several that are not there: it computes its rows of what is given as summed."""

    rank: int
    devices: int


class Given(NamedTuple):
    """What a kernel is given beside counters."""

    arrays: Arrays
    nth: Any  # [1]: which of the weights; None: the only one


def open_rows(axes: tuple[str, ...], x: Rows) -> tuple[Group, Own]:
    """Return the group, and this device's rows of the stream; inside `shard_map`, from jax 0.12 on.

    Two launches: see `sum_norm.open_meetings`.
    """
    counter = plgpu.SemaphoreType.REGULAR(()).get_array_aval().dtype
    counters = jax.new_ref(lax.convert_element_type(_zeros(), counter), memory_space=plgpu.GMEM)
    (rows, width), devices = x.shape, num_devices(axes)
    own, blocks = rows // devices, blocks_of(rows, devices)

    def kernel(x: Any, counters: Any, out: Any) -> None:
        meet(counters.at[lax.axis_index("block")], axes)
        first = _rank(axes) * own

        def copy(row: Any) -> None:
            for piece in pieces_of(width):
                store(piece.of(out, row), load_piece(x, piece, first + row))

        _each_row(own, blocks, copy)

    cut = x.reshape(rows, -1, BLOCK)
    out = jax.ShapeDtypeStruct((own, *cut.shape[1:]), x.dtype)
    taken = _kernel_of(kernel, out, blocks, "open_rows")(cut, counters)
    return Group(axes, counters), taken.reshape(own, width)


def _zeros() -> jax.Array:
    def kernel(zeros: Any) -> None:
        for i in range(MEETINGS * MOST_BLOCKS):
            zeros[i] = jnp.int32(0)

    out = jax.ShapeDtypeStruct((MEETINGS * MOST_BLOCKS,), jnp.int32)
    return _kernel_of(kernel, out, 1, "zero_counters")()


def sum_norm_rows(
    partial: Rows,
    x: Own,
    weight: tuple[Float[Array, " widths"], Int32[Array, ""] | None],
    kind: NormKind,
    group: Group | Alone,
    interpret: Any = False,
) -> tuple[Own, Rows, *tuple[Any, ...]]:
    """Return this device's rows of the new stream, and the norm of all rows.

    The norm comes as numbers, or as codes [rows, width] and scales [blocks, rows]; of a device that
    is `Alone`, nothing but its own rows of it is written. `weight` as in `sum_norm`. Raises
    ValueError for what `wrong_rows` names.
    """
    (rows, width), own = partial.shape, x.shape[0]
    _check(partial, x, group)
    stream, whole = x.reshape(own, -1, BLOCK), partial.reshape(rows, -1, BLOCK)
    cut, nth = weight[0].reshape(-1, width // BLOCK, BLOCK), weight[1]
    given = Given(Arrays(stream, whole, None, cut), None if nth is None else nth.reshape(1))
    made = Outputs(_like(stream), _like(whole), None)
    if kind.codes:
        scales = jax.ShapeDtypeStruct((width // BLOCK, rows), jnp.float32)
        made = Outputs(_like(stream), jax.ShapeDtypeStruct(whole.shape, FP8), scales)

    def of_row(given: Given, out: Outputs, place: Place) -> None:
        nth = 0 if given.nth is None else given.nth[0]
        norm_row(kind, given.arrays, out, place._replace(nth=nth))

    total, normed, *scales = _launch(of_row, (given, made), group, interpret)
    return total.reshape(x.shape), normed.reshape(partial.shape), *scales


def sum_whole(
    partial: Rows, x: Own, kind: NormKind, group: Group | Alone, interpret: Any = False
) -> Rows:
    """Return all rows of the new stream: what ends a program, or what has no norm."""
    rows, own = partial.shape[0], x.shape[0]
    _check(partial, x, group)
    stream, whole = x.reshape(own, -1, BLOCK), partial.reshape(rows, -1, BLOCK)

    def of_row(given: Given, out: Any, place: Place) -> None:
        pieces = pieces_of(partial.shape[1])
        for piece, total in zip(pieces, totals(kind, given.arrays, place), strict=True):
            place.put(piece.of(out, place.of_all), total)

    given = Given(Arrays(stream, whole, None, None), None)
    (total,) = _launch(of_row, (given, _like(whole)), group, interpret)
    return total.reshape(partial.shape)


OfRow = Callable[[Given, Any, Place], None]


def _launch(
    of_row: OfRow, both: tuple[Given, Any], group: Group | Alone, interpret: Any
) -> tuple[jax.Array, ...]:
    """Run a kernel over this device's rows, between two meetings; `both`: input and output."""
    given, made = both
    own = given.arrays.x.shape[0]
    devices = group.devices if isinstance(group, Alone) else num_devices(group.axes)
    blocks = blocks_of(own * devices, devices)
    leaves, tree = jax.tree.flatten(given)
    shapes, out_tree = jax.tree.flatten(made)

    def kernel(*refs: Any) -> None:
        given = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        out = jax.tree.unflatten(out_tree, refs[-out_tree.num_leaves :])

        def do_rows(place: Place, first: Any) -> None:
            def do(row: Any) -> None:
                of_row(given, out, place._replace(row=row, of_all=first + row))

            _each_row(own, blocks, do)

        if isinstance(group, Alone):
            do_rows(Place(0, 0, load_piece, store), group.rank * own)
            return
        axes, counters, block = group.axes, refs[tree.num_leaves], lax.axis_index("block")
        of_all = functools.partial(sum_of_all, axes), functools.partial(_to_all, axes)
        meet(counters.at[block], axes)
        do_rows(Place(0, 0, *of_all), _rank(axes) * own)
        meet(counters.at[MOST_BLOCKS + block], axes)

    counters = () if isinstance(group, Alone) else (group.counters,)
    name = "sum_norm_rows" if len(shapes) > 1 else "sum_rows"
    return _kernel_of(kernel, tuple(shapes), blocks, name, interpret)(*leaves, *counters)


def _kernel_of(kernel: Any, out: Any, blocks: int, name: str, interpret: Any = False) -> Any:
    return plgpu.kernel(
        kernel,
        out_type=out,
        grid=(blocks,),
        grid_names=("block",),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(skip_device_barrier=name.startswith("sum")),
        interpret=interpret,
    )


def _each_row(own: int, blocks: int, do: Callable[[Any], None]) -> None:
    """Do a thread block's rows, one after the other."""
    block = lax.axis_index("block")
    if own == blocks:
        do(block)
        return

    def body(i: Any, carry: None) -> None:
        do(block + i * blocks)
        return carry

    lax.fori_loop(0, own // blocks, body, None)


def _to_all(axes: tuple[str, ...], ref: Any, values: jax.Array) -> None:
    plgpu.multimem_store(values, ref, axes)


def _rank(axes: tuple[str, ...]) -> Any:
    """Return which of the devices this is."""
    rank = jnp.int32(0)
    for axis in axes:
        rank = rank * lax.axis_size(axis) + lax.axis_index(axis)
    return rank


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _check(partial: jax.Array, x: jax.Array, group: Group | Alone) -> None:
    devices = group.devices if isinstance(group, Alone) else num_devices(group.axes)
    words = wrong_rows(partial.shape[0], devices, math.prod(x.shape[1:]))
    if partial.dtype != jnp.bfloat16:
        words = f"activations are {partial.dtype.name}, not bfloat16"
    if words:
        raise ValueError(f"sum_norm_rows: {words}")
