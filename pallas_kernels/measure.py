"""How fast the kernels are on this device, beside the two ceilings measured in the same run.

A time is that of a chain of calls on the device, each of which needs the result of the one before,
dispatched as one program and waited for once; the median of several such programs. So the host's
part is paid once per chain. What a decode step reads must not lie in the cache of the chip: the
calls of a chain walk through different blocks of the pool.

    decode    bound by memory: bytes of keys and values, each read once, against a copy
    prefill   bound by the matrix units: operations of the causal half, against a large GEMM
    kv write  bound by memory, and for few tokens by the launch: bytes of keys and values, read and
              written once each, against a copy
"""

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.call import AttentionOptions, PagedKV
from pallas_kernels.decode import decode_attention
from pallas_kernels.decode_work import divide_decode
from pallas_kernels.kv_write import write_kv
from pallas_kernels.prefill import prefill_attention
from pallas_kernels.prefill_work import divide_prefill
from pallas_kernels.rows import Rows
from pallas_kernels.step_work import KernelConfig

UNITS = {"GB/s": 1e9, "TFLOP/s": 1e12}
CACHE_BYTES = 64 << 20  # more than the last-level cache of an H100 or H200 (50 MB)


class Effort(NamedTuple):
    """How much to measure."""

    repeats: int = 7  # programs, of whose times the median counts
    calls: int = 16  # in a chain
    copy_bytes: int = 2 << 30
    gemm_width: int = 8192
    interpret: Any = False  # InterpretGPUParams: a dry run without a GPU, whose times mean nothing


class Ceilings(NamedTuple):
    """What this device can do at best."""

    bytes_per_second: float  # of a copy: read and written
    flops_per_second: float  # of a square bfloat16 GEMM


class DecodeShape(NamedTuple):
    """Sequences of one length, each with one new token."""

    seqs: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    kernel, unit = "decode", "GB/s"

    @property
    def amount(self) -> int:
        """Bytes of keys and values, in 2-byte elements."""
        return 2 * 2 * self.seqs * self.context * self.kv_heads * self.head_dim


class PrefillShape(NamedTuple):
    """One chunk of a prompt, `context` tokens of which are in the pool already."""

    tokens: int
    context: int = 0
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    kernel, unit = "prefill", "TFLOP/s"

    @property
    def amount(self) -> int:
        """Operations: two products of a matrix with each pair of tokens that see each other."""
        pairs = self.tokens * self.context + self.tokens * (self.tokens + 1) // 2
        return 4 * self.heads * self.head_dim * pairs


class WriteShape(NamedTuple):
    """Keys and values of a step, put into their slots."""

    tokens: int
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    kernel, unit = "kv write", "GB/s"

    @property
    def amount(self) -> int:
        """Bytes of keys and values in 2-byte elements, read and written."""
        return 2 * 2 * 2 * self.tokens * self.kv_heads * self.head_dim


Shape = DecodeShape | PrefillShape | WriteShape


def chain_seconds(
    call: Callable[..., Any], first: Any, rest: tuple[Any, ...], effort: Effort
) -> float:
    """Return the median seconds of one `call(i, x, *rest)`, x being the result of the one before.

    A barrier stands between the calls, so that the compiler does not merge them.
    """

    def chain(x, rest):
        for i in range(effort.calls):
            x = lax.optimization_barrier(call(i, x, *rest))
        return x

    first, rest = jax.device_put((first, rest))
    program = jax.jit(chain).lower(first, rest).compile()
    jax.block_until_ready(program(first, rest))
    seconds = []
    for _ in range(effort.repeats):
        start = time.perf_counter()
        jax.block_until_ready(program(first, rest))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) / effort.calls


def measure_ceilings(effort: Effort) -> Ceilings:
    """Measure a copy and a GEMM."""
    line = jnp.zeros(effort.copy_bytes // 4, jnp.float32)
    copy = chain_seconds(lambda _, x: x + 1.0, line, (), effort)
    n, keys = effort.gemm_width, jax.random.split(jax.random.key(0))
    left, right = (jax.random.normal(key, (n, n), jnp.bfloat16) for key in keys)
    right = right * jnp.bfloat16(n**-0.5)  # so that the chain neither grows nor vanishes
    gemm = chain_seconds(lambda _, x, y: x @ y, left, (right,), effort)
    return Ceilings(2 * effort.copy_bytes / copy, 2 * n**3 / gemm)


def random_pool(blocks: int, shape: Shape) -> tuple[jax.Array, jax.Array]:
    """Return a pool, bfloat16."""
    size = blocks, shape.kv_heads, shape.block_size, shape.head_dim
    keys = jax.random.split(jax.random.key(1))
    k, v = (jax.random.normal(key, size, jnp.bfloat16) for key in keys)
    return k, v


def decode_seconds(shape: DecodeShape, config: KernelConfig, effort: Effort) -> float:
    """Time the decode kernel."""
    blocks_per_seq = -(-shape.context // shape.block_size)
    copies = min(effort.calls, 1 + math.ceil(CACHE_BYTES / shape.amount))
    blocks = shape.seqs * blocks_per_seq
    ids = 1 + np.random.default_rng(0).permutation(copies * blocks).astype(np.int32)
    tables = list(ids.reshape(copies, shape.seqs, blocks_per_seq))
    lens = np.full(shape.seqs, shape.context, np.int32)
    rows = Rows(np.arange(shape.seqs), lens)
    work = divide_decode(rows, shape.seqs, kv_heads=shape.kv_heads, config=config.decode)
    options = AttentionOptions(shape.head_dim**-0.5, interpret=effort.interpret)

    def call(i, q, kv, work):
        kv = kv._replace(block_tables=kv.block_tables[i % copies])
        return decode_attention(q, kv, work, options, config.decode, out=q)

    q = jax.random.normal(jax.random.key(2), (shape.seqs, shape.heads, shape.head_dim))
    kv = PagedKV(*random_pool(1 + copies * blocks, shape), tables, lens)
    return chain_seconds(call, q.astype(jnp.bfloat16), (kv, work), effort)


def prefill_seconds(shape: PrefillShape, config: KernelConfig, effort: Effort) -> float:
    """Time the prefill kernel."""
    length = shape.context + shape.tokens
    blocks = -(-length // shape.block_size)
    table = 1 + np.random.default_rng(0).permutation(blocks).astype(np.int32)[None]
    lens, starts = np.array([length], np.int32), np.array([0, shape.tokens], np.int32)
    q_per_kv = shape.heads // shape.kv_heads
    work = divide_prefill(lens, starts, 0, num_tokens=shape.tokens, q_per_kv=q_per_kv)
    options = AttentionOptions(shape.head_dim**-0.5, interpret=effort.interpret)

    def call(_, q, kv, work):
        return prefill_attention(q, kv, work, options, config.prefill)

    q = jax.random.normal(jax.random.key(2), (shape.tokens, shape.heads, shape.head_dim))
    kv = PagedKV(*random_pool(1 + blocks, shape), table, lens)
    return chain_seconds(call, q.astype(jnp.bfloat16), (kv, work), effort)


def write_seconds(shape: WriteShape, write: Callable[..., Any], effort: Effort) -> float:
    """Time `write(pool, k, v, slots)`: `write_kv`, or what does the same."""
    pool = random_pool(1 + -(-shape.tokens // shape.block_size), shape)
    rows = jnp.ones((shape.tokens, shape.kv_heads, shape.head_dim), jnp.bfloat16)
    slots = shape.block_size + jnp.arange(shape.tokens, dtype=jnp.int32)

    def call(_, pool, rows, slots):
        return write(pool, rows, rows, slots)

    return chain_seconds(call, pool, (rows, slots), effort)


def kernel_seconds(shape: Shape, config: KernelConfig, effort: Effort) -> float:
    """Time the kernel that a shape is for."""
    if isinstance(shape, DecodeShape):
        return decode_seconds(shape, config, effort)
    if isinstance(shape, PrefillShape):
        return prefill_seconds(shape, config, effort)
    return write_seconds(shape, partial(write_kv, interpret=effort.interpret), effort)


def row_of(shape: Shape, seconds: float, ceilings: Ceilings) -> dict[str, Any]:
    """Return a row of results; the prediction is the ceiling's."""
    is_compute = shape.unit == "TFLOP/s"
    ceiling = ceilings.flops_per_second if is_compute else ceilings.bytes_per_second
    return {
        "kernel": shape.kernel,
        "shape": shape._asdict(),
        "predicted_us": shape.amount / ceiling * 1e6,
        "us": seconds * 1e6,
        "rate": shape.amount / seconds / UNITS[shape.unit],
        "unit": shape.unit,
        "percent_of_ceiling": 100 * shape.amount / seconds / ceiling,
    }
