"""Buffers of XLA's own sums. That it has them for these sizes: `compile/test_all_reduces.py`."""

from dataclasses import replace

import pytest

from shiftjax.arch.formats import Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.core.policies import make_policy
from shiftjax.core.policy import wanted_modes
from shiftjax.costs.buckets import doubling, make_buckets
from shiftjax.costs.machine_files import load_engine, load_machine
from shiftjax.costs.memory import logit_bytes, sampling_bytes
from shiftjax.costs.sum_buffers import MOST_BYTES, PIECE_BYTES, buffer_bytes, sum_buffer_bytes
from shiftjax.parallel.layout import Layout
from shiftjax.sim.modelled import Target, memory_of, sum_buffers_of
from shiftjax.sim.named import deploy

MODEL, MIB = PRESETS["llama-70b"], 1 << 20


def test_a_sum_has_two_operands_and_flags_in_whole_pieces():
    assert buffer_bytes(8, 1) == buffer_bytes(8, MIB) == 2 * PIECE_BYTES
    assert buffer_bytes(8, MIB + 1) == 3 * PIECE_BYTES
    assert buffer_bytes(8, MOST_BYTES // 8) == 10 * MIB


def test_a_sum_by_nccl_has_none():
    assert buffer_bytes(8, MOST_BYTES // 8 + 1) == buffer_bytes(6, MIB) == buffer_bytes(1, MIB) == 0


SAMPLED = 2 * 20  # pieces of the sums of the sampler: the best tokens, and in branches 19 more


def test_sums_of_small_steps_of_a_70b():
    """161 of each size: two a layer, and the embedding's; in any step those of the sampler."""
    layout, sums = Layout(MODEL, 1, 8), 161
    buckets = make_buckets(doubling(8192), 256, layout)
    wanted = wanted_modes(make_policy("shift", 0), buckets, layout.modes)
    pieces = {tokens: 2 for tokens in (8, 16, 32, 64)} | {128: 3, 256: 5}
    for bucket, modes in wanted.items():
        expected = (sums * pieces.get(bucket.tokens, 0) + SAMPLED) * PIECE_BYTES
        assert sum_buffer_bytes(layout, Formats(), {bucket: modes}) == expected
    assert sum_buffer_bytes(layout, Formats(), wanted) == (sums * 16 + 11 * SAMPLED) * PIECE_BYTES


@pytest.mark.parametrize(
    ("machine", "engine", "pieces"),
    [("h200x8", "shiftjax", 16), ("a100x8-pcie", "shiftjax", 0), ("h200x8", "vllm", 0)],
)
def test_plans_leave_room_for_them(machine, engine, pieces):
    target = Target(MODEL, load_machine(machine), load_engine(engine), Formats())
    settings = {"max_num_batched_tokens": 8192, "max_num_seqs": 256}
    deployment = deploy(target, "tp=8,policy=shift", **settings)
    held = sum_buffers_of(target, deployment)
    of_xla = (161 * pieces + 11 * SAMPLED * (pieces > 0)) * PIECE_BYTES  # 5.4 GB
    by_switch = 2 * 8192 * MODEL.hidden_size * 2 + PIECE_BYTES  # partial sums, and their norm
    assert held == of_xla + (by_switch if pieces else 0)
    alone = replace(deployment, deterministic=True)
    assert sum_buffers_of(target, alone) == of_xla
    least = target.reserved_bytes(deployment) + held
    sampling = sampling_bytes(target.engine, 256, MODEL.vocab_size)
    after = logit_bytes(deployment.layout, 256) if sampling else 0
    step = max(deployment.temporary_bytes - after, sampling)
    assert memory_of(target, deployment).workspace_bytes == least + step
