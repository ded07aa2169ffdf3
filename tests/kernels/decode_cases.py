"""Steps of decode rows for the tests of the kernel, and what must come out, by definition."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import decode
from pallas_kernels.decode_plan import DecodeConfig, DecodePlan, plan_decode

FP8 = jnp.float8_e4m3fn
NULL_BLOCK = 0


class Case(NamedTuple):
    """A step; defaults are small, as the interpreter is slow."""

    lengths: tuple[int, ...] = (300, 33)
    padding: int = 0  # sequences of length 0 behind the others
    group: int = 4
    kv_heads: int = 1
    block_size: int = 16
    head_dim: int = 64
    dtype: Any = jnp.bfloat16
    kv_dtype: Any = jnp.bfloat16
    num_blocks: int = 2  # thread blocks
    prefills: int = 0  # so many of the last sequences are not decode rows
    sliding_window: int | None = None
    planned_window: int | None = -1  # -1: that of the layer
    soft_cap: float | None = None
    k_scale: Any = 1.0
    v_scale: Any = 1.0


class Step(NamedTuple):
    """The arrays of a case."""

    q: jax.Array
    k_pool: jax.Array
    v_pool: jax.Array
    block_tables: np.ndarray
    seq_lens: np.ndarray
    plan: DecodePlan


def make_step(case: Case, seed: int = 0) -> Step:
    """Make a step whose unused slots, and the null block, are NaN."""
    rng = np.random.default_rng(seed)
    lengths = np.array([*case.lengths, *[0] * case.padding], np.int32)
    blocks = -(-lengths // case.block_size)
    shape = (1 + blocks.sum(), case.kv_heads, case.block_size, case.head_dim)
    pools = [rng.standard_normal(shape) for _ in "kv"]
    tables = np.full((len(lengths), blocks.max(initial=1)), NULL_BLOCK, np.int32)
    ids = iter(rng.permutation(np.arange(1, shape[0])))
    for pool in pools:
        pool[NULL_BLOCK] = np.nan
    for row, length in enumerate(lengths):
        tables[row, : blocks[row]] = [next(ids) for _ in range(blocks[row])]
        if length % case.block_size:
            for pool in pools:
                pool[tables[row, blocks[row] - 1], :, length % case.block_size :] = np.nan
    q = 2 * rng.standard_normal((len(lengths), case.group * case.kv_heads, case.head_dim))
    planned = case.sliding_window if case.planned_window == -1 else case.planned_window
    plan = plan_decode(
        lengths,
        len(case.lengths) - case.prefills,
        kv_heads=case.kv_heads,
        sliding_window=planned,
        config=config_of(case),
    )
    k_pool, v_pool = (jnp.asarray(pool, case.kv_dtype) for pool in pools)
    return Step(jnp.asarray(q, case.dtype), k_pool, v_pool, tables, lengths, plan)


def run(case: Case, step: Step, module: ModuleType = decode, **options: Any) -> np.ndarray:
    """Run the kernel in the interpreter; a data race is an error."""

    def attend(*arrays: Any) -> jax.Array:
        return module.decode_attention(
            *arrays,
            scale=scale_of(case),
            sliding_window=case.sliding_window,
            soft_cap=case.soft_cap,
            k_scale=case.k_scale,
            v_scale=case.v_scale,
            config=config_of(case),
            interpret=plgpu.InterpretGPUParams(detect_races=True),
            **options,
        )

    with watched_races() as states:
        out = np.asarray(jax.jit(attend)(*step).astype(jnp.float32))
    assert states
    if any(state.races_found for state in states):
        raise RuntimeError("a data race")
    return out


@contextmanager
def watched_races() -> Iterator[list[Any]]:
    """Collect the findings of the race detector, kernel by kernel: it keeps only the last."""
    states = []
    detector = gpu_callbacks.GPURaceDetectionState

    def record(**options: Any) -> Any:
        states.append(detector(**options))
        return states[-1]

    gpu_callbacks.reset_gpu_interpret_mode_state()
    with mock.patch.object(gpu_callbacks, "GPURaceDetectionState", record):
        yield states


def config_of(case: Case) -> DecodeConfig:
    """Two stages only, so that places in the ring are used again."""
    return DecodeConfig(64, case.num_blocks, 80_000 if case.head_dim == 128 else 45_000)


def scale_of(case: Case) -> float:
    """The scale that the model would use."""
    return case.head_dim**-0.5


def expected(case: Case, step: Step) -> tuple[np.ndarray, np.ndarray]:
    """Return the output by definition, in float64, and the bound of the error of each number.

    Three things are rounded: a weight p to the type that is multiplied, the result to its own, and
    sums in float32, of which 2^-14 of sum(p |v|) is more than all.
    """
    q, k_pool, v_pool = (np.asarray(x.astype(jnp.float32), np.float64) for x in step[:3])
    multiplied = jnp.float16 if case.kv_dtype == FP8 else case.dtype
    of_p, of_out = (float(jnp.finfo(x).eps) / 2 for x in (multiplied, case.dtype))
    out, bound = np.zeros_like(q), np.zeros_like(q)
    scales = [np.broadcast_to(np.asarray(x), case.kv_heads) for x in (case.k_scale, case.v_scale)]
    for row in range(len(case.lengths) - case.prefills):
        length = step.seq_lens[row]
        begin = max(0, length - (case.sliding_window or length))
        block, offset = np.divmod(np.arange(begin, length), case.block_size)
        slots = step.block_tables[row, block], slice(None), offset
        for head in range(q.shape[1]):
            kv_head = head // case.group
            k, v = (pool[slots][:, kv_head] for pool in (k_pool, v_pool))
            logits = k @ q[row, head] * scale_of(case) * scales[0][kv_head]
            if case.soft_cap:
                logits = case.soft_cap * np.tanh(logits / case.soft_cap)
            p = np.exp(logits - logits.max())
            p *= scales[1][kv_head] / p.sum()
            out[row, head] = p @ v
            bound[row, head] = (of_p + 2**-14) * (p @ abs(v)) + of_out * abs(p @ v)
    return out, bound


def worst(case: Case, step: Step, out: np.ndarray) -> float:
    """Return the largest error in units of what is allowed; infinite where out is not finite."""
    reference, bound = expected(case, step)
    rows = len(case.lengths) - case.prefills
    if not np.isfinite(out[:rows]).all():
        return np.inf
    return float((abs(out - reference)[:rows] / bound[:rows]).max(initial=0))
