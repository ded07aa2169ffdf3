"""What both warpgroups of the decode kernel know: its arrays, its buffers, its jobs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.call import AttentionOptions, PagedKV
from pallas_kernels.mosaic import COLUMNS, oldest_seen

Q_SLOTS = 2  # the queries of this many jobs are in shared memory


class Shape(NamedTuple):
    """What is fixed when the kernel is compiled."""

    rows: int
    head_dim: int
    kv_tile: int
    stages: int
    copy_tokens: int  # tokens of one TMA copy: a block, or a part of one
    copies_per_block: int
    dtype: DTypeLike  # of the operands of the matrix instructions
    options: AttentionOptions
    q_slots: int = Q_SLOTS

    @property
    def width(self) -> int:
        """Numbers of a value."""
        return self.options.values_in_keys or self.head_dim

    @property
    def products(self) -> list[tuple[int, int]]:
        """Where in a value each product with V begins, and how much of it that takes.

        A product takes multiples of 64. What is over is in one of its own, the last 64: 96 are
        0..64 and 32..96, computed twice in part, rather than 128 that shared memory would hold.
        """
        whole = self.width - self.width % COLUMNS
        rest = [(self.width - COLUMNS, COLUMNS)] if whole < self.width else []
        return [(0, whole), *rest]

    @property
    def result_rows(self) -> int:
        """Rows of all products' results, stacked."""
        return sum(size for _, size in self.products)


class Inputs(NamedTuple):
    """The kernel's arrays in global memory; the first seven are of a `DecodeWork`."""

    worker_first: Any
    job_row: Any
    job_begin: Any
    job_end: Any
    row_seq: Any
    row_length: Any
    row_low: Any  # None: by the window
    kv: PagedKV  # without `seq_lens`: rows of a sequence differ in what they see
    scales: Any  # [2, kv_heads] float32: of K and of V; None where they are numbers
    q: Any  # [decode rows, kv_heads, rows, head_dim]


class Buffers(NamedTuple):
    """Shared memory, and barriers: `full` is said by the copies, `free` by the arithmetic."""

    q: Any  # [Q_SLOTS, rows, head_dim]
    k: Any  # [stages, kv_tile, head_dim]
    v: Any  # None of latents, and so are its barriers
    p: Any  # [rows, kv_tile]
    wide_k: Any  # [kv_tile, head_dim] float16 of an fp8 tile; None without fp8
    wide_v: Any
    q_full: Any
    q_free: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any


class Job(NamedTuple):
    """A share of a row: rounds from `begin` to `end`, of which positions low..length are seen."""

    row: jax.Array
    seq: jax.Array
    begin: jax.Array
    end: jax.Array
    low: jax.Array | int
    length: jax.Array


class Round(NamedTuple):
    """A part of a job, `kv_tile` positions from `begin`, of which low..length are seen."""

    begin: jax.Array
    low: jax.Array | int
    length: jax.Array


def down_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeat a value for each row of the query down the long side of a tile."""
    return lax.broadcast_in_dim(x, shape, [1])


def my_jobs(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Return the first job of this thread block and one past its last."""
    worker = lax.axis_index("worker")
    return inputs.worker_first[worker], inputs.worker_first[worker + 1]


def read_job(shape: Shape, inputs: Inputs, index: jax.Array) -> Job:
    """Read a job; one cut for a wider window loses the rounds before this layer's.

    And one cut for a longer context, of which others have more, those behind this one.
    """
    row, begin, tile = inputs.job_row[index], inputs.job_begin[index], jnp.int32(shape.kv_tile)
    seq, length = inputs.row_seq[row], inputs.row_length[row]
    end = jnp.minimum(inputs.job_end[index], lax.div(length + (tile - 1), tile))
    window = shape.options.window
    if window is None:
        return Job(row, seq, begin, end, 0, length)
    low = oldest_seen(length - 1, window) if inputs.row_low is None else inputs.row_low[row]
    begin = jnp.maximum(begin, lax.div(low, tile))
    return Job(row, seq, begin, end, low, length)
