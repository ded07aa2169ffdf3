"""Layers' weights as one array of a kind: what a step takes of them, in every mode."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from engines import MOE, RandomPolicy, checkpoint, make, run, tokens
from harness import held_bytes, silent
from jax.sharding import PartitionSpec as P
from oracle import numpy_llama
from spent import exhaustive, thorough

from shiftjax.arch.config import Experts
from shiftjax.arch.formats import Formats, formats_of
from shiftjax.arch.presets import PRESETS
from shiftjax.core.request import SamplingParams
from shiftjax.device import groups, joined
from shiftjax.device.joined import Joiner
from shiftjax.device.mesh import make_mesh, mesh_of
from shiftjax.device.mode_weights import ModeWeights
from shiftjax.device.place import define, load, load_rows, read_rows
from shiftjax.device.pool import num_pools
from shiftjax.models import gpu_software
from shiftjax.parallel.grid import ALL_AXES
from shiftjax.parallel.layout import Layout
from shiftjax.weights.random import RandomSource

TIED = replace(PRESETS["tiny"], num_layers=3, num_heads=9, num_kv_heads=3, tie_word_embeddings=True)
BIASED = replace(TIED, attention_bias=True, output_bias=True, mlp_bias=True, qk_norm=True)
SWIFTKV = replace(TIED, architecture="llama_swiftkv", num_kv_layers=1)
EXPERTS = replace(PRESETS["tiny-qwen3-moe"], experts=Experts(11, 2, 24, dense_layers=(0,)))
PROMPTS = [[5, 17, 99, 3, 42, 7, 7, 121, 64, 30, 11, 150][i:] * (1 + i % 3) for i in range(6)]


def shards(weights: ModeWeights, mesh, mode, stored) -> dict[str, np.ndarray]:
    """What the steps of a mode see of every weight, one device after the other."""

    def seen(params):
        return tuple(array[None] for array in weights.local(mode, params))

    mapped = jax.shard_map(
        seen,
        mesh=mesh_of(mesh, mode),
        in_specs=(weights.specs(),),
        out_specs=P(ALL_AXES),
        check_vma=False,
    )
    arrays = weights.of(mode, stored)
    described = weights.abstract(mode, mesh)
    for array, x in zip(arrays, described, strict=True):
        assert (array.shape, array.dtype) == (x.shape, x.dtype)
        assert array.sharding.is_equivalent_to(x.sharding, array.ndim)
    names = (weight.name for weight in weights.model.declared)
    return dict(zip(names, map(np.asarray, jax.jit(mapped)(arrays)), strict=True))


@pytest.mark.parametrize(
    ("config", "sp", "tp", "strategy", "dtype"),
    [
        (TIED, 3, 1, "alias", "float32"),
        *exhaustive((TIED, 1, 4, "alias", "bfloat16"), (SWIFTKV, 2, 2, "alias", "bfloat16")),
        *thorough(
            (BIASED, 4, 2, "alias", "bfloat16"),
            (BIASED, 2, 2, "alias", "fp8"),
            (BIASED, 2, 2, "slice", "fp8"),
            (EXPERTS, 2, 2, "alias", "fp8"),
        ),
    ],
)
def test_steps_see_the_same_shards(config, sp, tp, strategy, dtype):
    """Whether each weight is an array or not; and fewer arrays hold as many bytes."""
    layout = Layout(config, sp, tp)
    formats = Formats("fp8") if dtype == "fp8" else formats_of(dtype)
    mesh, model = make_mesh(jax.devices()[: sp * tp], sp, tp), define(layout, formats)
    alone = ModeWeights(model, layout, strategy)
    together = alone._replace(is_joined=True)
    source = RandomSource(config)
    whole = load(model, layout, mesh, source, silent)
    rows = lambda *each: read_rows(source, *each)  # noqa: E731
    arrays = load_rows(model, layout, mesh, rows, silent, together.arrays)
    assert len(arrays) <= len(whole) - 6  # three layers or two: norms, q, o, gate and up, down
    stored, joint = alone.with_head(whole), together.with_head(arrays)
    assert held_bytes(list(stored)) == held_bytes(list(joint))
    for mode in layout.modes:
        expected, found = (
            shards(w, mesh, mode, s) for w, s in ((alone, stored), (together, joint))
        )
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, err_msg=f"{name} in {mode.label}")


def test_views_of_joined_weights_take_no_memory():
    layout = Layout(TIED, 4, 2)
    mesh, model = make_mesh(jax.devices()[:8], 4, 2), define(layout, formats_of("float32"))
    weights = ModeWeights(model, layout, "alias", is_joined=True)
    whole = load(model, layout, mesh, RandomSource(TIED), silent)
    joiner = Joiner(weights.arrays)
    for weight, array in zip(model.declared, whole, strict=True):
        joiner.put(weight.name, array)
    stored = weights.with_head(joiner.arrays())
    for mode in layout.modes:
        assert held_bytes([*stored, *weights.of(mode, stored)]) == held_bytes(list(stored))


def test_an_array_has_no_more_elements_than_32_bits_count():
    formats = formats_of("bfloat16")
    declared = define(Layout(PRESETS["llama-70b"], 1, 1), formats).declared
    arrays = joined.joined_weights(declared, Layout(PRESETS["llama-70b"], 1, 1), formats)
    sizes = [sum(weight.num_elements for weight in members) for members in arrays]
    assert max(sizes) < 2**31 < max(sizes) + max(weight.num_elements for weight in declared)
    assert sum(map(len, arrays)) == len(declared) > 10 * len(arrays)
    eighth = joined.joined_weights(declared, Layout(PRESETS["llama-70b"], 1, 8), formats)
    assert len(eighth) <= 16  # 722 weights


@pytest.mark.parametrize(("driver", "each"), [("570.133.20", 80), ("575.51.03", 14), (None, 14)])
def test_a_driver_that_cannot_record_slices_gets_a_pool_a_layer(monkeypatch, driver, each):
    """CUDA graphs hold what reads a slice since CUDA 12.9, which came with driver 575."""
    monkeypatch.setattr(gpu_software, "driver_version", lambda: driver)
    elements = 2_670_000 * 128  # of a layer's K: what is free of an H200 beside 70B at TP = 8
    assert num_pools(80, elements, "gpu") == each
    assert num_pools(80, elements, "cpu") == 14


@pytest.mark.costs(12)
@pytest.mark.parametrize(
    ("sp", "tp", "sizes", "options"),
    [
        (2, 2, {}, {}),
        *thorough(
            (2, 2, MOE, {}),
            (None, 2, {}, {"fleet": True, "devices": 4}),
        ),
    ],
)
def test_an_engine_of_joined_weights_says_the_same(monkeypatch, sp, tp, sizes, options):
    monkeypatch.setattr(groups, "JOINED_ON", ("cpu",))
    directory, config, tensors = checkpoint(**sizes)
    built = make(directory, sp, tp, **options)
    for runner in built.runners:
        assert any(len(members) > 1 for members in runner.step.weights.arrays)
    built.engine.policy = RandomPolicy(1)
    sampling = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)] * len(PROMPTS)
    events = run(built.engine, PROMPTS, sampling)
    for i, prompt in enumerate(PROMPTS):
        assert tokens(events[i, 0]) == numpy_llama.greedy(config, tensors, prompt, 8)
