"""Compiling every (bucket, mode) ahead of traffic, and what a compiled bucket consists of."""

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np

from shiftjax.core.request import Request, ScheduledSequence, SequenceState, StepPlan
from shiftjax.costs.buckets import Bucket
from shiftjax.device.mesh import is_spread, put
from shiftjax.device.pack import step_inputs
from shiftjax.device.pool import PoolOptions, abstract_pools
from shiftjax.device.retarget import load_on
from shiftjax.device.sampling_inputs import RowMasks, neutral_scalars, neutral_tables
from shiftjax.device.step import Packing, StepDef, StepInputs
from shiftjax.parallel.grid import Mode

logger = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
COMPILE_THREADS = 2  # one compilation keeps about one core busy


@dataclass(frozen=True)
class Program:
    """A bucket: how its inputs are packed, its neutral tables, a compiled step per wanted mode."""

    bucket: Bucket
    packing: Packing
    tables: RowMasks
    steps: dict[Mode, jax.stages.Compiled]

    @property
    def temporary_bytes(self) -> int:
        """Device memory that the hungriest mode needs besides its arguments."""
        return max(_temporary_bytes(step) for step in self.steps.values())


def _temporary_bytes(step: jax.stages.Compiled) -> int:
    memory = step.memory_analysis()
    if memory is None:
        raise RuntimeError("this backend does not report a step's memory; set num_blocks")
    return memory.temp_size_in_bytes


def compile_programs(
    step: StepDef,
    pool: PoolOptions,
    wanted: Mapping[Bucket, Iterable[Mode]],
    progress: Progress,
) -> list[Program]:
    """Compile each bucket in the modes it is wanted in; nothing of the pool is allocated."""
    programs = [_empty_program(step, pool, bucket) for bucket in wanted]
    tasks = [(program, mode) for program in programs for mode in wanted[program.bucket]]
    progress("compile", 0, len(tasks))
    # Hosts compile in one order: where compilers wait for each other, they then do for the same.
    with ThreadPoolExecutor(1 if is_spread(step.mesh) else COMPILE_THREADS) as threads:
        jobs = [threads.submit(add_mode, step, pool, *task) for task in tasks]
        for done, job in enumerate(jobs, 1):
            job.result()
            progress("compile", done, len(jobs))
    return programs


def add_mode(step: StepDef, pool: PoolOptions, program: Program, mode: Mode) -> None:
    """Compile one mode of a bucket and add it to the program."""
    pools = abstract_pools(step.mesh, step.layout, pool.num_blocks, pool.block_size, pool.dtype)
    program.steps[mode] = step.compile(mode, pools, program.packing, program.tables)


def load_program(
    program: Program,
    compiled_for: StepDef,
    step: StepDef,
    pool: PoolOptions,
    try_out: Callable[[Program, Mode], None],
) -> Program:
    """Return a program of one group for another one of the same layout.

    Its steps are loaded, which takes a sixth of compiling them, and tried out, or compiled where
    that fails: on a CPU a program that came out of the compilation cache can be written once more,
    and read, but not run.
    """
    loaded = _empty_program(step, pool, program.bucket)
    devices, others = (list(one.mesh.devices.flat) for one in (compiled_for, step))
    for mode, compiled in program.steps.items():
        try:
            loaded.steps[mode] = load_on(compiled, devices, others)
            try_out(loaded, mode)
        except Exception as error:
            logger.info("a step is compiled for other devices, not loaded: %s", error)
            add_mode(step, pool, loaded, mode)
    return loaded


def _empty_program(step: StepDef, pool: PoolOptions, bucket: Bucket) -> Program:
    packing, tables = empty_inputs(step, pool, bucket)
    placed = map(put, jax.tree.leaves(tables), step.table_shardings)
    return Program(bucket, packing, RowMasks._make(placed), {})


def empty_inputs(step: StepDef, pool: PoolOptions, bucket: Bucket) -> tuple[Packing, RowMasks]:
    """How the inputs of a bucket are packed, and its neutral tables; NumPy arrays."""
    return Packing.of(trial_step(step, pool, bucket)), neutral_tables(bucket.rows, step.vocab)


def trial_step(step: StepDef, pool: PoolOptions, bucket: Bucket) -> StepInputs:
    """The inputs of a step that writes to the null block only, and goes once through every loop.

    It has a decode and, where there is room, a chunk; both read what they write.
    """
    model = step.layout.model
    scalars = neutral_scalars(bucket.rows)
    nobody = SequenceState(Request("", [0]), 0, 0, (0, 0.0, 0, 0), [0], 1, 1, frozenset(), [])
    item = ScheduledSequence(nobody, start=0, num_tokens=1, num_rows=1, previous_row=-1)
    num = min(2, bucket.tokens, bucket.rows, bucket.seqs)
    guesses = 0 if model.speculator is None else 1
    plan = StepPlan([item] * num, num, num, 1, [], [], step_id=-1, num_guesses=guesses)
    own = bucket, pool, step.attention, scalars, np.zeros(2, np.uint32)
    return step_inputs(plan, *own, model=model, adapters=[0] * num)


def abstract_inputs(step: StepDef, pool: PoolOptions, bucket: Bucket) -> tuple[Packing, RowMasks]:
    """The same as shapes: what `StepDef.compile` needs where there are no devices."""
    packing, tables = empty_inputs(step, pool, bucket)
    shapes = (
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for x, sharding in zip(jax.tree.leaves(tables), step.table_shardings, strict=True)
    )
    return packing, RowMasks._make(shapes)


class CompileCounter:
    """Counts XLA compilations in this process between `start` and `stop`."""

    def __init__(self):
        self.count = 0

    def start(self) -> None:
        """Begin to count."""
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def stop(self) -> None:
        """Count no more."""
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == COMPILE_EVENT
