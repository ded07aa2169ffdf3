"""What the start's check finds: faults put into the kernels that serve, step by step.

In Mosaic's interpreter, with few thread blocks and small rings, so that small steps reach what
large ones reach on a GPU (`test_attention_steps.py`). docs/gpu.md has this table.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import jax
import pytest
from faulty_attention import INTERPRETED
from mutations import load_all
from spent import mutants

import pallas_kernels.kv_write
import pallas_kernels.paged_attention
from pallas_kernels.decode_work import DecodeConfig
from pallas_kernels.prefill_work import PrefillConfig
from pallas_kernels.step_work import KernelConfig
from shiftjax.device import attention_cases
from shiftjax.device.attention_cases import Trial, tries_of
from shiftjax.device.attention_steps import Cases, Shape
from shiftjax.models.attention_backend import AttentionBackend, pallas_attention

DECODE = ("decode_terms", "decode_memory", "decode_compute", "decode_kernel", "decode_combine")
PREFILL = tuple(
    f"prefill_{part}"
    for part in ("terms", "rows", "memory", "softmax", "overlap", "compute", "combine")
)
MODULES = (*DECODE, "decode", *PREFILL, "prefill", "paged_attention", "kv_write")
# Four thread blocks with rings of two stages; a row of 68 rounds in 34 jobs; parts of a span.
CONFIG = KernelConfig(
    PrefillConfig(64, 2, 2, fixed_rounds=1), DecodeConfig(64, 4, 45_000, fixed_rounds=2)
)
LONG_BYTES = 68 * 64 * 4 * 64  # of keys and values of one head
CASES = Cases(
    decodes=(16, 17, 40),
    chunks=((17, 17), (20, 1100)),
    num_beside=1,
    in_largest=False,
    ring_bytes=LONG_BYTES * 2 // 3,
)
SHAPE = Shape(2, 1, 64, 16, (None,), "bfloat16", "bfloat16", (32, 8, 8), has_late=True)
STEPS = "edges", "long", "chunks", "late", "write"  # in the order of `tries_of`
CODES = {"kv_dtype": "fp8", "heads": 4, "kv_heads": 2}


class Fault(NamedTuple):
    """One change of a kernel's source, and the step that has to find it."""

    step: str
    module: str
    old: str
    new: str
    changes: Mapping[str, Any] = MappingProxyType({})  # of SHAPE


FAULTS = {
    "the memory's warpgroup never waits for a free place of the ring": Fault(
        "long", "decode_memory",
        "    pl.when(count >= shape.stages)(lambda: plgpu.barrier_wait(stream.free.at[slot]))\n",
        "",
    ),
    "a query's place is used again without waiting": Fault(
        "long", "decode_memory",
        "    pl.when(count >= Q_SLOTS)(lambda: plgpu.barrier_wait(buffers.q_free.at[slot]))\n", "",
    ),
    "jobs of a row beyond 32 are dropped": Fault(
        "long", "decode_combine", "fori_loop(0, lax.div(count + (stride - 1), jnp.int32(stride)),",
        "fori_loop(0, jnp.minimum(1, lax.div(count + (stride - 1), jnp.int32(stride))),",
    ),
    "key 4,096 is masked in decode": Fault(
        "long", "decode_compute", "seen = positions < part.length",
        "seen = (positions < part.length) & (positions != 4096)",
    ),
    "the combine leaves out the last job of a row": Fault(
        "long", "decode_combine", "(place < count)", "(place < count - 1)"
    ),
    "a worker's last job is lost": Fault(
        "long", "decode_terms", "inputs.worker_first[worker + 1]",
        "jnp.maximum(inputs.worker_first[worker + 1] - 1, inputs.worker_first[worker])",
    ),
    "sums of earlier rounds are not scaled down": Fault(
        "long", "decode_compute", "old * down_rows(decay, old.shape)", "old"
    ),
    "the mask is wrong where a length is a multiple of 16": Fault(
        "edges", "decode_compute", "positions < part.length",
        "positions < jnp.where(lax.rem(part.length, 16) == 0, part.length - 1, part.length)",
    ),
    "a decode reads beyond its length in the last block": Fault(
        "edges", "decode_compute", "positions < part.length", "positions <= part.length"
    ),
    "the window of a decode is one token short": Fault(
        "edges", "decode_compute", "positions >= part.low", "positions > part.low",
        {"windows": (20,)},
    ),
    "the first KV head for all": Fault(
        "edges", "decode_memory", 'lax.axis_index("kv_head"), tokens', "0, tokens",
        {"heads": 4, "kv_heads": 2},
    ),
    "the combine of prefill reads part 0 for all parts": Fault(
        "chunks", "prefill_combine", "split.first_part + nth, head",
        "split.first_part + 0 * nth, head",
    ),
    "key 1,024 is masked in prefill": Fault(
        "chunks", "prefill_softmax", "is_past = key <= lax.broadcast_in_dim(last, shape, [0])",
        "is_past = (key <= lax.broadcast_in_dim(last, shape, [0])) & (key != 1024)",
    ),
    "the weight of a part is to another base": Fault(
        "chunks", "prefill_compute", "state.maximum + jnp.log2(total)",
        "state.maximum + jnp.log(total)",
    ),
    "sinks count in every part": Fault(
        "chunks", "prefill_compute",
        "jnp.where(read_part(problem, inputs, turn) < 0, 0.0, FLOOR)", "0.0", {"has_sinks": True},
    ),
    "the window of a chunk is one token short": Fault(
        "chunks", "prefill_softmax", "key > lax.", "key - 1 > lax.", {"windows": (500,)}
    ),
    "a stage of prefill is filled while it is read": Fault(
        "chunks", "prefill_memory", "pl.when(j + offset >= stages)", "pl.when(j + offset > stages)"
    ),
    "rows alone are of the sequence of their number": Fault(
        "late", "decode_terms", "inputs.row_seq[row], inputs", "row, inputs"
    ),
    "rows of a sequence see what the one before sees": Fault(
        "late", "decode_terms", "inputs.row_length[row]",
        "inputs.row_length[jnp.maximum(row - 1, 0)]",
    ),
    "a token is not written": Fault(
        "write", "kv_write", "for i in range(TOKENS):", "for i in range(TOKENS - 1):", CODES
    ),
    "a token is written into the block before": Fault(
        "write", "kv_write", "lax.div(slot, block_size), lax.rem",
        "jnp.maximum(lax.div(slot, block_size) - 1, 0), lax.rem", CODES,
    ),
    "codes of values are in units of those of keys": Fault(
        "write", "kv_write", "first_head + head)[i]", "first_head + head)[0]", CODES,
    ),
    "codes are in units of the first head's": Fault(
        "write", "kv_write", "arrays.scales, first_head + head)",
        "arrays.scales, first_head)", CODES,
    ),
    "what is too large for a code is not cut off": Fault(
        "write", "kv_write", "jnp.clip(scaled, -LARGEST_FP8, LARGEST_FP8)", "scaled", CODES
    ),
}  # fmt: skip


def problem_with(step: str, shape: Shape, kernels: AttentionBackend) -> str | None:
    """Try one step, as the check does, once; return what is wrong."""
    tries = tries_of(Trial(shape, CASES, "", ()), kernels, jax.devices()[:1])
    names = [name for name in STEPS if name != "write" or shape.kv_dtype == "fp8"]
    (_, run) = dict(zip(names, tries, strict=True))[step]
    with mock.patch.object(attention_cases, "NUM_RUNS", 1):
        problem = run()
    return problem and problem.problem


def kernels_with(shape: Shape, *change: str) -> AttentionBackend:
    """Make the kernels anew, with a change of one of their sources."""
    made = load_all(MODULES, *change)
    used: Any = {name: made[name] for name in ("decode", "paged_attention", "kv_write")}
    with mock.patch.multiple(pallas_kernels, **used):
        return pallas_attention(shape.layout, CONFIG, shape.block_size, interpret=INTERPRETED)


CHEAP = [name for name, fault in FAULTS.items() if fault.step == "write"]
QUICK = "jobs of a row beyond 32 are dropped"
OTHERS = [name for name in FAULTS if name not in (*CHEAP, QUICK)]


@pytest.mark.parametrize(
    "fault", [*CHEAP, pytest.param(QUICK, marks=pytest.mark.costs(15)), *mutants(*OTHERS)]
)
def test_a_fault_is_found(fault):
    step, *change, changes = FAULTS[fault]
    shape = replace(SHAPE, **changes)
    assert problem_with(step, shape, kernels_with(shape, *change)) is not None


@pytest.mark.thorough
@pytest.mark.parametrize("step", STEPS)
def test_without_a_fault_nothing_is_found(step):
    shape = replace(SHAPE, **(CODES if step == "write" else {}))
    assert problem_with(step, shape, kernels_with(shape)) is None


def test_the_table_of_the_documentation_is_this_one():
    text = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    rows = [f"| {name} | {fault.step} |" for name, fault in FAULTS.items()]
    assert "\n".join(["| fault | found by |", "| --- | --- |", *rows]) in text
