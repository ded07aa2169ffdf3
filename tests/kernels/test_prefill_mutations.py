"""The checks of the prefill kernel can fail: every fault below, put into it, is found."""

import pytest
from attention_cases import FP8, Case, make_step, run_prefill_parts, worst_prefill_parts
from attention_cases import run_prefill as run
from attention_cases import worst_prefill as worst
from mutations import fit, load
from spent import mutants

from pallas_kernels.prefill_work import PrefillConfig

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

PARTS = ("terms", "rows", "memory", "softmax", "overlap", "compute", "combine")  # as they import
MODULES = (*(f"prefill_{part}" for part in PARTS), "prefill")
TWO_HEADS = Case(kv_heads=2)
SPLIT = Case(((20, 300),), config=PrefillConfig(64, 2, 2, fixed_rounds=1))
FAULTS = {
    "the last token is dropped": ("softmax", "is_past = key <= ", "is_past = key < ", Case()),
    "one token too many is seen": ("softmax", "is_past = key <= ", "is_past = key - 1 <= ", Case()),
    "the window is one token short": (
        "softmax", "key >= lax.", "key > lax.",
        Case(window=50),
    ),
    "the scale is 5% off": (
        "compute", "problem.options.scale * k_scale", "1.05 * problem.options.scale * k_scale",
        Case(),
    ),
    "the scale of values is forgotten": (
        "compute", "v_scale / total", "1 / total",
        Case(kv_dtype=FP8, kv_scales=(1.0, 1.1)),
    ),
    "the wrong KV head": (
        "memory", "blocks.at[block, piece.head]", "blocks.at[block, 0]", TWO_HEADS
    ),
    "the block before": (
        "memory", "jnp.minimum(place, last_place)", "jnp.maximum(place - 1, 0)", Case()
    ),
    "old values are not scaled down": (
        "compute", "weighted = state.weighted * lax.broadcast_in_dim(decay,",
        "weighted = state.weighted * lax.broadcast_in_dim(jnp.ones_like(decay),", Case()
    ),
    "values past the context are not cleared": (
        "memory", "round_of(problem, length)", "round_of(problem, length + problem.kv_tile)", Case()
    ),
    "rows of the next sequence are overwritten": (
        "rows", "whole = tokens.end - tokens.begin == box", "whole = tokens.end > tokens.begin",
        Case(((5, 5), (17, 100))),
    ),
    "values before the window are not cleared": (
        "memory", "seen = (rows + row >= low) & (", "seen = (",
        Case(((17, 200),), window=20),
    ),
    "the round that the window begins in is not looked at": (
        "memory", "is_part = (piece.first * problem.kv_tile < low)", "is_part = (low < 0)",
        Case(((17, 200),), window=20),
    ),
    "a row that sees nothing of a round weighs it by a rounding error": (
        "softmax", "filled((ROWS,), FLOOR, row)", "filled((ROWS,), LOWEST, row)",
        Case(((17, 200),), window=60),
    ),
    "the soft cap is half as steep": (
        "softmax", "(2 * LOG2_E / soft_cap)", "(LOG2_E / soft_cap)", Case(soft_cap=3.0)
    ),
    "a part reads a round of the part before": (
        "terms", "first = jnp.maximum(job.first * rounds",
        "first = jnp.maximum(job.first * rounds - 1", SPLIT,
    ),
    "a part ends a round early": (
        "terms", "last = jnp.minimum(job.last * rounds", "last = jnp.minimum(job.last * rounds - 1",
        SPLIT,
    ),
    "parts are not weighted": (
        "combine", "weight = jnp.exp2(lse - new_top) *", "weight = jnp.ones_like(lse) *", SPLIT
    ),
    "the weight of a part is to another base": (
        "compute", "state.maximum + jnp.log2(total)", "state.maximum + jnp.log(total)", SPLIT
    ),
    "the last part is left out": ("combine", "(place < count)", "(place < count - 1)", SPLIT),
    "parts of the other warpgroup": (
        "combine", "place = split.first_part + nth, head, warpgroup",
        "place = split.first_part + nth, head, 1 - warpgroup", SPLIT,
    ),
    "sinks of the heads beside": (
        "rows", "zero >= g * problem.n", "zero > g * problem.n", Case(sinks=(0, 6))
    ),
    "sinks are not capped as scores are": (
        "rows", "(logit - missing) * LOG2_E", "logit * LOG2_E", Case(soft_cap=3.0, sinks=(0, 2))
    ),
    "the sink weighs nothing": (
        "softmax", "filled((ROWS,), 1.0, row)", "filled((ROWS,), 0.0, row)", Case(sinks=(0, 6))
    ),
    "sinks count in every part": (
        "compute", "jnp.where(read_part(problem, inputs, turn) < 0, 0.0, FLOOR)", "0.0",
        SPLIT._replace(sinks=(4, 8)),
    ),
    "sinks of split tiles are left out": (
        "combine", "filled((ROWS,), 1.0, row), sink", "filled((ROWS,), 0.0, row), sink",
        SPLIT._replace(sinks=(4, 8)),
    ),
    "keys are not waited for": (
        "softmax", "    pl.when(j < place.last)(lambda: plgpu.barrier_wait(ready))\n", "",
        Case(((17, 300),)),
    ),
    "values are not waited for": (
        "compute", "    plgpu.barrier_wait(shared.v_ready.at[slot])\n\n    def weigh",
        "\n    def weigh", Case(((17, 300),)),
    ),
    "a stage is filled while it is read": (
        "memory", "pl.when(j + offset >= stages)", "pl.when(j + offset > stages)",
        Case(((17, 300),)),
    ),
    "queries are replaced while they are read": (
        "memory", "pl.when(turn > 0)(lambda w=w", "pl.when(turn > 1)(lambda w=w", Case(kv_heads=8),
    ),
    "queries are not committed": (
        "compute", "    shared.q.at[warpgroup][...] = rows\n    plgpu.commit_smem()\n",
        "    shared.q.at[warpgroup][...] = rows\n", Case(),
    ),
}  # fmt: skip


def test_every_fault_fits_its_source():
    fit((*FAULTS.values(), *FAULTS_OF_PARTS.values()), "prefill_")


@pytest.mark.parametrize("fault", mutants(*FAULTS))
def test_a_fault_is_found(fault):
    part, old, new, case = FAULTS[fault]
    module, step = load(MODULES, f"prefill_{part}", old, new), make_step(case)
    try:
        error = worst(case, step, run(case, step, module))
    except Exception as problem:  # the interpreter's own: a race, a barrier left half-way
        error = problem
    assert isinstance(error, Exception) or error > 1


FAULTS_OF_PARTS = {
    "rows weigh what those of the first head do": (
        "rows", "token] = units[g * problem.n", "token] = units[0 * problem.n", Case()
    ),
    "what leaves has no weight but its largest score's": (
        "compute", "state.maximum + jnp.log2(total)", "state.maximum", Case()
    ),
    "parts of parts weigh what the largest does": (
        "combine", "top + jnp.log2(total)", "top", SPLIT
    ),
    "the weight of split tiles is not written": (
        "combine", "block == 0)", "block < 0)", SPLIT
    ),
    "weights are those of the piece before": (
        "rows", "        store(leaving.units, lse)\n", "", Case()
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", mutants(*FAULTS_OF_PARTS))
def test_a_fault_of_parts_is_found(fault):
    part, old, new, case = FAULTS_OF_PARTS[fault]
    module, step = load(MODULES, f"prefill_{part}", old, new), make_step(case)
    try:
        error = worst_prefill_parts(case, step, run_prefill_parts(case, step, module))
    except Exception as problem:  # the interpreter's own
        error = problem
    assert isinstance(error, Exception) or not error <= 1


@pytest.mark.thorough
def test_without_a_fault_nothing_is_found():
    step = make_step(SPLIT)
    assert worst(SPLIT, step, run(SPLIT, step, load(MODULES))) <= 1
