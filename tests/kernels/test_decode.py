"""The decode kernel against its definition, in the Mosaic interpreter with race detection."""

import attention_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    FP8,
    decode_config,
    decode_work,
    decodes,
    interpreted,
    make_step,
    options_of,
    run_parts,
    with_latents,
    worst_parts,
)
from attention_cases import run_decode as run
from attention_cases import worst_decode as worst
from spent import quick

from pallas_kernels.call import AttentionOptions
from pallas_kernels.decode import decode_attention, decode_parts
from pallas_kernels.decode_work import DecodeConfig, divide_decode
from pallas_kernels.rows import Rows
from pallas_kernels.window import Chunk

EDGES = (1, 15, 16, 17, 31, 32, 33, 64, 65, 150)
CASES = {
    "edges, sinks": decodes(EDGES, padding=2, q_per_kv=4, kv_heads=2, num_blocks=6, sinks=(-2, 6)),
    "q_per_kv 1, head_dim 128, blocks of 64": decodes(
        (1, 65, 200), q_per_kv=1, head_dim=128, block_size=64
    ),
    "q_per_kv 2, float16, blocks of 128, window": decodes(
        (1, 39, 40, 41, 300),
        q_per_kv=2,
        dtype=jnp.float16,
        kv_dtype=jnp.float16,
        block_size=128,
        window=40,
    ),
    "q_per_kv 3, soft cap, sinks, blocks of 32": decodes(
        q_per_kv=3, kv_heads=2, soft_cap=5.0, sinks=(-2, 6), block_size=32
    ),
    "q_per_kv 7, fp8": decodes(
        (1, 70, 130), q_per_kv=7, kv_dtype=FP8, head_dim=128, kv_scales=(0.5, 3.0)
    ),
    "q_per_kv 8, fp8, scales by head, window": decodes(
        (20, 100, 200),
        q_per_kv=8,
        kv_heads=2,
        kv_dtype=FP8,
        kv_scales=jnp.float32([[0.5, 1.5], [2, 3]]),
        window=50,
    ),
    "q_per_kv 12, one worker": decodes(q_per_kv=12, num_blocks=1),
    "many jobs of a row, sinks": decodes(
        (1300, 5), num_blocks=24, head_dim=128, q_per_kv=8, sinks=(4, 8)
    ),
    "q_per_kv 16, blocks of 8, a long context": decodes(
        (900, 3), q_per_kv=16, block_size=8, num_blocks=3
    ),
    "q_per_kv 32, blocks of 256, window": decodes(
        (600, 40), q_per_kv=32, block_size=256, window=300
    ),
    "head_dim 96, window": decodes(
        (1, 39, 64, 200), padding=2, q_per_kv=1, kv_heads=2, head_dim=96, window=50
    ),
    "head_dim 96, q_per_kv 4, fp8": decodes(
        (70, 130), q_per_kv=4, head_dim=96, kv_dtype=FP8, kv_scales=(0.5, 3.0)
    ),
    "head_dim 160": decodes((1, 130), q_per_kv=3, head_dim=160),
    "rows that share a context": decodes((66, 4, 300), drafts=3, padding=1, num_blocks=4),
    "rows that share a context, window": decodes((66, 130), drafts=4, window=50),
    "chunks of 40, drafts across an edge": decodes(
        (39, 40, 77, 81, 300), drafts=3, window=Chunk(40), q_per_kv=5, padding=1, num_blocks=4
    ),
    "chunks of 64, fp8, work divided for no window": decodes(
        (1, 64, 65, 300), window=Chunk(64), kv_dtype=FP8, divided_window=None
    ),
    "work divided for no window": decodes((300, 20), window=70, divided_window=None, num_blocks=5),
}


@pytest.mark.parametrize(
    "name", quick(CASES, "q_per_kv 7, fp8", "chunks of 40, drafts across an edge", "head_dim 160")
)
def test_decode_is_attention(name):
    case = CASES[name]
    step = make_step(case)
    out = run(case, step)
    assert worst(case, step, out) <= 1
    assert (out[case.num_rows :] == 0).all()


PARTS = {
    "edges, padding": decodes(EDGES, padding=2, q_per_kv=4, kv_heads=2, num_blocks=6),
    "window": decodes((1, 39, 40, 41, 300), q_per_kv=8, window=40),
    "head_dim 96, fp8": decodes(
        (70, 130), q_per_kv=4, head_dim=96, kv_dtype=FP8, kv_scales=(0.5, 3.0)
    ),
    "many jobs of a row": decodes((1300, 5), num_blocks=24, head_dim=128, q_per_kv=12),
}


@pytest.mark.costs(10)
@pytest.mark.parametrize("name", quick(PARTS, "window", "head_dim 96, fp8"))
def test_parts_say_how_much_they_weigh(name):
    case = PARTS[name]
    step = make_step(case)
    values, lse = run_parts(case, step)
    assert worst_parts(case, step, (values, lse)) <= 1
    assert not values[case.num_rows :].any() and (lse[case.num_rows :] < -1e29).all()


LATENTS = {
    "8 heads, edges": (decodes(EDGES, padding=2, q_per_kv=8, head_dim=192), 128),
    "16 heads, window, blocks of 8": (
        decodes((39, 40, 300), q_per_kv=16, head_dim=160, window=40, block_size=8), 128
    ),
    "64 heads, edges": (decodes(EDGES, padding=2, q_per_kv=64, head_dim=192), 128),
    "40 heads, soft cap": (decodes((1, 70, 500), q_per_kv=40, head_dim=128, soft_cap=5.0), 128),
    "20 heads, window, blocks of 8": (
        decodes((39, 40, 300), q_per_kv=20, head_dim=128, window=40, block_size=8), 128
    ),
    "72 heads in two groups, drafts, many jobs": (
        decodes((1300, 5), q_per_kv=72, head_dim=128, drafts=2, num_blocks=20), 128
    ),
    "8 heads, fp8": (
        decodes((1, 70, 500), q_per_kv=8, head_dim=192, kv_dtype=FP8, kv_scales=(0.5, 3.0)), 128
    ),
    "20 heads, fp8, edges": (
        decodes(EDGES, q_per_kv=20, head_dim=192, kv_dtype=FP8, kv_scales=(0.5, 3.0)), 128
    ),
    "80 heads, fp8, scales in memory": (
        decodes(
            (300, 5), q_per_kv=80, head_dim=128, kv_dtype=FP8, kv_scales=jnp.float32([[0.5], [3]])
        ),
        128,
    ),
    "128 heads, widths of DeepSeek": (
        decodes((130, 5), q_per_kv=128, head_dim=576, num_blocks=4), 512
    ),
}  # fmt: skip


@pytest.mark.costs(10)
@pytest.mark.parametrize("name", quick(LATENTS, "20 heads, window, blocks of 8"))
def test_latents_are_keys_and_values(name):
    case, width = LATENTS[name]
    step = with_latents(make_step(case), width)
    values, lse = run_parts(case, step, latents=width)
    assert worst_parts(case, step, (values, lse)) <= 1
    assert (lse[case.num_rows :] < -1e29).all()


@pytest.mark.parametrize(
    ("head_dim", "width", "words"),
    [
        (160, 128, "latents of 160 numbers are no multiple of 64"),
        (576, 64, "values of 64 numbers are no multiple of 128 up to 512"),
        (704, 640, "values of 640 numbers are no multiple of 128 up to 512"),
    ],
)
def test_what_many_heads_cannot_take_is_said(head_dim, width, words):
    q, kv, work = arrays_of(decodes(q_per_kv=32, head_dim=head_dim))
    with pytest.raises(ValueError, match=words):
        decode_parts(q, kv._replace(v_pool=None), work, AttentionOptions(1, values_in_keys=width))


def test_latents_have_parts_alone():
    with pytest.raises(ValueError, match="of decode_parts"):
        decode_attention(*arrays_of(decodes()), AttentionOptions(1, values_in_keys=64))


def test_a_part_without_tokens_weighs_nothing():
    """Jobs that another device's part is long enough for."""
    case = decodes((130, 20), padding=1)
    step = make_step(case)
    rows = Rows(np.arange(2, dtype=np.int32), np.array([130, 20], np.int32))
    work = divide_decode(rows, 3, kv_heads=1, config=decode_config(case))
    work = work._replace(row_length=np.array([0, 20, 0], np.int32))
    options, config = options_of(case), decode_config(case)

    def attend(*arrays):
        values, lse = decode_parts(*arrays, options, config)
        return jnp.concatenate([values, lse[..., None]], axis=-1)

    out = interpreted(attend, step.q, step.kv, work)
    assert not out[0, :, :-1].any() and (out[0, :, -1] < -1e29).all()
    assert attention_cases.worst(case, step, out[..., :-1], slice(1, 2)) <= 1


def test_an_empty_step_is_zeros():
    case = decodes((), padding=3)
    assert (run(case, make_step(case)) == 0).all()


def test_other_rows_are_kept():
    case = decodes((40, 20), padding=1, chunks=((1, 70),))
    step = make_step(case)
    old = jnp.full(step.q.shape, 7, case.dtype)
    out = run(case, step, out=old)
    assert worst(case, step, out) <= 1
    assert (out[2:] == 7).all()


def arrays_of(case):
    step = make_step(case)
    return jax.tree.map(jnp.asarray, (step.q, step.kv, decode_work(case, step)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(head_dim=80), "head_dim 80 is not a multiple of 32 from 64 on"),
        (dict(head_dim=32), "head_dim 32 is not a multiple of 32 from 64 on"),
        (dict(block_size=24), "block_size 24 must"),
        (dict(dtype=jnp.float32, kv_dtype=jnp.float32), "q of float32"),
        (dict(kv_dtype=jnp.float16), "pools of float16"),
        (dict(window=0), "window 0 is not positive"),
        (dict(soft_cap=0.0), "soft_cap 0.0 is not positive"),
        (dict(sinks=(0, 1)), r"sinks of shape \(2,\): there must be one for each head"),
    ],
)
def test_what_the_kernel_cannot_take_is_said(change, message):
    case = decodes()._replace(**change)
    sinks = None if case.sinks is None else jnp.zeros(len(case.sinks))
    options = AttentionOptions(1.0, case.window, case.soft_cap, sinks=sinks)
    with pytest.raises(ValueError, match=message):
        decode_attention(*arrays_of(case), options)


def test_too_little_shared_memory_is_said():
    with pytest.raises(ValueError, match="hold 1 stages of 16384 bytes beside"):
        decode_attention(*arrays_of(decodes()), AttentionOptions(1.0), DecodeConfig(64, 3, 30_000))
