"""What a switch of mode costs: nothing. Pointers, memory and the compiled programs say so."""

import ctypes
import gc
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from engines import checkpoint, make, run
from harness import silent
from hlo import (
    FLOAT32_BYTES,
    Instruction,
    collectives,
    counted,
    expected_collectives,
    matrices,
    weight_moves,
)
from lean import greedy_collectives

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.formats import formats_of
from shiftjax.core.policies import FixedPolicy
from shiftjax.core.request import SamplingParams
from shiftjax.device.mesh import make_mesh
from shiftjax.device.mode_weights import ModeWeights
from shiftjax.device.place import define, load
from shiftjax.parallel.grid import Group
from shiftjax.parallel.layout import Layout
from shiftjax.weights.random import RandomSource

MESHES = [(4, 2), (8, 1), (3, 2)]  # others' collectives: costs/test_costs_hlo.py
# Odd sizes, so that no activation happens to be as large as a shard of a weight.
ODD = {"hidden_size": 80, "intermediate_size": 272, "vocab_size": 331, "head_dim": 32}


@cache
def runner_of(sp: int, tp: int, shift_weights: str | None = None, **options):
    """A runner of one small bucket, shared by the tests that only look at it."""
    directory, _, _ = checkpoint(**ODD)
    options = {"token_buckets": (24,), "max_num_batched_tokens": 24} | options
    controls = {"shift_weights": shift_weights}
    return make(directory, sp, tp, controls=controls, **options).runners[0]


def buffers(tree) -> dict:
    """Address of every shard of every array."""
    return {
        (i, shard.device.id): shard.data.unsafe_buffer_pointer()
        for i, array in enumerate(jax.tree.leaves(tree))
        for shard in array.addressable_shards
    }


@pytest.mark.thorough
def test_only_what_the_policy_may_choose_is_compiled(caplog):
    directory, _, _ = checkpoint(**ODD)
    options = {"token_buckets": (8, 24), "max_num_batched_tokens": 24, "shift_threshold": 8}
    built = make(directory, 2, 1, **options)
    (runner,) = built.runners
    modes = [set(program.steps) for program in runner.programs]
    base, shift = runner.step.layout.modes
    assert modes == [{shift}, {base}]
    # Another policy may want more, and gets it late.
    built.engine.policy = FixedPolicy(0)
    run(built.engine, [[5, 6, 7]], [SamplingParams(temperature=0, max_tokens=2)])
    assert set(runner.programs[0].steps) == {shift, base}
    assert "a base step of 8 tokens is compiled late" in caplog.text


@pytest.mark.thorough
def test_the_weights_of_a_mode_are_made_at_the_start_not_at_its_first_step(monkeypatch):
    directory, _, _ = checkpoint()
    built = make(directory, 2, 2, num_blocks=42)

    def fail(*_, **__):
        raise AssertionError("weights are made while serving")

    monkeypatch.setattr("shiftjax.device.mode_weights.array_in_mode", fail)
    run(built.engine, [[5, 6, 7] * 9], [SamplingParams(temperature=0, max_tokens=3)])
    steps = built.engine.stats()
    assert min(steps.steps_by_mode.values()) > 0 and steps.num_failed_steps == 0


def test_switching_keeps_the_pool_where_it_is():
    directory, _, _ = checkpoint()
    built = make(directory, 2, 2, num_blocks=42)  # as in test_mode_invisibility: compiled there
    (runner,) = built.runners
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    before = buffers(runner.memory.pools)
    for place in (0, -1, 0):
        built.engine.policy = FixedPolicy(place)
        run(built.engine, [[5, 6, 7]], [sampling])
        assert buffers(runner.memory.pools) == before
    assert built.engine.stats().mode_switches == {("base", "shift"): 1, ("shift", "base"): 1}


@pytest.mark.thorough
@pytest.mark.parametrize(("sp", "tp"), MESHES)
def test_the_weights_of_every_mode_lie_inside_their_base_shards(sp, tp):
    runner = runner_of(sp, tp)
    base, *modes = runner.step.layout.modes
    stored = runner.memory.params(base)
    # q, o, gate, up and down at least; k and v shards are no smaller where heads are replicated.
    views_per_device = 5 * runner.step.layout.model.num_layers
    for mode in modes:
        num_views, used = 0, runner.memory.params(mode)
        for weight, whole, part in zip(runner.step.model.declared, stored, used, strict=True):
            shards = {shard.device: shard.data for shard in whole.addressable_shards}
            for shard in part.addressable_shards:
                owner = shards[shard.device]
                offset = shard.data.unsafe_buffer_pointer() - owner.unsafe_buffer_pointer()
                assert 0 <= offset <= owner.nbytes - shard.data.nbytes, weight.name
                num_views += shard.data.nbytes < owner.nbytes
        assert num_views >= sp * tp * views_per_device


def resident_bytes() -> int:
    """Memory of this process; what earlier tests freed goes back first, or it would be reused."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_aliased_shift_weights_take_no_memory_and_copies_do():
    config = ModelConfig(
        name="wide",
        architecture="llama",
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=8192,
        num_layers=2,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
        max_position_embeddings=64,
    )
    layout = Layout(config, 4, 2)
    mesh = make_mesh(jax.devices()[:8], 4, 2)
    model = define(layout, formats_of("float32"))
    base = load(model, layout, mesh, RandomSource(config, 0), silent)
    copy_bytes = sum(
        model.dtype.itemsize * int(np.prod(w.shape))
        for w in model.declared
        if w.axes[0] is not None and not w.in_shift
    )
    grown, kept = {}, []
    for strategy in ("alias", "replicate"):
        start = resident_bytes()
        kept.append(ModeWeights(model, layout, strategy).of(layout.shift, base))
        grown[strategy] = resident_bytes() - start
    assert grown["alias"] < 0.05 * copy_bytes
    assert grown["replicate"] > 0.7 * copy_bytes  # the measure can see a copy


# ------------------------------------------------------------ the compiled programs


@pytest.mark.costs(15)
@pytest.mark.parametrize(("sp", "tp"), MESHES)
def test_collectives_are_the_papers_to_the_byte(sp, tp):
    runner = runner_of(sp, tp)
    (program,) = runner.programs
    for mode in runner.step.layout.modes:
        step = runner.compiled(program, mode)
        assert collectives(step.as_text()) == expected_collectives(
            runner.step.layout, mode, *program.bucket[:2], FLOAT32_BYTES
        ) + counted(greedy_collectives(runner.step.layout, program.bucket.rows)), (sp, tp, mode)


def in_shift(runner):
    """The compiled SHIFT step."""
    return runner.compiled(runner.programs[-1], runner.step.layout.shift)


def moves_in_shift(runner, weights: set[tuple[int, int]]) -> list[Instruction]:
    """Slices, copies and transposes of weights in the SHIFT step."""
    return weight_moves(in_shift(runner).as_text(), weights, "f32")


@pytest.mark.costs(8)
def test_the_shift_step_reads_its_weights_in_place():
    aliased, sliced = runner_of(4, 2), runner_of(4, 2, shift_weights="slice")
    weights = matrices(aliased.step, aliased.memory.params(aliased.step.layout.shift))
    assert moves_in_shift(aliased, weights) == []
    # The control: slicing in the step shows, in its text and in its temporary memory.
    assert len(moves_in_shift(sliced, weights)) >= aliased.step.layout.model.num_layers
    temporaries = [
        in_shift(runner).memory_analysis().temp_size_in_bytes for runner in (aliased, sliced)
    ]
    assert temporaries[0] < temporaries[1]


@pytest.mark.thorough
@pytest.mark.parametrize("mode", Group(0, 4).modes)
def test_temporaries_do_not_grow_with_the_pool(mode):
    temporaries = [
        runner.compiled(runner.programs[-1], mode).memory_analysis().temp_size_in_bytes
        for runner in (runner_of(4, 2), runner_of(4, 2, num_blocks=20_000))
    ]
    assert temporaries[0] == temporaries[1]
