"""Attention of prefill chunks over a paged context, for Hopper, in Pallas Mosaic GPU.

A thread block has three warpgroups. The memory warpgroup asks the copy engine (TMA) for queries and
for rounds of keys and values, block by block through the block table, and so runs ahead; two
compute warpgroups, each with 64 rows, multiply (wgmma) and keep an online softmax:

memory      q  k0 v0  k1 v1 | k2 v2 ...   waits for `*_free` before it fills a stage again
compute 0          S0 p0 O0   S1 p1 ...   waits for `*_ready`; frees a stage when it has read it
compute 1             S0 p0 O0   S1 ...   half a turn behind: one multiplies, one exponentiates

The rows of a warpgroup are `n` tokens of one sequence for each query head of one KV head, head by
head: row = head * n + token. Thread blocks stay and take tiles from the work in turn. The shape of
the computation is that of FlashAttention-3 (Shah et al., arXiv 2407.08608), base 2.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.call import AttentionOptions, PagedKV
from pallas_kernels.head_codes import Heads, like_heads, wrong_codes
from pallas_kernels.mosaic import FP8, LOG2_E, TMA_ALIGNMENT, scales_in_memory, swizzled
from pallas_kernels.prefill_combine import combine_parts
from pallas_kernels.prefill_compute import compute_piece, note_row_tokens
from pallas_kernels.prefill_memory import await_the_end, fetch_piece
from pallas_kernels.prefill_terms import (
    Inputs,
    Kernel,
    Outputs,
    PartHeads,
    Problem,
    Shared,
    count_pieces,
)
from pallas_kernels.prefill_work import (
    COMPUTE_WARPGROUPS,
    DEFAULT_CONFIG,
    WARPGROUP_ROWS,
    PrefillConfig,
    PrefillWork,
    tokens_per_warpgroup,
)
from pallas_kernels.queries import Queries, by_head, operand_type

SHARED_MEMORY_LIMIT = 227 * 1024  # bytes of a thread block
OVERHEAD_BYTES = 3072  # barriers, alignment, and what reductions take
KV_TILES = 128, 64  # in the order of preference


def prefill_attention(
    q: Float[Array, "tokens heads head_dim"] | Queries,
    kv: PagedKV,
    work: PrefillWork,
    options: AttentionOptions,
    config: PrefillConfig = DEFAULT_CONFIG,
) -> Heads:
    """Attention of the tokens of the work's tiles; zeros for padding; decode rows are unspecified.

    Arguments as in `paged_attention.ragged_paged_attention`. Raises ValueError for what the kernel
    cannot do.
    """
    return _attended(q, kv, work, options, config)


def prefill_parts(
    q: Float[Array, "tokens heads head_dim"] | Queries,
    kv: PagedKV,
    work: PrefillWork,
    options: AttentionOptions,
    config: PrefillConfig = DEFAULT_CONFIG,
) -> PartHeads:
    """Attention of tiles over a part of their contexts, to be put together with others.

    The part is the spans of the work's jobs, which may be none. Values have q's type; those of
    padding are zeros, and of decode rows unspecified. Arguments as of `prefill_attention`, but for
    sinks and codes, which are for who has all parts.
    """
    options = options._replace(sinks=None, codes=None)
    found = _attended(q, kv, work, options, config, gives_lse=True)
    missing = (options.soft_cap or 0.0) * LOG2_E  # of every logit: `prefill_softmax.cap`
    return found._replace(lse=found.lse + missing)


def _attended(
    q: jax.Array | Queries,
    kv: PagedKV,
    work: PrefillWork,
    options: AttentionOptions,
    config: PrefillConfig,
    *,
    gives_lse: bool = False,
) -> Any:
    tokens, heads, head_dim = q.shape
    _, kv_heads, block_size, _ = kv.k_pool.shape
    n = tokens_per_warpgroup(heads // kv_heads)
    problem = Problem(
        kv_heads=kv_heads,
        q_per_kv=heads // kv_heads,
        n=n,
        box=min(n, tokens),
        head_dim=head_dim,
        block_size=block_size,
        dtype=operand_type(q.dtype, kv.k_pool.dtype),
        out_dtype=q.dtype,
        pool_dtype=kv.k_pool.dtype,
        options=options,
        kv_tile=0,
        stages=0,
        config=config,
        gives_lse=gives_lse,
    )
    problem = choose_rounds(problem)
    check(problem, heads, [] if options.codes is None else wrong_codes(head_dim))
    scales = scales_in_memory(options.kv_scales)
    fixed = None if options.codes is None else options.codes.fixed
    inputs = Inputs(work, kv, scales, by_head(q, problem.dtype), options.sinks, fixed)
    outputs = run(problem, inputs)
    return outputs.out if outputs.parts is None else combine_parts(problem, inputs, outputs)


def run(problem: Problem, inputs: Inputs) -> Outputs:
    """Launch the kernel that attends."""
    arrays, tree = jax.tree.flatten(inputs)
    like = jax.ShapeDtypeStruct(inputs.q.shape, problem.out_dtype)
    out = like_heads(like, problem.options.codes)
    if problem.gives_lse:
        out = PartHeads(out, jax.ShapeDtypeStruct(like.shape[1::-1], jnp.float32))
    outputs = Outputs(out, None, None)
    if parts := 2 * inputs.work.splits.shape[0]:
        rows = parts, problem.kv_heads, COMPUTE_WARPGROUPS, WARPGROUP_ROWS
        of_rows = jax.ShapeDtypeStruct((*rows, problem.head_dim), jnp.float32)
        outputs = Outputs(out, of_rows, jax.ShapeDtypeStruct(rows, jnp.float32))
    written, outputs_tree = jax.tree.flatten(outputs)

    def prefill_kernel(*refs):
        read, written, shared = refs[: len(arrays)], refs[len(arrays) : -1], refs[-1]
        outputs = jax.tree.unflatten(outputs_tree, written)
        run_block(Kernel(problem, jax.tree.unflatten(tree, read), outputs, shared))

    results = plgpu.kernel(
        prefill_kernel,
        out_type=written,
        kernel_name="prefill_attention",
        scratch_types=[shared_memory(problem)],
        grid=(problem.config.num_blocks,),
        grid_names=("block",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
        interpret=problem.options.interpret,
    )(*arrays)
    return jax.tree.unflatten(outputs_tree, results)


def run_block(kernel: Kernel) -> None:
    """Run one thread block: every piece of work that falls to it, in three warpgroups."""
    warpgroup = lax.axis_index("warpgroup")
    count = count_pieces(kernel.problem, kernel.inputs)
    # Registers of a thread: two compute warpgroups and the memory's have 504 together.
    is_plain = not kernel.problem.is_fp8 and not kernel.problem.gives_units
    compute_registers, memory_registers = (224, 56) if is_plain else (216, 72)

    @pl.when(warpgroup < COMPUTE_WARPGROUPS)
    def _():
        plgpu.set_max_registers(compute_registers, action="increase")

        note_row_tokens(kernel.problem, kernel.shared, warpgroup)

        def compute(turn, step):
            return compute_piece(kernel, warpgroup, turn, step)

        lax.fori_loop(0, count, compute, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == COMPUTE_WARPGROUPS)
    def _():
        plgpu.set_max_registers(memory_registers, action="decrease")

        def fetch(turn, step):
            return fetch_piece(kernel, turn, step)

        steps = lax.fori_loop(0, count, fetch, jnp.int32(0))
        await_the_end(kernel.problem, kernel.shared, count, steps)


def choose_rounds(problem: Problem) -> Problem:
    """Return the problem with the context tokens of a round, and rounds at a time, that fit.

    As configured; else the largest rounds of which as many fit as are configured, or one.
    """
    config = problem.config
    if config.kv_tile is not None:
        return problem._replace(kv_tile=config.kv_tile, stages=config.stages)
    for stages in (config.stages, 1):
        for kv_tile in KV_TILES:
            chosen = problem._replace(kv_tile=kv_tile, stages=stages)
            if shared_bytes(chosen) <= SHARED_MEMORY_LIMIT:
                return chosen
    return problem._replace(kv_tile=KV_TILES[-1], stages=config.stages)


def shared_bytes(problem: Problem) -> int:
    """Return about how much shared memory a thread block takes; no less than it does."""
    staged = 0
    if not problem.out_in_queries:
        width, room = problem.stage_shape[-1], math.prod(problem.stage_shape[1:])
        staged = room // width * jnp.dtype(problem.stage_dtype).itemsize
    queries = (2 * 2 + staged) * COMPUTE_WARPGROUPS * WARPGROUP_ROWS * problem.head_dim
    round_bytes = 2 * problem.kv_tile * problem.head_dim * 2
    raw_bytes = round_bytes if problem.is_fp8 else 0
    return queries + problem.stages * round_bytes + raw_bytes + OVERHEAD_BYTES


def check(problem: Problem, heads: int, wrong: list[str]) -> None:
    """Raise ValueError for what the kernel cannot do, and for what is `wrong` already."""
    kv_tile, block_size, stages = problem.kv_tile, problem.block_size, problem.stages
    wrong = problem.options.wrong(heads, problem.kv_heads) + wrong
    if problem.out_dtype not in (jnp.bfloat16, jnp.float16):
        wrong.append(f"q must be bfloat16 or float16, not {problem.out_dtype}")
    if problem.pool_dtype not in (problem.out_dtype, FP8):
        wrong.append(f"pools of {problem.pool_dtype} with q of {problem.out_dtype}")
    if problem.head_dim % 32:
        wrong.append(f"head_dim must be a multiple of 32, not {problem.head_dim}")
    row_bytes = problem.head_dim * jnp.dtype(problem.dtype).itemsize
    if problem.q_per_kv > 1 and problem.n * row_bytes % TMA_ALIGNMENT:
        wrong.append(f"{problem.n} query tokens of a head take {row_bytes} bytes each")
    if kv_tile not in KV_TILES:
        wrong.append(f"kv_tile must be one of {KV_TILES}, not {kv_tile}")
    if block_size % 8 or max(kv_tile, block_size) % min(kv_tile, block_size):
        wrong.append(
            f"block_size {block_size} must be a multiple of 8, and it or kv_tile {kv_tile} a "
            "multiple of the other"
        )
    size = shared_bytes(problem)
    if size > SHARED_MEMORY_LIMIT and not problem.interpreted:
        wrong.append(
            f"head_dim {problem.head_dim} with kv_tile {kv_tile} and {stages} stages takes {size} "
            f"bytes of shared memory; there are {SHARED_MEMORY_LIMIT}"
        )
    if wrong:
        raise ValueError("prefill_attention: " + "; ".join(wrong))


def shared_memory(problem: Problem) -> Shared:
    """Describe the shared memory of a thread block."""
    stages, kv_tile, d = problem.stages, problem.kv_tile, problem.head_dim
    rows = (COMPUTE_WARPGROUPS, 64)
    stage = swizzled((stages, kv_tile, d), problem.dtype)
    raw = swizzled((2, kv_tile, d), problem.pool_dtype)
    copies = problem.copies_per_round
    ready = plgpu.Barrier(num_arrivals=1 if problem.is_fp8 else copies, num_barriers=stages)
    free = plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=stages)
    units = None if problem.options.codes is None else plgpu.SMEM(rows, jnp.float32)
    row_token = plgpu.SMEM(rows, jnp.int32)
    if problem.gives_lse:  # which has no room of its own: every buffer takes a multiple of 1 KB
        row_token = plgpu.SMEM((2 * COMPUTE_WARPGROUPS, WARPGROUP_ROWS), jnp.float32)
    return Shared(
        q_in=plgpu.SMEM((*rows, d), problem.dtype),
        q=swizzled((*rows, d), problem.dtype),
        k=stage,
        v=stage,
        out=None
        if problem.out_in_queries
        else plgpu.SMEM((COMPUTE_WARPGROUPS, *problem.stage_shape), problem.stage_dtype),
        row_token=row_token,
        q_ready=plgpu.Barrier(num_arrivals=problem.q_per_kv, num_barriers=COMPUTE_WARPGROUPS),
        q_free=plgpu.Barrier(num_barriers=COMPUTE_WARPGROUPS),
        k_ready=ready,
        k_free=free,
        v_ready=ready,
        v_free=free,
        raw_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=4 if problem.is_fp8 else 1),
        turn=plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS),
        k_raw=raw if problem.is_fp8 else None,
        v_raw=raw if problem.is_fp8 else None,
        p=swizzled((*rows, kv_tile), problem.dtype) if problem.interpreted else None,
        units=units,
    )
