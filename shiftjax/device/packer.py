"""Lays out the plan of a step for a program: the host's work, which touches no device."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from shiftjax.core.request import StepPlan
from shiftjax.device.pack import step_inputs, suits
from shiftjax.device.pool import PoolOptions
from shiftjax.device.programs import Program
from shiftjax.device.sampling_inputs import RowMasks, build_rows, refresh_params
from shiftjax.device.step import StepDef

SlotOf = Callable[[str | None], int]  # of what a request has as its adapter; below 0: none


class NoBucketError(RuntimeError):
    """A step that no compiled program fits: a bug, because the scheduler knows the limits."""


class Prepared(NamedTuple):
    """A plan laid out for the devices: what every stage of a step is given."""

    program: int  # its place among those of a stage
    flat: np.ndarray
    tables: RowMasks | None
    wants_top: bool


class Packer:
    """Lays out the plans of one group; `programs` are in the order of their buckets.

    `seed` is the engine's: sampled tokens depend on it, the request's seed and the position alone.
    """

    def __init__(
        self,
        step: StepDef,
        pool: PoolOptions,
        programs: Sequence[Program],
        seed: int = 0,
        slots: SlotOf | None = None,  # of adapters, where there is room for such
    ):
        self.step, self.pool, self.programs = step, pool, programs
        self.seed, self.slots = seed, slots
        self._key = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
        self._row_params = {}

    def prepare(self, plan: StepPlan) -> Prepared:
        """Lay out a plan. Raises `NoBucketError`."""
        index = self.index_for(plan)
        program, model = self.programs[index], self.step.layout.model
        self._row_params = refresh_params(plan, self._row_params, model.vocab_size)
        rows = build_rows(plan, self._row_params, program.bucket.rows, self.step.vocab)
        inputs = step_inputs(
            plan,
            program.bucket,
            self.pool,
            self.step.attention,
            rows.scalars,
            self._key,
            model=model,
            adapters=self._slots_of(plan) if program.bucket.has_adapters else (),
        )
        return Prepared(index, program.packing.pack(inputs), rows.tables, rows.wants_top)

    def shapes(self, program: int) -> Sequence[tuple[tuple[int, ...], np.dtype]]:
        """Return shape and type of what a program is given: the plan, and tables of sampling."""
        known = self.programs[program]
        tables = jax.tree.leaves(known.tables)
        inputs = [(table.shape, np.dtype(table.dtype)) for table in tables]
        return [((known.packing.size,), np.dtype(np.int32)), *inputs]

    def index_for(self, plan: StepPlan) -> int:
        """Return the place of the smallest program that suits a plan. Raises `NoBucketError`."""
        has_adapters = self.slots is not None and any(
            item.sequence.request.adapter for item in plan.scheduled
        )
        for index, program in enumerate(self.programs):
            if suits(program.bucket, plan, self.step.attention, has_adapters=has_adapters):
                return index
        size = plan.num_tokens, plan.num_rows, len(plan.scheduled)
        sizes = [(*program.bucket[:2], program.bucket.seqs) for program in self.programs]
        raise NoBucketError(f"no step of (tokens, rows, sequences) {size} among {sizes}")

    def _slots_of(self, plan: StepPlan) -> list[int]:
        """The slot of each sequence's adapter."""
        assert self.slots is not None
        return [self.slots(item.sequence.request.adapter) for item in plan.scheduled]
