"""Tensors under other names, or stacked in one: what is read is what a model has, and back."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import random_tensors, write_config
from safetensors.numpy import load_file, save_file

from shiftjax.arch.presets import PRESETS
from shiftjax.arch.weights import expected_tensors
from shiftjax.weights.huggingface import HuggingFaceSource, save_huggingface
from shiftjax.weights.source import CheckpointError, check_complete

PARITY = Path(__file__).parent.parent / "data" / "parity"


@pytest.mark.parametrize("name", ["gemma4_text", "gemma4_inputs"])
def test_gemma4_is_written_as_it_was(name, tmp_path):
    source = HuggingFaceSource(PARITY / name)
    save_huggingface(source, tmp_path)
    stored, written = (
        load_file(folder / "model.safetensors") for folder in (PARITY / name, tmp_path)
    )
    assert written.keys() == stored.keys()
    for key, tensor in stored.items():
        np.testing.assert_array_equal(written[key], tensor)
    assert replace(HuggingFaceSource(tmp_path).config, name=name) == source.config


@pytest.mark.parametrize("name", ["phi3", "glm4", "glm"])
def test_stacked_projections_are_read_in_parts_and_written_as_they_were(name, tmp_path):
    source = HuggingFaceSource(PARITY / name)
    check_complete(source)
    stored, config = load_file(PARITY / name / "model.safetensors"), source.config
    layer, width = "model.layers.1", config.intermediate_size
    stack = stored[f"{layer}.mlp.gate_up_proj.weight"]
    np.testing.assert_array_equal(source.read(f"{layer}.mlp.gate_proj.weight"), stack[:width])
    np.testing.assert_array_equal(source.read(f"{layer}.mlp.up_proj.weight"), stack[width:])
    part = source.read(f"{layer}.mlp.up_proj.weight", (slice(3, 7), slice(1, 9)))
    np.testing.assert_array_equal(part, stack[width + 3 : width + 7, 1:9])
    with pytest.raises(ValueError, match="is no range"):  # of the part, though one of the stack
        source.read(f"{layer}.mlp.gate_proj.weight", (slice(0, width + 1),))
    save_huggingface(source, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == stored.keys()
    for key, tensor in stored.items():
        np.testing.assert_array_equal(written[key], tensor)


def test_experts_in_one_tensor_are_read_one_by_one(tmp_path):
    source = HuggingFaceSource(PARITY / "gpt_oss")
    check_complete(source)
    stored = load_file(PARITY / "gpt_oss" / "model.safetensors")
    layer = "model.layers.1.mlp.experts"
    stack, bias = stored[f"{layer}.gate_up_proj"], stored[f"{layer}.gate_up_proj_bias"]
    for nth, part in enumerate(("gate", "up")):
        matrix = source.read(f"{layer}.2.{part}_proj.weight")
        np.testing.assert_array_equal(matrix, stack[2, :, nth::2].T)
        rows = source.read(f"{layer}.2.{part}_proj.weight", (slice(3, 7), slice(1, 9)))
        np.testing.assert_array_equal(rows, matrix[3:7, 1:9])
        assert rows.flags.c_contiguous
        np.testing.assert_array_equal(source.read(f"{layer}.2.{part}_proj.bias"), bias[2, nth::2])
        nothing = source.read(f"{layer}.2.{part}_proj.weight", (slice(4, 4),))
        assert nothing.shape == (0, matrix.shape[1])
    down = source.read(f"{layer}.3.down_proj.weight")
    np.testing.assert_array_equal(down, stored[f"{layer}.down_proj"][3].T)
    with pytest.raises(CheckpointError, match="convert to orbax instead"):
        save_huggingface(source, tmp_path)


@pytest.mark.parametrize(
    ("outer", "text", "images"),
    [
        ("llama4", "llama4_text", "vision_model.layernorm_pre.weight"),
        ("mistral3", "mistral", "vision_tower.ln_pre.weight"),
    ],
)
def test_the_text_model_beside_one_of_images_is_read(tmp_path, outer, text, images):
    alone = PARITY / text
    config = json.loads((alone / "config.json").read_text())
    whole = {"model_type": outer, "text_config": config, "eos_token_id": [2, 7]}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    stored = load_file(alone / "model.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in stored.items()}
    tensors |= {
        images: np.ones(4, np.float32),
        "multi_modal_projector.norm.weight": np.ones(2, np.float32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    source, expected = HuggingFaceSource(tmp_path, text), HuggingFaceSource(alone)
    check_complete(source)
    assert source.config == expected.config
    for name in expected.tensors:
        np.testing.assert_array_equal(source.read(name), expected.read(name))
    other = whole | {"text_config": config | {"model_type": "bert"}}
    (tmp_path / "config.json").write_text(json.dumps(other))
    with pytest.raises(CheckpointError, match=f"model_type must be {text}.*, found 'bert'"):
        HuggingFaceSource(tmp_path)


def test_fused_and_transposed_experts_of_llama_4_are_read():
    source = HuggingFaceSource(PARITY / "llama4_text")
    stored = load_file(PARITY / "llama4_text" / "model.safetensors")
    layer, width = "model.layers.2.feed_forward.experts", 16
    stack = stored[f"{layer}.gate_up_proj"][3]
    np.testing.assert_array_equal(source.read(f"{layer}.3.gate_proj.weight"), stack[:, :width].T)
    np.testing.assert_array_equal(source.read(f"{layer}.3.up_proj.weight"), stack[:, width:].T)


def test_experts_of_another_shape_are_refused(tmp_path):
    write_config(tmp_path, PRESETS["tiny-gpt-oss"])
    tensors = {"model.layers.0.mlp.experts.down_proj": np.zeros((8, 64, 32), np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"expected shape \[8, 32, 64\], found \[8, 64, 32\]"):
        HuggingFaceSource(tmp_path)


def test_parts_may_be_stored_as_they_are_used(tmp_path):
    config = PRESETS["tiny-phi3"]
    write_config(tmp_path, config)
    tensors = random_tensors(config)
    save_file(tensors, tmp_path / "model.safetensors")
    source = HuggingFaceSource(tmp_path)
    check_complete(source)
    name = "model.layers.0.self_attn.k_proj.weight"
    np.testing.assert_array_equal(source.read(name), tensors[name])


def test_a_stack_of_other_rows_is_refused(tmp_path):
    config = PRESETS["tiny-phi3"]
    write_config(tmp_path, config)
    stack = np.zeros((100, config.hidden_size), np.float32)
    save_file({"model.layers.0.self_attn.qkv_proj.weight": stack}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"qkv_proj.weight: expected 64 \+ 32 \+ 32 rows"):
        HuggingFaceSource(tmp_path)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_model_that_sees_images(prefix, tmp_path, caplog):
    config = replace(PRESETS["tiny-gemma3"], tie_word_embeddings=False)
    write_config(tmp_path, config)
    tensors = random_tensors(config)
    renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    renamed["language_model.lm_head.weight"] = renamed.pop("lm_head.weight")
    renamed["vision_tower.vision_model.post_layernorm.weight"] = np.ones(4, np.float32)
    renamed["model.multi_modal_projector.mm_soft_emb_norm.weight"] = np.ones(4, np.float32)
    save_file(renamed, tmp_path / "model.safetensors")
    with caplog.at_level("INFO"):
        source = HuggingFaceSource(tmp_path)
    assert "2 tensors of images are not loaded" in caplog.text
    check_complete(source)
    assert set(source.tensors) == set(expected_tensors(config))
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(source.read(name), tensor)


def test_indexers_and_layers_that_draft_are_left_out_of_glm_5(tmp_path, caplog):
    stored = load_file(PARITY / "glm_moe_dsa" / "model.safetensors")
    own = {name for name in stored if ".indexer." not in name}
    assert len(own) < len(stored)
    draft = stored["model.layers.1.self_attn.o_proj.weight"]
    stored["model.layers.2.self_attn.o_proj.weight"] = draft
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((PARITY / "glm_moe_dsa" / "config.json").read_text())
    with caplog.at_level("INFO"):
        source = HuggingFaceSource(tmp_path)
    check_complete(source)
    assert "1 tensors of layers that draft tokens are not loaded" in caplog.text
    assert f"{len(stored) - len(own) - 1} tensors of indexers are not loaded" in caplog.text


def test_keys_and_values_that_no_layer_reads_are_left_out(tmp_path, caplog):
    """Published files of Gemma 4 have them in layers that read the cache of others."""
    stored = load_file(PARITY / "gemma4_inputs" / "model.safetensors")
    config = json.loads((PARITY / "gemma4_inputs" / "config.json").read_text())
    text = {name.replace("model.", "model.language_model.", 1): x for name, x in stored.items()}
    for layer in (4, 6):
        for name in ("k_proj", "v_proj", "k_norm"):
            own = f"model.language_model.layers.{layer}.self_attn.{name}.weight"
            text[own] = np.ones(4, np.float32)
    for name in ("audio_tower", "embed_vision"):
        text[f"model.{name}.x.weight"] = np.ones(4, np.float32)
    save_file(text, tmp_path / "model.safetensors")
    whole = {"model_type": "gemma4", "text_config": config, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    caplog.set_level("INFO")
    source = HuggingFaceSource(tmp_path)
    check_complete(source)
    assert "6 tensors of keys and values are not loaded" in caplog.text
    assert source.config == replace(
        HuggingFaceSource(PARITY / "gemma4_inputs").config, name=tmp_path.name
    )


def test_stacked_experts_are_read_one_by_one_where_rows_are_outputs():
    source = HuggingFaceSource(PARITY / "gemma4_experts")
    check_complete(source)
    stored = load_file(PARITY / "gemma4_experts" / "model.safetensors")
    layer = "model.layers.1.experts"
    stack, down = stored[f"{layer}.gate_up_proj"], stored[f"{layer}.down_proj"]
    matrix = source.read(f"{layer}.2.up_proj.weight")
    np.testing.assert_array_equal(matrix, stack[2, 12:])
    rows = source.read(f"{layer}.2.up_proj.weight", (slice(3, 7), slice(1, 9)))
    np.testing.assert_array_equal(rows, matrix[3:7, 1:9])
    np.testing.assert_array_equal(source.read(f"{layer}.3.down_proj.weight"), down[3])
