"""Experts in checkpoints: their configuration, what is read of them, and what is missed."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import random_tensors, write_config
from safetensors.numpy import save_file

from shiftjax.arch.config import Experts
from shiftjax.arch.presets import PRESETS
from shiftjax.arch.weights import weights_of
from shiftjax.device.place import HostWeights, read_rows
from shiftjax.weights.hf_config import parse_config, read_config, to_json
from shiftjax.weights.huggingface import HuggingFaceSource
from shiftjax.weights.random import RandomSource
from shiftjax.weights.source import CheckpointError, check_complete

PARITY = Path(__file__).parent.parent / "data" / "parity"
QWEN, MIXTRAL = PRESETS["tiny-qwen3-moe"], PRESETS["tiny-mixtral"]


def test_configs_of_transformers_are_understood():
    qwen, mixtral = (read_config(PARITY / name) for name in ("qwen3_moe", "mixtral"))
    assert qwen.experts == Experts(8, 3, 16, norm_topk=True, dense_layers=(1,))
    assert qwen.qk_norm and qwen.intermediate_size == 40
    assert mixtral.experts == Experts(4, 2, 24) and not mixtral.qk_norm
    qwen, glm = (read_config(PARITY / name) for name in ("qwen2_moe", "glm4_moe"))
    shared = Experts(8, 3, 16, 24, has_shared_gate=True, norm_topk=False, dense_layers=(1,))
    assert qwen.experts == shared and qwen.attention_bias and not qwen.output_bias
    sigmoids = {"scores": "sigmoid", "has_correction": True, "num_groups": 2, "scale": 1.5}
    assert glm.experts == Experts(8, 3, 16, 32, dense_layers=(0,), **sigmoids)
    assert glm.qk_norm and glm.rotary_dim == 4 and not glm.rope_interleaved


@pytest.mark.parametrize(
    "name", ["qwen1.5-moe-a2.7b", "glm-4.5-air", "tiny-llama4", "llama-4-maverick"]
)
def test_presets_are_what_their_files_would_say(name):
    assert parse_config(to_json(PRESETS[name], "bfloat16"), name, "f") == PRESETS[name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, "n_group must cut 128 experts in equal parts of 2 or more, not 3"),
        ({"n_group": 128}, "n_group must cut 128 experts in equal parts of 2 or more, not 128"),
        ({"n_group": 32}, "topk_group must leave 8 experts, and be 32 at most"),
        ({"topk_group": 2}, "topk_group must leave 8 experts, and be 1 at most"),
    ],
)
def test_groups_that_leave_too_few_experts_are_refused(changes, message):
    data = to_json(PRESETS["glm-4.5-air"], "float32") | changes
    with pytest.raises(CheckpointError, match=message):
        parse_config(data, "glm", "f")


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("tiny-qwen2-moe", [8, None, 8, None, None, None]),  # every other one below the limit
        ("tiny-qwen3-moe", [8] * 6),  # which has no such limit
    ],
)
def test_windows_are_those_of_transformers(name, windows):
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    data = to_json(PRESETS[name], "float32") | window | {"num_hidden_layers": 6}
    config = parse_config(
        {key: value for key, value in data.items() if key != "layer_types"}, name, "f"
    )
    assert [kind.sliding_window for kind in config.kinds] == windows
    assert parse_config(to_json(config, "float32"), name, "f") == config


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
@pytest.mark.parametrize("family", ["tiny-qwen3-moe", "tiny-mixtral"])
def test_experts_are_counted_by_either_name(family, name):
    data = to_json(PRESETS[family], "float32")
    num = data.pop("num_experts", None) or data.pop("num_local_experts")
    config = parse_config(data | {name: num}, PRESETS[family].name, "f")
    assert config == PRESETS[family]


def test_layers_of_qwen3_moe_that_would_differ_are_refused():
    kinds = {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2}
    data = to_json(PRESETS["tiny-qwen3-moe"], "float32") | kinds
    with pytest.raises(CheckpointError, match="layer_types must be alike in all layers of qwen3"):
        parse_config(data, "qwen", "f")


def test_layers_that_draft_are_left_out(tmp_path, caplog):
    config = PRESETS["tiny-glm4-moe"]
    write_config(tmp_path, config)
    behind = f"model.layers.{config.num_layers}"
    tensors = random_tensors(config)
    extra = {f"{behind}.eh_proj.weight": np.zeros((2, 2), np.float32)}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    with caplog.at_level("INFO"):
        source = HuggingFaceSource(tmp_path)
    check_complete(source)
    assert source.tensors.keys() == tensors.keys()
    assert "1 tensors of layers that draft tokens are not loaded" in caplog.text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"decoder_sparse_step": 2}, (0,)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (0, 1)),
        ({"mlp_only_layers": None}, ()),
    ],
)
def test_layers_without_experts_are_counted_or_listed(changes, expected):
    config = parse_config(to_json(QWEN, "float32") | changes, "qwen", "f")
    assert config.experts is not None and config.experts.dense_layers == expected
    assert parse_config(to_json(config, "float32"), "qwen", "f") == config


def test_old_files_do_not_make_weights_sum_to_one():
    data = to_json(QWEN, "float32")
    del data["norm_topk_prob"]
    config = parse_config(data, "qwen", "f")
    assert config.experts is not None and not config.experts.norm_topk
    assert parse_config(to_json(config, "float32"), "qwen", "f") == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 17}, "num_experts_per_tok 17 is more than 16 experts"),
        ({"num_experts": None}, "num_experts is missing"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list of layers, found 3"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number of at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        parse_config(to_json(QWEN, "float32") | changes, "qwen", "f")


class Recording(RandomSource):
    """A source that remembers what was read of it."""

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        self.names = [*getattr(self, "names", []), name]
        return super().read(name, index)


@pytest.mark.parametrize("config", [QWEN, MIXTRAL], ids=["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_only_the_wanted_experts_are_read(config, name):
    source = Recording(config)
    (weight,) = (w for w in weights_of(config) if w.name == f"layers.1.mlp.experts.{name}")
    rows = read_rows(source, weight, 3, 6)
    assert source.names == [weight.of_expert(expert).source for expert in (3, 4, 5)]
    for expert, found in zip((3, 4, 5), rows, strict=True):
        np.testing.assert_array_equal(found, source.read(weight.of_expert(expert).source))
    assert rows.shape == (3, *weight.shape[1:])


def test_one_copy_on_the_host_serves_every_layout():
    source = Recording(MIXTRAL)
    (weight,) = (w for w in weights_of(MIXTRAL) if w.name == "layers.0.mlp.experts.down")
    held = HostWeights(source, np.float32)
    padded = weight._replace(shape=(9, *weight.shape[1:]))  # as three devices store it
    np.testing.assert_array_equal(held(padded, 2, 5), read_rows(source, weight, 2, 5))
    num_read = len(source.names)
    assert held(weight, 0, 8).shape == weight.shape and len(source.names) == num_read


def test_missing_experts_are_told_of_in_one_line(tmp_path):
    write_config(tmp_path, MIXTRAL)
    tensors = random_tensors(MIXTRAL)
    at = "model.layers.1.block_sparse_moe.experts"
    missing = {f"{at}.{e}.{part}.weight" for e in (2, 5, 7) for part in ("w1", "w2")}
    missing.add(f"{at}.0.w3.weight")
    kept = {name: tensor for name, tensor in tensors.items() if name not in missing}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        check_complete(HuggingFaceSource(tmp_path))
    line = f"{tmp_path}: tensor {at}.2.w1.weight: expected shape [128, 64], found nothing"
    assert str(error.value) == f"{line}, nor 6 others of experts"


def test_a_config_that_says_another_number_of_experts_is_seen(tmp_path):
    experts = Experts(9, 2, 128)
    write_config(tmp_path, MIXTRAL)
    data = to_json(replace(MIXTRAL, experts=experts), "float32")
    (tmp_path / "config.json").write_text(json.dumps(data))
    save_file(random_tensors(MIXTRAL), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts\.8\.w1\.weight.*nor 5 others of experts"):
        check_complete(HuggingFaceSource(tmp_path))
