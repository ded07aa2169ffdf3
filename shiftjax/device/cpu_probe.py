"""Which number format, and which sizes of small steps, suit this CPU: tried, not known by name.

XLA's products of few rows differ a lot between processors. One with bfloat16 instructions takes as
long for 2 rows as for 8, since both are bound by reading the weights; one without widens every
weight, and is quicker with 2 rows than with 8, or in float32. So the products that a decode step
consists of are timed at the first start. Those of one row are not: a step of one row takes many
times as long as its products (docs/results/cpu.md).
"""

import functools
import importlib.metadata
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from shiftjax.costs.buckets import worthwhile
from shiftjax.deploy.resolve import Suited
from shiftjax.device import kept

logger = logging.getLogger(__name__)
FOLDER = "cpu"
LEAST_PARAMETERS = 16_000_000  # a smaller model lies in the caches: its products matter little
FEW_ROWS = (2, 4, 8, 12, 16, 24, 32, 48, 64)
MANY_ROWS = 256  # as a chunk of a prompt has
FORMATS_TRIED = ("bfloat16", "float32")
WORTH_TWICE_THE_MEMORY = 0.8  # float32 must take so much of the time of bfloat16
SHAPE = 1536, 576  # of a weight; a product with it, and one with its transpose, are a layer
NUM_LAYERS = 24  # together more than caches hold, in every format
NUM_ROUNDS = 3

Seconds = Mapping[str, Mapping[int, float]]  # of the products, by format and rows


@functools.cache
def suited_to_cpu(
    dtype: str | None, directory: Path | None, xla_flags: str = "", num_cores: int = 1
) -> Suited:
    """What suits this CPU, measured or recalled; `dtype` None: the format, too.

    `directory` is that of the compilation cache, where it is kept; None: it is not kept.
    `xla_flags` is what this process has as XLA_FLAGS, `num_cores` how many cores it may use.
    """
    tried = FORMATS_TRIED if dtype is None else (dtype,)
    key = {
        "cpu": [*_cpu(), num_cores],
        "jaxlib": importlib.metadata.version("jaxlib"),
        "flags": _flags(xla_flags),
        "tried": list(tried),
    }
    seconds = _read(kept.read(directory, FOLDER, key), tried)
    if seconds is None:
        begin = time.perf_counter()
        seconds = measure_products(tried)
        kept.keep(directory, FOLDER, key, {"seconds": seconds})
        logger.info("this CPU was tried in %.1f s", time.perf_counter() - begin)
    suited = choose(seconds)
    sizes = ", ".join(map(str, suited.few_tokens))
    logger.info("what suits this CPU: %s, steps of %s tokens and more", suited.dtype, sizes)
    return suited


def choose(seconds: Seconds) -> Suited:
    """The format whose products are quicker over all numbers of rows, and its sizes of steps."""
    sizes = {name: worthwhile(_few(each)) for name, each in seconds.items()}
    costs = {name: _mean(each, sizes[name]) for name, each in seconds.items()}
    first = next(iter(seconds))  # of the tried ones it takes the least memory
    best = min(costs, key=lambda name: costs[name])
    chosen = best if costs[best] < WORTH_TWICE_THE_MEMORY * costs[first] else first
    return Suited(chosen, sizes[chosen])


def measure_products(formats: Sequence[str]) -> dict[str, dict[int, float]]:
    """Seconds of all layers' products, the least of interleaved rounds."""
    weights = {name: _weights(name) for name in formats}
    inputs = {
        (name, rows): jnp.ones((rows, SHAPE[1]), name)
        for name in formats
        for rows in (*FEW_ROWS, MANY_ROWS)
    }
    for (name, _), x in inputs.items():
        _layer(x, *weights[name][0]).block_until_ready()  # compiled
    seconds: dict[str, dict[int, float]] = {name: {} for name in formats}
    for _ in range(NUM_ROUNDS):
        for (name, rows), x in inputs.items():
            begin = time.perf_counter()
            hidden = x
            for layer in weights[name]:
                hidden = _layer(hidden, *layer)
            hidden.block_until_ready()
            took = time.perf_counter() - begin
            seconds[name][rows] = min(took, seconds[name].get(rows, math.inf))
    return seconds


@jax.jit
def _layer(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Two products with weights as a step has them: (out, in), and (in, out)."""
    return jnp.einsum("to,oh->th", jnp.einsum("th,oh->to", x, up), down)


def _weights(name: str) -> list[tuple[jax.Array, jax.Array]]:
    """Weights that keep numbers as they are, near enough, through all layers."""
    value = 1 / math.sqrt(math.prod(SHAPE))
    return [(jnp.full(SHAPE, value, name), jnp.full(SHAPE, value, name)) for _ in range(NUM_LAYERS)]


def _few(seconds: Mapping[int, float]) -> dict[int, float]:
    return {rows: seconds[rows] for rows in FEW_ROWS}


def _mean(seconds: Mapping[int, float], sizes: Sequence[int]) -> float:
    """The geometric mean over numbers of rows, each padded to the next of `sizes`."""
    padded = [seconds[min(size for size in sizes if size >= rows)] for rows in FEW_ROWS]
    return math.exp(math.fsum(map(math.log, [*padded, seconds[MANY_ROWS]])) / (len(padded) + 1))


def _read(found: Mapping[str, Any], formats: Sequence[str]) -> Seconds | None:
    """What was kept; None for what somebody has changed."""
    try:
        seconds = found["seconds"]
        return {
            name: {rows: float(seconds[name][str(rows)]) for rows in (*FEW_ROWS, MANY_ROWS)}
            for name in formats
        }
    except (LookupError, TypeError, ValueError):
        return None


def _cpu() -> list[str]:
    """The processor, and what it can do."""
    fields: dict[str, str] = {}
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        fields = {
            name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
    except OSError:
        pass
    names = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    return [fields.get(name, "") for name in names]


def _flags(text: str) -> list[str]:
    """XLA's flags, but for the number of virtual devices."""
    return sorted(flag for flag in text.split() if "device_count" not in flag)
