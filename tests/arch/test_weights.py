"""The table of weights: what checkpoints have of it, and how much it is."""

import re
from dataclasses import replace

import pytest

from shiftjax.arch.config import Experts, Speculator, stages_of
from shiftjax.arch.presets import PRESETS
from shiftjax.arch.weights import expected_tensors, layer_parameters, num_parameters, weights_of
from shiftjax.sim.models import find_model

TINY = PRESETS["tiny"]


PUBLISHED = [
    ("llama-3.3-70b", 70.55),
    ("qwen3-30b-a3b", 30.53),
    ("mixtral-8x7b", 46.70),
    ("olmoe-1b-7b", 6.92),
    ("deepseek-v2-lite", 15.71),
    ("deepseek-v2", 235.74),
    ("deepseek-v3", 671.03),
    ("kimi-k2", 1026.41),
    ("llama-4-scout", 107.77),  # 109 and 402 with the part for images
    ("llama-4-maverick", 400.71),
]


@pytest.mark.parametrize(("name", "billions"), PUBLISHED)
def test_parameters_are_those_that_were_published(name, billions):
    config = find_model(name)
    tables = 2 * config.vocab_size * config.hidden_size
    assert num_parameters(config) == pytest.approx(1e9 * billions, rel=1e-3)
    assert layer_parameters(config) == pytest.approx(num_parameters(config) - tables, rel=0.02)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gemma-3-1b", 999_885_952),
        ("gemma-4-31b", 30_697_345_340),  # 30.7 B, published so
        ("gemma-4-26b-a4b", 25_233_141_790),  # 25.2 B
        ("gemma-3-27b", 27_009_346_304),  # of the 27,432,406,640 published, 423 M see images
        ("phi-4", 14_659_507_200),
        ("glm-4-9b", 9_400_279_040),
        ("olmo-2-7b", 7_298_617_344),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
    ],
)
def test_parameters_of_other_families_are_those_of_their_checkpoints(name, count):
    assert num_parameters(PRESETS[name]) == count


def test_a_tied_head_is_no_tensor_and_no_parameter_of_its_own():
    tied = replace(TINY, tie_word_embeddings=True)
    assert [w.tied_to for w in weights_of(tied) if w.name == "lm_head"] == ["embed"]
    assert set(expected_tensors(TINY)) - set(expected_tensors(tied)) == {"lm_head.weight"}
    assert num_parameters(TINY) - num_parameters(tied) == TINY.vocab_size * TINY.hidden_size


def test_late_layers_have_queries_of_their_own_and_no_keys():
    late = replace(TINY, architecture="llama_swiftkv", num_kv_layers=1)
    shapes, dense = expected_tensors(late), expected_tensors(TINY)
    renamed = {
        re.sub(r"(layers\.1\.self_attn\.[qkv]_proj)", r"\1_swiftkv", name): shape
        for name, shape in dense.items()
    }
    assert shapes == renamed | {"model.norm_swiftkv.weight": (64,)}
    assert num_parameters(late) == num_parameters(TINY) + 64
    (kv,) = (weight for weight in weights_of(late) if weight.name == "swiftkv.kv")
    at = "model.layers.1.self_attn"
    sources = [f"{at}.k_proj_swiftkv.weight", f"{at}.v_proj_swiftkv.weight"]
    assert [part.source for part in kv.parts] == sources
    all_early = replace(late, num_kv_layers=2)
    assert set(expected_tensors(all_early)) - set(dense) == {"model.norm_swiftkv.weight"}


def test_every_expert_is_a_tensor_and_the_shared_one_too():
    experts = Experts(num=3, per_token=1, intermediate_size=24, shared_intermediate_size=40)
    config = replace(TINY, experts=experts)
    shapes, dense = expected_tensors(config), expected_tensors(TINY)
    assert sum(".experts." in name for name in shapes) == config.num_layers * 3 * 3
    mlp = "model.layers.1.mlp"
    assert shapes[f"{mlp}.experts.2.down_proj.weight"] == (64, 24)
    assert shapes[f"{mlp}.experts.0.up_proj.weight"] == (24, 64)
    assert shapes[f"{mlp}.shared_expert.gate_proj.weight"] == (40, 64)
    assert shapes[f"{mlp}.gate.weight"] == (3, 64)
    assert not any(name.startswith(f"{mlp}.up_proj") for name in shapes)
    more = 3 * 64 * (3 * 24 + 40) + 3 * 64 - 3 * 64 * TINY.intermediate_size
    assert num_parameters(config) - num_parameters(TINY) == config.num_layers * more
    assert {name for name in dense if ".mlp." not in name} < set(shapes)


def test_some_layers_can_be_dense_and_stages_count_them_from_the_first():
    config = PRESETS["tiny-qwen3-moe"]
    assert config.experts is not None
    experts = replace(config.experts, dense_layers=(0, 3))
    config = replace(config, num_layers=5, experts=experts)
    shapes = expected_tensors(config)
    dense = {int(name.split(".")[2]) for name in shapes if name.endswith(".mlp.up_proj.weight")}
    assert dense == {0, 3} and config.num_expert_layers == 3
    first, last = stages_of(config, 2)
    assert [first.num_expert_layers, last.num_expert_layers] == [2, 1]
    assert expected_tensors(first) | expected_tensors(last) == shapes


def test_mixtral_has_names_of_its_own():
    shapes = expected_tensors(PRESETS["tiny-mixtral"])
    at = "model.layers.1.block_sparse_moe"
    assert shapes[f"{at}.experts.7.w1.weight"] == shapes[f"{at}.experts.7.w3.weight"] == (128, 64)
    assert shapes[f"{at}.experts.7.w2.weight"] == (64, 128)
    assert shapes[f"{at}.gate.weight"] == (8, 64)


def test_a_speculator_is_beside_the_layers_and_its_head_is_as_long_as_what_it_drafts():
    drafts = Speculator("lstm", 3, 40, tie_weights=True, tie_lstm_embs=True, draft_vocab=100)
    config = replace(TINY, speculator=drafts)
    shapes = expected_tensors(config)
    assert shapes["speculator.head.0.weight"] == (100, 40)
    assert shapes["speculator.forget_emb.0.weight"] == (TINY.vocab_size, 40)
    assert shapes["speculator.cell_proj.0.weight"] == (40, 64)
    assert shapes["speculator.cell_proj.1.weight"] == (40, 40)
    assert layer_parameters(config) == layer_parameters(TINY)
    own = 40 * (100 + TINY.vocab_size + 4 * (64 + 40) + 4)
    assert num_parameters(config) - num_parameters(TINY) == own
