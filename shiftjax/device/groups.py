"""The groups of a deployment: weights placed on their devices, pools sized, steps compiled."""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shiftjax.arch.formats import FORMATS
from shiftjax.control.deployment import Deployment
from shiftjax.costs.buckets import Bucket
from shiftjax.device.memory import GroupMemory
from shiftjax.device.mesh import grid_mesh, group_mesh
from shiftjax.device.mode_weights import ModeWeights
from shiftjax.device.place import define, load
from shiftjax.device.pool import PoolOptions
from shiftjax.device.programs import Program, Progress, compile_programs
from shiftjax.device.runner import DeviceRunner
from shiftjax.device.sizing import measure
from shiftjax.device.step import StepDef
from shiftjax.models.attention_backend import choose_attention
from shiftjax.parallel.grid import Device, Mode
from shiftjax.weights.source import TensorSource

LEAST_WORKSPACE_BYTES = 64 << 20  # kept for a step's temporaries until they are compiled and known


class Placed(NamedTuple):
    """One group: its step definition, and what its devices hold."""

    step: StepDef
    memory: GroupMemory


def define_steps(deployment: Deployment, devices: Sequence[Device]) -> list[StepDef]:
    """What the steps of every group are; groups are consecutive devices. Nothing is allocated."""
    layout, grid = deployment.layout, deployment.grid
    dtype, kv = (FORMATS[n].dtype for n in (deployment.formats.weights, deployment.formats.kv))
    attention = choose_attention(layout, devices[0], dtype, kv, deployment.block_size)
    weights = ModeWeights(define(layout.model, layout, dtype), layout, deployment.weights)
    max_rows = max(bucket.rows for bucket in deployment.buckets)
    meshes = [group_mesh(devices, grid, group) for group in grid.groups(layout.sp)]
    has_paths = deployment.drafts.draft_paths > 1
    return [StepDef(weights, mesh, max_rows, attention, has_paths) for mesh in meshes]


def place(
    deployment: Deployment, devices: Sequence[Device], source: TensorSource, progress: Progress
) -> list[Placed]:
    """Load the weights onto every group."""
    steps, grid = define_steps(deployment, devices), deployment.grid
    weights, layout = steps[0].weights, deployment.layout
    mesh = grid_mesh(devices, grid, grid.groups(layout.sp))
    stored = load(weights.model, layout, mesh, source, progress)
    return [Placed(step, GroupMemory(weights, stored, step.mesh)) for step in steps]


def compile_steps(
    deployment: Deployment,
    step: StepDef,
    wanted: Mapping[Bucket, list[Mode]],
    devices: Sequence[Device],
    progress: Progress,
) -> tuple[Deployment, list[Program]]:
    """Compile the wanted steps for one group; returns the deployment with its KV blocks, too.

    The pool is sized by a guess of the temporaries first; only if the compiled steps then need
    more is it made smaller, and the largest bucket compiled again.
    """
    last, workspace = max(wanted), LEAST_WORKSPACE_BYTES
    while True:
        sized = _sized(deployment, devices, workspace)
        largest = compile_programs(step, pool_of(sized), {last: wanted[last]}, progress)
        if deployment.num_blocks or largest[0].temporary_bytes <= workspace:
            break
        workspace = largest[0].temporary_bytes
    missing = {bucket: wanted[bucket] for bucket in wanted if bucket != last}
    return sized, compile_programs(step, pool_of(sized), missing, progress) + largest


def _sized(deployment: Deployment, devices: Sequence[Device], workspace_bytes: int) -> Deployment:
    """Size the pool by the memory that is free now, with the stored weights in place."""
    now = measure(devices)
    held = deployment.memory(now).weight_bytes
    memory = deployment.memory(now._replace(free_bytes=now.free_bytes + held), workspace_bytes)
    return deployment.sized(memory)


def pool_of(deployment: Deployment) -> PoolOptions:
    """The KV pool of a group."""
    kv = FORMATS[deployment.formats.kv].dtype
    blocks = deployment.num_blocks, deployment.block_size, deployment.blocks_per_seq
    return PoolOptions(*blocks, kv)


def start_runners(
    deployment: Deployment, groups: Sequence[Placed], programs: list[Program], seed: int
) -> list[DeviceRunner]:
    """Allocate the pools, and load the programs of the first group on the others.

    Raises:
        ConfigError: the weights of a mode cannot be viewed in place; not at its first step.
    """
    pool, swaps = pool_of(deployment), deployment.preemption == "swap"
    runners = [DeviceRunner(*group, pool, (), swaps=swaps, seed=seed) for group in groups]
    runners[0].programs = programs
    for runner in runners[1:]:
        runner.load_programs(runners[0])
    modes = {mode for program in programs for mode in program.steps}
    for runner, mode in itertools.product(runners, modes):
        runner.memory.params(mode)  # made here, so that no step waits for them
    return runners
