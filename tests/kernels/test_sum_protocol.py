"""How devices meet for sums of the switch: every order of what they do, for few devices.

The steps of a launch are read off the traced kernel. A model of the devices then takes them in
every order that is possible: signals arrive one by one, whenever they like. No order may let a
device read partial sums that are not of this sum, or leave one waiting for ever.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from launch_steps import equations, inner, launch_in

from pallas_kernels.norm_codes import NormKind
from pallas_kernels.sum_norm import Meeting, open_meetings, sum_norm

pytestmark = pytest.mark.skipif(
    not hasattr(plgpu, "alloc_semaphore"), reason="counters of several launches need jax 0.12"
)
AXES = "unit", "device"
SUMS = 3  # of a program
PROGRAMS = 2  # one after the other, with the same memory
SHAPE = 2, 1024


class Launch(NamedTuple):
    """What a thread block of a sum does with other devices."""

    steps: tuple[tuple[str, int], ...]  # ("signal", 1), ("wait", n), ("read", 0), in their order
    buffers: int  # that partial sums have in turn


class State(NamedTuple):
    """Where all devices are."""

    at: tuple[int, ...]  # each device's step
    counter: tuple[int, ...]
    coming: tuple[int, ...]  # signals that have not arrived
    memory: tuple[tuple[int, ...], ...]  # which sum each buffer of each device is of


def traced(devices: int) -> Launch:
    """Return what a sum is, as it is traced for so many devices."""

    def three(*partials: jax.Array) -> jax.Array:
        meeting, x = open_meetings(AXES, *SHAPE), partials[0]
        for partial in partials:
            x, _ = sum_norm(partial, x, (x[0], None), NormKind(1e-5), meeting)
            meeting = Meeting(AXES, meeting.counters, partial)
        return jax.lax.psum(x, AXES)

    mesh = AbstractMesh((1, devices), AXES)
    on_each = jax.shard_map(three, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    partials = (jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16),) * SUMS
    traced = jax.make_jaxpr(on_each)(*partials).jaxpr
    (body,) = (e.params["jaxpr"] for e in traced.eqns if e.primitive.name == "shard_map")
    calls = [(eqn, launch_in(eqn, "sum_norm")) for eqn in body.eqns]
    (_, first), *later = [(eqn, launch) for eqn, launch in calls if launch is not None]
    kept = [
        before in eqn.invars
        for before, (eqn, _) in zip(body.invars[: SUMS - 1], later, strict=True)
    ]
    steps = tuple(_steps(first))
    assert all(tuple(_steps(launch)) == steps for _, launch in later)
    return Launch(steps, 2 if all(kept) else 1)


def _steps(launch: Any) -> Iterator[tuple[str, int]]:
    (kernel,) = inner(launch)
    for eqn in equations(kernel):
        if eqn.primitive.name == "semaphore_signal_multicast":
            assert set(eqn.params["collective_axes"]) == set(AXES)
            yield "signal", int(eqn.invars[-1].val)
        elif eqn.primitive.name == "semaphore_wait":
            *_, count, decrements = (getattr(x, "val", None) for x in eqn.invars)
            assert decrements  # the counter is at zero again for the next sum
            yield "wait", int(count)
        elif eqn.primitive.name == "multimem_load_reduce":
            yield "read", 0


def program_of(launch: Launch) -> list[tuple[str, int]]:
    """Return the steps of a device: programs that begin with zero counters and end with a sum."""
    steps: list[tuple[str, int]] = []
    for program in range(PROGRAMS):
        steps += [("zero", 0), ("meet", 0)]
        for nth in range(SUMS):
            steps.append(("write", program * SUMS + nth))
            which = program * SUMS + nth
            steps += [(kind, which if kind == "read" else n) for kind, n in launch.steps]
        steps.append(("meet", 0))
    return steps


def wrong_order(launch: Launch, devices: int) -> str | None:
    """Take the steps in all orders; say what goes wrong in one, or None."""
    steps = program_of(launch)
    nowhere = (-1,) * launch.buffers
    start = State((0,) * devices, (0,) * devices, (0,) * devices, (nowhere,) * devices)
    seen, waiting = {start}, [start]
    while waiting:
        state = waiting.pop()
        following = []
        for device in range(devices):
            if state.coming[device]:
                coming = _with(state.coming, device, state.coming[device] - 1)
                counter = _with(state.counter, device, state.counter[device] + 1)
                following.append(state._replace(coming=coming, counter=counter))
            if state.at[device] < len(steps):
                after = _after(state, device, steps, launch.buffers)
                if isinstance(after, str):
                    return after
                if after is not None:
                    at = _with(state.at, device, state.at[device] + 1)
                    following.append(after._replace(at=at))
        if not following and set(state.at) != {len(steps)}:
            return f"devices wait for ever: {[steps[at] for at in state.at if at < len(steps)]}"
        for each in following:
            if each not in seen:
                seen.add(each)
                waiting.append(each)
    return None


def _after(
    state: State, device: int, steps: list[tuple[str, int]], buffers: int
) -> State | str | None:
    """The state after a device's next step; None: it has to wait; words: what is wrong."""
    at = state.at[device]
    kind, n = steps[at]
    after: State | str | None = state
    if kind == "zero":
        after = state._replace(counter=_with(state.counter, device, 0))
    elif kind == "meet" and min(state.at) < at:
        after = None
    elif kind == "write":
        memory = _with(state.memory[device], n % buffers, n)
        after = state._replace(memory=_with(state.memory, device, memory))
    elif kind == "signal":
        after = state._replace(coming=tuple(coming + n for coming in state.coming))
    elif kind == "wait":
        left = state.counter[device] - n
        after = state._replace(counter=_with(state.counter, device, left)) if left >= 0 else None
    elif kind == "read":
        found = [memory[n % buffers] for memory in state.memory]
        if set(found) != {n}:
            after = f"device {device} reads sums {found} as sum {n}"
    return after


def _with(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


@pytest.mark.parametrize("devices", [2, 3])
def test_devices_read_sums_of_this_launch_in_every_order(devices):
    launch = traced(devices)
    assert launch.steps[:2] == (("signal", 1), ("wait", devices))
    assert wrong_order(launch, devices) is None


def _faults() -> dict[str, Launch]:
    signal, wait, read = ("signal", 1), ("wait", 3), ("read", 0)
    return {
        "nobody waits": Launch((signal, read), 2),
        "one does not count": Launch((signal, ("wait", 2), read), 2),
        "it is read before the wait": Launch((signal, read, wait), 2),
        "all wait before they signal": Launch((wait, signal, read), 2),
        "one buffer": Launch((signal, wait, read), 1),
        "a signal too many": Launch((signal, signal, wait, read), 2),
    }


@pytest.mark.parametrize("name", _faults())
def test_faults_of_the_protocol_are_found(name):
    assert wrong_order(_faults()[name], 3)


def test_one_buffer_serves_if_the_end_is_waited_for():
    signal, wait, read = ("signal", 1), ("wait", 3), ("read", 0)
    assert wrong_order(Launch((signal, wait, read, signal, wait), 1), 3) is None
