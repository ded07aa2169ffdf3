"""What must be right on a GPU before a time counts: the kernels against float64, and the views."""

import itertools
from collections.abc import Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tune_kernels import candidates_for

from pallas_kernels import reference
from pallas_kernels.call import AttentionOptions, PagedKV
from pallas_kernels.decode_work import DecodeConfig
from pallas_kernels.paged_attention import ragged_paged_attention
from pallas_kernels.prefill_work import PrefillConfig
from pallas_kernels.step_work import KernelConfig, divide_step
from pallas_kernels.tuned import safe_config
from shiftjax.device.views import dlpack_view

Step = tuple[tuple[int, int], ...]  # (new tokens, context); the first have one new token each
STEPS: dict[str, Step] = {
    "mixed": ((1, 337), (1, 64), (17, 17), (5, 640), (130, 196)),
    "edges": ((1, 15), (1, 16), (1, 17), (1, 1), (16, 32), (17, 33), (64, 64)),
    "decodes": tuple((1, n) for n in (1, 15, 16, 17, 63, 64, 65, 128, 129, 2000)),
    "chunk": ((100, 700),),
}
SMALL: dict[str, Step] = {"mixed": ((1, 70), (1, 17), (18, 45))}
PADDING = 7  # tokens, and sequences, beyond the real ones
# Relative error in the norm: rounding of the probabilities and of the output.
LIMITS = {jnp.bfloat16: 5e-3, jnp.float16: 1e-3}
FP8 = jnp.float8_e4m3fn


class Kernel(NamedTuple):
    """One configuration of the kernels; without `config` the safe one."""

    heads: tuple[int, int] = (8, 2)  # of queries, of keys and values
    head_dim: int = 128
    block_size: int = 16
    dtype: Any = jnp.bfloat16
    kv_dtype: Any = jnp.bfloat16
    sliding_window: int | None = None
    soft_cap: float | None = None
    scales: tuple[float, float] = (1.0, 1.0)
    config: KernelConfig | None = None

    def described(self) -> dict[str, Any]:
        """Return what differs from the defaults, for people."""
        values = self._asdict().items()
        changed = {n: v for n, v in values if v != self._field_defaults[n]}
        return {n: v.__name__ if isinstance(v, type) else str(v) for n, v in changed.items()}


def kernels() -> list[Kernel]:
    """Return every shape and option, and every candidate of the tuning for one shape."""
    some: list[Kernel] = [Kernel((h, kv)) for h, kv in ((32, 8), (8, 8), (12, 4), (7, 1))]
    for head_dim, block_size in itertools.product((64, 128, 256), (16, 32, 64, 128)):
        some.append(Kernel(head_dim=head_dim, block_size=block_size))
    fp8 = Kernel(kv_dtype=FP8, scales=(0.5, 2.0))
    some += [Kernel(dtype=jnp.float16, kv_dtype=jnp.float16), fp8]
    some += [Kernel(sliding_window=100), Kernel(soft_cap=30.0)]
    some += [fp8._replace(sliding_window=100, soft_cap=30.0, block_size=64)]
    prefill = (PrefillConfig(**one) for one in candidates_for("prefill", 128, 16))
    decode = (DecodeConfig(**one) for one in candidates_for("decode", 128, 16))
    some += [Kernel(config=KernelConfig(prefill=one)) for one in prefill]
    return some + [Kernel(config=KernelConfig(decode=one)) for one in decode]


# What an interpreter can run: few thread blocks, which it runs one by one.
SMALL_CONFIG = KernelConfig(PrefillConfig(64, 2, 2), DecodeConfig(64, 2, 45_000))
SMALL_KERNEL = Kernel((4, 2), head_dim=64, config=SMALL_CONFIG)


def attention_rows(
    some: list[Kernel], steps: dict[str, Step] = STEPS, interpret: Any = False
) -> Iterator[dict[str, Any]]:
    """Yield the error of every configuration in every step, against float64."""
    for kernel in some:
        attend = jax.jit(partial(attention, kernel, interpret))  # one program for all steps
        for name in steps:
            error = attention_error(attend, kernel, tuple(steps.items()), name)
            row = {"step": name, "error": error, "right": error < LIMITS[kernel.dtype]}
            yield {"part": "correctness"} | kernel.described() | row


def attention(kernel: Kernel, interpret: Any, q: jax.Array, kv: PagedKV, work: Any) -> jax.Array:
    """Run the kernels."""
    config = kernel.config or safe_config(kernel.head_dim)
    return ragged_paged_attention(q, kv, work, options_of(kernel, interpret), config)


def options_of(kernel: Kernel, interpret: Any = False) -> AttentionOptions:
    """Return what the kernels and the reference are told alike."""
    limits = kernel.sliding_window, kernel.soft_cap
    return AttentionOptions(kernel.head_dim**-0.5, *limits, *kernel.scales, interpret)


class Arrays(NamedTuple):
    """A step, padded to what the largest of all steps needs, and its result in float64."""

    q: np.ndarray
    kv: PagedKV
    query_start_loc: np.ndarray
    expected: np.ndarray


@cache
def make_arrays(kernel: Kernel, steps: tuple[tuple[str, Step], ...], name: str) -> Arrays:
    """Make random arrays, the unused slots of whose pools are NaN."""
    rng, step = np.random.default_rng(0), dict(steps)[name]
    heads, kv_heads = kernel.heads
    every = [each for _, each in steps]
    seqs = PADDING + max(map(len, every))
    tokens = PADDING + max(sum(n for n, _ in each) for each in every)
    blocks = max(-(-context // kernel.block_size) for each in every for _, context in each)
    new, lens = np.zeros((2, seqs), np.int32)
    new[: len(step)], lens[: len(step)] = zip(*step, strict=True)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    ids = 1 + rng.permutation(seqs * blocks).astype(np.int32).reshape(seqs, blocks)
    tables = np.where(np.arange(blocks) < -(-lens[:, None] // kernel.block_size), ids, 0)
    shape = (1 + ids.size, kv_heads, kernel.block_size, kernel.head_dim)
    k_pool, v_pool = (np.full(shape, np.nan, kernel.kv_dtype) for _ in "kv")
    for table, length in zip(tables, lens, strict=True):
        block, offset = np.divmod(np.arange(length), kernel.block_size)
        for pool in (k_pool, v_pool):
            values = rng.standard_normal((length, kv_heads, kernel.head_dim))
            pool[table[block], :, offset] = values
    q = rng.standard_normal((tokens, heads, kernel.head_dim)).astype(kernel.dtype)
    arrays = q, PagedKV(k_pool, v_pool, tables.astype(np.int32), lens), starts
    expected = reference.ragged_paged_attention(*arrays, options_of(kernel))
    return Arrays(*arrays, expected)


def attention_error(
    attend: Any, kernel: Kernel, steps: tuple[tuple[str, Step], ...], name: str
) -> float:
    """Relative error against float64; infinite where padding rows are not zeros."""
    step = make_arrays(kernel._replace(config=None), steps, name)
    work = divide_step(
        step.kv.seq_lens,
        step.query_start_loc,
        sum(1 for _ in itertools.takewhile(lambda one: one[0] == 1, dict(steps)[name])),
        num_tokens=len(step.q),
        heads=kernel.heads,
        sliding_window=kernel.sliding_window,
        config=kernel.config or safe_config(kernel.head_dim),
    )
    out = np.asarray(attend(*jax.device_put((step.q, step.kv, work))), np.float64)
    if out[step.query_start_loc[-1] :].any() or not np.isfinite(out).all():
        return float("inf")
    return float(np.linalg.norm(out - step.expected) / np.linalg.norm(step.expected))


def view_rows() -> Iterator[dict[str, Any]]:
    """Yield whether DLPack views of device buffers stay in place through steps that donate a pool.

    The same path as the weights of SHIFT (`parallel/views.py`), with the pointers looked at.
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
        yield {"part": "views", "dtype": name, "right": in_place and offsets == after and all(same)}
