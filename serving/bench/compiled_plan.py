"""`shiftjax plan --compile`: the engine's own steps, compiled for GPUs that are not here.

XLA's CUDA plugin compiles for a description of a chip (`targets/`) in place of the chip. Nothing
is allocated: weights, pools and inputs are shapes. The largest step of a deployment, and one of
decodes alone, are compiled with two and with four layers, and a deeper model is on the line through
both: XLA adds the same for every layer. Temporaries do not grow with the layers.
"""

import importlib.metadata
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from serving.bench.compiled_cost import SWITCH, Kernel, Prices, kernels_of, step_seconds
from serving.bench.hlo import collectives
from serving.bench.launch_list import Launch, layer_launches, named_launches
from serving.bench.thunks import HOST_DECIDES, dumped_thunks, top_level
from shiftjax.costs.buckets import Bucket, doubling
from shiftjax.costs.collectives import (
    context_gathers,
    sampling_collectives,
    step_collectives,
)
from shiftjax.costs.work import Work
from shiftjax.deploy.deployment import Deployment
from shiftjax.models.gpu_software import installed
from shiftjax.options import ConfigError
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.positions import GATHERED_TOKENS, gathered_tokens
from shiftjax.sim.estimate import Workload
from shiftjax.sim.modelled import Target, cost_model, memory_of, sum_buffers_of

if TYPE_CHECKING:
    from shiftjax.device.groups import TryKernels
    from shiftjax.parallel.grid import Device

TARGETS = Path(__file__).parents[1] / "targets"
PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
FEW, MANY = 2, 4  # layers; XLA's choices have a period of two


class Step(NamedTuple):
    """A step of a deployment to compile, and what it is priced with."""

    mode: Mode
    bucket: Bucket
    work: Work


class Compiled(NamedTuple):
    """One step of a model with few layers; bytes are of one device."""

    weight_bytes: int
    temporary_bytes: int
    collective_bytes: int
    predicted_collective_bytes: int
    top_level_thunks: int
    kernels: Mapping[Kernel, int]
    all_reduces: Mapping[str, int]  # how they are done
    is_decided_by_the_host: bool  # a branch or a loop makes it wait for the device
    compile_seconds: float  # of the CPU: this process and the assembler
    named: Sequence[Launch]  # of a shallow step all, else those of a layer, in order

    @property
    def launches(self) -> int:
        """How many kernels and collectives a device runs."""
        return sum(self.kernels.values())


Row = dict[str, Any]


def compile_rows(
    target: Target, deployments: Sequence[Deployment], workload: Workload
) -> tuple[list[Row], list[Row], list[Row]]:
    """A row per compiled step, beside predictions; per kind of kernel; per launch of a layer.

    The target has passed `check_target`.
    """
    rows, kernels, layers = [], [], []
    for deployment in deployments:
        steps = {step: _whole(target, deployment, step) for step in _steps(deployment, workload)}
        memory = _memory_row(target, deployment, steps)
        for step, (compiled, per_layer) in steps.items():
            name = {"sp": deployment.sp, "tp": deployment.tp}
            name |= {"step": step.mode.label, "tokens": step.bucket.tokens}
            rows.append(name | _step_row(target, deployment, step, compiled, per_layer) | memory)
            kernels += [name | row for row in _kernel_rows(compiled.kernels)]
            layers += [name | launch._asdict() for launch in compiled.named]
    return rows, kernels, layers


def _steps(deployment: Deployment, workload: Workload) -> list[Step]:
    """The largest step in every mode, a prompt's, and in SHIFT one of decodes alone."""
    most, count = deployment.max_num_batched_tokens, deployment.max_num_seqs
    buckets = replace(deployment, token_buckets=doubling(most)).buckets
    steps = [Step(mode, buckets[-1], Work.prefill(most)) for mode in deployment.layout.modes]
    bucket = next(one for one in buckets if one.holds(count, count, count))
    context = workload.num_prompt_tokens + workload.num_output_tokens // 2
    return [*steps, Step(deployment.layout.shift, bucket, Work.decode(count, context))]


def check_target(target: Target) -> None:
    """Raise ConfigError with what is missing or cannot be compiled."""
    wrong, machine = [], target.machine.name
    if not (TARGETS / f"{_chip(target)}.txtpb").is_file():
        known = ", ".join(sorted(f"{path.stem}x8" for path in TARGETS.glob("*.txtpb")))
        wrong.append(f"--compile knows no description of {machine}; there are {known}")
    jaxlib = importlib.metadata.version("jaxlib")
    missing = [f"{name}=={jaxlib}" for name in PACKAGES if installed(name) != jaxlib]
    if missing:
        wrong.append(
            f"--compile needs {' and '.join(missing)}, and ptxas (nvidia-cuda-nvcc): "
            f"pip install --no-deps {' '.join(missing)} nvidia-cuda-nvcc"
        )
    if wrong:
        raise ConfigError(wrong)


def _chip(target: Target) -> str:
    return target.machine.name.removesuffix("x8")


def _memory_row(
    target: Target, deployment: Deployment, steps: Mapping[Step, tuple[Compiled, int]]
) -> Row:
    """What a device holds. SHIFT's weights are views of those of BASE, which are all there are."""
    memory = memory_of(target, deployment)
    every = [compiled for compiled, _ in steps.values()]
    held, temporary = every[0].weight_bytes, max(one.temporary_bytes for one in every)
    sums = sum_buffers_of(target, deployment)
    predicted = memory.workspace_bytes - target.reserved_bytes(deployment) - sums
    more = memory.weight_bytes + predicted - held - temporary  # than was predicted
    kv = memory.kv_bytes + more
    return {
        "weights_gb": held / 1e9,
        "predicted_weights_gb": memory.weight_bytes / 1e9,
        "temporaries_gb": temporary / 1e9,
        "predicted_temporaries_gb": predicted / 1e9,
        "sum_buffers_gb": sums / 1e9,
        "kv_tokens": kv * memory.num_kv_tokens // memory.kv_bytes,
        "predicted_kv_tokens": memory.num_kv_tokens,
    }


def _step_row(
    target: Target, deployment: Deployment, step: Step, compiled: Compiled, per_layer: int
) -> Row:
    """One step. Where the host decides in its middle, its own time is not hidden."""
    costs = cost_model(target, deployment)
    seconds = step_seconds(compiled.kernels)
    if compiled.is_decided_by_the_host:
        seconds += costs.host_seconds(step.work)
    return {
        "top_level_thunks": compiled.top_level_thunks,
        "launches_per_layer": per_layer,
        "priced_per_layer": costs.stages[0].layers.num_launches(step.mode, step.bucket.tokens),
        "launches": compiled.launches,
        "all_reduce_kinds": dict(compiled.all_reduces),
        "predicted_seconds": seconds,
        "seconds_by_formula": costs.device_seconds(step.mode, step.work),
        "compile_cpu_seconds": compiled.compile_seconds,
        "step_temporaries_gb": compiled.temporary_bytes / 1e9,
        "collectives_mb": compiled.collective_bytes / 1e6,
        "predicted_collectives_mb": compiled.predicted_collective_bytes / 1e6,
    }


def _kernel_rows(kernels: Mapping[Kernel, int]) -> list[Row]:
    """What a step spends its time on, the longest first."""
    by_time = sorted(kernels.items(), key=lambda item: -item[0].seconds * item[1])
    return [
        {
            "kind": kernel.kind,
            "kernel": kernel.name,
            "result": kernel.shape,
            "launches": count,
            "mb": kernel.num_bytes / 1e6,
            "gflop": kernel.flops / 1e9,
            "us": kernel.seconds * 1e6,
            "total_ms": kernel.seconds * count * 1e3,
        }
        for kernel, count in by_time
    ]


def _whole(target: Target, deployment: Deployment, step: Step) -> tuple[Compiled, int]:
    """(the step of the whole model, launches of one of its layers).

    It is on the line through two shallow ones, if its layers are alike.
    """
    layers = deployment.layout.model.num_layers
    if layers <= MANY or deployment.layout.model.num_late_layers:
        whole = _compile(target, deployment, step, layers)
        return whole._replace(named=()), whole.launches // layers
    few, many = (_compile(target, deployment, step, count) for count in (FEW, MANY))

    def on_the_line[T: (int, float)](a: T, b: T) -> T:
        return b + (layers - MANY) * (b - a) // (MANY - FEW)

    def counts(a: Mapping[Any, int], b: Mapping[Any, int]) -> dict[Any, int]:
        line = {key: on_the_line(a.get(key, 0), b.get(key, 0)) for key in {**b, **a}}
        return {key: count for key, count in line.items() if count > 0}

    whole = many._replace(
        weight_bytes=on_the_line(few.weight_bytes, many.weight_bytes),
        collective_bytes=on_the_line(few.collective_bytes, many.collective_bytes),
        predicted_collective_bytes=on_the_line(
            few.predicted_collective_bytes, many.predicted_collective_bytes
        ),
        top_level_thunks=on_the_line(few.top_level_thunks, many.top_level_thunks),
        kernels=counts(_alike(few.kernels, many.kernels), many.kernels),
        all_reduces=counts(few.all_reduces, many.all_reduces),
        compile_seconds=max(0.0, on_the_line(few.compile_seconds, many.compile_seconds)),
        named=layer_launches(few.named, many.named),
    )
    return whole, (many.launches - few.launches) // (MANY - FEW)


def _alike(few: Mapping[Kernel, int], many: Mapping[Kernel, int]) -> Counter[Kernel]:
    """The kernels of few layers under the names that the same work has in many.

    What writes into an array of all layers has a result as large as that.
    """
    shapes = {kernel._replace(shape=""): kernel for kernel in many}
    found: Counter[Kernel] = Counter()
    for kernel, count in few.items():
        found[kernel if kernel in many else shapes.get(kernel._replace(shape=""), kernel)] += count
    return found


@contextmanager
def _uncached() -> Iterator[None]:
    """Keep out JAX's cache, which can write programs for absent devices, but not read them."""
    import jax

    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _compile(target: Target, deployment: Deployment, step: Step, num_layers: int) -> Compiled:
    """Compile one step of a deployment with so many layers."""
    from shiftjax.device.all_reduces import all_reduce_kinds
    from shiftjax.device.groups import define_steps, pool_of
    from shiftjax.device.pool import abstract_pools
    from shiftjax.device.programs import abstract_inputs

    config = replace(deployment.layout.model, num_layers=num_layers)
    layout, formats = replace(deployment.layout, model=config), deployment.formats
    one = replace(deployment, layout=layout, dp=1, weights="alias")
    one = replace(
        one, token_buckets=(step.bucket.tokens,), max_model_len=deployment.max_num_batched_tokens
    )
    bucket, pool = step.bucket, pool_of(replace(one, num_blocks=1 + one.blocks_per_seq))
    with _uncached(), dumped_thunks() as (dump, read_thunks):
        devices = gpus(_chip(target), layout.num_devices)
        (definition,) = define_steps(one, devices, _passes(target)).values()
        definition = replace(definition, gpu_options={**definition.gpu_options, **dump})
        sizes = pool.num_blocks, pool.block_size, pool.dtype
        pools = abstract_pools(definition.mesh, layout, *sizes)
        inputs = abstract_inputs(definition, pool, bucket)
        begin = _cpu_seconds()
        compiled = definition.compile(step.mode, pools, *inputs)
        compile_seconds = _cpu_seconds() - begin
        thunks = top_level(read_thunks())
    memory = compiled.memory_analysis()
    if memory is None:
        raise ConfigError(["--compile: the compiler says nothing of the memory"])
    text, sizes = compiled.as_text() or "", (bucket.tokens, bucket.rows)
    use = definition.use_in(step.mode, sizes)
    moves = step_collectives(layout, step.mode, *sizes, formats, use)
    moves += sampling_collectives(layout, bucket.rows, sums=formats.sums)
    gathered = gathered_tokens(pool.block_size, GATHERED_TOKENS)
    moves += layout.model.num_early_layers * context_gathers(layout, formats, gathered)
    costs = cost_model(target, deployment)
    kernels = kernels_of(text, Prices.of(costs.stages[0], step.mode, step.work))
    switched = sum(one.num_bytes * count for one, count in kernels.items() if one.kind == SWITCH)
    return Compiled(
        memory.argument_size_in_bytes - memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        sum(num_bytes * count for (_, num_bytes), count in collectives(text).items()) + switched,
        sum(move.num_bytes * move.num_times for move in moves),
        len(thunks),
        kernels,
        all_reduce_kinds(text),
        any(kind in HOST_DECIDES for kind in thunks),
        compile_seconds,
        named_launches(text),
    )


def _passes(target: Target) -> "TryKernels | None":
    """What takes kernels for right, as nothing can be tried; None: those that are taken untried.

    Where the machine's switch can add up, the kernel that asks it to is one of them.
    """
    by_switch = target.machine.switch_sum and target.engine.sums_by_switch
    return (lambda shape: None) if by_switch else None


def _cpu_seconds() -> float:
    """CPU seconds of this process and of the children that have ended."""
    return sum(os.times()[:4])


@cache
def gpus(chip: str, count: int) -> "list[Device]":
    """GPUs that can be compiled for. Must be called before JAX has looked for devices."""
    import jax
    from jax.experimental import topologies

    # Nothing runs on a GPU here. With platforms to choose from, the CUDA plugin asks for a driver
    # and for CUDA's libraries when it is loaded, and without them cannot even compile.
    jax.config.update("jax_platforms", "cpu")
    description = (TARGETS / f"{chip}.txtpb").read_text(encoding="utf-8")
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=description, topology=f"1x1x{count}"
    )
    return list(topologies.make_mesh(topology, (count,), ("x",)).devices.flat)
