"""Decode rows and prefill chunks in one step, through the one interface."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from prefill_cases import FP8, Case, make_step, options_of, watched_races, worst

from pallas_kernels.decode_plan import DecodeConfig
from pallas_kernels.paged_attention import ragged_paged_attention
from pallas_kernels.prefill_plan import PrefillConfig
from pallas_kernels.work_plan import KernelConfig, plan_step

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

CONFIG = KernelConfig(PrefillConfig(64, 2, 2), DecodeConfig(64, 2, 45_000))
CASES = {
    "decodes and chunks": Case(((17, 100), (5, 5)), decodes=(130, 1, 64), kv_heads=2, padding=2),
    "decodes alone": Case((), decodes=(65, 17), tokens=2, padding=0),
    "window, soft cap, fp8": Case(
        ((17, 100),),
        decodes=(130, 20),
        kv_dtype=FP8,
        sliding_window=30,
        soft_cap=4.0,
        k_scale=0.5,
        v_scale=2.0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_attention(name):
    case = CASES[name]
    step = make_step(case)
    plan = plan_step(
        step.seq_lens,
        step.query_start_loc,
        len(case.decodes),
        num_tokens=step.q.shape[0],
        group=case.group,
        kv_heads=case.kv_heads,
        sliding_window=case.sliding_window,
        config=CONFIG,
    )

    def attend(*arrays):
        interpret = plgpu.InterpretGPUParams(detect_races=True)
        options = options_of(case) | {"config": CONFIG, "interpret": interpret}
        return ragged_paged_attention(*arrays, **options)

    with watched_races() as states:
        out = np.asarray(jax.jit(attend)(*step[:5], plan).astype(jnp.float32), np.float64)
    assert not any(state.races_found for state in states)
    assert worst(case._replace(decodes=()), step, out) <= 1  # decode rows, too
    assert not out[step.query_start_loc[-1] :].any()
