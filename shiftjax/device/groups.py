"""The groups of a deployment: weights placed on their devices, pools sized, steps compiled."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

from shiftjax.arch.formats import FORMATS
from shiftjax.costs.buckets import Bucket
from shiftjax.deploy.deployment import Deployment
from shiftjax.device.all_reduces import warn_of_slow_all_reduces
from shiftjax.device.attention_cases import Shape
from shiftjax.device.attention_check import shape_of
from shiftjax.device.choosers import expert_modes_of, query_modes_of
from shiftjax.device.gpu_options import gpu_options
from shiftjax.device.group_memory import GroupMemory
from shiftjax.device.joined import JOINED_ON
from shiftjax.device.mesh import group_mesh, joined_mesh, own_devices
from shiftjax.device.mode_weights import ModeWeights
from shiftjax.device.place import Rows, define, load_rows, read_rows
from shiftjax.device.pool import DevicePools, PoolOptions
from shiftjax.device.pool_sizes import LEAST_WORKSPACE_BYTES, PoolSizes
from shiftjax.device.programs import Program, Progress, compile_programs
from shiftjax.device.runner import DeviceRunner, SlotOf
from shiftjax.device.sampling import sample
from shiftjax.device.step import StepDef
from shiftjax.device.strict import Chosen, check_strict
from shiftjax.fleet.mover_device import DeviceMover
from shiftjax.host_tier.store_device import Extents
from shiftjax.models.attention_backend import AttentionBackend, AttentionNeeds, choose_attention
from shiftjax.models.attention_heads import by_heads, layouts_by_heads
from shiftjax.models.expert_backend import XLA_EXPERTS, choose_experts
from shiftjax.models.gpu_software import records_slices
from shiftjax.models.norm_backend import choose_norms
from shiftjax.models.product_backend import (
    XLA_CODES,
    CodeShape,
    choose_products,
    fixed_products,
)
from shiftjax.models.sum_backend import SumNeeds, SumShape, choose_sums
from shiftjax.parallel.grid import Device, Group, Mode
from shiftjax.routing.counts_device import counted_steps
from shiftjax.routing.history import RoutingHistory
from shiftjax.weights.source import TensorSource

# Tries the attention kernels in a shape: what is wrong with them, or None.
TryKernels = Callable[[Shape], str | None]


class Placed(NamedTuple):
    """One group, or a stage of it: its step definition, and what its devices hold."""

    group: Group
    step: StepDef
    memory: GroupMemory
    stage: int = 0


class Kind(NamedTuple):
    """Steps that differ in their devices alone: one program does for all of them."""

    width: int
    num_layers: int
    is_first_stage: bool
    is_last_stage: bool


# By the setting `logprobs_mode`, what steps have that is not theirs by default.
SAMPLERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "raw_logprobs": {},
        "processed_logprobs": {"sampler": partial(sample, of_processed=True)},
    }
)


def kind_of(step: StepDef) -> Kind:
    """The kind of a step."""
    model, width = step.layout.model, step.layout.sp
    return Kind(width, model.num_layers, model.is_first_stage, model.is_last_stage)


def define_steps(
    deployment: Deployment, devices: Sequence[Device], check: TryKernels | None = None
) -> dict[Group, StepDef]:
    """What the steps of every group are; groups are consecutive devices. Nothing is allocated.

    Attention kernels are tried with `check` first, where devices and shapes allow them.
    """
    found: dict[Group, StepDef] = {}
    own = own_devices(devices)[0]
    options = gpu_options(own, deployment.gpu_options)
    for width, of_width in deployment.by_width.items():
        layout, grid, size = of_width.layout, of_width.grid, of_width.block_size
        attention = attention_of(of_width, own, check)
        experts = choose_experts(layout.model, of_width.formats, own, attention.name)
        try_plain = None if check is None else partial(_try_plain, of_width, check)
        how = layout, of_width.formats, own, attention.name
        products = choose_products(*how, try_plain)
        if of_width.of_numerics.is_strict:
            products = fixed_products(products, own)
        groups = grid.groups(width)
        meshes = {group: group_mesh(devices, grid, group) for group in groups}
        try_sums = None if check is None else partial(_try_sums, of_width, check)
        sums = choose_sums(
            layout,
            of_width.formats,
            SumNeeds(
                list(meshes[groups[0]].devices.flat) if len(groups) == 1 else (),
                attention.name,
                of_width.bars_switch,
                try_sums,
            ),
        )
        gives_codes = products.codes.name != XLA_CODES.name
        norms = choose_norms(layout, of_width.formats, attention.name, gives_codes=gives_codes)
        chosen = Chosen(attention, norms, products)
        check_strict(own, of_width.of_numerics, layout.model, of_width.formats, chosen)
        model = define(layout, of_width.formats)
        is_joined = own.platform in JOINED_ON and records_slices()
        loops = experts.name == XLA_EXPERTS.name
        weights = ModeWeights(model, layout, of_width.weights, is_joined, loops)
        max_rows = max(bucket.rows for bucket in of_width.buckets)
        used, queries = expert_modes_of(of_width, own), query_modes_of(of_width, own)
        for group, mesh in meshes.items():
            step = StepDef(weights, mesh, max_rows, attention, size, options, experts)
            kernels = {"products": products, "norms": norms, "sums": sums}
            of_step = {"expert_modes": used, "query_modes": queries}
            of_step |= {"numerics": of_width.of_numerics}
            of_step |= {"routed_experts": of_width.routed_experts}
            of_step |= SAMPLERS[of_width.logprobs_mode]
            found[group] = replace(step, **of_step, **kernels)
    return found


def _try_plain(deployment: Deployment, check: TryKernels, plain: CodeShape) -> str | None:
    """Try products of numbers, beside which nothing of the shape counts."""
    largest = deployment.buckets[-1]
    own = deployment.layout, deployment.formats, deployment.block_size, largest
    return check(replace(shape_of(*own, deterministic=False), plain=plain))


def _try_sums(deployment: Deployment, check: TryKernels, sums: SumShape) -> str | None:
    """Try sums over devices, beside which nothing of the shape counts."""
    largest = deployment.buckets[-1]
    own = deployment.layout, deployment.formats, deployment.block_size, largest
    return check(replace(shape_of(*own, deterministic=False), sums=sums))


def attention_of(
    deployment: Deployment, device: Device, check: TryKernels | None
) -> AttentionBackend:
    """The attention of groups of one width, on devices like this one."""
    layout, size, formats = deployment.layout, deployment.block_size, deployment.formats
    dtypes = FORMATS[formats.activations].dtype, FORMATS[formats.kv].dtype
    has_drafts = deployment.drafts.speculation != "none"
    largest = max(of_width.block_size for of_width in deployment.by_width.values())
    is_strict = deployment.of_numerics.is_strict
    needs = AttentionNeeds(
        deployment.is_deterministic, has_drafts, deployment.attention, largest, is_strict
    )
    chosen = []
    for own in layouts_by_heads(layout):
        shape = shape_of(own, formats, size, deployment.buckets[-1], deployment.is_deterministic)
        tries = None if check is None else partial(check, shape)
        chosen.append(choose_attention(own, device, dtypes, size, needs, tries))
    return by_heads(layout.model, chosen)


def place(
    deployment: Deployment,
    devices: Sequence[Device],
    source: TensorSource,
    progress: Progress,
    check: TryKernels | None = None,
) -> list[Placed]:
    """The groups of a deployment with their weights, which are read from `source`."""
    groups = define_groups(deployment, devices, check)
    load_weights(groups, partial(read_rows, source), progress)
    return groups


def define_groups(
    deployment: Deployment, devices: Sequence[Device], check: TryKernels | None = None
) -> list[Placed]:
    """The groups of a deployment, and of a pipeline their stages. Nothing is allocated.

    Groups share the pools of their devices. Each stage has as many devices, and the units of its
    own layers.
    """
    each = deployment.grid.num_devices // deployment.pp
    check = cache(check) if check is not None else None
    groups = []
    for number, stage in enumerate(deployment.stages):
        steps = define_steps(stage, devices[number * each : (number + 1) * each], check)
        pools = DevicePools()
        for group, step in steps.items():
            memory = GroupMemory(step.weights, step.mesh, pools)
            groups.append(Placed(group, step, memory, number))
    return groups


def load_weights(groups: Sequence[Placed], rows: Rows, progress: Progress) -> int:
    """Load the weights of every stage onto all its units, where groups view them.

    Returns the bytes that went to devices.
    """
    num_bytes = 0
    for number in sorted({placed.stage for placed in groups}):
        of_stage = [placed for placed in groups if placed.stage == number]
        narrowest = min(placed.group.width for placed in of_stage)
        units = [placed.step for placed in of_stage if placed.group.width == narrowest]
        mesh, first = joined_mesh([step.mesh for step in units]), units[0]
        weights, layout = first.weights, first.layout
        stored = load_rows(weights.model, layout, mesh, rows, progress, weights.arrays)
        num_bytes += sum(
            shard.data.nbytes
            for array in stored
            if array is not None
            for shard in array.addressable_shards
        )
        for placed in of_stage:
            placed.memory.fill(stored)
    return num_bytes


Wanted = Mapping[int, Mapping[Bucket, list[Mode]]]  # modes of each bucket, by width


def compile_steps(
    deployment: Deployment,
    steps: Mapping[Kind, StepDef],
    wanted: Wanted,
    sizes: PoolSizes,
    progress: Progress,
) -> tuple[Deployment, dict[Kind, list[Program]]]:
    """Compile the wanted steps of each kind for one of them, `steps`.

    Returns the deployment with its KV blocks, too. The pool is sized by a guess of the temporaries
    first, or by what an earlier start needed; only if the compiled steps then need more is it made
    smaller, and the largest bucket compiled again.
    """
    workspace = LEAST_WORKSPACE_BYTES
    wanted_of = {kind: wanted[kind.width] for kind in steps}
    progress = _Together(progress, sum(len(m) for w in wanted_of.values() for m in w.values()))
    while True:
        sized, room = sizes.size(workspace)
        largest = {}
        for kind, step in steps.items():
            last, pool = max(wanted_of[kind]), pool_of(sized.of_width(kind.width))
            largest[kind] = compile_programs(step, pool, {last: wanted_of[kind][last]}, progress)
        needed = max(programs[0].temporary_bytes for programs in largest.values())
        if deployment.num_blocks or needed <= room:
            break
        workspace = needed
        progress.total += sum(map(len, (program.steps for p in largest.values() for program in p)))
    programs = {}
    for kind, step in steps.items():
        largest_bucket = max(wanted_of[kind])
        missing = {b: modes for b, modes in wanted_of[kind].items() if b != largest_bucket}
        pool = pool_of(sized.of_width(kind.width))
        programs[kind] = compile_programs(step, pool, missing, progress) + largest[kind]
    sizes.keep(sized.num_blocks, max(needed, LEAST_WORKSPACE_BYTES))
    return sized, programs


class _Together:
    """The progress of several calls as that of one, of `total` pieces."""

    def __init__(self, progress: Progress, total: int):
        self.total = total
        self._progress, self._before = progress, 0

    def __call__(self, task: str, done: int, total: int) -> None:
        """`done` of `total` pieces of this call are done; the last one counts for later calls."""
        self._progress(task, self._before + done, self.total)
        self._before += done if done == total else 0


def pool_of(deployment: Deployment) -> PoolOptions:
    """The KV pool of a group."""
    kv = FORMATS[deployment.formats.kv].dtype
    blocks = deployment.num_blocks, deployment.block_size, deployment.blocks_per_seq
    return PoolOptions(*blocks, kv, deployment.blocks_in_flight)


def start_runners(
    deployment: Deployment,
    groups: Sequence[Placed],
    programs: Mapping[Kind, list[Program]],
    extents: Extents,
    routing: RoutingHistory | None = None,
    slots: SlotOf | None = None,
) -> dict[Group, list[DeviceRunner]]:
    """Allocate the pools, and load the programs of the first step of a kind for the others.

    Every program runs once; `warm_up` is to follow when all else is compiled. `extents` are the KV
    blocks on the host, of all groups and stages. Returns the runners of every group's stages; of
    one that is no pipeline there is one. Steps of models with experts add to `routing`;
    `slots` says which slot an adapter is in.

    The widest groups come first: what devices need to talk to each other is made when they first
    do, and is then there for narrower groups, too.

    Raises:
        ConfigError: the weights of a mode cannot be viewed in place; not at its first step.
    """
    on_host = extents if deployment.host_bytes else None
    stages: dict[Group, list[DeviceRunner]] = {}
    firsts: dict[Kind, DeviceRunner] = {}
    for group, step, memory, stage in sorted(groups, key=lambda placed: -placed.group.width):
        pool, kind = pool_of(deployment.of_width(group.width)), kind_of(step)
        counted = counted_steps(deployment, stage, routing)
        beside = {"extents": on_host, "counted": counted, "slots": slots}
        runner = DeviceRunner(step, memory, pool, (), seed=deployment.seed, **beside)
        if kind in firsts:
            runner.load_programs(firsts[kind])
        else:
            runner.programs[:] = programs[kind]
        firsts.setdefault(kind, runner)
        runner.view_weights()
        runner.warm_up()
        stages.setdefault(group, []).append(runner)
    first = next(iter(firsts.values()))
    shift, smallest = first.step.layout.shift, first.programs[0]
    if first.step.platform == "gpu" and shift in smallest.steps:
        warn_of_slow_all_reduces(smallest, shift, first.step.layout.num_devices)
    return stages


def warm_up(runners: Mapping[Group, Sequence[DeviceRunner]]) -> None:
    """Run every program of GPUs once more, when nothing is left to compile or to load.

    XLA (jax 0.12) runs the parts of a graph one by one the first time, and records it the second.
    A program with a graph that is made later lets go of the graphs of all others.
    """
    for stages in runners.values():
        for runner in stages:
            if runner.step.platform == "gpu":
                runner.warm_up()


def make_mover(deployment: Deployment, groups: Sequence[Placed]) -> DeviceMover:
    """What moves sequences between the groups of a fleet, compiled."""
    memories = {placed.group: placed.memory for placed in groups}
    pools = {w: pool_of(of_width) for w, of_width in deployment.by_width.items()}
    return DeviceMover(memories, pools, groups[0].step.gpu_options)
