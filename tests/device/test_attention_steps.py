"""The steps of the kernels' check reach what serving reaches, by the planner of the kernels.

A fault that shows where a ring is filled again, a query's place used again, more jobs of a row
added up than a turn takes, or parts put together is not found by steps that never get there.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from regime import reached

from pallas_kernels.decode import ROW_TILE, count_stages
from pallas_kernels.decode_work import JOBS_AT_ONCE, DecodeConfig, most_jobs
from pallas_kernels.prefill_combine import MOST_AT_ONCE
from pallas_kernels.step_work import KernelConfig, StepWork
from pallas_kernels.tuned import fixed_config, safe_config
from shiftjax.arch.formats import FORMATS
from shiftjax.device.attention_steps import (
    MOST_EDGES,
    Cases,
    Shape,
    Step,
    make_inputs,
    on_edges,
    steps_of,
)
from shiftjax.models.attention_backend import pallas_attention

CANDIDATES = Path(__file__).parents[2] / "scripts" / "kernel_candidates.json"

SERVED = (
    Step("64 x 2,048", (64, 64, 64), (1,) * 64, (2048,) * 64, 64),
    Step("64 x 8,192", (64, 64, 64), (1,) * 64, (8192,) * 64, 64),
    Step("1 x 32k", (8, 8, 8), (1,), (32768,), 1),
    Step("128 after 32k", (256, 8, 8), (128,), (32768,), 0),
)


def shape_with(heads: int, kv_heads: int, head_dim: int = 128, **changes) -> Shape:
    shape = Shape(
        heads, kv_heads, head_dim, 16, (None,), "bfloat16", "bfloat16", bucket=(8192, 64, 64)
    )
    return replace(shape, **changes)


SHAPES = {
    "70B on 8": shape_with(8, 1),
    "70B on 1": shape_with(64, 8),
    "8B on 1": shape_with(32, 8),
    "every head its own": shape_with(32, 32),
    "groups of 16": shape_with(16, 1),
    "groups of 16, 8 KV heads": shape_with(128, 8),
    "groups of 32": shape_with(32, 1),
    "head_dim 64": shape_with(8, 1, 64),
    "head_dim 256": shape_with(8, 4, 256),
    "codes": shape_with(8, 1, kv_dtype="fp8"),
    "codes, 8 KV heads": shape_with(32, 8, kv_dtype="fp8"),
    "gpt-oss on 1": shape_with(64, 8, 64, windows=(128, None), has_sinks=True),
    "gpt-oss on 8": shape_with(8, 1, 64, windows=(128, None), has_sinks=True),
    "a window": shape_with(32, 8, windows=(4096,)),
    "a window, 1 KV head": shape_with(8, 1, windows=(4096,)),
    "256 sequences": shape_with(8, 1, bucket=(8192, 256, 256)),
    "8 sequences": shape_with(8, 1, bucket=(2048, 8, 8)),
}


# By the step, in the order of `steps_of`: what each is there for.
PURPOSES = (
    set(),
    {"rings_again", "queries_again", "turns"},
    {"split_tiles"},
    {"rings_again", "split_tiles"},
)


def divided(shape: Shape, step: Step, config: KernelConfig, window: int = 0) -> StepWork:
    """Divide a step as it is divided on a GPU."""
    lens = np.zeros(step.bucket[2], np.int32)
    lens[: len(step.contexts)] = step.contexts
    starts = np.full(step.bucket[2] + 1, sum(step.new), np.int32)
    starts[: len(step.new) + 1] = np.cumsum((0, *step.new))
    blocks = -(-max(step.contexts) // shape.block_size)
    contexts = np.zeros((step.bucket[2], blocks), np.int32), lens, starts, step.num_decodes
    sizes = {"num_tokens": step.bucket[0], "num_rows": step.bucket[1]}
    kernels = pallas_attention(shape.layout, config, shape.block_size)
    return kernels.divide(*contexts, **sizes)[window]


def names_reached(shape: Shape, step: Step, config: KernelConfig, window: int = 0) -> set[str]:
    """What a step makes the kernels do."""
    return reached(divided(shape, step, config, window), stages_of(shape, config)).names


def stages_of(shape: Shape, config: KernelConfig) -> int:
    rows = -(-shape.heads // shape.kv_heads // ROW_TILE) * ROW_TILE
    return count_stages(rows, shape.head_dim, FORMATS[shape.kv_dtype].dtype, config.decode)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_whatever_serving_reaches_the_check_does(name, deterministic):
    shape = SHAPES[name]
    config = safe_config(shape.head_dim, shape.heads // shape.kv_heads)
    config = fixed_config(config) if deterministic else config
    served = [step for step in SERVED if step.bucket[2] <= shape.bucket[2]]
    for window in range(len(shape.windows)):
        found, wanted = (
            set().union(*(names_reached(shape, step, config, window) for step in steps))
            for steps in (steps_of(shape, Cases()), served)
        )
        assert found >= wanted, shape.windows[window]


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if None in shape.windows])
def test_every_step_reaches_what_it_is_for(name):
    """In a layer without a window; a row has one turn of jobs where there are no more workers."""
    shape = SHAPES[name]
    config = safe_config(shape.head_dim, shape.heads // shape.kv_heads)
    can_turn = most_jobs(config.decode, shape.kv_heads) > JOBS_AT_ONCE
    for step, purposes in zip(steps_of(shape, Cases()), PURPOSES, strict=True):
        found = names_reached(shape, step, config, shape.windows.index(None))
        assert found >= purposes - (set() if can_turn else {"turns"}), step.name


@pytest.mark.parametrize("name", ["70B on 8", "codes"])
def test_parts_are_more_than_one_turn_of_their_combine_takes(name):
    shape = SHAPES[name]
    _, _, chunks, _ = steps_of(shape, Cases())
    work = divided(shape, chunks, safe_config(shape.head_dim, shape.heads // shape.kv_heads))
    assert work.prefill is not None and work.prefill.splits[:, 3].max() > MOST_AT_ONCE


@pytest.mark.parametrize("kv_heads", [1, 8])
def test_a_long_context_fills_rings_again_in_every_setting_that_may_be_tuned(kv_heads):
    rows = [row for row in json.loads(CANDIDATES.read_text()) if row["kernel"] == "decode"]
    assert len(rows) > 5
    for row in rows:
        shape = shape_with(8 * kv_heads, kv_heads, row["head_dim"], block_size=row["block_size"])
        config = KernelConfig(decode=DecodeConfig(**row["settings"]))
        _, long, *_ = steps_of(shape, Cases())
        assert "rings_again" in names_reached(shape, long, config), row


@pytest.mark.parametrize("name", SHAPES)
def test_pools_are_small_beside_a_twentieth_of_a_gpu(name):
    shape = SHAPES[name]
    token = 2 * shape.kv_heads * shape.head_dim * FORMATS[shape.kv_dtype].dtype.itemsize
    most = max(sum(step.contexts) * token for step in steps_of(shape, Cases()))
    assert 80e6 < most < (0.16e9 if shape.kv_heads <= 8 else 0.26e9)


def test_what_is_tried_with_is_in_the_tables_and_no_more():
    """Every slot of a token holds something, and is its own."""
    shape = shape_with(2, 1, 64)
    step = Step("", (8, 8, 8), (1, 1), (40, 17), 2)
    inputs = make_inputs(shape, step)
    tokens = ~np.isnan(inputs.pool[0].astype(np.float32)[:, 0, :, 0])
    assert tokens.sum() == 57 and not tokens[0].any()


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 64, 65, 337, 3000, 8200, 89892])
@pytest.mark.parametrize("window", [None, 100])
def test_edges_are_few_and_both_sides_of_each_are_there(length, window):
    places = on_edges(length, (window,))
    assert {0, length - 1} <= set(places) and places.max() < length
    assert len(places) <= 2 * MOST_EDGES + 5
    for power in (1024, 4096):
        if length > power:
            assert {power - 1, power} <= set(places) or length > 64 * power
    if window and length > window:
        assert {length - window, length - window - 1} <= set(places)


def test_half_of_the_rows_look_at_edges_and_the_others_do_not():
    """By their weights, float64: edges are nearly all there, and about their share here."""
    shape, step = shape_with(2, 1), Step("", (8, 8, 8), (1,), (3000,), 1)
    inputs = make_inputs(shape, step)
    q, (k, _) = inputs.q[0].astype(np.float64), inputs.pool
    position = np.arange(3000)
    keys = k[inputs.tables[0][position // 16], 0, position % 16].astype(np.float64)
    weights = np.exp(q @ keys.T / 128**0.5)
    weights /= weights.sum(axis=1, keepdims=True)
    places = on_edges(3000)
    shares = weights[:, places].sum(axis=1)
    assert shares[0] < 0.1 and shares[1] > 0.9
    assert (weights[1, places] / np.linalg.norm(weights[1])).min() > 0.04
