"""How fast the kernels are on this device, beside the two ceilings measured in the same run.

A time is that of a chain of calls on the device, each of which needs the result of the one before,
dispatched as one program and waited for once; the median of several such programs. So the host's
part is paid once per chain. The chain is no loop: a loop over kernels is not recorded as a CUDA
graph by XLA's defaults, and its body would be launched call by call. What a decode step reads must
not lie in the cache of the chip: the calls of a chain walk through different blocks of the pool.

    decode    bound by memory: bytes of keys and values, each read once, against a copy
    prefill   bound by the matrix units: operations of the causal half, against a large GEMM
    kv write  bound by memory, and for few tokens by the launch: bytes of keys and values, read and
              written once each, against a copy
    experts   `measure_experts`: decodes by memory, chunks by the matrix units
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Int32

from pallas_kernels.call import AttentionOptions, PagedKV
from pallas_kernels.decode import decode_attention
from pallas_kernels.decode_work import divide_decode
from pallas_kernels.kv_write import write_kv
from pallas_kernels.prefill import prefill_attention
from pallas_kernels.rows import Rows, Sequences
from pallas_kernels.step_work import KernelConfig, divide_step

UNITS = {"GB/s": 1e9, "TFLOP/s": 1e12}
CACHE_BYTES = 64 << 20  # more than the last-level cache of an H100 or H200 (50 MB)

LANES, LAUNCHES = 128, 16  # elements of the smallest kernel; how many times `Effort.calls` of them


class Effort(NamedTuple):
    """Repeats and sizes of a measurement."""

    repeats: int = 7  # programs, of whose times the median counts
    calls: int = 16  # in a chain
    copy_bytes: int = 2 << 30
    gemm_width: int = 8192
    cache_bytes: int = CACHE_BYTES  # what a chain of decode calls reads at least
    interpret: Any = False  # InterpretGPUParams: a dry run without a GPU, whose times mean nothing


class Ceilings(NamedTuple):
    """Measured ceilings of this device, by which kernels are rated."""

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
    dtype: str = "bfloat16"  # of keys and values
    kernel, unit = "decode", "GB/s"

    @property
    def amount(self) -> int:
        """Bytes of keys and values."""
        elements = 2 * self.seqs * self.context * self.kv_heads * self.head_dim
        return elements * jnp.dtype(self.dtype).itemsize


class PrefillShape(NamedTuple):
    """One chunk of a prompt, `context` tokens of which are in the pool already."""

    tokens: int
    context: int = 0
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    has_sinks: bool = False
    dtype: str = "bfloat16"  # of keys and values
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
    dtype: str = "bfloat16"  # of the pool
    kernel, unit = "kv write", "GB/s"

    @property
    def amount(self) -> int:
        """Bytes of keys and values, read in bfloat16 and written."""
        elements = 2 * self.tokens * self.kv_heads * self.head_dim
        return elements * (2 + jnp.dtype(self.dtype).itemsize)


# Inputs that share a scale, and its type, of weights of four bits.
FOUR_BIT_GROUPS = {"mxfp4": (32, "uint8"), "int4": (128, "float32")}


class ExpertsShape(NamedTuple):
    """Tokens, each with `k` experts of `experts`, the first `own` of which are this device's."""

    tokens: int
    hidden: int = 2048  # these are of one of 8 devices with Qwen3-30B-A3B
    width: int = 768
    experts: int = 128
    own: int = 16
    k: int = 8
    dtype: str = "bfloat16"  # of the weights; or a name of `FOUR_BIT_GROUPS`
    unit: str = "TFLOP/s"
    kernel = "experts"

    def chosen(self) -> Int32[np.ndarray, "tokens k"]:
        """Draw the experts of every token, all alike; -1 for those that are not own."""
        rng = np.random.default_rng(0)
        order = rng.random((self.tokens, self.experts)).argsort(axis=1)[:, : self.k]
        return np.where(order < self.own, order, -1).astype(np.int32)

    @property
    def amount(self) -> int:
        """Operations of the own pairs; in GB/s, bytes of the weights of experts that have any."""
        chosen, size = self.chosen(), 3 * self.hidden * self.width
        own = chosen[chosen >= 0]
        if self.unit == "TFLOP/s":
            return 2 * size * len(own)
        return round(size * len(np.unique(own)) * self.weight_bytes)

    @property
    def weight_bytes(self) -> float | int:
        """Bytes of a weight; of four bits with its part of a scale."""
        if self.dtype not in FOUR_BIT_GROUPS:
            return jnp.dtype(self.dtype).itemsize
        group, scale = FOUR_BIT_GROUPS[self.dtype]
        return 0.5 + jnp.dtype(scale).itemsize / group


Shape = DecodeShape | PrefillShape | WriteShape


class Calls(NamedTuple):
    """What a chain is made of: `x = call(x, *turn)`, a turn after the other, then again."""

    call: Callable[..., Any]
    first: Any  # x of the first call
    turns: Sequence[tuple[Any, ...]]


ONE_GRAPH = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,"
    "DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": "1",
}


def chain_seconds(
    calls: Calls, effort: Effort, compiler_options: Mapping[str, str] | None = None
) -> float:
    """Return the median seconds of one call; a chain has `effort.calls`, or one for every turn.

    The call is traced and lowered once, however long the chain. A barrier stands between the
    calls, so that the compiler does not merge them. On a GPU a chain is one CUDA graph, as a step
    is: launched one by one, calls of ours take 20 us more.
    """
    call, length = jax.jit(calls.call), max(effort.calls, len(calls.turns))

    def chain(x, turns):
        for i in range(length):
            x = lax.optimization_barrier(call(x, *turns[i % len(turns)]))
        return x

    first, turns = jax.device_put((calls.first, calls.turns))
    recorded = ONE_GRAPH if jax.default_backend() == "gpu" else {}
    options = {**recorded, **(compiler_options or {})}
    program = jax.jit(chain).lower(first, turns).compile(compiler_options=options)
    jax.block_until_ready(program(first, turns))
    seconds = []
    for _ in range(effort.repeats):
        start = time.perf_counter()
        jax.block_until_ready(program(first, turns))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) / length


def measure_ceilings(effort: Effort) -> Ceilings:
    """Measure a copy and a GEMM."""
    line = jnp.zeros(effort.copy_bytes // 4, jnp.float32)
    copy = chain_seconds(Calls(lambda x: x + 1.0, line, [()]), effort)
    n, keys = effort.gemm_width, jax.random.split(jax.random.key(0))
    left, right = (jax.random.normal(key, (n, n), jnp.bfloat16) for key in keys)
    right = right * jnp.bfloat16(n**-0.5)  # so that the chain neither grows nor vanishes
    gemm = chain_seconds(Calls(lambda x, y: x @ y, left, [(right,)]), effort)
    return Ceilings(2 * effort.copy_bytes / copy, 2 * n**3 / gemm)


def launch_seconds(effort: Effort) -> float:
    """Measure one of many kernels that do nearly nothing, recorded as one program."""
    calls = Calls(lambda x: x + 1.0, jnp.zeros(LANES, jnp.float32), [()])
    return chain_seconds(calls, effort._replace(calls=LAUNCHES * effort.calls))


def random_pool(blocks: int, shape: Shape) -> tuple[jax.Array, jax.Array]:
    """Return a pool in the shape's type."""
    size = blocks, shape.kv_heads, shape.block_size, shape.head_dim
    keys = jax.random.split(jax.random.key(1))
    k, v = (jax.random.normal(key, size, jnp.bfloat16).astype(shape.dtype) for key in keys)
    return k, v


def decode_calls(shape: DecodeShape, config: KernelConfig, effort: Effort) -> Calls:
    """Return calls of the decode kernel."""
    blocks_per_seq = -(-shape.context // shape.block_size)
    copies = 1 + math.ceil(effort.cache_bytes / shape.amount)
    blocks = shape.seqs * blocks_per_seq
    ids = 1 + np.random.default_rng(0).permutation(copies * blocks).astype(np.int32)
    tables = list(ids.reshape(copies, shape.seqs, blocks_per_seq))
    lens = np.full(shape.seqs, shape.context, np.int32)
    rows = Rows(np.arange(shape.seqs), lens)
    work = divide_decode(rows, shape.seqs, kv_heads=shape.kv_heads, config=config.decode)
    options = AttentionOptions(shape.head_dim**-0.5, interpret=effort.interpret)

    def call(q, kv, work):
        return decode_attention(q, kv, work, options, config.decode, out=q)

    q = jax.random.normal(jax.random.key(2), (shape.seqs, shape.heads, shape.head_dim))
    pool = random_pool(1 + copies * blocks, shape)
    turns = [(PagedKV(*pool, table, lens), work) for table in tables]
    return Calls(call, q.astype(jnp.bfloat16), turns)


def prefill_calls(shape: PrefillShape, config: KernelConfig, effort: Effort) -> Calls:
    """Return calls of the prefill kernel."""
    length = shape.context + shape.tokens
    blocks = -(-length // shape.block_size)
    table = 1 + np.random.default_rng(0).permutation(blocks).astype(np.int32)[None]
    lens, starts = np.array([length], np.int32), np.array([0, shape.tokens], np.int32)
    sizes = {"num_tokens": shape.tokens, "heads": (shape.heads, shape.kv_heads)}
    work = divide_step(Sequences(lens, starts, 0), **sizes, config=config).prefill
    sinks = jnp.zeros(shape.heads, jnp.bfloat16) if shape.has_sinks else None
    scale = shape.head_dim**-0.5
    options = AttentionOptions(scale, sinks=sinks, interpret=effort.interpret)

    def call(q, kv, work):
        return prefill_attention(q, kv, work, options, config.prefill)

    q = jax.random.normal(jax.random.key(2), (shape.tokens, shape.heads, shape.head_dim))
    kv = PagedKV(*random_pool(1 + blocks, shape), table, lens)
    return Calls(call, q.astype(jnp.bfloat16), [(kv, work)])


def write_calls(shape: WriteShape, write: Callable[..., Any]) -> Calls:
    """Return calls of `write(pool, k, v, slots)`: `write_kv`, or what does the same."""
    pool = random_pool(1 + -(-shape.tokens // shape.block_size), shape)
    rows = jnp.ones((shape.tokens, shape.kv_heads, shape.head_dim), jnp.bfloat16)
    slots = shape.block_size + jnp.arange(shape.tokens, dtype=jnp.int32)

    def call(pool, rows, slots):
        return write(pool, rows, rows, slots)

    return Calls(call, pool, [(rows, slots)])


def kernel_calls(shape: Shape, config: KernelConfig, effort: Effort) -> Calls:
    """Return calls of the kernel that a shape is for."""
    if isinstance(shape, DecodeShape):
        return decode_calls(shape, config, effort)
    if isinstance(shape, PrefillShape):
        return prefill_calls(shape, config, effort)
    return write_calls(shape, partial(write_kv, interpret=effort.interpret))


def kernel_seconds(shape: Shape, config: KernelConfig, effort: Effort) -> float:
    """Time the kernel that a shape is for."""
    return chain_seconds(kernel_calls(shape, config, effort), effort)


def trace(shape: Shape, config: KernelConfig) -> None:
    """Trace what `kernel_seconds` would time, allocating nothing; raises what that would."""

    def one() -> Any:
        call, first, turns = kernel_calls(shape, config, Effort(cache_bytes=0))
        return call(first, *turns[0])

    jax.eval_shape(one)


def row_of(shape: Shape | ExpertsShape, seconds: float, ceilings: Ceilings) -> dict[str, Any]:
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
