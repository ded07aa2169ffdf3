"""The checks of the prefill kernel can fail: every fault below, put into it, is found."""

from pathlib import Path
from types import ModuleType

import pytest
from attention_cases import FP8, Case, make_step
from attention_cases import run_prefill as run
from attention_cases import worst_prefill as worst

from pallas_kernels import prefill

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

FOLDER = Path(prefill.__file__).parent
TWO_HEADS = Case(kv_heads=2)
FAULTS = {
    "the last token is dropped": ("compute", "is_past = key <= ", "is_past = key < ", Case()),
    "one token too many is seen": ("compute", "is_past = key <= ", "is_past = key - 1 <= ", Case()),
    "the window is one token short": (
        "compute", "key > lax.", "key - 1 > lax.",
        Case(sliding_window=50),
    ),
    "the scale is 5% off": (
        "compute", "logit_scale = problem.options", "logit_scale = 1.05 * problem.options", Case()
    ),
    "the scale of values is forgotten": (
        "compute", "inputs.v_scale[piece.head] / total", "1 / total",
        Case(kv_dtype=FP8, v_scale=1.1),
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
        "compute", "whole = share.end - share.begin == n", "whole = share.end > share.begin",
        Case(((5, 5), (17, 100))),
    ),
    "keys are not waited for": (
        "compute", "    pl.when(j < place.last)(lambda: plgpu.barrier_wait(ready))\n", "",
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


def load(name: str, old: str = "", new: str = "") -> ModuleType:
    """Make a module from the source of a kernel's, with one thing changed."""
    source = (FOLDER / f"{name}.py").read_text()
    assert not old or source.count(old) == 1, "the fault does not fit the source any more"
    module = ModuleType(f"faulty_{name}")
    exec(compile(source.replace(old, new) if old else source, f"{name}.py", "exec"), vars(module))
    return module


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault):
    part, old, new, case = FAULTS[fault]
    faulty, module = load(f"prefill_{part}", old, new), load("prefill")
    entry = {"compute": "compute_piece", "memory": "fetch_piece"}[part]
    setattr(module, entry, vars(faulty)[entry])
    step = make_step(case)
    try:
        error = worst(case, step, run(case, step, module))
    except Exception as problem:  # the interpreter's own: a race, a barrier left half-way
        error = problem
    assert isinstance(error, Exception) or error > 1


def test_without_a_fault_nothing_is_found():
    step = make_step(TWO_HEADS)
    assert worst(TWO_HEADS, step, run(TWO_HEADS, step, load("prefill"))) <= 1
