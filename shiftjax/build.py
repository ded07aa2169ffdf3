"""The assembly root: from a config to devices, weights, KV pools, compiled steps and an engine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.formats import dtype_of, formats_of
from shiftjax.config import ConfigError, EngineConfig, check_model, choose_degrees
from shiftjax.control.admission import RequestLimits
from shiftjax.control.engine import Engine, Lane
from shiftjax.control.policy import Policy, make_policy
from shiftjax.control.scheduler import Scheduler
from shiftjax.control.scheduler_config import SchedulerConfig
from shiftjax.costs.buckets import Bucket, doubling, make_buckets
from shiftjax.costs.machine_files import load_engine, load_machine, machine_of
from shiftjax.costs.memory import weight_bytes
from shiftjax.costs.step import CostModel
from shiftjax.device.memory import GroupMemory
from shiftjax.device.mesh import grid_mesh, group_mesh
from shiftjax.device.mode_weights import ModeWeights
from shiftjax.device.place import define, load
from shiftjax.device.pool import PoolOptions, block_bytes
from shiftjax.device.programs import compile_programs
from shiftjax.device.runner import DeviceRunner
from shiftjax.device.sizing import device_memory, num_blocks_for
from shiftjax.device.step import StepDef
from shiftjax.models.attention_backend import choose_attention
from shiftjax.parallel.grid import Device, Grid, Mode
from shiftjax.parallel.layout import Layout
from shiftjax.settings import compile_cache_dir
from shiftjax.weights.source import TensorSource, check_complete

Progress = Callable[[str, int, int], None]
LEAST_WORKSPACE_BYTES = 64 << 20  # kept for a step's temporaries until they are compiled and known


@dataclass(frozen=True)
class Built:
    """A running engine and what is worth knowing about how it came to be."""

    engine: Engine
    runners: list[DeviceRunner]
    layout: Layout
    mesh: str  # for people: dp x sp x tp
    load_seconds: float
    compile_seconds: float


def build(config: EngineConfig, source: TensorSource, progress: Progress) -> Built:
    """Place the weights, size the pools, compile every step.

    Raises:
        ConfigError: what the options ask for does not fit the model or the machine.
        CheckpointError: the checkpoint is not what its config says.
    """
    _use_compile_cache(config)
    model = source.config
    devices = jax.devices()[: config.parallel.devices]
    problems = check_model(config, model, len(devices))
    if problems:
        raise ConfigError(problems)
    check_complete(source)
    dtype = dtype_of(config.model.dtype)
    layout = _choose_layout(config, model, devices, dtype)
    placed, load_seconds = _timed(lambda: _place(config, layout, dtype, devices, source, progress))
    policy = _make_policy(config, placed[0])
    runners, compile_seconds = _timed(
        lambda: _compile(config, placed, policy, len(devices), progress)
    )
    engine = _make_engine(config, model, runners, policy)
    mesh = f"dp={config.parallel.dp} sp={layout.sp} tp={layout.tp}"
    return Built(engine, runners, layout, mesh, load_seconds, compile_seconds)


@dataclass(frozen=True)
class Placed:
    """One group: its step definition, and what its devices hold."""

    step: StepDef
    memory: GroupMemory


def kv_dtype(config: EngineConfig, dtype: np.dtype) -> np.dtype:
    """Return the number format of the KV pool; `dtype` is that of the weights."""
    return dtype_of(config.cache.kv_cache_dtype, dtype)


def max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Return the longest prompt plus output, in tokens."""
    return config.model.max_model_len or model.max_position_embeddings


def _choose_layout(
    config: EngineConfig, model: ModelConfig, devices: list[Device], dtype: np.dtype
) -> Layout:
    weights = weight_bytes(Layout(model, 1, 1), formats_of(str(dtype)))
    total, _ = device_memory(devices[0], len(devices))
    sp, tp = choose_degrees(config.parallel, model, len(devices), weights, total)
    return Layout(model, sp, tp)


def _place(
    config: EngineConfig,
    layout: Layout,
    dtype: np.dtype,
    devices: list[Device],
    source: TensorSource,
    progress: Progress,
) -> list[Placed]:
    """Load the weights onto every group; groups are consecutive devices."""
    max_rows = _buckets(config, layout)[-1].rows
    model = define(layout.model, layout, dtype)
    block_size, pool_dtype = config.cache.block_size, kv_dtype(config, dtype)
    attention = choose_attention(layout, devices[0], dtype, pool_dtype, block_size)
    weights = ModeWeights(model, layout, config.parallel.weights)
    grid = Grid(layout.tp, layout.sp * config.parallel.dp)
    groups = grid.groups(layout.sp)
    stored = load(model, layout, grid_mesh(devices, grid, groups), source, progress)
    meshes = [group_mesh(devices, grid, group) for group in groups]
    return [
        Placed(StepDef(weights, mesh, max_rows, attention), GroupMemory(weights, stored, mesh))
        for mesh in meshes
    ]


def _buckets(config: EngineConfig, layout: Layout) -> list[Bucket]:
    scheduler = config.scheduler
    sizes = config.compile.token_buckets or doubling(scheduler.max_num_batched_tokens)
    return make_buckets(sizes, scheduler.max_num_seqs, layout)


def _wanted(
    policy: Policy, buckets: list[Bucket], modes: Sequence[Mode]
) -> dict[Bucket, list[Mode]]:
    """The modes that the policy may choose in each bucket."""
    wanted, least = {}, 1
    for bucket in buckets:
        wanted[bucket] = policy.wanted(modes, least, bucket)
        least = bucket.tokens + 1
    return wanted


def _compile(
    config: EngineConfig,
    groups: list[Placed],
    policy: Policy,
    num_devices: int,
    progress: Progress,
) -> list[DeviceRunner]:
    """Compile every step once, load it on every group, and allocate the pools.

    The pool is sized by a guess of the temporaries first; only if the compiled steps then need
    more is it made smaller, and the largest bucket compiled again.
    """
    first, layout = groups[0], groups[0].step.layout
    wanted = _wanted(policy, _buckets(config, layout), first.step.weights.modes)
    last = max(wanted)
    workspace = LEAST_WORKSPACE_BYTES
    while True:
        pool = _pool_options(config, first, num_devices, workspace)
        largest = compile_programs(first.step, pool, {last: wanted[last]}, progress)
        if config.cache.num_blocks or largest[0].temporary_bytes <= workspace:
            break
        workspace = largest[0].temporary_bytes
    missing = {bucket: wanted[bucket] for bucket in wanted if bucket != last}
    programs = compile_programs(first.step, pool, missing, progress) + largest
    swaps, seed = config.cache.preemption == "swap", config.model.seed
    runners = [
        DeviceRunner(group.step, group.memory, pool, (), swaps=swaps, seed=seed) for group in groups
    ]
    runners[0].programs = programs
    for runner in runners[1:]:
        runner.load_programs(runners[0])
    return runners


def _pool_options(
    config: EngineConfig, group: Placed, num_devices: int, workspace_bytes: int
) -> PoolOptions:
    """Size the pool: as configured, or what fits, but never more than could be used."""
    cache, layout = config.cache, group.step.layout
    longest = max_model_len(config, layout.model)
    blocks_per_seq = -(-longest // cache.block_size)
    dtype = kv_dtype(config, group.step.model.dtype)
    num_blocks = cache.num_blocks
    if num_blocks is None:
        device = group.step.mesh.devices.flat[0]
        total, free = device_memory(device, num_devices)
        each = block_bytes(layout, cache.block_size, dtype)
        fits = num_blocks_for(free, total, cache.memory_fraction, workspace_bytes, each)
        num_blocks = min(stable(fits), 1 + config.scheduler.max_num_seqs * blocks_per_seq)
    if num_blocks < 2:
        raise ConfigError(["no memory is left for KV blocks: use more devices or a smaller model"])
    return PoolOptions(num_blocks, cache.block_size, blocks_per_seq, dtype)


def stable(count: int) -> int:
    """Round down to 4 significant bits, so that starts on a busy machine agree.

    The pool's size is part of every compiled program, and so of its key in the compilation cache.
    """
    shift = max(0, count.bit_length() - 4)
    return count >> shift << shift


def _make_engine(
    config: EngineConfig, model: ModelConfig, runners: list[DeviceRunner], policy: Policy
) -> Engine:
    pool, scheduler = runners[0].pool, config.scheduler
    budgets = SchedulerConfig(
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        eos_token_ids=model.eos_token_ids,
        model=model.name,
        prefix_caching=config.cache.prefix_caching,
        preemption=config.cache.preemption,
        num_host_blocks=config.cache.num_host_blocks,
    )
    limits = RequestLimits(
        vocab_size=model.vocab_size,
        max_model_len=max_model_len(config, model),
        num_kv_tokens=(pool.num_blocks - 1) * pool.block_size,
        eos_token_ids=model.eos_token_ids,
    )
    return Engine(
        [Lane(Scheduler(budgets), runner, runner.step.weights.modes) for runner in runners],
        policy,
        limits,
        overlap=scheduler.overlap,
        seed=config.model.seed,
        clock=time.monotonic,
    )


def _make_policy(config: EngineConfig, group: Placed) -> Policy:
    scheduler = config.scheduler
    costs = _costs(config, group) if scheduler.policy == "cost" else None
    return make_policy(scheduler.policy, scheduler.threshold_tokens, costs)


def _costs(config: EngineConfig, group: Placed) -> CostModel:
    layout, device = group.step.layout, group.step.mesh.devices.flat[0]
    machine = load_machine(config.scheduler.machine or machine_of(device.device_kind))
    weights = group.step.model.dtype
    formats = formats_of(str(weights), str(kv_dtype(config, weights)))
    buckets, engine = _buckets(config, layout), load_engine("shiftjax")
    return CostModel(layout.model, layout.sp, layout.tp, machine, engine, formats, buckets)


def _use_compile_cache(config: EngineConfig) -> None:
    """Point JAX at the persistent cache; every program counts, however quick to compile."""
    directory = compile_cache_dir(config)
    if directory is not None:
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _timed[T](function: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    return function(), time.perf_counter() - start
