"""What must be right on a GPU before a time counts: the kernels against float64, and the views.

The steps reach what serving reaches; `shiftjax/device/attention_steps.py` says what that is, and
why half of the rows look at keys on edges.
"""

import itertools
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gpu_cases import (
    DRY_EXPERTS,
    DRY_SHAPES,
    EXPERTS,
    FP8_DTYPE,
    SHAPES,
    SMALL,
    SMALL_CONFIG,
    SMALL_EXPERTS,
    SMALL_KERNEL,
    SMALL_TILES,
    STEPS,
    WRAPPING,
    Kernel,
    Step,
    Steps,
    kernels,
)
from gpu_parts import BLOCK_SIZE, HEAD_DIM, LAUNCHES, SLICES, SMOKE, Row, Run, attempted

from pallas_kernels import kv_write, reference
from pallas_kernels.call import AttentionOptions, PagedKV
from pallas_kernels.decode import decode_attention
from pallas_kernels.decode_work import DecodeWork, divide_decode
from pallas_kernels.grouped import TILE_ROWS, GroupedConfig
from pallas_kernels.measure import Effort, ExpertsShape, kernel_seconds, row_of, trace
from pallas_kernels.measure_experts import experts_error, experts_seconds, trace_experts
from pallas_kernels.paged_attention import ragged_paged_attention
from pallas_kernels.rows import Rows, Sequences
from pallas_kernels.step_work import KernelConfig, StepWork, divide_step
from pallas_kernels.tuned import config_for, safe_config
from shiftjax.device import write_cases
from shiftjax.device.attention_steps import Shape, make_inputs, wrapping_tokens
from shiftjax.device.attention_steps import Step as CheckedStep
from shiftjax.device.views import dlpack_view

SMALL_WRITE = 32  # tokens
PADDING = 7  # tokens, and sequences, beyond the real ones
# Relative error of a token's head, in the norm: rounding of the probabilities and of the output.
LIMITS = {jnp.bfloat16: 1e-2, jnp.float16: 2e-3}
# The same, of what experts add; codes that fall to the other side of a tie are off by 6%.
EXPERT_LIMITS = {"bfloat16": 1e-2, "float8_e4m3fn": 2e-2, "mxfp4": 1e-2, "int4": 1e-2}
RUNS = 3  # of every step: a race shows as bits that differ


def attention_rows(
    some: list[Kernel], steps: dict[str, Step] = STEPS, interpret: Any = False
) -> Iterator[Row]:
    """Yield the error of every configuration in every step, and whether runs differ in a bit.

    Then of the last rows alone of the first step, as in layers that compute no others, and of
    writing codes. A configuration that the kernels refuse, or that fails, is a row; the next one
    follows.
    """
    for kernel in some:
        row = {"kernel": kernel.described()}
        if reason := refusal(kernel):
            yield row | reason
            continue
        attend = jax.jit(partial(attention, kernel, interpret))  # one program for all steps
        attend_rows = jax.jit(partial(row_attention, kernel, interpret))
        of_kernel = fitted(steps, kernel)
        try:
            for name in steps:
                yield row | {"step": name} | judged(attend, kernel, of_kernel, name)
            yield row | {"step": "rows alone"} | judged_rows(attend_rows, kernel, of_kernel)
            if kernel.kv_dtype == FP8_DTYPE:
                yield row | {"step": "write"} | judged_write(kernel, interpret)
        except Exception as error:  # the compiler's, or the chip's
            yield row | {"failed": str(error).strip()[:400]}


def fitted(steps: dict[str, Step], kernel: Kernel) -> Steps:
    """Return the steps with contexts as long as the rings of this configuration want."""
    itemsize = jnp.dtype(kernel.kv_dtype).itemsize
    wrapping = wrapping_tokens(kernel.heads[1], kernel.head_dim, itemsize)
    return tuple(
        (name, tuple((new, wrapping if context == WRAPPING else context) for new, context in step))
        for name, step in steps.items()
    )


def refusal(kernel: Kernel) -> dict[str, str]:
    """Trace a configuration, running nothing: why the kernels refuse it, or what failed."""
    seqs, tokens, columns, blocks = padded(fitted(STEPS, kernel), kernel.block_size)
    (heads, kv_heads), size = kernel.heads, (kernel.block_size, kernel.head_dim)
    pool = jax.ShapeDtypeStruct((blocks, kv_heads, *size), kernel.kv_dtype)
    q = jax.ShapeDtypeStruct((tokens, heads, kernel.head_dim), kernel.dtype)
    lens, starts = np.zeros(seqs, np.int32), np.zeros(seqs + 1, np.int32)
    kv = PagedKV(pool, pool, np.zeros((seqs, columns), np.int32), lens)
    try:
        work = divided(kernel, lens, starts, 0, tokens)
        jax.eval_shape(partial(attention, kernel, False), q, kv, work)
    except ValueError as error:
        return {"refused": str(error)}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:400]}
    return {}


def divided(
    kernel: Kernel, lens: np.ndarray, starts: np.ndarray, num_decodes: int, num_tokens: int
) -> StepWork:
    """Divide a step as the kernels want it."""
    options = {"window": kernel.window, "config": config_of(kernel)}
    sizes = {"num_tokens": num_tokens, "heads": kernel.heads}
    return divide_step(Sequences(lens, starts, num_decodes), **sizes, **options)


def config_of(kernel: Kernel) -> KernelConfig:
    """Return the settings of a configuration."""
    return kernel.config or safe_config(kernel.head_dim, kernel.heads[0] // kernel.heads[1])


def attention(kernel: Kernel, interpret: Any, q: jax.Array, kv: PagedKV, work: Any) -> jax.Array:
    """Run the kernels."""
    out = ragged_paged_attention(q, kv, work, options_of(kernel, interpret), config_of(kernel))
    assert isinstance(out, jax.Array)  # no codes were asked for
    return out


def row_attention(
    kernel: Kernel, interpret: Any, q: jax.Array, kv: PagedKV, work: DecodeWork
) -> jax.Array:
    """Run the kernel of decode rows on rows alone: q[i] is row i."""
    config = config_of(kernel).decode
    out = decode_attention(q, kv, work, options_of(kernel, interpret), config)
    assert isinstance(out, jax.Array)
    return out


def options_of(kernel: Kernel, interpret: Any = False) -> AttentionOptions:
    """Return what the kernels and the reference are told alike."""
    limits, sinks = (kernel.window, kernel.soft_cap), None
    if kernel.has_sinks:
        sinks = np.linspace(0, 6, kernel.heads[0], dtype=np.float32)
    return AttentionOptions(kernel.head_dim**-0.5, *limits, kernel.scales, sinks, interpret)


def shape_of(kernel: Kernel, bucket: tuple[int, ...]) -> Shape:
    """Return what the check before serving calls this configuration, in its plainest form."""
    kv = "fp8" if kernel.kv_dtype == FP8_DTYPE else jnp.dtype(kernel.kv_dtype).name
    sizes = *kernel.heads, kernel.head_dim, kernel.block_size
    return Shape(*sizes, (kernel.window,), jnp.dtype(kernel.dtype).name, kv, bucket)


class Arrays(NamedTuple):
    """A step, padded to what the largest of all steps needs, and its result in float64."""

    q: np.ndarray
    kv: PagedKV
    query_start_loc: np.ndarray
    expected: np.ndarray


def padded(steps: Steps, block_size: int) -> tuple[int, int, int, int]:
    """Return sequences, tokens, blocks of a sequence, and of the pool, enough for every step."""
    every = [each for _, each in steps]
    tokens = max(sum(n for n, _ in each) for each in every)
    blocks = [[-(-context // block_size) for _, context in each] for each in every]
    sizes = PADDING + max(map(len, every)), PADDING + tokens, max(max(each) for each in blocks)
    return *sizes, 1 + max(sum(each) for each in blocks)


@lru_cache(maxsize=8)  # the steps of one shape: they are large
def make_arrays(kernel: Kernel, steps: Steps, name: str) -> Arrays:
    """Make random arrays, the unused slots of whose pools are NaN."""
    new, contexts = zip(*dict(steps)[name], strict=True)
    seqs, tokens, columns, blocks = padded(steps, kernel.block_size)
    bucket = tokens, seqs, seqs
    made = make_inputs(shape_of(kernel, bucket), CheckedStep(name, bucket, new, contexts, 0))
    tables = np.zeros((seqs, columns), np.int32)
    tables[:, : made.tables.shape[1]] = made.tables
    pools = [np.full((blocks, *pool.shape[1:]), np.nan, pool.dtype) for pool in made.pool]
    for pool, part in zip(pools, made.pool, strict=True):
        pool[: len(part)] = part
    arrays = made.q, PagedKV(pools[0], pools[1], tables, made.lens), made.starts
    expected = reference.ragged_paged_attention(*arrays, options_of(kernel))
    return Arrays(*arrays, expected)


def judged(attend: Any, kernel: Kernel, steps: Steps, name: str) -> Row:
    """Run a step some times: the relative error against float64, and whether all bits agree.

    The error is that of the worst head of a token, infinite where padding rows are not zeros.
    """
    step = make_arrays(kernel._replace(config=None), steps, name)
    new = [new for new, _ in dict(steps)[name]]
    num_decodes = sum(1 for _ in itertools.takewhile(lambda count: count == 1, new))
    work = divided(kernel, step.kv.seq_lens, step.query_start_loc, num_decodes, len(step.q))
    expected = step.expected[: sum(new)]
    return judgement(runs_of(attend, step.q, step.kv, work), expected, LIMITS[kernel.dtype])


def judged_rows(attend: Any, kernel: Kernel, steps: Steps) -> Row:
    """Run the last token of each sequence of the first step alone; as `judged`."""
    step = make_arrays(kernel._replace(config=None), steps, steps[0][0])
    count = len(steps[0][1])
    last = np.minimum(step.query_start_loc[1:] - 1, len(step.q) - 1)
    rows = Rows(np.arange(count, dtype=np.int32), step.kv.seq_lens[:count])
    options = {"window": kernel.window, "config": config_of(kernel).decode}
    work = divide_decode(rows, len(last), kv_heads=kernel.heads[1], **options)
    runs = runs_of(attend, step.q[last], step.kv._replace(seq_lens=None), work)
    return judgement(runs, step.expected[last[:count]], LIMITS[kernel.dtype])


def runs_of(call: Any, *arguments: Any) -> list[np.ndarray]:
    """Return what some calls give."""
    placed = jax.device_put(arguments)
    return [np.asarray(call(*placed)) for _ in range(RUNS)]


def judgement(runs: list[np.ndarray], expected: np.ndarray, limit: float) -> Row:
    """Hold the same rows of some runs against what is expected of the first; others are zeros."""
    same_bits = all(run.tobytes() == runs[0].tobytes() for run in runs)
    out, error = runs[0].astype(np.float64), float("inf")
    if np.isfinite(out).all() and not out[len(expected) :].any():
        norms = (np.linalg.norm(x, axis=-1) for x in (out[: len(expected)] - expected, expected))
        error = float(np.divide(*norms).max())
    return {"error": error, "same_bits": same_bits, "right": error < limit and same_bits}


def judged_write(kernel: Kernel, interpret: Any) -> Row:
    """Write codes of keys and values some times: what is wrong with them, against NumPy's."""
    bucket = (SMALL_WRITE if interpret else write_cases.MOST_TOKENS, 8, 8)
    arrays = write_cases.make_arrays(shape_of(kernel, bucket))

    def write(arrays: write_cases.Arrays) -> jax.Array:
        pool = kv_write.write_kv(*arrays[:4], scales=arrays.scales, interpret=interpret)
        return jax.lax.bitcast_convert_type(jnp.stack(pool), jnp.uint8)

    runs = runs_of(jax.jit(write), arrays)
    wrong = write_cases.wrong_with_codes(runs, write_cases.expected_codes(arrays))
    return {"wrong": wrong, "right": wrong is None}


def expert_rows(effort: Effort, *, dry: bool) -> Iterator[Row]:
    """Yield the error of experts in tiles of every size, and cut, of both types, in float64."""
    shape = SMALL_EXPERTS if dry else ExpertsShape(600, own=16)
    configs = [GroupedConfig(rows) for rows in TILE_ROWS] + [GroupedConfig(16, parts=(4, 3))]
    for dtype, config in itertools.product(EXPERT_LIMITS, [SMALL_TILES] if dry else configs):
        row = {"kernel": {"experts": dtype, "rows": config.rows, "parts": config.parts}}
        one = shape._replace(dtype=dtype)

        def error_of(one=one, config=config) -> Row:
            error = experts_error(one, config, effort)
            return {"error": error, "right": error < EXPERT_LIMITS[one.dtype]}

        yield attempted(row, error_of)


def view_rows(_: Run | None = None) -> Iterator[Row]:
    """Yield whether DLPack views of device buffers stay in place through steps that donate a pool.

    The same path as the weights of SHIFT (`device/views.py`), with the pointers looked at.
    """
    step = jax.jit(lambda weight, pool: pool + weight.sum(), donate_argnums=1)
    for dtype in (jnp.float32, jnp.bfloat16):
        values = np.arange(64 * 256).reshape(64, 256) % 17
        base = jax.device_put(values.astype(dtype), jax.devices()[0])
        views = [dlpack_view(base, start, 16) for start in range(0, 64, 16)]
        offsets = [view.unsafe_buffer_pointer() - base.unsafe_buffer_pointer() for view in views]
        pool = jnp.zeros((1 << 16,), dtype)
        for view in views:
            pool = step(view, pool)
        after = [view.unsafe_buffer_pointer() - base.unsafe_buffer_pointer() for view in views]
        same = [
            bool((np.asarray(view) == values[start : start + 16].astype(dtype)).all())
            for view, start in zip(views, range(0, 64, 16), strict=True)
        ]
        in_place = offsets == [start * base.nbytes // 64 for start in range(0, 64, 16)]
        name = jnp.dtype(dtype).name
        yield {"dtype": name, "right": in_place and offsets == after and all(same)}


# ---------------------------------------------------------------------- parts of the run


def smoke(heads: tuple[int, int], run: Run) -> Iterator[Row]:
    """Yield three steps of one configuration, three times each: right, always the same bits."""
    if not run.dry:
        yield from attention_rows([Kernel(heads)], {name: STEPS[name] for name in list(STEPS)[:3]})
    elif heads == SMOKE["1 KV head"]:
        yield from attention_rows([SMALL_KERNEL], SMALL, run.effort.interpret)
    else:
        yield {"skipped": "an interpreter is slow"}


def correctness(nth: int, run: Run) -> Iterator[Row]:
    """Yield every configuration of the kernels against float64, a slice of them."""
    if not run.dry:
        yield from attention_rows(kernels()[nth::SLICES])


def kernel_times(kind: str, run: Run) -> Iterator[Row]:
    """Yield times of the shapes that are deployed, against the ceilings."""
    device, ceilings = jax.devices()[0], run.ceilings
    cores = getattr(device, "core_count", None)  # not every device says
    config, is_tuned = config_for(device.device_kind, HEAD_DIM, BLOCK_SIZE, cores=cores)
    config = SMALL_CONFIG if run.dry else config
    for name, (shape, settings) in (DRY_SHAPES if run.dry else SHAPES)[kind].items():
        config = changed(config, kind, settings)

        def times(shape=shape, config=config) -> Row:
            seconds = kernel_seconds(shape, config, run.effort)
            return row_of(shape, seconds, ceilings) | {"launches": LAUNCHES[kind]}

        yield attempted({"row": name, "tuned": is_tuned}, times)


def changed(config: KernelConfig, kind: str, settings: dict[str, Any]) -> KernelConfig:
    """Return a configuration with other settings of one kernel."""
    return config._replace(**{kind: getattr(config, kind)._replace(**settings)})


def experts(run: Run) -> Iterator[Row]:
    """Yield experts of one device: right in tiles of every size, then how fast."""
    yield from expert_rows(run.effort, dry=run.dry)
    ceilings, tiles = run.ceilings, SMALL_TILES if run.dry else None
    for name, shape in (DRY_EXPERTS if run.dry else EXPERTS).items():

        def times(shape=shape) -> Row:
            return row_of(shape, experts_seconds(shape, tiles, run.effort), ceilings)

        yield attempted({"row": name}, times)


def traces(_: Run) -> Iterator[Row]:
    """Trace all that a run and its tuning would run: what a GPU's time must not be spent on."""
    for kernel in kernels():
        yield {"kernel": kernel.described()} | refusal(kernel)
    for kind, shapes in SHAPES.items():
        for name, (shape, settings) in shapes.items():
            trace(shape, changed(safe_config(HEAD_DIM), kind, settings))
            yield {"row": name}
    for name, shape in EXPERTS.items():
        trace_experts(shape)
        yield {"row": name}
