"""Buckets whose tokens all attend as rows: which plans go there, and what they get."""

import numpy as np
import pytest
from harness import prefill_plan

from pallas_kernels.step_work import KernelConfig
from pallas_kernels.tuned import fixed_config
from shiftjax.arch.presets import PRESETS
from shiftjax.core.request import StepPlan
from shiftjax.costs.buckets import Bucket
from shiftjax.device.pack import step_inputs, suits
from shiftjax.device.pool import PoolOptions
from shiftjax.models.attention_backend import pallas_attention, xla_attention
from shiftjax.parallel.layout import Layout

MODEL = PRESETS["tiny"]
POOL = PoolOptions(400, 16, 300, np.dtype(np.float32))
KERNELS = pallas_attention(Layout(MODEL, 1, 1), KernelConfig(), 16)
LOOPS = xla_attention(MODEL.head_dim, (None,), 16)
ALONE, TILES = Bucket(8, 8, rows_alone=True), Bucket(32, 8)


def plan_of(*items: tuple[int, int], num_decodes: int = 0) -> StepPlan:
    """A plan of (context before, new tokens) each, of which the first are decodes."""
    scheduled = []
    for start, new in items:
        (item,) = prefill_plan([1] * (start + new), 1, block_size=16).scheduled
        item.start, item.num_tokens = start, new
        scheduled.append(item)
    num_tokens = sum(new for _, new in items)
    return StepPlan(scheduled, num_tokens, len(items), num_decodes, [], [], step_id=0)


def work_of(plan: StepPlan, bucket: Bucket, backend=KERNELS):
    key = np.zeros(2, np.uint32)
    return step_inputs(plan, bucket, POOL, backend, {}, key, model=MODEL).attention.work[0]


def test_a_step_of_decodes_has_rows_alone():
    plan = plan_of((100, 1), (4000, 1), num_decodes=2)
    assert suits(ALONE, plan, KERNELS)
    work = work_of(plan, ALONE)
    assert work.prefill is None
    assert work.decode.row_length.tolist() == [101, 4001, 0, 0, 0, 0, 0, 0]
    assert work_of(plan, TILES).prefill is not None


def test_tokens_of_a_chunk_attend_as_rows():
    work = work_of(plan_of((100, 1), (20, 3), num_decodes=1), ALONE)
    assert work.decode.row_length.tolist() == [101, 21, 22, 23, 0, 0, 0, 0]
    assert work.decode.row_seq.tolist() == [0, 1, 1, 1, 0, 0, 0, 0]


def test_a_chunk_that_would_read_much_as_rows_goes_where_there_are_tiles():
    """7 tokens after s read 7 s + 28 tokens of context."""
    longest = (KERNELS.most_row_reads - 28) // 7
    assert 0 < longest < 4700
    for start, fits in ((longest, True), (longest + 1, False)):
        plan = plan_of((200, 1), (start, 7), num_decodes=1)
        assert suits(ALONE, plan, KERNELS) == fits
        assert suits(TILES, plan, KERNELS)


def test_decodes_may_read_as_much_as_they_have():
    assert suits(ALONE, plan_of(*[(4700, 1)] * 8, num_decodes=8), KERNELS)


def test_what_is_too_large_suits_nothing():
    assert not suits(ALONE, plan_of((0, 9)), KERNELS)


def test_prompts_are_always_tiles_where_bits_must_not_change():
    kernels = pallas_attention(Layout(MODEL, 1, 1), fixed_config(KernelConfig()), 16)
    assert not suits(ALONE, plan_of((0, 2)), kernels)
    assert suits(ALONE, plan_of((9, 1), num_decodes=1), kernels)


@pytest.mark.parametrize("bucket", [ALONE, TILES])
def test_loops_have_the_same_work_in_all_buckets(bucket):
    plan = plan_of((4000, 7))
    assert suits(bucket, plan, LOOPS)
    assert work_of(plan, bucket, LOOPS).tiles.num_tiles == 1
