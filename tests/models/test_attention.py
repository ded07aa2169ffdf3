"""Ragged paged attention against the definition in float64; unused slots hold NaN.

The tolerance is derived from the type and holds for every row, relative to the row's norm. In
bfloat16 weights and outputs are rounded, each to half a unit and at random: one unit is a bound. In
float32 the rounding of a score of size 4 is a relative error of its exponential: some units more.
The mutations at the end show that no wrong kernel hides below it.
"""

from functools import partial
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from spent import quick, thorough

from pallas_kernels import reference
from pallas_kernels.call import AttentionOptions, PagedKV
from pallas_kernels.rows import Rows, Sequences
from pallas_kernels.window import Chunk
from shiftjax.models.attention import (
    AttentionMetadata,
    LayerPool,
    LoopOptions,
    Scores,
    attend_chunk,
    divide_attention,
    empty_state,
    ragged_paged_attention,
    row_attention,
    write_kv,
)
from shiftjax.models.attention_work import (
    CPU_DRAFT_SIZES,
    CPU_SIZES,
    GPU_SIZES,
    LoopSizes,
    RowLoop,
    divide_rows,
    loop_sizes,
)

ULPS = {"float32": 16, "bfloat16": 1}
EDGES = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 150, 300]


class Case(NamedTuple):
    q: jax.Array
    pool: LayerPool
    metadata: AttentionMetadata


def make_case(
    query_lens, seq_lens, tokens, seqs, *, seed=0, block_size=16, kv_heads=2, q_per_kv=2,
    head_dim=16, dtype="float32", max_len=512, window=None, min_blocks=0,
    num_decodes=None, num_rows=None, sizes=CPU_SIZES,
):  # fmt: skip
    """A step whose sequences lie in shuffled blocks of a pool that is NaN wherever it may be.

    The tokens of the first `num_decodes` sequences are decode rows: of all those that begin the
    step with one token each, if it is None.
    """
    rng = np.random.default_rng(seed)
    blocks_needed = [-(-length // block_size) for length in seq_lens]
    shape = max(sum(blocks_needed) + 4, min_blocks), kv_heads, block_size, head_dim
    pool = [np.full(shape, np.nan, np.float32) for _ in range(2)]
    tables = np.zeros((seqs, -(-max_len // block_size)), np.int32)
    free = iter(1 + rng.permutation(shape[0] - 1))
    slots = []
    for i, (length, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
        tables[i, : blocks_needed[i]] = [next(free) for _ in range(blocks_needed[i])]
        block, offset = np.divmod(np.arange(length), block_size)
        for array in pool:
            array[tables[i, block], :, offset] = rng.standard_normal((length, kv_heads, head_dim))
        slots += list((tables[i, block] * block_size + offset)[length - query_len :])
    starts = np.full(seqs + 1, sum(query_lens), np.int32)
    starts[: len(query_lens) + 1] = np.cumsum([0, *query_lens])
    if num_decodes is None:
        num_decodes = next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens))
    lens = np.zeros(seqs, np.int32)
    lens[: len(seq_lens)] = seq_lens
    work = divide_attention(
        tables, Sequences(lens, starts, num_decodes, num_rows),
        num_tokens=tokens, block_size=block_size, window=window, sizes=sizes,
    )  # fmt: skip
    slot_mapping = np.zeros(tokens, np.int32)
    slot_mapping[: len(slots)] = slots
    metadata = AttentionMetadata(slot_mapping, tables, lens, starts, np.int32(num_decodes), work)
    q = rng.standard_normal((tokens, kv_heads * q_per_kv, head_dim))
    q, k_pool, v_pool = (jnp.asarray(x, dtype) for x in (q, *pool))
    return Case(q, (k_pool, v_pool), metadata)


@partial(jax.jit, static_argnames=("scale", "window", "sizes"))
def attend(q, pool, metadata, scale, window, sizes):
    options = LoopOptions(scale, window=window, sizes=sizes)
    return ragged_paged_attention(q, pool, metadata.block_tables, metadata.work, options)


def run(case, window=None, sizes=CPU_SIZES):
    return np.asarray(attend(*case, case.q.shape[-1] ** -0.5, window, sizes), np.float64)


def expected(case, window=None, **changed):
    scale = changed.pop("scale", 1.0) * case.q.shape[-1] ** -0.5
    of = case.metadata
    kv = PagedKV(*case.pool, of.block_tables, of.seq_lens)._replace(**changed)
    options = AttentionOptions(scale, window)
    return reference.ragged_paged_attention(case.q, kv, of.query_start_loc, options)


def tolerance(case):
    return ULPS[case.q.dtype.name] * float(jnp.finfo(case.q.dtype).eps)


def row_errors(case, out, wanted):
    """Errors of the rows that hold tokens, relative to the size of the row."""
    used = slice(0, case.metadata.query_start_loc[-1])
    error, size = (np.linalg.norm(x[used], axis=(1, 2)) for x in (out - wanted, wanted))
    return error / size


def check(case, window=None, sizes=CPU_SIZES):
    out = run(case, window, sizes)
    assert (row_errors(case, out, expected(case, window)) <= tolerance(case)).all()
    assert not out[case.metadata.query_start_loc[-1] :].any()  # padding: finite, and zero


STEPS = {
    "decodes at the edges": ([1] * 15, EDGES, 16, 16),
    "decodes, all rows used": ([1] * 8, EDGES[:8], 8, 8),
    "one decode": ([1], [300], 8, 8),
    "prompts at the edges": (EDGES[1:6] + EDGES[8:10], EDGES[1:6] + EDGES[8:10], 256, 8),
    "chunks of long prompts": ([20, 64, 65], [300, 164, 65], 160, 4),
    "one prompt fills the step": ([128], [128], 128, 4),
    "a tile that ends where the step ends": ([1, 1, 70], [33, 5, 300], 72, 4),
    "a short chunk in a decode bucket": ([1, 6], [40, 200], 8, 8),
    "decodes and prompts": ([1] * 5 + [40, 100, 3], [1, 16, 33, 300, 64, 60, 100, 3], 256, 16),
    "nothing": ([], [], 8, 8),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_equals_the_definition(name):
    check(make_case(*STEPS[name]))


BOTH = "decodes at the edges", "decodes and prompts"
QUICK_WINDOWS = list(product(BOTH, [20, Chunk(24)]))
WINDOWS = [*QUICK_WINDOWS, *product(BOTH, [1, 100, Chunk(1), Chunk(64)])]


@pytest.mark.parametrize(("name", "window"), quick(WINDOWS, *QUICK_WINDOWS))
def test_windows(name, window):
    check(make_case(*STEPS[name], window=window), window)


# As on a GPU, all jobs in one wave; small enough for several rounds, tiles and parts of a row.
ONE_WAVE = LoopSizes(lambda rows: RowLoop(2 * rows, 1, 32), 48, 96)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "window", "sizes"),
    quick(product((*BOTH, "nothing"), (None, 20, Chunk(48)), (ONE_WAVE, GPU_SIZES)), times=2),
)
def test_the_loops_of_gpus_equal_the_definition(name, window, sizes):
    case = make_case(*STEPS[name], window=window, sizes=sizes)
    if window is None and sizes == ONE_WAVE and name == "decodes at the edges":
        work = case.metadata.work.rows
        assert work.max_parts > 1 and work.wave_rounds[0] > 1
    check(case, window, sizes)


def test_the_loops_of_gpus_take_large_rounds():
    """In the same chunks in every bucket: what a row gives does not depend on the others'."""
    for rows, tokens in ((8, 4096), (64, 32_768), (128, 32_768), (256, 65_536)):
        lanes, waves, chunk = GPU_SIZES.row_loop(rows)
        assert (waves, chunk, lanes * chunk) == (1, 256, tokens)
    work = make_case([1] * 64, [2048] * 64, 64, 64, max_len=8192, sizes=GPU_SIZES).metadata.work
    assert (work.rows.wave_rounds.tolist(), work.rows.max_parts) == ([4], 2)
    work = make_case([1], [8192], 8, 8, max_len=8192, sizes=GPU_SIZES).metadata.work
    assert (work.rows.wave_rounds.tolist(), work.rows.max_parts) == ([2], 16)
    assert loop_sizes("gpu") == loop_sizes("gpu", drafts=True) == GPU_SIZES
    assert loop_sizes("cpu") == loop_sizes("tpu") == CPU_SIZES
    assert loop_sizes("cpu", drafts=True) == CPU_DRAFT_SIZES
    assert loop_sizes("cpu", deterministic=True, drafts=True).row_tile is None


def test_a_deterministic_context_is_cut_at_the_same_places_in_tiles_and_rows():
    sizes = loop_sizes("cpu", deterministic=True)
    assert {sizes.row_loop(rows).chunk for rows in (1, 8, 300)} == {sizes.tile_chunk}


def test_a_softmax_in_order_has_the_same_bits_with_other_heads_beside_it():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((8, 4, n, 64)), jnp.bfloat16) for n in (3, 64, 64))
    seen = jnp.asarray(rng.random((8, 1, 64)) < 0.9)

    def state_of(heads: int) -> list[np.ndarray]:
        own = [x[:, :heads] for x in (q, k, v)]
        state = empty_state(q, 8, heads, 3, 64)
        attend = jax.jit(partial(attend_chunk, scores=Scores(0.125, None), in_order=True))
        return [np.asarray(each)[:, :1] for each in attend(state, *own, seen)]

    for of_all, of_one in zip(state_of(4), state_of(1), strict=True):
        np.testing.assert_array_equal(of_all, of_one)


# Sequences whose tokens are decode rows, as drafted ones are: [tokens], [contexts], sizes.
DRAFTED = {
    "drafts between decodes and chunks": ([1, 5, 3, 40], [300, 130, 3, 60], 64, 4, 3, 16),
    "drafts alone, as many as fit": ([6, 2], [70, 17], 8, 2, 2, 8),
    "one draft of a short context": ([4], [4], 8, 2, 1, 4),
}


@pytest.mark.parametrize("window", [None, *thorough(20, Chunk(32))])
@pytest.mark.parametrize("name", DRAFTED)
def test_every_token_of_a_sequence_may_be_a_row(name, window):
    *step, num_decodes, num_rows = DRAFTED[name]
    own = {"num_decodes": num_decodes, "num_rows": num_rows, "window": window}
    case = make_case(*step, **own)
    assert case.metadata.work.tiles.num_tiles == len(step[0]) - num_decodes
    check(case, window)


# As above; with the tiles and jobs that are made of them.
TILED = {
    "one draft": ([6], [300], 8, 2, 1, 8, 1, 0),
    "too few rows for a tile": ([3], [300], 8, 2, 1, 8, 0, 3),
    "drafts of several tiles, and a short one": ([17, 1, 2], [300, 90, 33], 32, 4, 3, 32, 3, 3),
    "a draft beside a decode and a chunk": ([1, 4, 5], [300, 130, 60], 16, 4, 2, 16, 2, 1),
    "in a bucket of fewer rows": ([1, 6, 40], [300, 130, 60], 64, 4, 2, 16, 1, 7),
    "two rows fill the smallest bucket": ([2], [140], 2, 2, 1, 2, 1, 0),
    "a bucket of more than a large tile": ([9, 40], [300, 130], 96, 2, 1, 96, 1, 9),
}


@pytest.mark.parametrize(("name", "window"), quick(product(TILED, (None, 20, Chunk(32)))))
def test_drafts_of_some_length_are_tiles_on_a_cpu(name, window):
    *step, num_decodes, num_rows, num_tiles, num_in_jobs = TILED[name]
    own = {"num_decodes": num_decodes, "num_rows": num_rows, "window": window}
    case = make_case(*step, **own, sizes=CPU_DRAFT_SIZES)
    work = case.metadata.work
    assert (work.tiles.num_tiles, (work.rows.row_count > 0).sum()) == (num_tiles, num_in_jobs)
    check(case, window, CPU_DRAFT_SIZES)


@pytest.mark.parametrize("window", [None, 20, Chunk(32)])
def test_rows_of_any_tokens(window):
    """The queries of some tokens only, in any order: what layers that compute rows alone do."""
    case = make_case(*STEPS["decodes and prompts"], window=window)
    tokens = np.array([147, 3, 0, 144, 5, 44])  # of the last chunk, decodes, the first chunk
    starts = case.metadata.query_start_loc
    seq = (np.searchsorted(starts, tokens, side="right") - 1).astype(np.int32)
    lengths = case.metadata.seq_lens[seq] - (starts[seq + 1] - tokens - 1)
    work = divide_rows(Rows(seq, lengths), 8, block_size=16, window=window)
    q = jnp.pad(case.q[tokens], ((0, 2), (0, 0), (0, 0)))
    out = jax.jit(partial(row_attention, options=LoopOptions(16**-0.5)))(
        q, case.pool, case.metadata.block_tables, work
    )
    wanted = expected(case, window)[tokens]
    error, size = (np.linalg.norm(x, axis=(1, 2)) for x in (out[:6] - wanted, wanted))
    assert (error / size <= tolerance(case)).all()
    assert not out[6:].any()


@pytest.mark.parametrize("q_per_kv", [1, 3, 8, *thorough(2, 4, 7)])
def test_query_heads_per_kv_head(q_per_kv):
    step = [1, 1, 1, 30], [5, 17, 90, 40], 48, 4
    check(make_case(*step, q_per_kv=q_per_kv, kv_heads=3 if q_per_kv == 3 else 1))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", *thorough("bfloat16")])
@pytest.mark.parametrize(("head_dim", "block_size"), [(32, 8), (64, 64), (128, 16)])
def test_types_and_sizes(dtype, head_dim, block_size):
    step = [1, 1, 1, 30], [5, 17, 140, 150], 48, 8
    check(make_case(*step, dtype=dtype, head_dim=head_dim, block_size=block_size))


@pytest.mark.thorough
def test_a_block_longer_than_a_chunk_and_a_table_of_no_whole_chunks():
    check(make_case([1, 1, 50], [5, 290, 60], 64, 4, block_size=256, max_len=300))
    check(make_case([1, 1, 50], [5, 330, 60], 64, 4, block_size=48, max_len=336))


def test_a_long_context_among_short_ones_is_split():
    case = make_case([1] * 32, [4000] + [40] * 31, 32, 32, max_len=8192)
    work = case.metadata.work.rows
    assert work.row_count[0] > 8
    assert work.wave_rounds[: work.num_waves].sum() <= 8  # 63 rounds if one lane did it all
    check(case)


def test_equal_contexts_are_not_split():
    work = make_case([1] * 32, [192] * 32, 32, 32).metadata.work.rows
    assert (work.num_waves, work.max_parts, work.wave_rounds[0]) == (1, 1, 3)


def test_work_follows_contexts_and_window():
    work = make_case([1] * 4 + [64], [300] * 4 + [300], 128, 8, max_len=8192).metadata.work
    assert work.tiles.tile_chunk_end[: work.tiles.num_tiles].tolist() == [3]
    windowed = make_case([1] * 4 + [64], [300] * 5, 128, 8, max_len=8192, window=10).metadata.work
    assert windowed.tiles.tile_chunk_begin[0] == 1
    assert windowed.rows.wave_rounds.sum() == 1


def test_shapes_of_work_depend_on_the_bucket_only():
    steps = STEPS["decodes and prompts"], ([], [], 256, 16), ([1], [500], 256, 16)
    works = [make_case(*step).metadata.work for step in steps]
    shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(work)] for work in works]
    assert shapes[0] == shapes[1] == shapes[2]


def test_refuses_a_context_longer_than_its_table():
    with pytest.raises(ValueError, match=r"600 tokens .* 32 blocks of 16 \(512 tokens\)"):
        divide_attention(
            np.zeros((1, 32), np.int32),
            Sequences(np.array([600], np.int32), np.array([0, 1], np.int32), 1),
            num_tokens=8, block_size=16,
        )  # fmt: skip


@pytest.mark.thorough
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    decodes=st.lists(st.integers(1, 512), max_size=8),
    prompts=st.lists(st.tuples(st.integers(2, 90), st.integers(0, 400)), max_size=4),
    window=st.sampled_from([None, 40]),
    seed=st.integers(0, 99),
)
def test_any_step(decodes, prompts, window, seed):
    prompts = [(query_len, query_len + before) for query_len, before in prompts]
    query_lens = [1] * len(decodes) + [query_len for query_len, _ in prompts]
    lens = decodes + [length for _, length in prompts]
    check(make_case(query_lens, lens, 384, 12, seed=seed, window=window, min_blocks=400), window)


def mutations(case):
    """Outputs of five wrong kernels, by what each does wrong."""
    tables, lens = case.metadata.block_tables, case.metadata.seq_lens
    neighbour = tables.copy()
    neighbour[:, 0] = np.roll(tables[:, 0], 1)
    # Another sequence's last block may hold unused slots: a real stale block is full of numbers.
    k_pool, v_pool = (jnp.nan_to_num(x, nan=1.0) for x in case.pool)
    rolled = (jnp.roll(x, 1, axis=1) for x in case.pool)
    shorter = np.maximum(lens - 1, 0)
    return {
        "last token dropped": expected(case, seq_lens=shorter),
        "mask off by one": expected(case, seq_lens=lens + (lens > 0), k_pool=k_pool, v_pool=v_pool),
        "scale": expected(case, scale=1.05),
        "wrong KV head": expected(case, **dict(zip(("k_pool", "v_pool"), rolled, strict=True))),
        "stale block": expected(case, block_tables=neighbour, k_pool=k_pool, v_pool=v_pool),
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wrong_kernels_would_be_caught(dtype):
    # Lengths of 2 and more, and room in the last block: every mutation touches every row.
    case = make_case([1, 1, 1, 12], [2, 18, 133, 140], 16, 4, dtype=dtype)
    out = run(case)
    for name, wrong in mutations(case).items():
        assert row_errors(case, out, wrong).max() > 3 * tolerance(case), name


def write(case, k, v):
    step = jax.jit(write_kv, donate_argnums=0)
    return step.lower(case.pool, k, v, case.metadata.slot_mapping).compile()


def test_write_puts_tokens_into_their_slots_and_nothing_else():
    case = make_case([1, 1, 20], [33, 16, 40], 24, 4)
    rng = np.random.default_rng(1)
    k, v = (jnp.asarray(rng.standard_normal((24, 2, 16)), jnp.float32) for _ in range(2))
    want = [np.array(x) for x in case.pool]
    block, offset = np.divmod(case.metadata.slot_mapping[:22], 16)
    for array, rows in zip(want, (k, v), strict=True):
        array[block, :, offset] = rows[:22]
    got = write(case, k, v)(case.pool, k, v, case.metadata.slot_mapping)
    for array, wanted in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(array)[1:], wanted[1:])  # block 0 takes padding


def test_write_is_in_place():
    case = make_case([1] * 4, [400] * 4, 8, 8)
    k = jnp.ones((8, 2, 16), jnp.float32)
    compiled = write(case, k, k)
    assert compiled.memory_analysis().temp_size_in_bytes < case.pool[0].nbytes / 20
    pool = case.pool[0] + 0, case.pool[1] + 0  # buffers of JAX, not of NumPy: these can be donated
    before = [x.unsafe_buffer_pointer() for x in pool]
    out = compiled(pool, k, k, case.metadata.slot_mapping)
    assert [x.unsafe_buffer_pointer() for x in out] == before


def test_write_then_attend_does_not_copy_the_pool():
    case = make_case([1] * 4, [400] * 4, 8, 8)

    def layers(pools, q, k, metadata):
        out = []
        for pool in pools:
            written = write_kv(pool, k, k, metadata.slot_mapping)
            of = metadata.block_tables, metadata.work
            q = ragged_paged_attention(q, written, *of, LoopOptions(0.25))
            out.append(written)
        return out, q

    pools = [(case.pool[0] + i, case.pool[1] + i) for i in range(3)]
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(pools)]
    k = jnp.ones((8, 2, 16), jnp.float32)
    compiled = jax.jit(layers, donate_argnums=0).lower(pools, case.q, k, case.metadata).compile()
    shape = "f32[" + ",".join(map(str, case.pool[0].shape)) + "]"
    assert not [s for s in compiled.as_text().splitlines() if shape in s and " copy(" in s]
    out, _ = compiled(pools, case.q, k, case.metadata)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(out)] == before


@pytest.mark.parametrize("check_vma", [True, False])
def test_heads_split_over_a_mesh(check_vma):
    case = make_case([1, 1, 30], [17, 300, 90], 48, 4, kv_heads=4)
    mesh = jax.make_mesh((2, 2), ("sp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    heads = PartitionSpec(None, ("tp", "sp"))
    local = jax.shard_map(
        lambda q, pool, of: ragged_paged_attention(q, pool, *of, LoopOptions(0.25)),
        mesh=mesh,
        in_specs=(heads, heads, PartitionSpec()),
        out_specs=heads,
        check_vma=check_vma,
    )
    of = case.metadata.block_tables, case.metadata.work
    out = np.asarray(jax.jit(local)(case.q, case.pool, of), np.float64)
    assert (row_errors(case, out, expected(case)) <= tolerance(case)).all()
