"""What sums by a switch must get right before they serve; see `attention_cases`.

Held against XLA's all-reduces on the same devices, in a chain: what a device adds to the next sum
is made of what the last one gave, so that one that runs ahead overwrites what others still read.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pallas_kernels.norm_codes import NormKind
from pallas_kernels.sum_norm import Meeting, open_meetings, sum_norm
from pallas_kernels.sum_rows import Group, open_rows, sum_norm_rows, sum_whole
from pallas_kernels.sum_sizes import MOST_BLOCKS, MOST_ROWS, shots
from shiftjax.arch.formats import FORMATS
from shiftjax.device.expert_cases import wrong_rows
from shiftjax.device.mesh import devices_spec, joined_mesh, make_mesh, named
from shiftjax.models.layers import rms_norm
from shiftjax.models.sum_backend import SumBackend, SumShape
from shiftjax.parallel.grid import ALL_AXES, Device

AXES = "dp", *ALL_AXES
CHAIN = 24  # sums of a program
MOST_ERROR = 2e-2  # of a row, relative to its norm: every sum is rounded, in an order of its own
EPS = 1e-5
SHOWN = 16  # rows of a chain, or twice as many

# The next sum of a chain: (partial, x, weight, meeting) -> x and its norm.
Add = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, jax.Array]]


class SumStep(NamedTuple):
    """A chain of sums of some rows."""

    rows: int
    shots: int = 1

    @property
    def name(self) -> str:
        """For people."""
        how = "one shot" if self.shots == 1 else "two shots"
        return f"{CHAIN} sums of {self.rows} rows by the switch in {how}"


def sum_steps(shape: SumShape, num_devices: int) -> Iterator[SumStep]:
    """Yield chains of the fewest rows and of the most of one shot, and of two.

    The most of two are twice as many for a device as it has thread blocks: more are as those.
    """
    of_one = functools.partial(shots, devices=num_devices, width=shape.hidden)
    split = {"splits_rows": shape.splits_rows}
    yield SumStep(1)
    yield SumStep(max(rows for rows in range(1, MOST_ROWS + 1) if of_one(rows, **split) == 1))
    if shape.splits_rows:
        yield SumStep(num_devices, 2)
        yield SumStep(2 * MOST_BLOCKS * num_devices, 2)


def kernel(partial: jax.Array, x: jax.Array, weight: jax.Array, meeting: Any) -> Any:
    """Sum by the switch."""
    if isinstance(meeting, Group):
        return sum_norm_rows(partial, x, (weight, None), NormKind(EPS), meeting)
    return sum_norm(partial, x, (weight, None), NormKind(EPS), meeting)


def all_reduce(partial: jax.Array, x: jax.Array, weight: jax.Array, meeting: None) -> Any:
    """Sum as XLA does, which the kernel is held against."""
    del meeting
    total = x + jax.lax.psum(partial, AXES)
    return total, rms_norm(total, weight, EPS)


def _begin(x: jax.Array, num_shots: int) -> tuple[Any, jax.Array]:
    """Return where devices meet, and the stream that each has."""
    return open_rows(AXES, x) if num_shots == 2 else (open_meetings(AXES, *x.shape), x)


def _end(partial: jax.Array, x: jax.Array, meeting: Any) -> jax.Array:
    """Return the last stream, behind which nobody reads of the last sum."""
    if isinstance(meeting, Group):
        return sum_whole(partial, x, NormKind(EPS), meeting)
    return x + jax.lax.psum(partial, AXES)


def lowered(
    add: Add, shape: SumShape, step: SumStep, devices: Sequence[Device]
) -> jax.stages.Lowered:
    """Trace a chain, and lower it for devices: not in their order, which no switch asks for."""
    count, dtype = len(devices), FORMATS[shape.dtype].dtype
    size = step.rows, shape.hidden

    def chain(place: jax.Array) -> jax.Array:
        keys = jax.random.split(jax.random.key(0), 2)
        x, partial = (jax.random.normal(key, size).astype(dtype) for key in keys)
        weight = jnp.linspace(0.5, 1.5, shape.hidden).astype(dtype)
        meeting, x = _begin(x, step.shots) if add is kernel else (None, x)
        for _ in range(CHAIN):
            partial = jnp.roll(partial, place[0], axis=1) * jnp.asarray(0.5, dtype)
            x, normed = add(partial, x, weight, meeting)
            if isinstance(meeting, Meeting):
                meeting = meeting._replace(before=partial)
            partial = normed
        x = _end(partial, x, meeting)[:: max(1, step.rows // SHOWN - 1)]  # of every thread block
        return jax.lax.all_gather(x.astype(jnp.float32), AXES)[None]

    mesh, spec = mesh_of_sums(devices), devices_spec()
    traced_for = SumBackend("multimem").mesh(mesh) if add is kernel else mesh
    on_each = jax.shard_map(chain, mesh=traced_for, in_specs=spec, out_specs=spec, check_vma=False)
    places = jax.ShapeDtypeStruct((count,), jnp.int32, sharding=named(mesh, spec))
    return jax.jit(on_each).lower(places)


def mesh_of_sums(devices: Sequence[Device]) -> Mesh:
    """Return the mesh of all devices."""
    return joined_mesh([make_mesh(devices[::-1], 1, len(devices))])


def outputs_of(
    add: Add, shape: SumShape, step: SumStep, devices: Sequence[Device]
) -> Callable[[], np.ndarray]:
    """Compile a chain; what comes back runs it.

    It returns [devices, devices, rows, hidden]: the streams of all, as each has gathered them; of
    many rows some.
    """
    program = lowered(add, shape, step, devices).compile()
    places = np.arange(len(devices), dtype=np.int32)
    given = jax.device_put(places, named(mesh_of_sums(devices), devices_spec()))
    return lambda: np.asarray(program(given))


def wrong_with_sums(outputs: Sequence[np.ndarray], expected: np.ndarray) -> str | None:
    """Say what is wrong with the streams that a device has gathered, a run each."""
    if any((own != streams[0]).any() for streams in outputs for own in streams):
        return "devices come to different numbers"
    first = [streams[0] for streams in outputs]
    return wrong_rows(first, expected[0], MOST_ERROR, "a row of a chain of sums")
