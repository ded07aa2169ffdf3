"""The prefill kernel in the Mosaic interpreter, races watched, against attention's definition."""

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import FP8, Case, Step, make_step, run_prefill_parts, worst_prefill_parts
from attention_cases import run_prefill as run
from attention_cases import worst_prefill as worst
from spent import quick

from pallas_kernels.prefill_work import PrefillConfig
from pallas_kernels.window import Chunk

# Slots of no token hold NaN, and keys of them are multiplied before they are masked.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

SPLIT = PrefillConfig(64, 2, 2, fixed_rounds=1)
CASES = {
    "lengths at the edges of blocks": Case(tuple((n, n) for n in (1, 15, 16, 17, 32, 33))),
    "chunks that continue a context": Case(((17, 100), (5, 64), (33, 130), (1, 65)), kv_heads=2),
    "decode rows before, sequences of padding behind": Case(decodes=(60, 33), padding=3),
    "nothing but padding": Case((), padding=3, tokens=40),
    "a bucket of fewer tokens than a tile": Case(((3, 70), (2, 2)), q_per_kv=1, tokens=8),
    "a chunk of several tiles up to the end of the bucket": Case(((70, 150),), tokens=70),
    "q_per_kv 1": Case(((70, 200),), q_per_kv=1),
    "q_per_kv 2": Case(q_per_kv=2),
    "q_per_kv 3, sinks": Case(((50, 90), (9, 9)), q_per_kv=3, kv_heads=2, sinks=(-2, 6)),
    "q_per_kv 7": Case(((40, 70),), q_per_kv=7),
    "q_per_kv 8": Case(((20, 70), (3, 80)), q_per_kv=8),
    "blocks of 64": Case(block_size=64),
    "blocks of 128, two rounds to a block": Case(((17, 300), (5, 5)), block_size=128),
    "rounds of 128, head_dim 128": Case(
        ((17, 300),), head_dim=128, config=PrefillConfig(128, 2, 1)
    ),
    "head_dim 96": Case(((17, 100),), head_dim=96, q_per_kv=1),
    "head_dim 192, rows leave by the buffer that queries come in": Case(
        ((17, 100), (5, 5)), head_dim=192, kv_heads=2
    ),
    "head_dim 256, one stage": Case(
        ((17, 200), (5, 5)), head_dim=256, config=PrefillConfig(64, 1, 1)
    ),
    "window 20, sinks": Case(((17, 200), (40, 40)), window=20, sinks=(-2, 6)),
    "window 60, rows that see nothing of their first round": Case(((17, 200),), window=60),
    "chunks of 40, tiles across their edges": Case(((17, 100), (60, 130)), window=Chunk(40)),
    "chunks of rounds, q_per_kv 5, two KV heads": Case(
        ((70, 200), (5, 64)), window=Chunk(64), q_per_kv=5, kv_heads=2
    ),
    "window 100": Case(((17, 200), (70, 150)), window=100),
    "soft cap, sinks": Case(soft_cap=3.0, sinks=(-2, 2)),
    "float16": Case(dtype=jnp.float16, kv_dtype=jnp.float16),
    "fp8": Case(
        ((17, 150), (5, 5)),
        kv_heads=2,
        kv_dtype=FP8,
        kv_scales=jnp.float32([[0.5, 2], [1.5, 1.5]]),
    ),
    "fp8, blocks of 128": Case(((17, 200),), kv_dtype=FP8, block_size=128, dtype=jnp.float16),
    "no ping-pong, three stages": Case(config=PrefillConfig(64, 3, 1, ping_pong=False)),
    "the next product under way, two KV heads, a window, sinks": Case(
        ((17, 300), (5, 5)),
        kv_heads=2,
        window=60,
        sinks=(-2, 6),
        config=PrefillConfig(64, 2, 2, overlap=True),
    ),
    "the next product under way, split, no ping-pong": Case(
        ((17, 300),), config=PrefillConfig(64, 2, 2, ping_pong=False, overlap=True, fixed_rounds=1)
    ),
    "more thread blocks than work": Case(config=PrefillConfig(64, 2, 5)),
    "a long context split where it pays": Case(
        ((17, 1100), (5, 5)), config=PrefillConfig(64, 2, 4), q_per_kv=8, kv_heads=2
    ),
    "split, one KV head of 32": Case(((3, 300),), q_per_kv=32, config=SPLIT, padding=2),
    "split, tiles that end in different spans, a partial tile, sinks": Case(
        ((50, 280), (1, 130)), decodes=(300,), config=SPLIT, sinks=(4, 8)
    ),
    "split, chunks of 150, sinks": Case(
        ((40, 470),), window=Chunk(150), config=SPLIT, sinks=(-2, 6)
    ),
    "chunks, divided for no window, the next product under way": Case(
        ((40, 280),),
        window=Chunk(130),
        divided_window=None,
        config=PrefillConfig(64, 2, 2, overlap=True),
    ),
    "split, window 150": Case(((40, 400),), window=150, config=SPLIT),
    "split for a wider window, sinks": Case(
        ((40, 600),), window=150, divided_window=None, config=SPLIT, sinks=(-2, 6)
    ),
    "split, fp8": Case(((17, 300),), kv_heads=2, kv_dtype=FP8, kv_scales=(1.0, 1.5), config=SPLIT),
    "blocks of 8, one KV head of 16": Case(((9, 70),), q_per_kv=16, block_size=8),
    "blocks of 256": Case(((5, 300),), block_size=256),
}


@pytest.mark.parametrize(
    "name",
    quick(CASES, "chunks of 40, tiles across their edges", "fp8", "split, one KV head of 32"),
)
def test_it_is_attention(name):
    case = CASES[name]
    step = make_step(case)
    out = run(case, step)
    assert worst(case, step, out) <= 1
    assert not out[step.query_start_loc[-1] :].any()


PARTS = {
    "decodes before, padding behind": Case(((17, 100), (70, 90)), decodes=(60,), tokens=100),
    "two KV heads of 3, window 60": Case(((17, 200),), q_per_kv=3, kv_heads=2, window=60),
    "q_per_kv 1, a bucket of fewer tokens than a tile": Case(((3, 70),), q_per_kv=1, tokens=8),
    "soft cap": Case(soft_cap=3.0),
    "split, a partial tile": Case(((50, 280), (1, 130)), config=SPLIT, q_per_kv=8),
    "split, chunks of 150, head_dim 96": Case(
        ((40, 470),), window=Chunk(150), config=SPLIT, head_dim=96
    ),
    "head_dim 192, rows leave by the buffer that queries come in": Case(
        ((17, 100), (5, 5)), head_dim=192, kv_heads=2
    ),
    "fp8": Case(
        ((17, 150), (5, 5)),
        kv_heads=2,
        kv_dtype=FP8,
        kv_scales=jnp.float32([[0.5, 2], [1.5, 1.5]]),
    ),
}


@pytest.mark.parametrize("name", quick(PARTS, "split, a partial tile"))
def test_it_says_how_much_a_part_weighs(name):
    case = PARTS[name]
    step = make_step(case)
    values, lse = run_prefill_parts(case, step)
    assert worst_prefill_parts(case, step, (values, lse)) <= 1
    padding = slice(step.query_start_loc[-1], None)
    assert not values[padding].any() and (lse[padding] < -1e19).all()


@pytest.mark.thorough
def test_fixed_rounds_give_a_token_the_same_bits_in_any_company():
    case = Case(((20, 300), (33, 90)), config=SPLIT, padding=0)
    step = make_step(case)
    together = run(case, step)
    for first in 0, 13:  # the chunk alone, and what of it comes in a step of its own
        tables, lens = step.kv.block_tables[:1], step.kv.seq_lens[:1]
        kv = step.kv._replace(block_tables=tables, seq_lens=lens)
        alone = Step(step.q[first:20], kv, np.array([0, 20 - first], np.int32))
        assert np.array_equal(run(case, alone), together[first:20])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(head_dim=80), "head_dim must be a multiple of 32, not 80"),
        (dict(head_dim=256, config=PrefillConfig(64)), "head_dim 256 with kv_tile 64 and 2 stages"),
        (dict(block_size=24), "block_size 24 must be a multiple of 8, and it or kv_tile 64"),
        (dict(block_size=4), "block_size 4 must be a multiple of 8"),
        (dict(config=PrefillConfig(256)), "kv_tile must be one of"),
        (dict(dtype=jnp.float32, kv_dtype=jnp.float32), "q must be bfloat16 or float16"),
        (dict(kv_dtype=jnp.float16), "pools of float16 with q of bfloat16"),
        (dict(window=0), "window 0 is not positive"),
        (dict(soft_cap=-1.0), "soft_cap -1.0 is not positive"),
        (dict(q_per_kv=33), "33 query heads to a KV head: 1 to 32"),
    ],
)
def test_what_it_cannot_do_is_said(change, message):
    case = Case()._replace(**change)
    step = make_step(case)
    with pytest.raises(ValueError, match=message):
        run(case, step, interpret=False)


def test_heads_must_divide():
    step = make_step(Case())
    q = jnp.concatenate([step.q] * 2, axis=1)[:, :7]
    k_pool, v_pool = (jnp.concatenate([pool] * 2, axis=1) for pool in step.kv[:2])
    step = step._replace(q=q, kv=step.kv._replace(k_pool=k_pool, v_pool=v_pool))
    with pytest.raises(ValueError, match="7 query heads do not divide into 2 KV heads"):
        run(Case(), step, interpret=False)
