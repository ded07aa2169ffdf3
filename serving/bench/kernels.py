"""`shiftjax bench kernels`: the attention kernels on this GPU, its ceilings, and the alternatives.

Decoding is bound by memory and judged by the copy bandwidth, prefill by the rate of a large GEMM,
both measured in the same run. The alternatives attend over contiguous keys and values, which no
engine with a paged cache has: cuDNN through `jax.nn.dot_product_attention`, and PyTorch's SDPA and
FlexAttention where torch is installed and this is a checkout (`scripts/peers/torch_attention.py`).
That of the KV write is XLA's scatter. An alternative that does not run here says so in its row.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import measure as kernels
from pallas_kernels.measure import CACHE_BYTES, Calls, chain_seconds, row_of, write_calls
from pallas_kernels.tuned import config_for
from shiftjax.config import EngineConfig
from shiftjax.core.request import SamplingParams
from shiftjax.costs.machine import ANY
from shiftjax.costs.machine_files import load_machine, machine_of, renewed
from shiftjax.models.attention import write_kv
from shiftjax.options import ConfigError

TORCH_WORKER = Path(__file__).parents[2] / "scripts" / "peers" / "torch_attention.py"
DECODE_SHAPES = ((1, 8192), (8, 4096), (64, 2048), (64, 8192), (256, 1024))  # sequences, context
PREFILL_SHAPES = ((2048, 0), (8192, 0), (16_384, 0), (2048, 14_336))  # tokens, context before
WRITE_TOKENS = (64, 8192)
COLUMNS = ("kernel", "shape", "time, µs", "rate", "", "% of ceiling")


def bench_kernels(
    arguments: argparse.Namespace, config: EngineConfig, sampling: SamplingParams
) -> int:
    """Measure and print a table; without a GPU that has kernels this is a usage error."""
    device = jax.devices()[0]
    require_hopper(device)
    name = machine_of(device.device_kind) if arguments.out else ""
    rows = []
    for row in measure(device, arguments.head_dim, arguments.block_size):
        rows.append(row)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print_rows(f"attention kernels on {device.device_kind}", rows)
    if arguments.out:
        arguments.out.write_text(machine_file(name, rows), encoding="utf-8")
    return 0


def machine_file(name: str, rows: list[dict[str, Any]]) -> str:
    """The file of a machine with the efficiencies that the rows show; the medians of the shapes."""
    machine, ceilings = load_machine(name), rows[0]
    peak = machine.matmul_flops["bfloat16"]

    def rate(kernel: str) -> float:
        return statistics.median(row["rate"] for row in rows if row["kernel"] == kernel)

    values: dict[str, Any] = {
        "matmul_efficiency": ceilings["flops_per_second"] / peak,
        "kv_efficiency": {ANY: rate("decode") * 1e9 / machine.memory_bytes_per_second},
        "attention_efficiency": rate("prefill") * 1e12 / peak,
    }
    by = f"`shiftjax bench kernels` on {ceilings['device']}"
    return renewed(name, values, f"measured by {by}", f"{by}, {date.today()}")


def require_hopper(device: Any) -> None:
    """Raise ConfigError where the kernels cannot run."""
    if device.platform != "gpu":
        seen = f"JAX sees only {device.platform} here"
        raise ConfigError([f"bench kernels needs a Hopper GPU (H100, H200): {seen}"])
    if not str(device.compute_capability).startswith("9."):
        has = f"{device.device_kind} has {device.compute_capability}"
        raise ConfigError([f"bench kernels needs a GPU of compute capability 9.x: {has}"])


def measure(device: Any, head_dim: int, block_size: int) -> Iterator[dict[str, Any]]:
    """Yield the ceilings, a row for each kernel and shape beside its alternatives, then PyTorch."""
    effort = kernels.Effort()
    device_kind, cores = device.device_kind, getattr(device, "core_count", None)
    settings, is_tuned = config_for(device_kind, head_dim, block_size, cores=cores)
    ceilings = kernels.measure_ceilings(effort)
    yield {"kernel": "ceilings", "device": device_kind, "tuned": is_tuned} | ceilings._asdict()
    sizes: dict[str, Any] = {"head_dim": head_dim, "block_size": block_size}
    shapes = [
        *(kernels.DecodeShape(*shape, **sizes) for shape in DECODE_SHAPES),
        *(kernels.PrefillShape(*shape, **sizes) for shape in PREFILL_SHAPES),
        *(kernels.WriteShape(tokens, **sizes) for tokens in WRITE_TOKENS),
    ]
    for shape in shapes:
        yield kernels.row_of(shape, kernels.kernel_seconds(shape, settings, effort), ceilings)
        name, seconds = ALTERNATIVES[shape.kernel]
        yield from _alternatives(shape, {name: partial(seconds, shape, effort)}, ceilings)
    found = _torch_seconds(head_dim)
    for shape in shapes:
        key = json.dumps([type(shape).__name__, *shape[:2]])
        times = {name: lambda time=time: time for name, time in found.get(key, {}).items()}
        yield from _alternatives(shape, times, ceilings)


def _alternatives(
    shape: Any, times: dict[str, Callable[[], float]], ceilings: Any
) -> Iterator[dict[str, Any]]:
    """Yield rows of what does the same work; without a chunk's context, which none of them has."""
    for name, measured in times.items():
        label = {"kernel": f"  {name}"}
        if shape.kernel == "prefill" and shape.context:
            continue
        try:
            yield row_of(shape, measured(), ceilings) | label
        except Exception as error:  # cuDNN refuses shapes, and may be missing: not our kernels
            reason = str(error).strip().splitlines()[0][:160]
            yield label | {"shape": shape._asdict(), "unavailable": reason}


def xla_write_seconds(shape: Any, effort: Any) -> float:
    """Time XLA's scatter on the same slots."""
    return chain_seconds(write_calls(shape, write_kv), effort)


def cudnn_seconds(shape: Any, effort: Any) -> float:
    """Time cuDNN on the same work, contiguous, and of prompts without a context before."""
    is_prompt = shape.kernel == "prefill"
    seqs, queries, keys = (
        (1, shape.tokens, shape.tokens) if is_prompt else (shape.seqs, 1, shape.context)
    )
    copies = 1 if is_prompt else 1 + CACHE_BYTES // shape.amount

    def random(seed: int, *sizes: int) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), (*sizes, shape.head_dim), jnp.bfloat16)

    def call(q, k, v):
        kind = {"is_causal": is_prompt, "implementation": "cudnn"}
        return jax.nn.dot_product_attention(q, k, v, **kind)

    k, v = (random(seed, copies, seqs, keys, shape.kv_heads) for seed in (2, 3))
    q, turns = random(1, seqs, queries, shape.heads), list(zip(k, v, strict=True))
    return chain_seconds(Calls(call, q, turns), effort)


ALTERNATIVES = {
    "decode": ("cuDNN", cudnn_seconds),
    "prefill": ("cuDNN", cudnn_seconds),
    "kv write": ("XLA", xla_write_seconds),
}


def _torch_seconds(head_dim: int) -> dict[str, dict[str, float]]:
    """Return seconds by shape and name of PyTorch's attentions; empty where there is no torch.

    PyTorch runs in a process of its own, once for all shapes: `shiftjax` does not import it.
    """
    if not TORCH_WORKER.exists() or importlib.util.find_spec("torch") is None:
        return {}
    shapes = {"decode": DECODE_SHAPES, "prefill": PREFILL_SHAPES, "head_dim": head_dim}
    command = [sys.executable, str(TORCH_WORKER), json.dumps(shapes)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout)


def print_rows(title: str, rows: list[dict[str, Any]]) -> None:
    """Print the rows for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("kernel", "shape", "") else "right")
    for row in rows:
        shape = " x ".join(str(n) for n in list(row.get("shape", {}).values())[:2])
        if "us" in row:
            cells = row["kernel"], shape, f"{row['us']:,.1f}", f"{row['rate']:,.0f}", row["unit"]
            table.add_row(*cells, f"{row['percent_of_ceiling']:.0f}")
        elif "unavailable" in row:
            table.add_row(row["kernel"], shape, "-", "-", row["unavailable"], "-")
        elif row["kernel"] == "ceilings":
            rates = row["bytes_per_second"] / 1e9, row["flops_per_second"] / 1e12
            for name, rate, unit in zip(("copy", "GEMM"), rates, ("GB/s", "TFLOP/s"), strict=True):
                table.add_row(name, "", "", f"{rate:,.0f}", unit, "100")
    Console(highlight=False).print(table)
