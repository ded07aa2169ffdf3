"""The prefill kernel's terms: what it knows and holds, and which piece of work is whose."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.call import AttentionOptions, PagedKV
from pallas_kernels.mosaic import FP8, oldest_seen, staged_rows
from pallas_kernels.prefill_split import SPAN
from pallas_kernels.prefill_work import WARPGROUP_ROWS, Job, PrefillConfig, PrefillWork


class Problem(NamedTuple):
    """What the kernel knows when it is compiled."""

    kv_heads: int
    q_per_kv: int  # query heads of a KV head
    n: int  # query tokens of a warpgroup
    box: int  # of a copy of queries or outputs: n, or all tokens where q has less
    head_dim: int
    block_size: int
    dtype: Any  # of the operands of every multiplication: q's, or float16 for pools of fp8
    out_dtype: Any  # of q and of the output, where that is numbers
    pool_dtype: Any
    options: AttentionOptions
    kv_tile: int  # context tokens of a round
    stages: int  # rounds in shared memory at a time
    config: PrefillConfig
    gives_lse: bool = False  # beside the output, which then is of a part of each context

    @property
    def interpreted(self) -> bool:
        """Whether multiplications start at 0 and take the left operand from `Shared.p`."""
        return bool(self.options.interpret)

    @property
    def is_fp8(self) -> bool:
        """Whether keys and values must be converted."""
        return self.pool_dtype == FP8

    @property
    def gives_units(self) -> bool:
        """Whether a number of each row leaves beside it: the scale of its codes, or its lse."""
        return self.gives_lse or self.options.codes is not None

    @property
    def stage_dtype(self) -> Any:
        """The type of what leaves: numbers or codes."""
        return self.out_dtype if self.options.codes is None else FP8

    @property
    def out_in_queries(self) -> bool:
        """Whether rows leave by the buffer that queries come in: there is no other room."""
        is_alone = len(self.stage_shape) == 2
        return self.head_dim > 128 and self.stage_dtype == self.dtype and is_alone

    @property
    def stage_shape(self) -> tuple[int, ...]:
        """What rows leave by, for each warpgroup: `staged_shape`."""
        return staged_shape(self.head_dim, self.stage_dtype)

    @property
    def copy_tokens(self) -> int:
        """Context tokens of a copy: a block, or a part of one."""
        return min(self.block_size, self.kv_tile)

    @property
    def copies_per_round(self) -> int:
        """Copies that bring the keys of a round."""
        return self.kv_tile // self.copy_tokens


def staged_shape(columns: int, dtype: DTypeLike) -> tuple[int, ...]:
    """Return [64, columns], or [64, room, columns] so that TMA may read each row where it lies."""
    room = staged_rows(1, columns * jnp.dtype(dtype).itemsize)
    return (WARPGROUP_ROWS, columns) if room == 1 else (WARPGROUP_ROWS, room, columns)


class Inputs(NamedTuple):
    """References to arrays in device memory."""

    work: PrefillWork
    kv: PagedKV
    scales: Any  # [2, kv_heads] float32: of K and of V; None where they are numbers
    q: Any
    sinks: Any  # [heads]; None: there are none
    fixed: Any = None  # [1] the scale of all codes; None: they have their own, or are none


class Shared(NamedTuple):
    """References to shared memory: buffers, and barriers of the same names."""

    q_in: Any  # [2, 64, head_dim] as it comes, row by row
    q: Any  # [2, 64, head_dim] as wgmma wants it
    k: Any  # [stages, kv_tile, head_dim]
    v: Any
    out: Any  # [2, 64, head_dim] row by row; None: `q_in` is used
    # [2, 64] which of a warpgroup's tokens a row belongs to; behind them rows' lse, where given
    row_token: Any
    q_ready: Any  # [2]
    q_free: Any
    k_ready: Any  # [stages]
    k_free: Any
    v_ready: Any
    v_free: Any
    raw_ready: Any  # of what the memory warpgroup works on: fp8 k, k, v, v; else the last values
    turn: Any  # the compute warpgroups take turns
    k_raw: Any = None  # [2, kv_tile, head_dim] as in the pool, if that is fp8
    v_raw: Any = None
    p: Any = None  # [2, 64, kv_tile], only for the interpreter
    units: Any = None  # [2, 64] scales of the rows' codes


class PartHeads(NamedTuple):
    """Heads of tokens over a part of their contexts, normalised, and how much they weigh."""

    values: Any  # [tokens, heads, head_dim]
    lse: Any  # [heads, tokens] float32: of the exponentials' sums, base 2


class Outputs(NamedTuple):
    """References to what is written: rows of whole tiles, and parts to be combined."""

    out: Any  # [tokens, heads, head_dim], or `CodedHeads`, or `PartHeads`
    parts: Any  # [parts, kv_heads, 2, 64, head_dim] float32, normalised; None: nothing is split
    lse: Any  # [parts, kv_heads, 2, 64] float32: of the exponentials' sums, base 2


class Kernel(NamedTuple):
    """A kernel under way: what it knows, reads, writes and holds."""

    problem: Problem
    inputs: Inputs
    outputs: Outputs
    shared: Shared


class Piece(NamedTuple):
    """One job and one KV head. Rounds are counted from position 0 of the sequence."""

    seq: jax.Array
    head: jax.Array
    begin: jax.Array  # tokens of q
    end: jax.Array
    position: jax.Array  # of the first token
    first: jax.Array  # the first round of the job that a token sees
    last: jax.Array  # one past the last


class Rows(NamedTuple):
    """The tokens of a compute warpgroup."""

    begin: jax.Array  # those that it owns
    end: jax.Array
    start: jax.Array  # the token of row 0: early enough that a box of tokens exists


class Share(NamedTuple):
    """A compute warpgroup's part of a piece of work."""

    rows: Rows
    position: jax.Array  # of token `rows.begin`
    first: jax.Array  # its rounds: first <= low <= high <= last
    low: jax.Array  # from here on the window hides nothing
    high: jax.Array  # from here on the future must be hidden
    last: jax.Array


# ---------------------------------------------------------------- who does what


def count_pieces(problem: Problem, inputs: Inputs) -> jax.Array:
    """Return how many pieces of work fall to this thread block."""
    total, blocks = inputs.work.counts[0] * problem.kv_heads, problem.config.num_blocks
    whole = lax.div(total, jnp.int32(blocks))
    return whole + jnp.int32(turn_of(problem, whole) < total - whole * blocks)


def turn_of(problem: Problem, turn: jax.Array) -> jax.Array:
    """Return this block's place in a turn: forth, then back, since the longest work comes first."""
    block = lax.axis_index("block")
    return jnp.where(lax.rem(turn, jnp.int32(2)) == 0, block, problem.config.num_blocks - 1 - block)


def read_piece(problem: Problem, inputs: Inputs, turn: jax.Array) -> Piece:
    """Return the piece of work that this thread block computes in turn `turn`."""
    index = turn * problem.config.num_blocks + turn_of(problem, turn)
    nth = lax.div(index, jnp.int32(problem.kv_heads))
    job = Job(*(inputs.work.jobs[nth, i] for i in range(len(Job._fields) - 1)), part=None)
    visible = jnp.maximum(job.position + job.end - job.begin, 0)
    head = index - nth * problem.kv_heads
    if problem.n < 8:  # with one KV head the compiler keeps what follows from it, and spills
        head = jnp.minimum(head, head + job.seq)
    rounds = SPAN // problem.kv_tile
    # Layers with a narrower window than the work was divided for see less of a job, or nothing.
    last = jnp.minimum(job.last * rounds, round_of(problem, visible + problem.kv_tile - 1))
    first = jnp.maximum(job.first * rounds, round_of(problem, oldest(problem, job.position)))
    return Piece(
        seq=job.seq,
        head=head,
        begin=job.begin,
        end=job.end,
        position=job.position,
        first=jnp.minimum(first, last),
        last=last,
    )


def read_part(problem: Problem, inputs: Inputs, turn: jax.Array) -> jax.Array:
    """Return which part of the tile's result a piece is; -1: all of it.

    Read when it is needed: kept in a register all the while, it would make others spill.
    """
    index = turn * problem.config.num_blocks + turn_of(problem, turn)
    nth = lax.div(index, jnp.int32(problem.kv_heads))
    return inputs.work.jobs[nth, Job._fields.index("part")]


def rows_of(
    problem: Problem, begin: jax.Array, end: jax.Array, tokens: jax.Array, warpgroup: Any
) -> Rows:
    """Return which tokens of a tile are a warpgroup's; of `tokens` in all. It may own none."""
    begin = begin + warpgroup * problem.n
    end = jnp.minimum(begin + problem.n, end)
    return Rows(begin, end, jnp.minimum(begin, tokens - problem.box))


def read_share(problem: Problem, inputs: Inputs, piece: Piece, warpgroup: jax.Array | int) -> Share:
    """Return the part of a compute warpgroup; if it owns no token, it has no rounds."""
    rows = rows_of(problem, piece.begin, piece.end, inputs.work.counts[1], warpgroup)
    position = piece.position + warpgroup * problem.n
    visible = jnp.maximum(position + rows.end - rows.begin, 0)
    last = round_of(problem, visible + problem.kv_tile - 1)
    last = jnp.clip(last, piece.first, piece.last)
    last = jnp.where(rows.end > rows.begin, last, piece.first)
    high = jnp.clip(round_of(problem, jnp.maximum(position + 1, 0)), piece.first, last)
    low = piece.first
    if problem.options.window is not None:
        in_all_windows = oldest(problem, position + rows.end - rows.begin - 1)
        low = round_of(problem, in_all_windows + problem.kv_tile - 1)
        low = jnp.clip(low, piece.first, high)
    return Share(rows, position, piece.first, low, high, last)


def for_each_head(problem: Problem, hidden: jax.Array, body: Callable[[jax.Array], None]) -> None:
    """Run `body` for each query head of the KV head.

    The end of the loop is hidden from the compiler, which unrolls it otherwise and keeps something
    in registers for every head; `hidden` is any number that it does not know, not negative.
    """
    count = jnp.minimum(problem.q_per_kv, problem.q_per_kv + hidden)
    lax.fori_loop(0, count, lambda g, _: body(g), None)


def oldest(problem: Problem, position: jax.Array) -> jax.Array:
    """Return the first position that a token sees."""
    window = problem.options.window
    if window is None:
        return jnp.int32(0)
    return oldest_seen(position, window)


def round_of(problem: Problem, position: jax.Array) -> jax.Array:
    """Return the round of a position, which is not negative."""
    return lax.div(position, jnp.int32(problem.kv_tile))
