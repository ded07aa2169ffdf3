"""Steps for the tests of the attention kernels, and what must come out, by definition."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from races import watched_races

from pallas_kernels import decode, prefill, reference
from pallas_kernels.call import AttentionOptions, PagedKV
from pallas_kernels.decode_work import DecodeConfig, DecodeWork, divide_decode
from pallas_kernels.prefill_work import PrefillConfig, PrefillWork, divide_prefill
from pallas_kernels.rows import Rows, Sequences, rows_of
from pallas_kernels.window import Window, first_seen

FP8 = jnp.float8_e4m3fn
NULL_BLOCK = 0
INTERPRETER = plgpu.InterpretGPUParams(detect_races=True)


class Case(NamedTuple):
    """A step; defaults are small, as the interpreter is slow."""

    chunks: tuple[tuple[int, int], ...] = ((17, 100), (5, 5))  # new tokens, context with them
    decodes: tuple[int, ...] = ()  # contexts of sequences before the chunks, whose tokens are rows
    padding: int = 1  # sequences of length 0 behind the others
    tokens: int = 0  # of the bucket; 0: a few more than there are
    q_per_kv: int = 4
    kv_heads: int = 1
    block_size: int = 16
    head_dim: int = 64
    dtype: Any = jnp.bfloat16
    kv_dtype: Any = jnp.bfloat16
    window: Window | None = None
    soft_cap: float | None = None
    kv_scales: Any = (1.0, 1.0)
    sinks: tuple[float, float] | None = None  # from, to: of the heads, in equal steps
    config: PrefillConfig = PrefillConfig(kv_tile=64, num_blocks=2, fixed_rounds=0)
    num_blocks: int = 2  # thread blocks of the decode kernel
    divided_window: Window | None = -1  # of its work; -1: that of the layer
    drafts: int = 0  # tokens of each of `decodes` after its first

    @property
    def num_rows(self) -> int:
        """Decode rows: the first tokens of the step."""
        return len(self.decodes) * (1 + self.drafts)


class Step(NamedTuple):
    """The arrays of a case."""

    q: jax.Array
    kv: PagedKV
    query_start_loc: np.ndarray


def decodes(
    lengths: tuple[int, ...] = (300, 33), padding: int = 0, chunks: Any = (), **changes: Any
) -> Case:
    """A case of decode rows, and of chunks and padding of one token each."""
    tokens = len(lengths) * (1 + changes.get("drafts", 0)) + len(chunks) + padding
    return Case(chunks, lengths, padding, tokens, **changes)


def make_step(case: Case, seed: int = 0) -> Step:
    """Make a step whose unused slots, and the null block, are NaN."""
    rng = np.random.default_rng(seed)
    new = (
        [1 + case.drafts] * len(case.decodes)
        + [chunk[0] for chunk in case.chunks]
        + [0] * case.padding
    )
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
    q = 2 * rng.standard_normal((tokens, case.q_per_kv * case.kv_heads, case.head_dim))
    k_pool, v_pool = (jnp.asarray(pool, case.kv_dtype) for pool in pools)
    return Step(jnp.asarray(q, case.dtype), PagedKV(k_pool, v_pool, tables, lengths), starts)


def free_what_has_left(case: Case, step: Step) -> Step:
    """Put the null block, which is NaN, where no token of the step sees a block any more."""
    if case.window is None:
        return step
    tables = step.kv.block_tables.copy()
    new = np.diff(step.query_start_loc)
    oldest = first_seen(step.kv.seq_lens - new, case.window)
    left = np.maximum(oldest, 0) // case.block_size
    for row, count in enumerate(left):
        tables[row, :count] = NULL_BLOCK
    return step._replace(kv=step.kv._replace(block_tables=tables))


def options_of(case: Case, interpret: Any = INTERPRETER) -> AttentionOptions:
    """What the kernels and the reference are told alike."""
    sinks = None
    if case.sinks is not None:
        sinks = jnp.linspace(*case.sinks, case.q_per_kv * case.kv_heads, dtype=case.dtype)
    limits = case.window, case.soft_cap
    return AttentionOptions(case.head_dim**-0.5, *limits, case.kv_scales, sinks, interpret)


def run_prefill(
    case: Case, step: Step, module: ModuleType = prefill, interpret: Any = INTERPRETER
) -> np.ndarray:
    """Run the prefill kernel."""
    work, step = prefill_work(case, step), free_what_has_left(case, step)
    options = options_of(case, interpret)
    attend = module.prefill_attention
    return interpreted(lambda *arrays: attend(*arrays, options, case.config), step.q, step.kv, work)


def run_prefill_parts(
    case: Case, step: Step, module: ModuleType = prefill
) -> tuple[np.ndarray, np.ndarray]:
    """Run it for outputs and base-2 logarithms, `[tokens, heads, ...]`."""
    work, step = prefill_work(case, step), free_what_has_left(case, step)

    def attend(*arrays: Any) -> jax.Array:
        values, lse = module.prefill_parts(*arrays, options_of(case), case.config)
        return jnp.concatenate([values.astype(jnp.float32), lse.T[..., None]], axis=-1)

    out = interpreted(attend, step.q, step.kv, work)
    return out[..., :-1], out[..., -1]


def prefill_work(case: Case, step: Step) -> PrefillWork:
    """Divide the chunks of a step."""
    return divide_prefill(
        Sequences(step.kv.seq_lens, step.query_start_loc, len(case.decodes)),
        num_tokens=step.q.shape[0],
        heads=(case.q_per_kv * case.kv_heads, case.kv_heads),
        window=case.window if case.divided_window == -1 else case.divided_window,
        max_context=step.kv.block_tables.shape[1] * case.block_size,
        config=case.config,
    )


def decode_config(case: Case) -> DecodeConfig:
    """Two stages only, so that places in the ring are used again."""
    shared_bytes = 10_000 + 35_000 * case.head_dim // 64 + 128 * case.q_per_kv
    return DecodeConfig(64, case.num_blocks, shared_bytes)


def decode_work(case: Case, step: Step) -> DecodeWork:
    """Divide the decode rows of a step."""
    rows = rows_of(step.kv.seq_lens, step.query_start_loc, len(case.decodes))
    return divide_decode(
        rows,
        max(case.num_rows, len(step.kv.seq_lens)),
        kv_heads=case.kv_heads,
        window=case.window if case.divided_window == -1 else case.divided_window,
        config=decode_config(case),
    )


def run_decode(
    case: Case, step: Step, module: ModuleType = decode, out: jax.Array | None = None
) -> np.ndarray:
    """Run the decode kernel."""

    def attend(*arrays: Any) -> jax.Array:
        return module.decode_attention(*arrays, options_of(case), decode_config(case), out=out)

    return interpreted(attend, step.q, step.kv, decode_work(case, step))


def run_parts(
    case: Case, step: Step, module: ModuleType = decode, latents: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Run the decode kernel for outputs and base-2 logarithms, `[rows, heads, ...]`.

    Rows say themselves where their windows begin. Of `latents` the first so many numbers of keys
    are values (`with_latents`), and the others come out as zeros.
    """
    rows = rows_of(step.kv.seq_lens, step.query_start_loc, len(case.decodes))
    if case.window is not None:
        rows = rows._replace(low=np.maximum(first_seen(rows.length - 1, case.window), 0))
    count = max(case.num_rows, len(step.kv.seq_lens))
    heads, kv = case.kv_heads, step.kv
    if latents is not None:
        heads, kv = decode.groups_of(case.q_per_kv), kv._replace(v_pool=None)
    sizes = {"kv_heads": heads, "config": decode_config(case)}
    # The kernel must not know the window, but that there is one.
    options = options_of(case)._replace(window=None if case.window is None else 1)
    options = options._replace(values_in_keys=latents)
    work = divide_decode(rows, count, **sizes)

    def attend(*arrays: Any) -> jax.Array:
        values, lse = module.decode_parts(*arrays, options, decode_config(case))
        return jnp.concatenate([values, lse[..., None]], axis=-1)

    out = interpreted(attend, step.q[:count], kv, work)
    rest = case.head_dim + 1 - out.shape[-1]
    return np.pad(out[..., :-1], ((0, 0), (0, 0), (0, rest))), out[..., -1]


def with_latents(step: Step, width: int) -> Step:
    """Return the step whose values are the first numbers of its keys, and zeros behind them."""
    keys = step.kv.k_pool
    is_value = jnp.arange(keys.shape[-1]) < width
    return step._replace(kv=step.kv._replace(v_pool=jnp.where(is_value, keys, 0)))


def expected_lse(case: Case, step: Step, rows: Rows) -> np.ndarray:
    """Return the logarithms of rows, the first tokens of the step, of their definition."""
    found = np.zeros((len(rows.seq), case.kv_heads * case.q_per_kv))
    q, k = (np.asarray(x).astype(np.float64) for x in (step.q, step.kv.k_pool))
    for row, (seq, length) in enumerate(zip(rows.seq, rows.length, strict=True)):
        position = np.arange(max(first_seen(length - 1, case.window), 0), length)
        block, offset = np.divmod(position, case.block_size)
        keys = k[step.kv.block_tables[seq, block], :, offset].repeat(case.q_per_kv, axis=1)
        scale = np.repeat(np.broadcast_to(case.kv_scales[0], case.kv_heads), case.q_per_kv)[:, None]
        scores = np.einsum("hd,thd->ht", q[row], keys) * case.head_dim**-0.5 * scale
        if case.soft_cap is not None:
            scores = case.soft_cap * np.tanh(scores / case.soft_cap)
        found[row] = np.log2(np.exp(scores).sum(axis=1))
    return found


def worst_parts(case: Case, step: Step, found: tuple[np.ndarray, np.ndarray]) -> float:
    """Return `worst` of such outputs, whose logarithms are within 2^-7 of a number, or beyond 1."""
    values, lse = (x[: case.num_rows] for x in found)
    out = np.zeros(step.q.shape)
    out[: case.num_rows] = values
    rows = rows_of(step.kv.seq_lens, step.query_start_loc, len(case.decodes))
    error = abs(lse - expected_lse(case, step, rows)).max(initial=0)
    return float(np.max([worst_decode(case, step, out), error * 2**7]))  # NaN, if there is one


def worst_prefill_parts(case: Case, step: Step, found: tuple[np.ndarray, np.ndarray]) -> float:
    """Return the same of all but the decode rows."""
    values, lse = found
    rows = rows_of(step.kv.seq_lens, step.query_start_loc, len(step.kv.seq_lens))
    own = slice(case.num_rows, len(rows.seq))
    error = abs(lse[: len(rows.seq)] - expected_lse(case, step, rows))[own].max(initial=0)
    return float(np.max([worst_prefill(case, step, values), error * 2**7]))  # NaN, if there is one


def interpreted(attend: Callable[..., jax.Array], *arrays: Any) -> np.ndarray:
    """Run kernels in the interpreter; a data race is an error."""
    with watched_races() as states:
        out = np.asarray(jax.jit(attend)(*arrays).astype(jnp.float32), np.float64)
    assert states
    if any(state.races_found for state in states):
        raise RuntimeError("a data race")
    return out


def worst(case: Case, step: Step, out: np.ndarray, rows: slice = slice(None)) -> float:
    """Return the largest error in units of what is allowed; infinite where out is not finite.

    Three things are rounded: a weight p to the type that is multiplied, the result to its own, and
    sums in float32, of which 2^-14 of sum(p |v|) is more than all. A capped logit is off by 2^-10.9
    of the cap where the chip's own tanh is used; not here.
    """
    expected = reference.ragged_paged_attention(*step, options_of(case))
    sizes = step._replace(kv=step.kv._replace(v_pool=abs(step.kv.v_pool)))
    weight = reference.ragged_paged_attention(*sizes, options_of(case))
    multiplied = jnp.float16 if case.kv_dtype == FP8 else case.dtype
    of_p, of_out = (float(jnp.finfo(x).eps) / 2 for x in (multiplied, case.dtype))
    bound = (of_p + 2**-14) * weight + of_out * abs(expected)
    if not np.isfinite(out[rows]).all():
        return np.inf
    error, bound = abs(out - expected)[rows], bound[rows]
    return float(np.where(error > 0, error / np.maximum(bound, 1e-30), 0).max(initial=0))


def worst_decode(case: Case, step: Step, out: np.ndarray) -> float:
    """Return `worst` of the decode rows."""
    return worst(case, step, out, slice(case.num_rows))


def worst_prefill(case: Case, step: Step, out: np.ndarray) -> float:
    """Return `worst` of all but the decode rows."""
    return worst(case, step, out, slice(case.num_rows, None))
