"""Steps with prefill chunks for the tests of the kernel, and what must come out, by definition."""

from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from decode_cases import watched_races
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import prefill, reference
from pallas_kernels.prefill_plan import PrefillConfig, plan_prefill

FP8 = jnp.float8_e4m3fn
NULL_BLOCK = 0
INTERPRETER = plgpu.InterpretGPUParams(detect_races=True)


class Case(NamedTuple):
    """A step; defaults are small, as the interpreter is slow."""

    chunks: tuple[tuple[int, int], ...] = ((17, 100), (5, 5))  # new tokens, context with them
    decodes: tuple[int, ...] = ()  # contexts of rows before the chunks
    padding: int = 1  # sequences of length 0 behind the others
    tokens: int = 0  # of the bucket; 0: a few more than there are
    group: int = 4
    kv_heads: int = 1
    block_size: int = 16
    head_dim: int = 64
    dtype: Any = jnp.bfloat16
    kv_dtype: Any = jnp.bfloat16
    sliding_window: int | None = None
    soft_cap: float | None = None
    k_scale: Any = 1.0
    v_scale: Any = 1.0
    config: PrefillConfig = PrefillConfig(kv_tile=64, num_blocks=2)


class Step(NamedTuple):
    """The arrays of a case."""

    q: jax.Array
    k_pool: jax.Array
    v_pool: jax.Array
    block_tables: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray


def make_step(case: Case, seed: int = 0) -> Step:
    """Make a step whose unused slots, and the null block, are NaN."""
    rng = np.random.default_rng(seed)
    new = [1] * len(case.decodes) + [chunk[0] for chunk in case.chunks] + [0] * case.padding
    lengths = [*case.decodes, *(chunk[1] for chunk in case.chunks), *[0] * case.padding]
    lengths = np.array(lengths, np.int32)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
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
    tokens = case.tokens or starts[-1] + 7
    q = 2 * rng.standard_normal((tokens, case.group * case.kv_heads, case.head_dim))
    pools = [jnp.asarray(pool, case.kv_dtype) for pool in pools]
    return Step(jnp.asarray(q, case.dtype), *pools, tables, lengths, starts)


def options_of(case: Case) -> dict[str, Any]:
    """The arguments that the kernel and the reference have in common."""
    return {
        "scale": case.head_dim**-0.5,
        "sliding_window": case.sliding_window,
        "soft_cap": case.soft_cap,
        "k_scale": case.k_scale,
        "v_scale": case.v_scale,
    }


def run(
    case: Case, step: Step, module: ModuleType = prefill, interpret: Any = INTERPRETER
) -> np.ndarray:
    """Run the kernel in the interpreter; a data race is an error."""
    plan = plan_prefill(
        step.seq_lens,
        step.query_start_loc,
        len(case.decodes),
        num_tokens=step.q.shape[0],
        group=case.group,
    )

    def attend(*arrays: Any) -> jax.Array:
        options = options_of(case) | {"config": case.config, "interpret": interpret}
        return module.prefill_attention(*arrays, **options)

    with watched_races() as states:
        out = jax.jit(attend)(*step[:5], plan)
        out = np.asarray(out.astype(jnp.float32), np.float64)
    assert states
    if any(state.races_found for state in states):
        raise RuntimeError("a data race")
    return out


def worst(case: Case, step: Step, out: np.ndarray) -> float:
    """Return the largest error in units of what is allowed; infinite where out is not finite.

    Three things are rounded: a weight p to the type that is multiplied, the result to its own, and
    sums in float32, of which 2^-14 of sum(p |v|) is more than all. A capped logit is off by 2^-10.9
    of the cap where the chip's own tanh is used; not here. Rows of decodes are not looked at.
    """
    expected = reference.ragged_paged_attention(*step, **options_of(case))
    sizes = step._replace(v_pool=abs(step.v_pool))
    weight = reference.ragged_paged_attention(*sizes, **options_of(case))
    multiplied = jnp.float16 if case.kv_dtype == FP8 else case.dtype
    of_p, of_out = (float(jnp.finfo(x).eps) / 2 for x in (multiplied, case.dtype))
    bound = (of_p + 2**-14) * weight + of_out * abs(expected)
    rows = slice(len(case.decodes), None)
    if not np.isfinite(out[rows]).all():
        return np.inf
    error, bound = abs(out - expected)[rows], bound[rows]
    return float(np.where(error > 0, error / np.maximum(bound, 1e-30), 0).max(initial=0))
