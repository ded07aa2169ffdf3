"""Decode rows and prefill chunks in one step, through the one interface."""

import pytest
from attention_cases import FP8, Case, interpreted, make_step, options_of, worst
from spent import quick

from pallas_kernels.decode_work import DecodeConfig
from pallas_kernels.paged_attention import ragged_paged_attention
from pallas_kernels.prefill_work import PrefillConfig
from pallas_kernels.rows import Sequences
from pallas_kernels.step_work import KernelConfig, divide_step

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

CONFIG = KernelConfig(PrefillConfig(64, 2, 2), DecodeConfig(64, 2, 65_000))
CASES = {
    "decodes and chunks": Case(((17, 100), (5, 5)), decodes=(130, 1, 64), kv_heads=2, padding=2),
    "drafts and chunks": Case(((17, 100),), decodes=(130, 20), drafts=2, kv_heads=2, padding=2),
    "head_dim 96": Case(((17, 100),), decodes=(130, 20), q_per_kv=1, kv_heads=2, head_dim=96),
    "decodes alone": Case((), decodes=(65, 17), tokens=2, padding=0),
    "window, soft cap, fp8": Case(
        ((17, 100),),
        decodes=(130, 20),
        kv_dtype=FP8,
        window=30,
        soft_cap=4.0,
        kv_scales=(0.5, 2.0),
    ),
}


@pytest.mark.costs(8)
@pytest.mark.parametrize("name", quick(CASES, "decodes alone"))
def test_a_step_is_attention(name):
    case = CASES[name]
    step = make_step(case)
    most = max(case.num_rows, len(step.kv.seq_lens))
    work = divide_step(
        Sequences(step.kv.seq_lens, step.query_start_loc, len(case.decodes), most),
        num_tokens=step.q.shape[0],
        heads=(case.q_per_kv * case.kv_heads, case.kv_heads),
        window=case.window,
        config=CONFIG,
    )

    def attend(*arrays):
        return ragged_paged_attention(*arrays, options_of(case), CONFIG)

    out = interpreted(attend, step.q, step.kv, work)
    assert worst(case, step, out) <= 1
    assert not out[step.query_start_loc[-1] :].any()


def test_a_bucket_of_rows_alone_needs_no_tiles():
    """Chunks attend row by row; what pads the rows is zeros, although nothing else writes them."""
    case = Case(((5, 70), (1, 1)), decodes=(130, 20), drafts=1, tokens=12, kv_heads=2, padding=2)
    step = make_step(case)
    work = divide_step(
        Sequences(step.kv.seq_lens, step.query_start_loc, 4, case.tokens),
        num_tokens=None,
        heads=(case.q_per_kv * case.kv_heads, case.kv_heads),
        config=CONFIG,
    )
    assert work.prefill is None

    def attend(*arrays):
        return ragged_paged_attention(*arrays, options_of(case), CONFIG)

    out = interpreted(attend, step.q, step.kv, work)
    assert worst(case, step, out) <= 1
    assert not out[step.query_start_loc[-1] :].any()
