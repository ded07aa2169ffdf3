"""Steps on the devices of several hosts: the leader calls them, followers repeat its calls.

    leader     prepare -> encode, send -> launch ...
    follower              decode ------> launch ...

Every host calls the same compiled programs in the same order with the same inputs, as JAX asks of
processes that share a mesh (multi-controller). Where collectives of several steps may run at a time
and meet in another order, on CPUs (gloo), each step is awaited before the next.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from shiftjax.adapters import told
from shiftjax.adapters.adapter import Adapter
from shiftjax.adapters.pool import Slots
from shiftjax.core.request import StepOutput, StepPlan
from shiftjax.device.packer import Prepared
from shiftjax.device.runner import DeviceRunner, Handle, in_flight
from shiftjax.device.sampling_inputs import RowMasks
from shiftjax.hosts.calls import ACK_STEPS, NOBODY, RESET, Follower, Leader, Recent, Step
from shiftjax.parallel.grid import Mode

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 20  # without one JAX takes a process for dead; the hosts themselves know before
JOIN_SECONDS = 300  # that processes may start apart
SHUTDOWN_SECONDS = 5  # that a process which ends waits for the others
MOST_IN_FLIGHT = 4  # steps whose sampled tokens a later one may read


class Sent(NamedTuple):
    """A step in flight, and the number of its call."""

    handle: Handle
    number: int


def join(address: str, num: int, rank: int) -> None:
    """Make one JAX of the processes on several hosts; before it is first used. Waits for all."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Or JAX aborts the leader when a follower dies, before anybody hears of it.
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us
    jax.distributed.initialize(
        address,
        num,
        rank,
        cluster_detection_method="deactivate",  # Slurm's would give each process one device
        initialization_timeout=JOIN_SECONDS,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
    )


class LeaderRunner:
    """Runs steps on the devices of all hosts; see `core.request.Runner`."""

    def __init__(self, runner: DeviceRunner, hosts: Leader):
        self._runner, self._hosts = runner, hosts
        self._recent, self._number = Recent(), 0

    def run(self, plan: StepPlan, mode: Mode, previous_handle: Sent | None) -> Sent | None:
        """Have all hosts dispatch one step. None: it moves blocks alone, which cannot be here.

        Raises LostHostError for all that goes wrong once a follower knows of the step.
        """
        plan.dropped.clear()
        if not plan.scheduled:
            return None
        prepared = self._runner.prepare(plan)
        mode = self._runner.mode_for(prepared, mode)
        last = None if previous_handle is None else previous_handle.handle.last_tokens
        follows = NOBODY if previous_handle is None else previous_handle.number
        arrays = (prepared.flat, *(prepared.tables or RowMasks()))
        number = self._number + 1
        self._send(self._recent.encode(Step(number, follows, prepared.program, mode.sp, arrays)))
        try:
            results = self._runner.launch(prepared, mode, last)
            _await_on_cpu(self._runner, results)
        except Exception as error:
            raise self._hosts.explain(error) from error
        return Sent(in_flight(plan, prepared, *results), number)

    def fetch(self, handle: Sent | None) -> StepOutput:
        """Wait for a step. Raises LostHostError where it failed, on whichever host."""
        try:
            return self._runner.fetch(None if handle is None else handle.handle)
        except Exception as error:
            raise self._hosts.explain(error) from error

    def is_ready(self, handle: Sent | None) -> bool:
        """Whether `fetch` would not wait for the devices."""
        return self._runner.is_ready(None if handle is None else handle.handle)

    def reset(self) -> None:
        """Have all hosts rebuild their pools."""
        self._send(RESET)
        self._runner.reset()

    def slots(self, own: Slots) -> Slots:
        """Return the slots of all hosts: what is written to `own`, others write, too."""
        return _SlotsOfAll(own, self._send)

    def _send(self, call: bytes) -> None:
        self._number += 1
        self._hosts.send(self._number, call)


class _SlotsOfAll:
    """The slots of adapters on all hosts; see `adapters.pool.Slots`."""

    def __init__(self, own: Slots, send: Callable[[bytes], None]):
        self._own, self._send = own, send

    def place(self, adapter: Adapter) -> tuple[Any, Adapter]:
        """Copy an adapter to this host's devices; others are told when it is written."""
        return self._own.place(adapter), adapter

    def write(self, slot: int, placed: tuple[Any, Adapter]) -> None:
        """Have all hosts write an adapter, each as a call between two steps."""
        self._send(told.encode(slot, placed[1]))
        self._own.write(slot, placed[0])


def follow(runner: DeviceRunner, hosts: Follower, slots: Slots | None = None) -> None:
    """Repeat the leader's calls until it ends. Raises what makes one fail, and LostHostError.

    `slots` are those of adapters on this host's devices, if there are such.
    """
    recent, number, done = Recent(), 0, 0
    sampled: dict[int, jax.Array] = {}
    modes = {mode.sp: mode for mode in runner.step.layout.modes}
    is_cpu = runner.step.platform == "cpu"

    for call in hosts.calls():
        if call is not None:
            number += 1
            if call == RESET:
                runner.reset()
            elif (found := told.decode(call)) is not None:
                assert slots is not None
                slot, adapter = found
                slots.write(slot, slots.place(adapter))
            else:
                step = recent.decode(call, runner.packer.shapes)
                flat, *tables = step.arrays
                assert flat is not None
                prepared = Prepared(step.program, flat, RowMasks(*tables), False)
                last = None if step.follows == NOBODY else sampled[step.follows]
                results = runner.launch(prepared, modes[step.sp], last)
                sampled[number] = results[0]
                sampled.pop(number - MOST_IN_FLIGHT, None)
                _await_on_cpu(runner, results)
        # While calls come, the youngest step stays on the devices when the one before is awaited.
        upto = number if call is None or is_cpu else number - 1
        if upto > done and (call is None or number % ACK_STEPS == 0):
            jax.block_until_ready(sampled.get(upto))
            done = upto
            hosts.done(done)


def _await_on_cpu(runner: DeviceRunner, results: Any) -> None:
    if runner.step.platform == "cpu":
        jax.block_until_ready(results)
