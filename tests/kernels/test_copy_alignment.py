"""Where the copy engine reads shared memory: at multiples of 128 bytes, which no interpreter asks.

Kernels are traced, and what each copy to global memory reads is looked at: every place that it may
begin at must be such a multiple. What is swizzled is left out: of that whole tiles are copied.
"""

import itertools
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.call import AttentionOptions, CodeKind, PagedKV
from pallas_kernels.head_terms import Given, Projected
from pallas_kernels.kv_write import write_kv
from pallas_kernels.mosaic import FP8, TMA_ALIGNMENT
from pallas_kernels.paged_attention import ragged_paged_attention
from pallas_kernels.rope_write import Heads, Target, rope_write
from pallas_kernels.rows import Sequences
from pallas_kernels.step_work import divide_step
from pallas_kernels.tuned import safe_config

BF16, SHAPE = jnp.bfloat16, jax.ShapeDtypeStruct


def odd_places(ref: Any) -> list[str]:
    """Say at which axes of shared memory a part begins that is no multiple of the alignment."""
    transforms = getattr(ref, "transforms", ())
    if not all(hasattr(each, "indices") for each in transforms):
        return []  # swizzled
    base = getattr(ref, "ref", ref).aval
    shape, itemsize = base.shape, jnp.dtype(base.dtype).itemsize
    strides = [math.prod(shape[i + 1 :]) * itemsize for i in range(len(shape))]
    odd, axes = [], list(range(len(shape)))
    for indexer in transforms:
        kept = []
        for axis, index in zip(axes, indexer.indices, strict=True):
            is_slice = hasattr(index, "size") and hasattr(index, "start")
            start = index.start if is_slice else index
            step = start * strides[axis] if isinstance(start, int) else strides[axis]
            if step % TMA_ALIGNMENT:
                odd.append(f"axis {axis} of {shape}: {step} bytes")
            if is_slice:
                kept.append(axis)
        axes = kept
    return odd


@pytest.fixture
def places(monkeypatch):
    """What is odd in the copies of all kernels that are traced, and how many copies they have."""
    found: list[list[str]] = []
    copy = plgpu.copy_smem_to_gmem

    def spy(source: Any, *others: Any, **options: Any) -> Any:
        found.append(odd_places(source))
        return copy(source, *others, **options)

    monkeypatch.setattr(plgpu, "copy_smem_to_gmem", spy)
    return found


HEADS = [(8, 1), (32, 8), (7, 1), (8, 8), (5, 1)]
ATTENTION = [
    (heads, head_dim, kv_dtype, False)
    for heads, head_dim in itertools.product(HEADS, (64, 96, 128, 160, 256))
    for kv_dtype in (BF16, FP8)
] + [(heads, 128, BF16, True) for heads in HEADS]


@pytest.mark.parametrize(("heads", "head_dim", "kv_dtype", "codes"), ATTENTION)
def test_rows_of_attention_begin_where_they_may(heads, head_dim, kv_dtype, codes, places):
    new, contexts = (1, 1, 17, 130), (337, 64, 17, 8200)
    tokens, starts = 256, np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    config = safe_config(head_dim, heads[0] // heads[1])
    lens = np.array(contexts, np.int32)
    sizes = {"num_tokens": tokens, "heads": heads, "config": config}
    work = divide_step(Sequences(lens, starts, 2), **sizes)
    pool = SHAPE((1024, heads[1], 16, head_dim), kv_dtype)
    kv = PagedKV(pool, pool, SHAPE((4, 513), jnp.int32), SHAPE((4,), jnp.int32))
    options = AttentionOptions(head_dim**-0.5, codes=CodeKind() if codes else None)
    attend = partial(ragged_paged_attention, options=options, config=config)
    try:
        jax.eval_shape(attend, SHAPE((tokens, heads[0], head_dim), BF16), kv, work)
    except ValueError as error:  # of what nothing is compiled
        assert "bytes of shared memory" in str(error) or "query tokens" in str(error)
    else:
        assert len(places) >= 4
    assert list(itertools.chain(*places)) == []


@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("tokens", [8, 64, 200])
def test_keys_and_values_begin_where_they_may(tokens, head_dim, kv_dtype, places):
    blocks = SHAPE((8, 2, 16, head_dim), kv_dtype)
    heads = Heads(8, 2, head_dim, BF16, BF16, 4)
    q, kv = (SHAPE((tokens, n * head_dim), BF16) for n in (8, 2))
    angle, slots = SHAPE((tokens, head_dim // 2), jnp.float32), SHAPE((tokens,), jnp.int32)

    def enter(q, k, v, cos, sin, pool, slots):
        return rope_write(Projected((q, k, v)), Given((cos, sin)), Target(pool, slots), heads)

    jax.eval_shape(enter, q, kv, kv, angle, angle, (blocks, blocks), slots)
    by_head = SHAPE((tokens, 2, head_dim), BF16)
    jax.eval_shape(write_kv, (blocks, blocks), by_head, by_head, slots)
    assert len(places) >= 6
    assert list(itertools.chain(*places)) == []
