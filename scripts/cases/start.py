"""What compiling a deep model for GPUs takes, in seconds of the CPU: no GPU is needed.

    PYTHONPATH=.:.venv/gpu JAX_PLATFORMS=cpu python scripts/bench.py start [--layers 1 2 4]

Compiles the largest step of every mode of a Llama-70B of few layers for H200s that are not here,
and draws the line through them to all layers: XLA adds the same for every layer. Seconds are of all
threads and of the assembler, which a busy machine does not change. How long such a program takes to
be read from the cache cannot be tried without a GPU; its bytes are there.
`shiftjax bench startup` times starts of an engine on this machine, by phase.
"""

import argparse
import resource
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from serving.bench.compiled_plan import gpus
from shiftjax.arch.presets import PRESETS
from shiftjax.config import SERVER_BUDGETS, EngineConfig
from shiftjax.core.policies import make_policy
from shiftjax.core.policy import wanted_modes
from shiftjax.costs.buckets import Bucket
from shiftjax.deploy.deployment import Deployment, Devices
from shiftjax.deploy.resolve import resolve
from shiftjax.device.compile_cache import use_compile_cache
from shiftjax.device.groups import define_steps, pool_of
from shiftjax.device.pool import abstract_pools
from shiftjax.device.programs import abstract_inputs
from shiftjax.parallel.grid import Mode

H200_BYTES = 141 * 10**9
NUM_BLOCKS = 4096  # the size of the pool is a number in the program, no work
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"


OPTIONS = {
    "--layers": [1, 2, 4],
    "--meshes": (["4x2", "1x8"], "SPxTP"),
    "--chip": ("h200", "a file of serving/targets"),
}


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each program."""
    with tempfile.TemporaryDirectory() as folder:
        use_compile_cache(Path(folder))
        for mesh in args.meshes:
            for row in rows_of(deployed(mesh), args.layers, args.chip, Path(folder)):
                yield {"mesh": mesh} | row


def deployed(mesh: str) -> Deployment:
    """Llama-70B on 8 GPUs with the budgets of a server."""
    sp, tp = map(int, mesh.split("x"))
    config = EngineConfig.from_options(
        sp=sp, tp=tp, dtype="bfloat16", num_blocks=NUM_BLOCKS, max_model_len=8192, **SERVER_BUDGETS
    )
    return resolve(config, PRESETS["llama-70b"], Devices(8, H200_BYTES, H200_BYTES))


def rows_of(
    deployment: Deployment, layers: list[int], chip: str, folder: Path
) -> Iterator[dict[str, Any]]:
    """What each program took with so many layers, and what all of a start would with all."""
    policy = make_policy(deployment.policy, deployment.threshold)
    wanted = wanted_modes(policy, deployment.buckets, deployment.layout.modes)
    programs = [(mode, bucket) for bucket, modes in wanted.items() for mode in modes]
    by_mode = {mode: max(b for m, b in programs if m == mode) for mode, _ in programs}
    whole, total = deployment.layout.model.num_layers, 0.0
    for mode, bucket in by_mode.items():
        costs = {n: compile_one(deployment, mode, bucket, n, chip, folder) for n in layers}
        for num_layers, cost in costs.items():
            yield {"step": mode.label, "tokens": bucket.tokens, "layers": num_layers, **cost}
        few, many = min(layers), max(layers)
        line = {
            name: costs[many][name]
            + (whole - many) * (costs[many][name] - costs[few][name]) / max(1, many - few)
            for name in costs[many]
        }
        total += sum(line["python_s"] + line["xla_s"] for m, _ in programs if m == mode)
        rounded = {name: round(value, 1) for name, value in line.items()}
        yield {"step": mode.label, "tokens": bucket.tokens, "layers": whole, "line": True} | rounded
    yield {"programs": len(programs), "layers": whole, "cpu_s of all": round(total)}


def compile_one(
    deployment: Deployment, mode: Mode, bucket: Bucket, num_layers: int, chip: str, folder: Path
) -> dict[str, float]:
    """CPU seconds of tracing and lowering, and of XLA; megabytes in the compilation cache."""
    model = replace(deployment.layout.model, num_layers=num_layers)
    one = replace(deployment, layout=replace(deployment.layout, model=model))
    (step,) = define_steps(one, gpus(chip, one.layout.num_devices)).values()
    pool = pool_of(one)
    pools = abstract_pools(step.mesh, one.layout, pool.num_blocks, pool.block_size, pool.dtype)
    inputs = abstract_inputs(step, pool, bucket)
    jax.clear_caches()
    stamps: list[float] = []

    def note(event: str, duration_secs: float, **_: str | int) -> None:
        if event == LOWERED:
            stamps.append(cpu_seconds())

    known = set(folder.iterdir())
    jax.monitoring.register_event_duration_secs_listener(note)
    begin = cpu_seconds()
    step.compile(mode, pools, *inputs)
    end = cpu_seconds()
    jax.monitoring.unregister_event_duration_listener(note)
    written = sum(path.stat().st_size for path in set(folder.iterdir()) - known)
    parts = {"python_s": stamps[-1] - begin, "xla_s": end - stamps[-1], "cache_mb": written / 1e6}
    return {name: round(value, 2) for name, value in parts.items()}


def cpu_seconds() -> float:
    """Of all threads of this process, and of the assemblers that it has started."""
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
