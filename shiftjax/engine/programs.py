"""Compiling every (bucket, mode) ahead of traffic, and what a compiled bucket consists of."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np

from shiftjax.cache.pool import abstract_pools
from shiftjax.engine.pack import pack_tokens
from shiftjax.engine.request import Mode, StepPlan
from shiftjax.engine.sampling_inputs import RowTables, neutral_rows
from shiftjax.engine.step import Bucket, Packing, StepDef, StepInputs
from shiftjax.models.attention import AttentionMetadata, plan_attention
from shiftjax.parallel.sharding import named, rows_spec

Progress = Callable[[str, int, int], None]
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
COMPILE_THREADS = 2  # one compilation keeps about one core busy


@dataclass(frozen=True)
class PoolOptions:
    """The KV pool of a group."""

    num_blocks: int  # the null block 0 included
    block_size: int  # tokens
    blocks_per_seq: int  # of the longest sequence
    dtype: np.dtype


@dataclass(frozen=True)
class Program:
    """One compiled bucket: how its inputs are packed, its neutral tables, a function per mode."""

    bucket: Bucket
    packing: Packing
    tables: RowTables
    steps: dict[Mode, jax.stages.Compiled]

    @property
    def temporary_bytes(self) -> int:
        """Device memory that the hungrier mode needs besides its arguments."""
        return max(_temporary_bytes(step) for step in self.steps.values())


def _temporary_bytes(step: jax.stages.Compiled) -> int:
    memory = step.memory_analysis()
    if memory is None:
        raise RuntimeError("this backend does not report a step's memory; set num_blocks")
    return memory.temp_size_in_bytes


def compile_programs(
    step: StepDef,
    params: dict[Mode, tuple[jax.Array, ...]],
    pool: PoolOptions,
    buckets: list[Bucket],
    progress: Progress,
) -> list[Program]:
    """Compile the buckets in both modes, a few at a time; nothing of the pool is allocated.

    With SP = 1 the two modes are one configuration and share their programs.
    """
    modes = [Mode.BASE, Mode.SHIFT] if step.layout.sp > 1 else [Mode.SHIFT]
    programs = [_empty_program(step, pool, bucket) for bucket in buckets]
    pools = abstract_pools(step.mesh, step.layout, pool.num_blocks, pool.block_size, pool.dtype)

    def compile_one(program: Program, mode: Mode) -> None:
        program.steps[mode] = step.compile(
            mode, params[mode], pools, program.packing, program.tables
        )

    progress("compile", 0, len(programs) * len(modes))
    with ThreadPoolExecutor(COMPILE_THREADS) as threads:
        jobs = [threads.submit(compile_one, p, mode) for p in programs for mode in modes]
        for done, job in enumerate(jobs, 1):
            job.result()
            progress("compile", done, len(jobs))
    for program in programs:
        program.steps.setdefault(Mode.BASE, program.steps[Mode.SHIFT])
    return programs


def _empty_program(step: StepDef, pool: PoolOptions, bucket: Bucket) -> Program:
    scalars, tables = neutral_rows(bucket.rows, step.layout.model.vocab_size)
    empty = StepPlan([], 0, 0, 0, [], [], step_id=-1)
    window = step.layout.model.sliding_window
    inputs = step_inputs(empty, bucket, pool, window, scalars, np.zeros(2, np.uint32))
    placed = jax.device_put(tables, named(step.mesh, rows_spec()))
    return Program(bucket, Packing.of(inputs), placed, {})


def step_inputs(
    plan: StepPlan,
    bucket: Bucket,
    pool: PoolOptions,
    sliding_window: int | None,
    scalars: dict[str, np.ndarray],
    key: np.ndarray,
) -> StepInputs:
    """Lay out a plan and its attention work in a bucket; NumPy arrays."""
    packed = pack_tokens(plan, *bucket, pool.blocks_per_seq, pool.block_size)
    work = plan_attention(
        packed.block_tables,
        packed.seq_lens,
        packed.query_start_loc,
        plan.num_decodes,
        num_tokens=bucket.tokens,
        block_size=pool.block_size,
        sliding_window=sliding_window,
    )
    attention = AttentionMetadata(
        slot_mapping=packed.slot_mapping,
        block_tables=packed.block_tables,
        seq_lens=packed.seq_lens,
        query_start_loc=packed.query_start_loc,
        num_decodes=np.asarray(plan.num_decodes, np.int32),
        plan=work,
    )
    return StepInputs(
        token_ids=packed.token_ids,
        positions=packed.positions,
        sample_rows=packed.sample_rows,
        attention=attention,
        sampling=scalars | {"positions": packed.sample_positions},
        key=key,
    )


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
