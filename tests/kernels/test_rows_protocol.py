"""How devices meet for sums in two shots: every order of what they do, for few devices.

The steps of a launch are read off the traced kernel. A model of the devices then takes them in
every order that is possible. What a device sends to another, stores and signals, arrives in the
order in which it was sent, but whenever it likes beside what others send. No order may let a device
read partial sums, or use a norm, of another launch, or leave one waiting for ever.
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
from pallas_kernels.sum_rows import open_rows, sum_norm_rows, sum_whole
from pallas_kernels.sum_sizes import MOST_BLOCKS

pytestmark = pytest.mark.skipif(
    not hasattr(plgpu, "alloc_semaphore"), reason="counters of several launches need jax 0.12"
)
AXES = "unit", "device"
WIDTH = 1024
Step = tuple[str, int]
Message = tuple[str, int]  # ("signal", counter) or ("store", launch)


class State(NamedTuple):
    """Where all devices are."""

    at: tuple[int, ...]  # each device's step
    counters: tuple[tuple[int, int], ...]
    partial: tuple[int, ...]  # of which launch each device's partial sums are
    norms: tuple[tuple[int, ...], ...]  # of which launch the rows of each device are, on each
    coming: tuple[tuple[Message, ...], ...]  # to each device from each: [to * devices + from]


def traced(devices: int, codes: bool) -> dict[str, tuple[Step, ...]]:
    """Return the steps of both kernels, as they are traced for so many devices."""

    def both(partial: jax.Array) -> jax.Array:
        group, x = open_rows(AXES, partial)
        kind = NormKind(1e-5, codes=codes)
        x, *_ = sum_norm_rows(partial, x, (partial[0], None), kind, group)
        return sum_whole(partial, x, kind, group)

    mesh = AbstractMesh((1, devices), AXES)
    on_each = jax.shard_map(both, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    partial = jax.ShapeDtypeStruct((devices, WIDTH), jnp.bfloat16)
    traced = jax.make_jaxpr(on_each)(partial).jaxpr
    (body,) = (e.params["jaxpr"] for e in traced.eqns if e.primitive.name == "shard_map")
    found = {}
    for name in ("sum_norm_rows", "sum_rows"):
        (launch,) = (one for e in body.eqns if (one := launch_in(e, name)) is not None)
        found[name] = tuple(dict.fromkeys(_steps(launch, devices)))  # pieces are as one
    return found


def _steps(launch: Any, devices: int) -> Iterator[Step]:
    (kernel,) = inner(launch)
    seen = list(equations(kernel))
    second = {  # the places of counters of the second meeting
        e.outvars[0]
        for e in seen
        if e.primitive.name == "add" and MOST_BLOCKS in [getattr(x, "val", 0) for x in e.invars]
    }
    for eqn in seen:
        which = int(any(x in second for x in eqn.invars if not hasattr(x, "val")))
        if eqn.primitive.name == "semaphore_signal_multicast":
            assert set(eqn.params["collective_axes"]) == set(AXES)
            assert int(eqn.invars[-1].val) == 1
            yield "signal", which
        elif eqn.primitive.name == "semaphore_wait":
            *_, count, decrements = (getattr(x, "val", None) for x in eqn.invars)
            assert decrements
            assert int(count) == devices
            yield "wait", which
        elif eqn.primitive.name == "multimem_load_reduce":
            yield "read", 0
        elif eqn.primitive.name == "multimem_store":
            yield "store", 0


def wrong_order(launch: tuple[Step, ...], devices: int, sums: int = 3) -> str | None:
    """Take the steps of some launches in all orders; say what goes wrong in one, or None."""
    steps: list[Step] = []
    for nth in range(sums):
        steps.append(("write", nth))
        steps += [(kind, nth if kind in ("read", "store") else n) for kind, n in launch]
        steps.append(("use", nth))
    nothing: tuple[int, ...] = (-1,) * devices
    start = State(
        *((0,) * devices, ((0, 0),) * devices, nothing, (nothing,) * devices),
        ((),) * devices**2,
    )
    seen, waiting = {start}, [start]
    while waiting:
        state = waiting.pop()
        following = [_arrived(state, channel) for channel in range(devices**2)]
        for device in range(devices):
            if state.at[device] < len(steps):
                after = _after(state, device, steps[state.at[device]])
                if isinstance(after, str):
                    return after
                following.append(after)
        following = [each for each in following if each is not None]
        if not following and set(state.at) != {len(steps)}:
            return f"devices wait for ever: {[steps[at] for at in state.at if at < len(steps)]}"
        for each in following:
            if each not in seen:
                seen.add(each)
                waiting.append(each)
    return None


def _arrived(state: State, channel: int) -> State | None:
    """Return the state after the next message of a channel has arrived; None: there is none."""
    if not state.coming[channel]:
        return None
    (kind, n), *rest = state.coming[channel]
    to, sender = divmod(channel, len(state.at))
    state = state._replace(coming=_with(state.coming, channel, tuple(rest)))
    if kind == "signal":
        counters = _with(state.counters[to], n, state.counters[to][n] + 1)
        return state._replace(counters=_with(state.counters, to, counters))
    return state._replace(norms=_with(state.norms, to, _with(state.norms[to], sender, n)))


def _after(state: State, device: int, step: Step) -> State | str | None:
    """The state after a device's next step; None: it has to wait; words: what is wrong."""
    kind, n = step
    devices = len(state.at)
    if kind == "write":
        state = state._replace(partial=_with(state.partial, device, n))
    elif kind in ("signal", "store"):
        coming = [
            (*messages, step) if channel % devices == device else messages
            for channel, messages in enumerate(state.coming)
        ]
        state = state._replace(coming=tuple(coming))
    elif kind == "wait":
        left = state.counters[device][n] - devices
        if left < 0:
            return None
        counters = _with(state.counters[device], n, left)
        state = state._replace(counters=_with(state.counters, device, counters))
    elif kind == "read" and set(state.partial) != {n}:
        return f"device {device} reads sums {state.partial} as sum {n}"
    elif kind == "use" and set(state.norms[device]) != {n}:
        return f"device {device} uses norms {state.norms[device]} as those of sum {n}"
    return state._replace(at=_with(state.at, device, state.at[device] + 1))


def _with(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


FIRST, LAST = (("signal", 0), ("wait", 0)), (("signal", 1), ("wait", 1))
WORK = ("read", 0), ("store", 0)


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("devices", [2, 3])
def test_kernels_meet_before_they_read_and_after_they_store(devices, codes):
    for name, steps in traced(devices, codes).items():
        assert steps == (*FIRST, *WORK, *LAST), name


@pytest.mark.costs(8)
@pytest.mark.parametrize(("devices", "sums"), [(2, 4), (3, 2)])
def test_devices_use_norms_of_this_launch_in_every_order(devices, sums):
    assert wrong_order((*FIRST, *WORK, *LAST), devices, sums) is None


FAULTS = {
    "nobody waits for partial sums": ((FIRST[0], *WORK, *LAST), "reads sums"),
    "it is read before the wait": ((FIRST[0], WORK[0], FIRST[1], WORK[1], *LAST), "reads sums"),
    "nobody waits for rows": ((*FIRST, *WORK, LAST[0]), "uses norms"),
    "rows are stored after the signal": ((*FIRST, WORK[0], LAST[0], WORK[1], LAST[1]), "uses"),
    "one counter for both": ((*FIRST, *WORK, *FIRST), "uses norms"),
    "all wait before they signal": ((FIRST[1], FIRST[0], *WORK, *LAST), "wait for ever"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_the_protocol_are_found(name):
    launch, words = FAULTS[name]
    assert words in (wrong_order(launch, 3, 2) or "nothing")
