"""The runner of a pipeline: the stages of one group, each a program on devices of its own.

    stage 0   embedding, layers   -> hidden states
    stage 1   layers              -> hidden states
    ...
    stage n   layers, norm, head  -> sampled tokens, for the host and for stage 0

A step is dispatched to all stages at once and nothing is awaited: what a stage is given travels
from devices to devices as soon as it is there, and every stage runs its steps in the order of
dispatch. So several steps of different sequences are in flight, one in each stage (Seesaw's
micro-batches, arXiv 2503.06433). A sampled token goes back to stage 0 without the host.
"""

from collections.abc import Sequence
from typing import Any

import jax

from shiftjax.core.request import StepOutput, StepPlan
from shiftjax.device.runner import DeviceRunner, Handle, in_flight
from shiftjax.device.step import StepDef
from shiftjax.parallel.grid import Mode


class PipelineRunner:
    """Runs steps on the stages of one group; see `core.request.Runner`.

    The stages have one block table, so the pools of all have as many blocks.
    """

    def __init__(self, stages: Sequence[DeviceRunner]):
        self.stages = list(stages)
        self._first, self._last = self.stages[0], self.stages[-1]

    def run(self, plan: StepPlan, mode: Mode, previous_handle: Handle | None) -> Handle | None:
        """Dispatch one step to all stages; nothing is awaited. None: it moves blocks alone."""
        for stage in self.stages:
            stage.move_blocks(plan)
        plan.dropped.clear()
        if not plan.scheduled:
            return None
        prepared = self._last.prepare(plan)
        mode = self._last.mode_for(prepared, mode)
        pending = {} if previous_handle is None else _tokens_by_stage(self.stages, previous_handle)
        results: list[Any] = []
        told: tuple[jax.Array, ...] = ()
        for index, stage in enumerate(self.stages):
            given = [hand_over(hidden, stage.step, mode) for hidden in results]
            *results, own = stage.launch(prepared, mode, pending.get(index), *given)
            told += own
        tokens, result = results
        first_tokens = jax.device_put(tokens, self._first.memory.everywhere)
        flight = in_flight(plan, prepared, tokens, result, told)
        return flight._replace(first_tokens=first_tokens)

    def is_ready(self, handle: Handle | None) -> bool:
        """Whether `fetch` would not wait for the devices."""
        return self._last.is_ready(handle)

    def fetch(self, handle: Handle | None) -> StepOutput:
        """Wait for a step and bring what was asked for to the host."""
        if handle is None:
            for stage in self.stages[:-1]:
                stage.fetch(handle)
        return self._last.fetch(handle)

    def reset(self) -> None:
        """Rebuild the pools of all stages: a failed step has written to some of them."""
        for stage in self.stages:
            stage.reset()


def hand_over(hidden: jax.Array, step: StepDef, mode: Mode) -> jax.Array:
    """Send hidden states to a stage's devices, each its part, and do not wait for them.

    All devices of the stage before have a part, so tokens x hidden x width bytes travel in all
    (a hidden size that the devices do not divide is padded).
    """
    return jax.device_put(hidden, step.entry(mode))


def _tokens_by_stage(stages: Sequence[DeviceRunner], handle: Handle) -> dict[int, jax.Array]:
    """The sampled tokens of a step where they are read: embedded first, counted last."""
    assert handle.first_tokens is not None
    return {0: handle.first_tokens, len(stages) - 1: handle.last_tokens}
