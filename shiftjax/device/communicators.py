"""What groups of devices need to talk to each other, made before the memory is given away.

A GPU backend makes a communicator, with buffers of its own, when a set of devices first runs a
collective together (Flying Serving's prepared communicators, F10). A fleet has many such sets: the
devices of every group, in every mode split by weights and by tokens, and those that exchange what
they cache. Here each set runs one sum of a number, those of the widest groups first: nobody waits
for a communicator while serving, and what is free afterwards is what pools can have.
"""

from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from shiftjax.device.mesh import exchange_mesh, mesh_of, named, replicated_spec
from shiftjax.device.step import StepDef
from shiftjax.parallel.grid import ALL_AXES, SHARE_AXIS, TOKEN_AXES, WEIGHT_AXES

EXCHANGE_AXIS = "exchange"


def make_communicators(
    steps: Iterable[StepDef], widths: Iterable[int], sizes: Iterable[int] = ()
) -> int:
    """Run a sum over every set of devices that steps or moves need; returns how many there are.

    `sizes` are tokens of steps, by which these share experts among more or fewer devices.
    """
    widest_first = sorted(steps, key=lambda step: -step.layout.sp)
    done: set[tuple] = set()
    for step in widest_first:
        for mesh, axes in _sets(step, widths, sizes):
            members = _members(mesh, axes)
            if members not in done and any(len(each) > 1 for each in members):
                done.add(members)
                _sum_over(mesh, axes)
    return len(done)


def _sets(
    step: StepDef, widths: Iterable[int], sizes: Iterable[int]
) -> Iterator[tuple[Mesh, tuple[str, ...]]]:
    """Meshes of a group, and the axes along which its devices talk."""
    for mode in step.weights.modes:
        for axes in (WEIGHT_AXES, TOKEN_AXES, ALL_AXES):
            yield mesh_of(step.mesh, mode), axes
        for used in {step.experts_in(mode, tokens) for tokens in sizes}:
            yield mesh_of(step.mesh, mode, used), (SHARE_AXIS,)
    for narrow in widths:
        if narrow < step.layout.sp:
            yield exchange_mesh(step.mesh, step.layout.sp // narrow), (EXCHANGE_AXIS,)


def _members(mesh: Mesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The devices that talk to each other along some axes, set by set."""
    places = [mesh.axis_names.index(axis) for axis in axes]
    rest = [i for i in range(mesh.devices.ndim) if i not in places]
    size = 1
    for place in places:
        size *= mesh.devices.shape[place]
    rows = mesh.devices.transpose(*rest, *places).reshape(-1, size)
    return tuple(tuple(device.id for device in row) for row in rows)


def _sum_over(mesh: Mesh, axes: tuple[str, ...]) -> None:
    everywhere = replicated_spec()
    summed = jax.shard_map(
        lambda x: jax.lax.psum(x, axes),
        mesh=mesh,
        in_specs=everywhere,
        out_specs=everywhere,
        check_vma=False,
    )
    one = jax.device_put(jnp.ones(8, jnp.float32), named(mesh, everywhere))
    jax.block_until_ready(jax.jit(summed)(one))
