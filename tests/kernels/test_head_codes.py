"""Attention whose output leaves as codes: the bits that XLA makes of the same numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    FP8,
    Case,
    Step,
    decode_config,
    decode_work,
    decodes,
    make_step,
    options_of,
    watched_races,
)
from mutations import fit, load_all
from spent import mutants, quick

from pallas_kernels import decode, paged_attention
from pallas_kernels.call import AttentionOptions, CodeKind
from pallas_kernels.decode_work import DecodeConfig
from pallas_kernels.prefill_work import PrefillConfig
from pallas_kernels.rows import Sequences
from pallas_kernels.step_work import KernelConfig, divide_step
from shiftjax.models.products import quantise_blocks

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

OWN, FIXED = CodeKind(), CodeKind(jnp.array([0.004], jnp.float32))
SPLIT = PrefillConfig(64, 2, 2, fixed_rounds=1)
ROWS = {
    "rows, one of them padding": (decodes((1, 65, 200), padding=1, head_dim=128), OWN),
    "q_per_kv 8, fixed": (decodes((65, 200), q_per_kv=8, head_dim=128), FIXED),
    "many jobs, sinks, two KV heads of 3": (
        decodes((1300, 5), num_blocks=24, q_per_kv=3, kv_heads=2, head_dim=128, sinks=(4, 8)),
        OWN,
    ),
    "q_per_kv 12, fp8": (
        decodes((70, 5), q_per_kv=12, kv_dtype=FP8, head_dim=128, kv_scales=(0.5, 3.0)),
        OWN,
    ),
}
STEPS = {
    "decodes and chunks": (
        Case(((17, 100), (5, 5)), decodes=(130, 1), head_dim=128, kv_heads=2, padding=2),
        OWN,
    ),
    "parts, q_per_kv 8": (Case(((20, 300),), q_per_kv=8, head_dim=128, config=SPLIT), OWN),
    "parts, q_per_kv 5, sinks, fixed, decodes": (
        Case(((20, 200),), (30,), q_per_kv=5, head_dim=128, config=SPLIT, sinks=(0, 6)),
        FIXED,
    ),
    "q_per_kv 1, fp8, fewer tokens than a box": (
        Case(((17, 40),), tokens=20, q_per_kv=1, kv_dtype=FP8, head_dim=128),
        OWN,
    ),
}


def check(attend: Any, step: Step, work: Any, kind: CodeKind) -> None:
    """Compare codes with those of the numbers that the same kernels give; no data race."""

    def run(*arrays: Any) -> Any:
        return attend(*arrays, None), attend(*arrays, kind)

    with watched_races() as states:
        numbers, codes = jax.tree.map(np.asarray, jax.jit(run)(step.q, step.kv, work))
    assert states and not any(state.races_found for state in states)
    assert np.isfinite(numbers.astype(np.float32)).all() and numbers.any()
    rows = jnp.asarray(numbers).reshape(numbers.shape[0], -1)
    right = quantise_blocks(rows, fixed=kind.fixed)
    values = codes.values.reshape(rows.shape)
    np.testing.assert_array_equal(values.view(np.uint8), np.asarray(right.values).view(np.uint8))
    np.testing.assert_array_equal(codes.scale, right.scale)


def rows_of_case(case: Case, kind: CodeKind, module: Any = decode) -> None:
    step, config = make_step(case), decode_config(case)

    def attend(q, kv, work, codes):
        options = options_of(case)._replace(codes=codes)
        return module.decode_attention(q, kv, work, options, config)

    check(attend, step, decode_work(case, step), kind)


def step_of_case(case: Case, kind: CodeKind, module: Any = paged_attention) -> None:
    step, config = make_step(case), KernelConfig(case.config, DecodeConfig(64, 2, 90_000))
    work = divide_step(
        Sequences(step.kv.seq_lens, step.query_start_loc, len(case.decodes), case.num_rows or 1),
        num_tokens=step.q.shape[0],
        heads=(case.q_per_kv * case.kv_heads, case.kv_heads),
        max_context=step.kv.block_tables.shape[1] * case.block_size,
        config=config,
    )

    def attend(q, kv, work, codes):
        options = options_of(case)._replace(codes=codes)
        return module.ragged_paged_attention(q, kv, work, options, config)

    check(attend, step, work, kind)


@pytest.mark.costs(8)
@pytest.mark.parametrize("name", quick(ROWS, "rows, one of them padding"))
def test_rows_leave_as_codes(name):
    rows_of_case(*ROWS[name])


@pytest.mark.costs(12)
@pytest.mark.parametrize("name", quick(STEPS, "parts, q_per_kv 5, sinks, fixed, decodes"))
def test_a_step_leaves_as_codes(name):
    step_of_case(*STEPS[name])


def test_rows_that_no_row_of_the_work_is_are_zeros():
    case = decodes((65, 20), padding=3, head_dim=128, q_per_kv=1)
    step, config = make_step(case), decode_config(case)
    work = decode_work(case, step)
    work = work._replace(row_first=work.row_first[:2], row_jobs=work.row_jobs[:2])
    work = work._replace(row_seq=work.row_seq[:2], row_length=work.row_length[:2])

    def attend(q, kv, work, codes):
        options = options_of(case)._replace(codes=codes)
        return decode.decode_attention(q, kv, work, options, config)

    check(attend, step, work, OWN)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_other_heads_are_refused(head_dim):
    case = decodes(head_dim=head_dim)
    step, options = make_step(case), AttentionOptions(1.0, codes=OWN)
    arrays = step.q, step.kv, decode_work(case, step)
    with pytest.raises(ValueError, match=f"codes of heads of {head_dim}"):
        decode.decode_attention(*arrays, options, decode_config(case))


# ------------------------------------------------------------------------------- faults

MODULES = (
    "head_codes",
    *("decode_combine", "decode"),
    *(f"prefill_{part}" for part in ("rows", "compute", "combine")),
    *("prefill", "paged_attention"),
)
FEW_ROWS = decodes((65, 20), q_per_kv=3, kv_heads=2, head_dim=128)
CHUNKS = Case(((9, 60), (5, 5)), decodes=(30,), kv_heads=2, head_dim=128)
PARTS = Case(((9, 200),), head_dim=128, config=SPLIT)
FAULTS = {
    "the largest of a part of the columns": (
        "prefill_combine",
        "return functools.reduce(jnp.maximum, each)",
        "return own",
        PARTS,
    ),
    "codes of numbers that nothing has rounded": (
        "head_codes",
        "values.astype(dtype).astype(jnp.float32)",
        "values",
        FEW_ROWS,
    ),
    "codes are rounded twice": (
        "head_codes",
        "[1 - axis])).astype(FP8)",
        "[1 - axis])).astype(jnp.bfloat16).astype(FP8)",
        FEW_ROWS,
    ),
    "scales of rows go to the head before": (
        "decode_combine",
        "scratch.units[head]",
        "scratch.units[max(head - 1, 0)]",
        FEW_ROWS,
    ),
    "scales of rows go to the other KV head": (
        "decode_combine",
        "out.scale[first + head, row]",
        "out.scale[head, row]",
        FEW_ROWS,
    ),
    "scales of chunks go to the token before": (
        "prefill_rows",
        "units[g * problem.n + token - tokens.start]",
        "units[g * problem.n + jnp.maximum(token - tokens.start - 1, 0)]",
        CHUNKS,
    ),
    "scales of chunks go to the other KV head": (
        "prefill_rows",
        "target[first + g, token]",
        "target[g, token]",
        CHUNKS,
    ),
    "a fixed scale that is not applied": (
        "head_codes",
        "jnp.clip(rounded / unit",
        "jnp.clip(rounded",
        FEW_ROWS,
    ),
    "others' codes are not waited for": (
        "prefill_combine",
        "    plgpu.barrier_arrive(scratch.done)\n"
        "    plgpu.barrier_wait(scratch.done)\n    pl.when(me == 0)",
        "    pl.when(me == 0)",
        PARTS,
    ),
}


def test_every_fault_fits_its_source():
    fit(FAULTS.values())


@pytest.mark.parametrize("fault", mutants(*FAULTS))
def test_a_fault_is_found(fault):
    *change, case = FAULTS[fault]
    modules = load_all(MODULES, *change)
    kind = FIXED if "fixed" in fault else OWN
    try:
        if case is FEW_ROWS:
            rows_of_case(case, kind, modules["decode"])
        else:
            step_of_case(case, kind, modules["paged_attention"])
    except (AssertionError, RuntimeError, jax.errors.JaxRuntimeError):
        return
    raise AssertionError("nothing is found")


@pytest.mark.thorough
def test_without_a_fault_nothing_is_found():
    modules = load_all(MODULES)
    rows_of_case(FEW_ROWS, OWN, modules["decode"])
    step_of_case(PARTS, OWN, modules["paged_attention"])
