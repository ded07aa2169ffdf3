"""What a switch of mode costs: nothing. Pointers, memory and the compiled programs say so."""

import ctypes
import gc
import re
from collections import Counter
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from engines import checkpoint, make, run
from harness import silent

from shiftjax.engine.policy import FixedPolicy
from shiftjax.engine.request import Mode, SamplingParams
from shiftjax.models.config import ModelConfig
from shiftjax.parallel.sharding import Layout, make_mesh
from shiftjax.weights.place import define, load, shift_weights
from shiftjax.weights.random import RandomSource

FLOAT_BYTES = 4
MESHES = [(4, 2), (2, 4), (8, 1), (1, 8), (3, 2), (2, 3)]
# Odd sizes, so that no activation happens to be as large as a shard of a weight.
ODD = {"hidden_size": 80, "intermediate_size": 272, "vocab_size": 331, "head_dim": 32}


@cache
def runner_of(sp: int, tp: int, **options):
    """A runner of one small bucket, shared by the tests that only look at it."""
    directory, _, _ = checkpoint(**ODD)
    options = {"token_buckets": (24,), "max_num_batched_tokens": 24} | options
    return make(directory, sp, tp, **options).runners[0]


def buffers(tree) -> dict:
    """Address of every shard of every array."""
    return {
        (i, shard.device.id): shard.data.unsafe_buffer_pointer()
        for i, array in enumerate(jax.tree.leaves(tree))
        for shard in array.addressable_shards
    }


def test_switching_keeps_the_pool_where_it_is():
    directory, _, _ = checkpoint()
    built = make(directory, 2, 2)
    (runner,) = built.runners
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    before = buffers(runner.pools)
    for mode in (Mode.BASE, Mode.SHIFT, Mode.BASE):
        built.engine.policy = FixedPolicy(mode)
        run(built.engine, [[5, 6, 7]], [sampling])
        assert buffers(runner.pools) == before
    assert built.engine.stats().mode_switches == {("base", "shift"): 1, ("shift", "base"): 1}


@pytest.mark.parametrize(("sp", "tp"), MESHES)
def test_every_shift_weight_lies_inside_its_base_shard(sp, tp):
    runner = runner_of(sp, tp)
    base, shift = runner.params[Mode.BASE], runner.params[Mode.SHIFT]
    num_views = 0
    for weight, whole, part in zip(runner.step.model.declared, base, shift, strict=True):
        shards = {shard.device: shard.data for shard in whole.addressable_shards}
        for shard in part.addressable_shards:
            owner = shards[shard.device]
            offset = shard.data.unsafe_buffer_pointer() - owner.unsafe_buffer_pointer()
            assert 0 <= offset <= owner.nbytes - shard.data.nbytes, weight.name
            num_views += shard.data.nbytes < owner.nbytes
    # q, o, gate, up and down at least; k and v shards are no smaller where heads are replicated.
    views_per_device = 5 * runner.step.layout.model.num_layers
    assert num_views >= (sp * tp * views_per_device if sp > 1 else 0)


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
    model = define(config, layout, np.dtype(np.float32))
    base = load(model, layout, mesh, RandomSource(config, 0), "alias", silent)
    copy_bytes = sum(
        w.dtype.itemsize * int(np.prod(w.shape))
        for w in model.declared
        if w.axes[0] not in (None, "lm_vocab")
    )
    grown, kept = {}, []
    for strategy in ("alias", "replicate"):
        start = resident_bytes()
        kept.append(shift_weights(model, base, layout, strategy))
        grown[strategy] = resident_bytes() - start
    assert grown["alias"] < 0.05 * copy_bytes
    assert grown["replicate"] > 0.7 * copy_bytes  # the measure can see a copy


# ------------------------------------------------------------ the compiled programs


def instructions(step) -> list[tuple[str, str, str]]:
    """(shape, opcode, rest of the line) of every instruction of a compiled step."""
    pattern = re.compile(r"= (\(?[a-z0-9]+\[.*?\)?) ([a-z][a-z-]*)\((.*)")
    lines = step.as_text().splitlines()
    return [match.groups() for line in lines if (match := pattern.search(line))]


def shape_bytes(shape: str) -> int:
    """Bytes of a (tuple) shape as HLO prints it, float32 and int32 only."""
    sizes = re.findall(r"[fs]32\[([\d,]*)\]", shape)
    return sum(FLOAT_BYTES * int(np.prod([int(n) for n in s.split(",") if n])) for s in sizes)


def collectives(step) -> Counter:
    """(opcode, bytes of the result on one device) -> how often."""
    names = ("all-to-all", "all-reduce", "all-gather", "collective-permute", "reduce-scatter")
    found = Counter()
    for shape, opcode, _ in instructions(step):
        if opcode.removesuffix("-start") in names:
            found[opcode.removesuffix("-start"), shape_bytes(shape)] += 1
    return found


def expected_collectives(layout: Layout, mode: Mode, tokens: int, rows: int) -> Counter:
    """What the published algorithm moves (bytes of results per device, float32).

    Per layer: BASE one all-to-all of q, k, v and one of the output over sp, two all-reduces of
    n / SP tokens over tp; SHIFT two all-reduces of n tokens. Beside the layers: the embedding's
    all-reduce; in BASE the sampled rows cross sp; the logits change from vocabulary to rows; the
    sampled tokens (id, log-probability, finite) go everywhere.
    """
    model, found = layout.model, Counter()
    hidden = model.hidden_size * FLOAT_BYTES
    splits = mode is Mode.BASE and layout.sp > 1
    local_tokens = tokens // layout.sp if splits else tokens
    reducers = layout.tp if mode is Mode.BASE else layout.num_devices
    if reducers > 1:
        found["all-reduce", local_tokens * hidden] += 1 + 2 * model.num_layers
    if splits:
        h, m = layout.heads_per_device, layout.kv_heads_per_device
        head = tokens * model.head_dim * FLOAT_BYTES
        found["all-to-all", head * (h + 2 * m)] += model.num_layers
        found["all-to-all", head * h] += model.num_layers
        found["all-reduce", rows * hidden] += 1
    if layout.num_devices > 1:
        found["all-to-all", rows * layout.vocab_size * FLOAT_BYTES // layout.num_devices] += 1
        found["all-gather", rows * 3 * FLOAT_BYTES] += 1
    return found


@pytest.mark.parametrize(("sp", "tp"), MESHES)
def test_collectives_are_the_papers_to_the_byte(sp, tp):
    runner = runner_of(sp, tp)
    (program,) = runner.programs
    for mode, step in program.steps.items():
        if sp == 1 and mode is Mode.BASE:
            continue  # one configuration, one program
        assert collectives(step) == expected_collectives(
            runner.step.layout, mode, *program.bucket
        ), (sp, tp, mode)


def weight_moves(runner) -> list[tuple[str, str]]:
    """Slices, copies and transposes in the SHIFT step whose result is as large as a weight."""
    step = runner.programs[-1].steps[Mode.SHIFT]
    sizes = {
        int(np.prod(array.sharding.shard_shape(array.shape))) * FLOAT_BYTES
        for weight, array in zip(runner.step.model.declared, runner.params[Mode.SHIFT], strict=True)
        if len(weight.shape) > 1
    }
    moves = ("slice", "dynamic-slice", "copy", "transpose", "copy-start")
    return [
        (opcode, shape)
        for shape, opcode, _ in instructions(step)
        if opcode in moves and shape_bytes(shape) in sizes and shape.startswith("f32")
    ]


def test_the_shift_step_reads_its_weights_in_place():
    aliased, sliced = runner_of(4, 2), runner_of(4, 2, weights="slice")
    assert weight_moves(aliased) == []
    # The control: slicing in the step shows, in its text and in its temporary memory.
    assert len(weight_moves(sliced)) >= aliased.step.layout.model.num_layers
    temporaries = [
        runner.programs[-1].steps[Mode.SHIFT].memory_analysis().temp_size_in_bytes
        for runner in (aliased, sliced)
    ]
    assert temporaries[0] < temporaries[1]


@pytest.mark.parametrize("mode", list(Mode))
def test_temporaries_do_not_grow_with_the_pool(mode):
    temporaries = [
        runner.programs[-1].steps[mode].memory_analysis().temp_size_in_bytes
        for runner in (runner_of(4, 2), runner_of(4, 2, num_blocks=20_000))
    ]
    assert temporaries[0] == temporaries[1]
