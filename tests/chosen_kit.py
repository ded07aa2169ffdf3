"""Engines whose runners tell of each token its number and its place, in place of experts."""

from dataclasses import replace

import numpy as np

from shiftjax.core.engine import Engine
from shiftjax.core.request import StepPlan
from shiftjax.device.pack import _token_ids
from shiftjax.routing.chosen import Chosen

SHAPE = 1, 2  # layers, experts of a token


def told_of(plan: StepPlan, previous: np.ndarray) -> np.ndarray:
    """The number and the place of every token of a plan."""
    ids = [each if each >= 0 else previous[-1 - each] for each in _token_ids(plan)]
    places = [item.start + nth for item in plan.scheduled for nth in range(item.num_tokens)]
    return np.array([ids, places]).T.astype(np.uint16)[:, None]


def let_tell(engine: Engine, size: int = 4, most: int = 1 << 20) -> Chosen:
    """Have all runners of an engine tell, and keep it."""
    chosen = Chosen(size, most, SHAPE, 1 << 9)
    engine.limits = replace(engine.limits, keeps_notes=True)
    for lane in engine.lanes:
        lane.scheduler.notes = lane.scheduler.tables.notes = chosen
        lane.runner.run = _telling(lane.runner.run)
    return chosen


def _telling(run):
    def run_and_tell(plan, mode, previous_handle):
        output = run(plan, mode, previous_handle)
        previous = np.zeros(0) if previous_handle is None else previous_handle.token_ids
        told = told_of(plan, previous) if plan.scheduled else None
        return output if isinstance(output, Exception) else output._replace(notes=told)

    return run_and_tell
