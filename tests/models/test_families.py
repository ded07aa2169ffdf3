"""The table of weights and the modules that compute with them are two sides of one thing."""

from dataclasses import replace

import pytest

from shiftjax.arch.config import Speculator
from shiftjax.arch.formats import formats_of
from shiftjax.arch.presets import PRESETS
from shiftjax.arch.weights import FAMILIES, weights_of
from shiftjax.device.place import define
from shiftjax.models.families import FORWARD
from shiftjax.options import ConfigError
from shiftjax.parallel.layout import Layout
from shiftjax.weights.hf_config import class_of

TINY = [name for name in PRESETS if name.startswith("tiny")]
SPECULATORS = [
    Speculator("mlp", 3, 40),
    Speculator("mlp", 3, 40, tie_weights=True),
    Speculator("lstm", 3, 40, tie_weights=True, draft_vocab=100),
    Speculator("lstm", 3, 40, tie_weights=True, tie_lstm_embs=True),
]


def test_every_family_has_a_forward_pass_and_every_architecture_a_name_in_checkpoints():
    assert set(FORWARD) == {family.name for family in FAMILIES.values()}
    assert all(class_of(architecture) for architecture in FAMILIES)


@pytest.mark.parametrize("name", TINY)
def test_the_module_has_every_weight_of_the_table_and_no_other(name):
    config = replace(PRESETS[name], mlp_bias=True, output_bias=True)
    model = define(Layout(config, 2, 2), formats_of("float32"))
    assert {weight.name for weight in model.declared} == {w.name for w in weights_of(config)}


@pytest.mark.parametrize("speculator", SPECULATORS)
def test_the_module_has_every_weight_of_its_speculator_and_no_other(speculator):
    config = replace(PRESETS["tiny"], speculator=speculator)
    model = define(Layout(config, 2, 2), formats_of("float32"))
    assert {weight.name for weight in model.declared} == {w.name for w in weights_of(config)}


def test_an_unknown_architecture_is_refused_with_those_that_are_known():
    config = replace(PRESETS["tiny"], architecture="gpt2")
    with pytest.raises(ConfigError, match="'gpt2' is none of llama, llama_swiftkv, mistral"):
        define(Layout(config, 1, 1), formats_of("float32"))
