"""Where arrays live: the mesh of a group in each mode, and every PartitionSpec of the engine.

A mesh has axes `("tp", "shift", "deal", "share", "sp")`: `tp` splits the weights as they are
stored, `shift` and `deal` split them further, `share` and `sp` split tokens. Experts are used as
in a mode of their own: `tp`, `shift` and `share` split them. The flat order is that of the places
`j = t * SP + s` of `parallel/grid.py` in every mode, so for (SP=4, TP=2), with experts over all,

    base   (2, 1, 1, 4, 1)      sp2   (2, 2, 1, 2, 1)      shift   (2, 4, 1, 1, 1)

are one list of devices in three shapes. With experts as in base they are (2, 1, 1, 1, 4),
(2, 1, 2, 1, 2) and (2, 1, 4, 1, 1). Heads and KV cache are split over all axes, so
block `j` of the heads is on device j, whatever the mode: a step of any mode finds the cache that
a step of another has written. For (SP=3, TP=2), with device (s, t) the (s * TP + t)-th that was
given, that order is 0 2 4 1 3 5 (Shift Parallelism, arXiv 2509.16495, section 3.3, prints it).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shiftjax.arch.weights import Weight
from shiftjax.parallel.grid import (
    ALIKE_AXES,
    ALL_AXES,
    EXPERT_AXES,
    STORED_AXES,
    TOKEN_AXES,
    WEIGHT_AXES,
    Device,
    Grid,
    Group,
    Mode,
    axis_sizes,
)
from shiftjax.parallel.layout import Layout


def make_mesh(devices: Sequence[Device], sp: int, tp: int) -> Mesh:
    """Return the mesh of one group in base mode, on the first `sp * tp` devices."""
    return group_mesh(devices, Grid(tp, sp), Group(0, sp))


def group_mesh(devices: Sequence[Device], grid: Grid, group: Group) -> Mesh:
    """Return the mesh of a group in base mode."""
    base = Mode(group.width, group.width)
    places = [devices[i] for i in grid.devices_of(group)]
    return _mesh(places, *axis_sizes(base, base, grid.tp))


def joined_mesh(meshes: Sequence[Mesh]) -> Mesh:
    """Return the mesh of equal groups together along an axis `dp`, in base mode as they are."""
    places = [device for mesh in meshes for device in mesh.devices.flat]
    return _mesh(places, len(meshes), *meshes[0].devices.shape)


def rows_mesh(devices: Sequence[Device]) -> Mesh:
    """Return the mesh of devices that each hold a whole model: as many groups of one."""
    return joined_mesh([make_mesh([device], 1, 1) for device in devices])


def on_each(
    run: Callable[..., jax.Array], devices: Sequence[Device], *arguments: Any
) -> Callable[[], np.ndarray]:
    """Compile a function, the same on every device; what comes back runs it: [devices, ...].

    Numbers become codes where it says so: without the option XLA on GPUs leaves such steps out.
    """
    mesh = rows_mesh(devices)
    given = jax.device_put(arguments, named(mesh, replicated_spec()))
    mapped = jax.shard_map(
        lambda *given: run(*given)[None],
        mesh=mesh,
        in_specs=(replicated_spec(),) * len(arguments),
        out_specs=devices_spec(),
        check_vma=False,
    )
    program = jax.jit(mapped).lower(*given).compile({"xla_allow_excess_precision": False})
    return lambda: np.asarray(program(*given))


def mesh_of(mesh: Mesh, mode: Mode, experts: Mode | None = None) -> Mesh:
    """Return the mesh of the same group in another mode: the same devices in the same order.

    `experts` is the mode as which its steps use experts; None: SHIFT.
    """
    experts = experts or Mode(mode.width, 1)
    return _mesh(mesh.devices.flat, *axis_sizes(mode, experts, mesh.shape["tp"]))


def exchange_mesh(mesh: Mesh, ways: int) -> Mesh:
    """Return the mesh of a group on which `ways` neighbours exchange what they cache."""
    devices = np.array(list(mesh.devices.flat), dtype=object)
    types = (AxisType.Auto,) * 2
    return Mesh(devices.reshape(-1, ways), ("same", "exchange"), axis_types=types)


def exchange_spec() -> P:
    """Return the spec of a KV pool on such a mesh."""
    return P(None, ("same", "exchange"))


def _mesh(places: Iterable[Device], *sizes: int) -> Mesh:
    names = ("dp", *ALL_AXES)[-len(sizes) :]
    grid = np.array(list(places), dtype=object).reshape(sizes)
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(sizes))


def weight_spec(weight: Weight, split: tuple[str, ...] = WEIGHT_AXES) -> P:
    """Return the spec of a weight, split over the mesh axes `split`.

    What computes logit rows alone (LM head, late layers) is split over all devices in every mode:
    a step has few rows, so the cost is the reading of the weight, and 1/P of it is least. Experts
    are split as the step says, whose mesh it is.
    """
    if weight.in_shift:
        split = ALL_AXES
    elif weight.split == "experts":
        split = EXPERT_AXES
    return P(*(axis and split for axis in weight.axes))


def stored_sharding(weight: Weight, layout: Layout, mesh: Mesh) -> NamedSharding:
    """Return where a weight is stored on the mesh of a group, or of some along an axis `dp`."""
    mode, base = layout.stored_in(weight), layout.base
    split = {layout.shift: ALL_AXES, base: STORED_AXES}.get(mode, EXPERT_AXES)
    if split == EXPERT_AXES:
        mesh = _reshaped(mesh, axis_sizes(base, mode, layout.tp))
    return NamedSharding(mesh, P(*(axis and split for axis in weight.axes)))


def on_group(sharding: NamedSharding, mesh: Mesh) -> NamedSharding:
    """Return the same sharding on the devices of one group, also a wider one of a fleet."""
    own = sharding.mesh
    assert isinstance(own, Mesh)
    sizes = own.devices.shape[-len(ALL_AXES) :]
    is_as_large = math.prod(sizes) == mesh.devices.size
    return NamedSharding(_reshaped(mesh, sizes) if is_as_large else mesh, sharding.spec)


def _reshaped(mesh: Mesh, sizes: tuple[int, ...]) -> Mesh:
    groups = mesh.devices.shape[: -len(ALL_AXES)]
    if mesh.devices.shape == (*groups, *sizes):
        return mesh
    return _mesh(mesh.devices.flat, *groups, *sizes)


def view_spec() -> P:
    """Return the spec of a weight whose first dimension a mode splits."""
    return P(WEIGHT_AXES)


def pool_spec() -> P:
    """Return the spec of a KV pool `[blocks, devices * elements of a block]`, in all modes."""
    return P(None, ALL_AXES)


def extent_spec() -> P:
    """Return the spec of blocks on the host, `[layers * entries, rows, tokens, width]`."""
    return P(None, ALL_AXES)


def vocab_spec() -> P:
    """Return the spec of arrays `[rows, vocabulary]`: logits, and tables of what is sampled."""
    return P(None, ALL_AXES)


def hidden_spec() -> P:
    """Return the spec of hidden states `[tokens, hidden]` between stages: all devices split them.

    Tokens as the mode does, columns as it splits weights.
    """
    return P(TOKEN_AXES, WEIGHT_AXES)


def counts_spec() -> P:
    """Return the spec of pairs by expert `[devices with the same experts, layers, experts]`."""
    return P(ALIKE_AXES, None, EXPERT_AXES)


def chosen_spec(*, in_parts: bool) -> P:
    """Return the spec of the experts that tokens chose `[tokens, layers, k]`: split as tokens are.

    `in_parts`: the devices that split a weight split their tokens among themselves, too.
    """
    return P((*TOKEN_AXES, *WEIGHT_AXES) if in_parts else TOKEN_AXES)


def packed_spec() -> P:
    """Return the spec of packed texts `[3, rows, width]`: rows over all devices of all groups."""
    return P(None, ("dp", *ALL_AXES))


def embeddings_spec() -> P:
    """Return the spec of the embeddings of packed texts `[rows, slots, hidden]`."""
    return P(("dp", *ALL_AXES))


def devices_spec() -> P:
    """Return the spec of an array whose first dimension is the devices of all groups."""
    return P(("dp", *ALL_AXES))


def replicated_spec() -> P:
    """Return the spec of an array that every device holds whole."""
    return P()


def is_spread(mesh: Mesh) -> bool:
    """Whether devices of a mesh belong to other hosts, too."""
    return len({device.process_index for device in mesh.devices.flat}) > 1


def own_devices(devices: Iterable[Device]) -> list[Device]:
    """Those of some devices that are this host's."""
    return [device for device in devices if device.process_index == jax.process_index()]


def put(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Put values that every host has on devices: all on one host, else each host its part.

    `jax.device_put` compares what the hosts have, a collective that no follower would expect.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(values, sharding)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def named(mesh: Mesh, spec: P) -> NamedSharding:
    """Bind a spec of this file to a mesh."""
    return NamedSharding(mesh, spec)
