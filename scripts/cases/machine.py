"""What this machine can do and whether it is busy: for benchmarks that report a percentage.

Three numbers bound a CPU engine: how fast weights stream from memory, how fast bfloat16 matrices
multiply, and how many cores something else is using.
"""

import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from cases.kit import spent

if TYPE_CHECKING:
    from pallas_kernels.measure import Ceilings

STREAM_BYTES = 512 << 20  # far beyond any cache
GEMM_SHAPES = ((128, 2048, 2048), (512, 2048, 2048), (512, 576, 1536))


def measure_ceilings() -> "Ceilings":
    """Return the best rates seen on this machine, in a few seconds; no engine should beat them.

    Bytes per second that all cores move together, the better of reading and of copying; operations
    per second of the best bfloat16 product, by XLA. Other load only ever adds time.
    """
    import jax
    import jax.numpy as jnp

    from pallas_kernels.measure import Ceilings

    num_threads = os.cpu_count() or 1
    source = np.array_split(np.ones(STREAM_BYTES // 8, np.int64), num_threads)
    target, rates, multiply = [np.empty_like(part) for part in source], [], jax.jit(jnp.matmul)
    with ThreadPoolExecutor(num_threads) as pool:
        read = _best_seconds(lambda: list(pool.map(np.bitwise_or.reduce, source)), 5)
        copy = _best_seconds(lambda: list(pool.map(np.copyto, target, source)), 5)
    for rows, inner, columns in GEMM_SHAPES:
        pair = jnp.ones((rows, inner), jnp.bfloat16), jnp.ones((inner, columns), jnp.bfloat16)
        seconds = _best_seconds(lambda pair=pair: multiply(*pair).block_until_ready(), 21)
        rates.append(2 * rows * inner * columns / seconds)
    return Ceilings(max(STREAM_BYTES / read, 2 * STREAM_BYTES / copy), max(rates))


def _best_seconds(action: Callable[[], object], repeats: int) -> float:
    return min(spent(action)[1]["seconds"] for _ in range(repeats))


def busy_core_seconds() -> float:
    """Core-seconds that all processes have used since the machine started (Linux)."""
    with open("/proc/stat") as stat:
        ticks = [int(field) for field in stat.readline().split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # less idle and iowait


def wait_until_idle(budget_seconds: float, busy_cores: float = 0.15, window: float = 2.0) -> float:
    """Wait until fewer than `busy_cores` are in use, within a budget; return the seconds waited."""
    start = time.monotonic()
    while time.monotonic() - start < budget_seconds:
        before = busy_core_seconds()
        time.sleep(window)
        if (busy_core_seconds() - before) / window < busy_cores:
            break
    return time.monotonic() - start


def describe_machine() -> dict:
    """Processor, cores and system, to stand beside every number."""
    with open("/proc/cpuinfo") as info:
        models = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }
