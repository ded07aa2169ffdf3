"""The prefill kernel's terms: what it knows and holds, and which piece of work is whose."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.call import AttentionOptions, PagedKV
from pallas_kernels.mosaic import FP8
from pallas_kernels.prefill_work import PrefillConfig, PrefillWork


class Problem(NamedTuple):
    """What the kernel knows when it is compiled."""

    tokens: int  # of q, at least n
    kv_heads: int
    q_per_kv: int  # query heads of a KV head
    n: int  # query tokens of a warpgroup
    head_dim: int
    block_size: int
    dtype: Any  # of the operands of every multiplication: q's, or float16 for pools of fp8
    out_dtype: Any  # of q and of the output
    pool_dtype: Any
    options: AttentionOptions
    kv_tile: int  # context tokens of a round
    config: PrefillConfig

    @property
    def interpreted(self) -> bool:
        """Whether multiplications start at 0 and take the left operand from `Shared.p`."""
        return bool(self.options.interpret)

    @property
    def is_fp8(self) -> bool:
        """Whether keys and values must be converted."""
        return self.pool_dtype == FP8

    @property
    def copy_tokens(self) -> int:
        """Context tokens of a copy: a block, or a part of one."""
        return min(self.block_size, self.kv_tile)

    @property
    def copies_per_round(self) -> int:
        """Copies that bring the keys of a round."""
        return self.kv_tile // self.copy_tokens


class Inputs(NamedTuple):
    """References to arrays in device memory."""

    work: PrefillWork
    kv: PagedKV
    k_scale: Any  # [kv_heads] float32
    v_scale: Any
    q: Any


class Shared(NamedTuple):
    """References to shared memory: buffers, and barriers of the same names."""

    q_in: Any  # [2, 64, head_dim] as it comes, row by row
    q: Any  # [2, 64, head_dim] as wgmma wants it
    k: Any  # [stages, kv_tile, head_dim]
    v: Any
    out: Any  # [2, 64, head_dim] row by row
    row_token: Any  # [2, 64] which of a warpgroup's tokens a row belongs to
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


class Kernel(NamedTuple):
    """A kernel under way: what it knows, reads, writes and holds."""

    problem: Problem
    inputs: Inputs
    out: Any
    shared: Shared


class Piece(NamedTuple):
    """One tile and one KV head. Rounds are counted from position 0 of the sequence."""

    seq: jax.Array
    head: jax.Array
    begin: jax.Array  # tokens of q
    end: jax.Array
    position: jax.Array  # of the first token
    first: jax.Array  # the first round that a token sees
    last: jax.Array  # one past the last


class Share(NamedTuple):
    """A compute warpgroup's part of a piece of work."""

    begin: jax.Array  # the tokens that it owns
    end: jax.Array
    start: jax.Array  # the token of row 0: early enough that n tokens exist
    position: jax.Array  # of token `begin`
    first: jax.Array  # its rounds: first <= low <= high <= last
    low: jax.Array  # from here on the window hides nothing
    high: jax.Array  # from here on the future must be hidden
    last: jax.Array


# ---------------------------------------------------------------- who does what


def count_pieces(problem: Problem, inputs: Inputs) -> jax.Array:
    """Return how many pieces of work fall to this thread block."""
    total, blocks = inputs.work.num_tiles[0] * problem.kv_heads, problem.config.num_blocks
    whole = lax.div(total, jnp.int32(blocks))
    return whole + jnp.int32(turn_of(problem, whole) < total - whole * blocks)


def turn_of(problem: Problem, turn: jax.Array) -> jax.Array:
    """Return this block's place in a turn: forth, then back, since the longest work comes first."""
    block = lax.axis_index("block")
    return jnp.where(lax.rem(turn, jnp.int32(2)) == 0, block, problem.config.num_blocks - 1 - block)


def read_piece(problem: Problem, inputs: Inputs, turn: jax.Array) -> Piece:
    """Return this block's piece of work of a turn."""
    index = turn * problem.config.num_blocks + turn_of(problem, turn)
    tile = lax.div(index, jnp.int32(problem.kv_heads))
    work = inputs.work
    begin, end, position = (x[tile] for x in (work.tile_begin, work.tile_end, work.tile_position))
    visible = jnp.maximum(position + end - begin, 0)
    return Piece(
        seq=work.tile_seq[tile],
        head=index - tile * problem.kv_heads,
        begin=begin,
        end=end,
        position=position,
        first=round_of(problem, oldest(problem, position)),
        last=round_of(problem, visible + problem.kv_tile - 1),
    )


def read_share(problem: Problem, piece: Piece, warpgroup: jax.Array | int) -> Share:
    """Return the part of a compute warpgroup; it may own no token, and then has no rounds."""
    begin = piece.begin + warpgroup * problem.n
    end = jnp.minimum(begin + problem.n, piece.end)
    position = piece.position + warpgroup * problem.n
    visible = jnp.maximum(position + end - begin, 0)
    last = round_of(problem, visible + problem.kv_tile - 1)
    last = jnp.where(end > begin, last, piece.first)
    high = jnp.clip(round_of(problem, jnp.maximum(position + 1, 0)), piece.first, last)
    low = piece.first
    if problem.options.sliding_window is not None:
        in_all_windows = oldest(problem, position + end - begin - 1)
        low = round_of(problem, in_all_windows + problem.kv_tile - 1)
        low = jnp.clip(low, piece.first, high)
    start = jnp.minimum(begin, problem.tokens - problem.n)
    return Share(begin, end, start, position, piece.first, low, high, last)


def for_each_head(problem: Problem, piece: Piece, body: Callable[[jax.Array], None]) -> None:
    """Run `body` for each query head of the KV head.

    The end of the loop is hidden from the compiler, which unrolls it otherwise and keeps something
    in registers for every head.
    """
    count = jnp.minimum(problem.q_per_kv, problem.q_per_kv + piece.seq)
    lax.fori_loop(0, count, lambda g, _: body(g), None)


def oldest(problem: Problem, position: jax.Array) -> jax.Array:
    """Return the first position that a token sees."""
    window = problem.options.sliding_window
    if window is None:
        return jnp.int32(0)
    return jnp.maximum(position - window + 1, 0)


def round_of(problem: Problem, position: jax.Array) -> jax.Array:
    """Return the round of a position, which is not negative."""
    return lax.div(position, jnp.int32(problem.kv_tile))
