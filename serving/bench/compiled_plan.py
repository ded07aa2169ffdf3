"""`shiftjax plan --compile`: the engine's own steps, compiled for GPUs that are not here.

XLA's CUDA plugin compiles for a description of a chip (`targets/`) in place of the chip. Nothing
is allocated: weights, pools and inputs are shapes. The largest step of a deployment is compiled
with two and with four layers, and a deeper model has the memory on the line through both: XLA adds
the same for every layer. Temporaries do not grow with the layers.
"""

import importlib.metadata
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shiftjax.control.deployment import Deployment
from shiftjax.costs.collectives import step_collectives
from shiftjax.options import ConfigError
from shiftjax.parallel.grid import Mode
from shiftjax.sim.deployment import Target, memory_of

if TYPE_CHECKING:
    from shiftjax.parallel.grid import Device

TARGETS = Path(__file__).parents[1] / "targets"
PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
FEW, MANY = 2, 4  # layers; XLA's choices have a period of two
# An asynchronous collective is counted where it is done: its start may return its operand, too.
_COLLECTIVE = re.compile(
    r" = (\(?[a-z0-9]+\[.*?\)?) (all-to-all|all-reduce|all-gather)(?:-done)?\("
)
_ARRAY = re.compile(r"([a-z]+)(\d+)[a-z0-9]*\[([\d,]*)\]")


class Compiled(NamedTuple):
    """One step of a model with few layers; bytes are of one device."""

    weight_bytes: int
    temporary_bytes: int
    collective_bytes: int
    predicted_collective_bytes: int


def compile_rows(target: Target, deployments: Sequence[Deployment]) -> list[dict[str, Any]]:
    """A row per deployment: what its steps hold and move, beside predictions. ConfigError."""
    check_target(target)
    return [_row(target, deployment) for deployment in deployments]


def check_target(target: Target) -> None:
    """Raise ConfigError with what is missing or cannot be compiled."""
    wrong, machine = [], target.machine.name
    if not (TARGETS / f"{_chip(target)}.txtpb").is_file():
        known = ", ".join(sorted(f"{path.stem}x8" for path in TARGETS.glob("*.txtpb")))
        wrong.append(f"--compile knows no description of {machine}; there are {known}")
    if target.model.experts is not None:
        wrong.append(f"--compile: the engine has no experts, so no {target.model.name} yet")
    if "fp8" in (target.formats.weights, target.formats.kv):
        wrong.append("--compile: the engine has no fp8 yet; use --dtype bfloat16")
    jaxlib = importlib.metadata.version("jaxlib")
    missing = [f"{name}=={jaxlib}" for name in PACKAGES if _version(name) != jaxlib]
    if missing:
        wrong.append(
            f"--compile needs {' and '.join(missing)}, and ptxas (nvidia-cuda-nvcc): "
            f"pip install --no-deps {' '.join(missing)} nvidia-cuda-nvcc"
        )
    if wrong:
        raise ConfigError(wrong)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _chip(target: Target) -> str:
    return target.machine.name.removesuffix("x8")


def _row(target: Target, deployment: Deployment) -> dict[str, Any]:
    """SHIFT's weights are views of those of BASE, so those of BASE are all there are."""
    modes, memory = deployment.layout.modes, memory_of(target, deployment)
    steps = {mode: _whole(target, deployment, mode) for mode in modes}
    held = steps[modes[0]].weight_bytes
    temporary = max(step.temporary_bytes for step in steps.values())
    predicted = memory.workspace_bytes - int(target.engine.reserved_bytes)
    more = memory.weight_bytes + predicted - held - temporary  # than was predicted
    kv = memory.kv_bytes + more
    row = {
        "sp": deployment.sp,
        "tp": deployment.tp,
        "weights_gb": held / 1e9,
        "predicted_weights_gb": memory.weight_bytes / 1e9,
        "temporaries_gb": temporary / 1e9,
        "predicted_temporaries_gb": predicted / 1e9,
        "kv_tokens": kv * memory.num_kv_tokens // memory.kv_bytes,
        "predicted_kv_tokens": memory.num_kv_tokens,
    }
    for mode, step in steps.items():
        row[f"{mode.label}_collectives_mb"] = step.collective_bytes / 1e6
        row[f"predicted_{mode.label}_collectives_mb"] = step.predicted_collective_bytes / 1e6
    return row


def _whole(target: Target, deployment: Deployment, mode: Mode) -> Compiled:
    """The step of the whole model, on the line through two shallow ones if its layers are alike."""
    layers = deployment.layout.model.num_layers
    if layers <= MANY or deployment.layout.model.num_late_layers:
        return _compile(target, deployment, mode, layers)
    many = _compile(target, deployment, mode, MANY)
    few = _compile(target, deployment, mode, FEW)
    whole = Compiled(
        *(b + (layers - MANY) * (b - a) // (MANY - FEW) for a, b in zip(few, many, strict=True))
    )
    return whole._replace(temporary_bytes=many.temporary_bytes)


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


def _compile(target: Target, deployment: Deployment, mode: Mode, num_layers: int) -> Compiled:
    """Compile the largest step of a deployment with so many layers."""
    from shiftjax.device.groups import define_steps, pool_of
    from shiftjax.device.pool import abstract_pools
    from shiftjax.device.programs import abstract_inputs

    config = replace(deployment.layout.model, num_layers=num_layers)
    layout, formats = replace(deployment.layout, model=config), deployment.formats
    tokens = deployment.max_num_batched_tokens
    one = replace(deployment, layout=layout, dp=1, weights="alias", token_buckets=(tokens,))
    one = replace(one, max_model_len=tokens)
    bucket, pool = one.buckets[-1], pool_of(replace(one, num_blocks=1 + one.blocks_per_seq))
    (step,) = define_steps(one, _devices(_chip(target), layout.num_devices)).values()
    pools = abstract_pools(step.mesh, layout, pool.num_blocks, pool.block_size, pool.dtype)
    inputs = abstract_inputs(step, pool, bucket)
    with _uncached():
        compiled = step.compile(mode, pools, *inputs)
    memory = compiled.memory_analysis()
    if memory is None:
        raise ConfigError(["--compile: the compiler says nothing of the memory"])
    moves = step_collectives(layout, mode, bucket.tokens, bucket.rows, formats.activation_bytes)
    return Compiled(
        memory.argument_size_in_bytes - memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        sum(collective_bytes(compiled.as_text() or "").values()),
        sum(move.num_bytes * move.num_times for move in moves),
    )


@cache
def _devices(chip: str, count: int) -> "list[Device]":
    """GPUs that can be compiled for."""
    from jax.experimental import topologies

    description = (TARGETS / f"{chip}.txtpb").read_text(encoding="utf-8")
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=description, topology=f"1x1x{count}"
    )
    return list(topologies.make_mesh(topology, (count,), ("x",)).devices.flat)


def collective_bytes(text: str) -> Counter[str]:
    """Bytes of the results of every kind of collective in a compiled program, on one device."""
    found: Counter[str] = Counter()
    for shape, kind in _COLLECTIVE.findall(text):
        found[kind] += sum(_array_bytes(*array) for array in _ARRAY.findall(shape))
    return found


def _array_bytes(_kind: str, bits: str, sizes: str) -> int:
    count = 1
    for size in sizes.split(","):
        count *= int(size) if size else 1
    return count * int(bits) // 8
