"""The runner that computes: owns the compiled steps of one group.

Nothing else touches device memory. Steps are dispatched, not awaited; the device runs them in
order, so a step may read what an earlier one in flight will have written.
"""

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from shiftjax.core.proposal import ModelGuess
from shiftjax.core.request import StepOutput, StepPlan
from shiftjax.costs.expert_modes import ExpertModes
from shiftjax.device.group_memory import GroupMemory
from shiftjax.device.mesh import named, put, replicated_spec
from shiftjax.device.mode_weights import Weights
from shiftjax.device.packer import Packer, Prepared, SlotOf
from shiftjax.device.pool import PoolOptions
from shiftjax.device.programs import Program, add_mode, load_program, trial_step
from shiftjax.device.sampling_inputs import RowMasks
from shiftjax.device.step import StepDef, StepResult
from shiftjax.host_tier.store_device import Extents
from shiftjax.parallel.grid import Mode
from shiftjax.routing.chosen_device import on_host, send_to_host
from shiftjax.routing.counts_device import CountedSteps

logger = logging.getLogger(__name__)


class Handle(NamedTuple):
    """A step in flight."""

    last_tokens: jax.Array
    result: StepResult
    num_rows: int
    wants_top: bool
    num_guesses: int  # for each of so many sequences
    num_seqs: int
    first_tokens: jax.Array | None = None  # `last_tokens` on the first stage, of a pipeline
    num_tokens: int = 0  # of which `chosen` tells
    chosen: tuple[jax.Array, ...] = ()  # the experts of tokens, by stage; of models that tell


MOST_TOKENS_TRIED_ON_CPU = 128
NO_ROWS = StepOutput(np.zeros(0, np.int32), np.zeros(0, bool))  # of a step that moves blocks alone


class DeviceRunner:
    """Runs steps on one group of devices; see `core.request.Runner`.

    `programs` are in the order of their buckets, smallest first. `seed` is the engine's: sampled
    tokens depend on it, the request's seed and the position alone.
    """

    def __init__(
        self,
        step: StepDef,
        memory: GroupMemory,
        pool: PoolOptions,
        programs: Iterable[Program],
        *,
        extents: Extents | None = None,  # None: there is no host tier
        seed: int = 0,
        counted: CountedSteps | None = None,  # of models with experts, where somebody asks
        slots: SlotOf | None = None,  # of adapters, where there is room for such
    ):
        self.step, self.memory, self.pool = step, memory, pool
        self.programs = list(programs)
        self.counted = counted
        self.packer = Packer(step, pool, self.programs, seed, slots)
        self._replicated = named(step.mesh, replicated_spec())
        self._tables = step.table_shardings
        self._no_tokens = put(np.zeros(step.max_rows, np.int32), self._replicated)
        memory.prepare(pool, extents)

    @property
    def expert_modes(self) -> ExpertModes | None:
        """As in which mode its programs use experts; None: as in SHIFT."""
        return self.step.expert_modes

    def load_programs(self, other: "DeviceRunner") -> None:
        """Take over the programs of the runner of another group, which has the same layout."""
        for program in other.programs:
            loaded = load_program(program, other.step, self.step, self.pool, self._try_out)
            self.programs.append(loaded)

    def view_weights(self) -> None:
        """Make the weights of every mode that there is a program for, so that no step waits."""
        for program in self.programs:
            for mode in program.steps:
                self._params(program, mode)

    def warm_up(self) -> None:
        """Run every program once, and every copy between device and host.

        A GPU loads code then, makes communicators and the buffers of XLA's own sums; `warm_up` of
        `device/groups.py` says when it records graphs. A CPU prepares its products: 0.2 s for 30
        layers, many times a small step's own time. A large step takes longer than that anyhow, and
        is left to whoever needs it.
        """
        is_cpu = self.step.platform == "cpu"
        for program in self.programs:
            if is_cpu and program.bucket.tokens > MOST_TOKENS_TRIED_ON_CPU:
                continue
            for mode in program.steps:
                self._try_out(program, mode)
        if self.memory.host is not None and not is_cpu:
            self.memory.pools = self.memory.host.try_out(self.memory.pools)

    def _try_out(self, program: Program, mode: Mode) -> None:
        """Run `trial_step`. Raises what makes it fail."""
        inputs = trial_step(self.step, self.pool, program.bucket)
        prepared = Prepared(0, program.packing.pack(inputs), None, False)
        hidden = self.step.hidden(mode, program.bucket.tokens)
        given = [jax.device_put(np.zeros(x.shape, x.dtype), x.sharding) for x in hidden]
        try:
            jax.block_until_ready(self._call(program, prepared, mode, None, *given))
        except Exception:
            self.reset()
            raise

    def run(self, plan: StepPlan, mode: Mode, previous_handle: Handle | None) -> Handle | None:
        """Dispatch one step; nothing is awaited. None: it moves blocks alone."""
        self.move_blocks(plan)
        plan.dropped.clear()
        if not plan.scheduled:
            return None
        prepared = self.prepare(plan)
        mode = self.mode_for(prepared, mode)
        last = None if previous_handle is None else previous_handle.last_tokens
        return in_flight(plan, prepared, *self.launch(prepared, mode, last))

    def prepare(self, plan: StepPlan) -> Prepared:
        """Lay out a plan: the host's work of a step. Raises `NoBucketError`."""
        return self.packer.prepare(plan)

    def launch(
        self,
        prepared: Prepared,
        mode: Mode,
        last_tokens: jax.Array | None,
        *hidden: jax.Array,
    ) -> list[Any]:
        """Dispatch a step, or this stage of it: `[last_tokens, StepResult]` or `[hidden]`.

        Behind them comes a tuple: of the experts that tokens chose, if steps tell, else of nothing.
        `mode` is that of `mode_for`. `last_tokens` None: no token of the plan is on the devices
        alone.
        """
        program = self.programs[prepared.program]
        results, told = self._call(program, prepared, mode, last_tokens, *hidden), ()
        if self.step.tells:
            *results, chosen = results
            told = (chosen,)
        if self.step.counts:
            *results, counts = results
            if self.counted is not None:
                self.counted.see(counts)
        return [*results, told]

    def _call(
        self,
        program: Program,
        prepared: Prepared,
        mode: Mode,
        last_tokens: jax.Array | None,
        *hidden: jax.Array,
    ) -> list[Any]:
        flat = put(prepared.flat, self._replicated)
        tables = self._place(program.tables, prepared.tables)
        last = self._no_tokens if last_tokens is None else last_tokens
        memory, step, params = self.memory, program.steps[mode], self._params(program, mode)
        memory.pools, *results = step(params, memory.pools, last, flat, tables, *hidden)
        return results

    def _params(self, program: Program, mode: Mode) -> Weights:
        return self.memory.params(mode, self.step.use_in(mode, program.bucket[:2]))

    def mode_for(self, prepared: Prepared, wanted: Mode) -> Mode:
        """The mode that a step runs in: the wanted one, or on a GPU the nearest that is compiled.

        A policy names modes by the tokens of a plan. What a bucket is compiled in follows from its
        size, and a plan may need a larger one: for a long context, or many rows. To compile would
        make all requests wait, and on a GPU let go of the graphs of every program.
        """
        program = self.programs[prepared.program]
        if wanted not in program.steps and self.step.platform == "gpu":
            return min(program.steps, key=lambda one: abs(one.sp - wanted.sp))
        self.compiled(program, wanted)
        return wanted

    def compiled(self, program: Program, mode: Mode) -> jax.stages.Compiled:
        """The step of a bucket; compiled here if the policy at the start could not ask for it."""
        if mode not in program.steps:
            logger.warning("a %s step of %d tokens is compiled late", mode.label, program.bucket[0])
            add_mode(self.step, self.pool, program, mode)
        return program.steps[mode]

    def fetch(self, handle: Handle | None) -> StepOutput:
        """Wait for a step and bring what was asked for to the host."""
        if handle is None:
            self.memory.settle()
            return NO_ROWS
        return output_of(handle)

    def is_ready(self, handle: Handle | None) -> bool:
        """Whether `fetch` would not wait for the devices."""
        if handle is None:
            return True
        summary: Any = handle.result.summary  # the stubs of jax.Array do not know is_ready
        return summary.is_ready()

    def reset(self) -> None:
        """Rebuild the pools, whose buffers a failed step may have consumed."""
        self.memory.allocate(self.pool)
        if self.memory.host is not None:
            self.memory.host.prefetch(())

    def move_blocks(self, plan: StepPlan) -> None:
        """Copy the blocks of a plan to the host and back, before it computes."""
        host = self.memory.host
        if host is None:
            return
        host.drop(plan.dropped)
        for extent, blocks in plan.offloads:
            host.offload(self.memory.pools, extent, blocks)
        for extent, blocks in plan.restores:
            self.memory.pools = host.restore(self.memory.pools, extent, blocks)
        for each in plan.unit_restores:
            self.memory.pools = host.restore_units(self.memory.pools, each)
        host.prefetch(plan.prefetches)

    def program_for(self, plan: StepPlan) -> Program:
        """The smallest program that suits a plan. Raises `NoBucketError`."""
        return self.programs[self.packer.index_for(plan)]

    def _place(self, neutral: RowMasks, tables: RowMasks | None) -> RowMasks:
        """Put the tables that differ from the neutral ones (not None) on the devices."""
        if tables is None:
            return neutral
        return RowMasks(
            *(
                default if table is None else put(table, sharding)
                for default, table, sharding in zip(neutral, tables, self._tables, strict=True)
            )
        )


def in_flight(
    plan: StepPlan,
    prepared: Prepared,
    last_tokens: jax.Array,
    result: StepResult,
    chosen: tuple[jax.Array, ...] = (),
) -> Handle:
    """A dispatched step, whose results are on their way to the host."""
    send_results(result, plan.num_guesses)
    counts = plan.num_rows, prepared.wants_top, plan.num_guesses, len(plan.scheduled)
    send_to_host(chosen)
    return Handle(last_tokens, result, *counts, num_tokens=plan.num_tokens, chosen=chosen)


def send_results(result: StepResult, num_guesses: int) -> None:
    """Start to copy what a step gives back to the host."""
    summary: Any = result.summary
    summary.copy_to_host_async()
    if num_guesses:
        guesses: Any = result.guesses
        guesses.copy_to_host_async()


def output_of(handle: Handle) -> StepOutput:
    """Wait for a step and return what was asked for; its arrays may be NumPy's."""
    n = handle.num_rows
    summary = np.asarray(handle.result.summary)[:n]
    output = StepOutput(
        token_ids=summary[:, 0],
        is_finite=summary[:, 2] != 0,
        logprobs=np.ascontiguousarray(summary[:, 1]).view(np.float32),
        guesses=_guesses(handle) if handle.num_guesses else None,
        notes=on_host(handle.chosen, handle.num_tokens),
    )
    if not handle.wants_top:
        return output
    return output._replace(
        top_ids=np.asarray(handle.result.top_ids)[:n],
        top_logprobs=np.asarray(handle.result.top_logprobs)[:n],
    )


def _guesses(handle: Handle) -> list[ModelGuess]:
    """What the speculator guessed for each sequence."""
    guesses = np.asarray(handle.result.guesses)[:, : handle.num_seqs, : handle.num_guesses]
    probabilities = np.ascontiguousarray(guesses[1]).view(np.float32)
    return list(map(ModelGuess, guesses[0].tolist(), probabilities.tolist()))
