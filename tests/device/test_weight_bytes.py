"""The bytes of weights that are foretold are those that loading puts on a device."""

from dataclasses import replace

import jax
import pytest
from harness import BIASED, ODD, SWIFTKV, TIED, covered, held_bytes, silent

from shiftjax.arch.config import Experts, ModelConfig, Speculator
from shiftjax.arch.formats import Formats, formats_of
from shiftjax.arch.presets import PRESETS
from shiftjax.arch.weights import layer_parameters
from shiftjax.costs.memory import shift_copy_bytes, weight_bytes
from shiftjax.device.mesh import make_mesh
from shiftjax.device.mode_weights import ModeWeights
from shiftjax.device.place import define, load
from shiftjax.parallel.layout import Layout
from shiftjax.weights.random import RandomSource

EXPERTS = replace(PRESETS["tiny-qwen3-moe"], experts=Experts(11, 2, 24, dense_layers=(0,)))
DRAFTED = {
    "mlp": replace(SWIFTKV, speculator=Speculator("mlp", 3, 40)),
    "lstm": replace(TIED, speculator=Speculator("lstm", 3, 40, tie_weights=True, draft_vocab=101)),
}
MODELS = ["untied", "tied", "biased", "swiftkv", "experts"]
MESHES = [(1, 1), (4, 2), (2, 4), (8, 1), (1, 8), (3, 2), (2, 3), (3, 1)]


def check(
    config: ModelConfig, sp: int, tp: int, strategy: str, dtype: str, experts_sp: int = 1
) -> None:
    layout = Layout(config, sp, tp, gathers=strategy == "gather", experts_sp=experts_sp)
    formats = Formats("fp8") if dtype == "fp8" else formats_of(dtype)
    mesh = make_mesh(jax.devices()[: sp * tp], sp, tp)
    weights = ModeWeights(define(layout, formats), layout, strategy)
    stored = load(weights.model, layout, mesh, RandomSource(config), silent)
    expected = weight_bytes(layout, formats)
    assert set(held_bytes([array for array in stored if array is not None]).values()) == {expected}
    base = weights.with_head(stored)
    expected += shift_copy_bytes(layout, formats, strategy)
    assert set(held_bytes([*base, *weights.of(layout.shift, base)]).values()) == {expected}


@pytest.mark.parametrize(("sp", "tp"), MESHES)
@pytest.mark.parametrize("config", [ODD, TIED, BIASED, SWIFTKV, EXPERTS], ids=MODELS)
def test_weights_take_what_is_foretold(config, sp, tp):
    check(config, sp, tp, "alias", "bfloat16")


@pytest.mark.parametrize(("sp", "tp"), [(1, 1), (4, 2), (3, 2)])
@pytest.mark.parametrize(
    "config",
    [BIASED, SWIFTKV, DRAFTED["mlp"], EXPERTS],
    ids=["biased", "swiftkv", "mlp", "experts"],
)
def test_codes_and_scales_take_what_is_foretold(config, sp, tp):
    check(config, sp, tp, "alias", "fp8")


@pytest.mark.parametrize(("sp", "tp"), [(1, 1), (4, 2), (3, 1)])
def test_blocks_take_what_is_foretold(sp, tp):
    """The last one of hidden states is ragged; a width is padded to whole ones."""
    config = replace(PRESETS["tiny"], hidden_size=192, intermediate_size=1000)
    check(config, sp, tp, "alias", "fp8")


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize(("sp", "tp", "stored"), [(4, 2, 4), (4, 2, 2), (8, 1, 8), (3, 2, 3)])
def test_experts_take_what_is_foretold_however_they_are_stored(sp, tp, stored, dtype):
    check(EXPERTS, sp, tp, "alias", dtype, stored)


@pytest.mark.parametrize("strategy", ["slice", "replicate"])
def test_copies_of_codes_take_what_is_foretold(strategy):
    check(BIASED, 3, 2, strategy, "fp8")


@pytest.mark.parametrize(("sp", "tp", "dtype"), [(4, 2, "bfloat16"), (3, 2, "fp8"), (8, 1, "fp8")])
@pytest.mark.parametrize("config", [ODD, BIASED, SWIFTKV], ids=["untied", "biased", "swiftkv"])
def test_what_is_gathered_is_stored_as_shift_uses_it(config, sp, tp, dtype):
    """Just what plain TP over as many devices stores, and nothing beside it."""
    check(config, sp, tp, "gather", dtype)
    formats = Formats("fp8") if dtype == "fp8" else formats_of(dtype)
    alone, gathers = Layout(config, 1, sp * tp), Layout(config, sp, tp, gathers=True)
    assert weight_bytes(gathers, formats) == weight_bytes(alone, formats)


@pytest.mark.parametrize("strategy", ["slice", "replicate"])
@pytest.mark.parametrize("config", [ODD, BIASED, SWIFTKV], ids=["untied", "biased", "swiftkv"])
def test_copies_take_what_is_foretold(config, strategy):
    check(config, 3, 2, strategy, "float32")


@pytest.mark.parametrize("strategy", ["alias", "slice", "replicate"])
@pytest.mark.parametrize("config", DRAFTED.values(), ids=DRAFTED)
def test_speculators_take_what_is_foretold_and_no_copy(config, strategy):
    check(config, 3, 2, strategy, "bfloat16")
    layout, formats = Layout(config, 3, 2), formats_of("bfloat16")
    alone = Layout(replace(config, speculator=None), 3, 2)
    copies = (shift_copy_bytes(one, formats, strategy) for one in (layout, alone))
    assert len(set(copies)) == 1


def test_late_layers_are_stored_once_for_all_modes():
    """At (SP=4, TP=2), half of the layers: an eighth of their matrices, not a half, and no copy."""
    layers = replace(PRESETS["tiny"], num_heads=8, num_kv_heads=8, intermediate_size=128)
    late = replace(layers, architecture="llama_swiftkv", num_kv_layers=1)
    formats, layout = formats_of("bfloat16"), Layout(layers, 4, 2)
    each = (layer_parameters(layers) // layers.num_layers) * formats.weight_bytes
    saved = weight_bytes(layout, formats) - weight_bytes(Layout(late, 4, 2), formats)
    norm = layers.hidden_size * formats.activation_bytes
    assert layers.num_layers == 2 and saved == each // 2 - each // 8 - norm
    layouts = layout, Layout(late, 4, 2)
    dense, less = (shift_copy_bytes(one, formats, "replicate") for one in layouts)
    assert dense - less == each // 8


def test_what_is_shared_counts_once():
    assert covered([(0, 4), (2, 3), (8, 10), (3, 6)]) == 8
