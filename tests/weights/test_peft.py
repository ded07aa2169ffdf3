"""Adapters as PEFT writes them: what is read, and what is refused in which words."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from shiftjax.adapters.adapter import AdapterError
from shiftjax.adapters.folder import path_within
from shiftjax.arch.config import LoraSlots, ModelConfig
from shiftjax.arch.lora import adapted
from shiftjax.arch.presets import PRESETS
from shiftjax.weights.peft import CONFIG, TENSORS, read_adapter

SMALL = {"num_layers": 2, "vocab_size": 199, "hidden_size": 48, "intermediate_size": 80}
SMALL |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
LLAMA = replace(PRESETS["smollm2-135m"], **SMALL)
PHI = replace(LLAMA, architecture="phi3", name="phi")
GLM = replace(LLAMA, architecture="glm4", name="glm")
MOE = replace(PRESETS["qwen3-30b-a3b"], **SMALL)
MLA = replace(PRESETS["deepseek-v3"], num_layers=4)
FLOAT32 = np.dtype(np.float32)
PREFIX = "base_model.model.model.layers"
CONFIG_OF = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"]}


def write(path: Path, shapes: dict[str, tuple[int, int, int]], **config) -> dict:
    """An adapter with modules of (rank, inputs, outputs); returns its tensors."""
    rng, tensors = np.random.default_rng(0), {}
    for module, (rank, inputs, outputs) in shapes.items():
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = rng.standard_normal(shape).astype(np.float32)
            tensors[f"{PREFIX}.{module}.lora_{part}.weight"] = values
    (path / CONFIG).write_text(json.dumps(CONFIG_OF | config))
    save_file(tensors, path / TENSORS, metadata={"format": "pt"})
    return tensors


def read(path: Path, model: ModelConfig = LLAMA, max_rank: int = 16):
    return read_adapter("own", path, model, FLOAT32, max_rank)


def product(tensors: dict, module: str, scale: float) -> np.ndarray:
    a, b = (tensors[f"{PREFIX}.{module}.lora_{part}.weight"] for part in "AB")
    return scale * b.astype(np.float64) @ a.astype(np.float64)


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 6 / 4),
        ({"use_rslora": True}, 6 / math.sqrt(4)),
        ({"alpha_pattern": {"q_proj": 10}}, 10 / 4),
        ({"alpha_pattern": {"layers.1.self_attn.q_proj": 10}}, 6 / 4),
        ({"alpha_pattern": {r"^model\.layers\.0\.self_attn\.q_proj": 2}}, 2 / 4),
        ({"lora_dropout": 0.1, "use_dora": False, "a_new_field": None}, 6 / 4),
        ({"init_lora_weights": "gaussian", "fan_in_fan_out": True}, 6 / 4),
    ],
)
def test_factors_are_those_of_the_file_with_their_scale(config, scale, tmp_path):
    tensors = write(tmp_path, {"0.self_attn.q_proj": (4, 48, 64)}, **config)
    found = read(tmp_path)
    (name, factor), *others = found.factors.items()
    assert name == "model.layers.0.self_attn.q_proj.weight" and not others and found.rank == 4
    expected = product(tensors, "0.self_attn.q_proj", scale)
    np.testing.assert_allclose(factor.b.astype(np.float64) @ factor.a, expected, atol=1e-5)


def test_stacks_share_a_and_cut_b(tmp_path):
    shapes = {"1.self_attn.qkv_proj": (3, 48, 128), "0.mlp.gate_up_proj": (2, 48, 160)}
    tensors = write(tmp_path, shapes)
    found = read(tmp_path, PHI)
    layer, whole = "model.layers.1.self_attn", product(tensors, "1.self_attn.qkv_proj", 6 / 3)
    parts = [found.factors[f"{layer}.{n}_proj.weight"] for n in "qkv"]
    np.testing.assert_allclose(np.concatenate([f.b @ f.a for f in parts]), whole, atol=1e-5)
    assert [factor.b.shape[0] for factor in parts] == [64, 32, 32]
    layer, whole = "model.layers.0.mlp", product(tensors, "0.mlp.gate_up_proj", 6 / 2)
    parts = [found.factors[f"{layer}.{n}_proj.weight"] for n in ("gate", "up")]
    np.testing.assert_allclose(np.concatenate([f.b @ f.a for f in parts]), whole, atol=1e-5)
    glm = tmp_path / "glm"
    glm.mkdir()
    write(glm, {"0.mlp.gate_up_proj": (2, 48, 160), "0.self_attn.q_proj": (2, 48, 64)})
    assert len(read(glm, GLM).factors) == 3


def test_projections_of_latents_and_experts(tmp_path):
    rank = MLA.latent.query_rank
    width = MLA.latent.width
    shapes = {
        "0.self_attn.q_a_proj": (2, MLA.hidden_size, rank),
        "1.self_attn.kv_a_proj_with_mqa": (2, MLA.hidden_size, width),
    }
    write(tmp_path, shapes)
    assert len(read(tmp_path, MLA).factors) == 2
    write(tmp_path, {"0.self_attn.kv_b_proj": (2, 8, 8)})
    with pytest.raises(AdapterError, match="kv_b_proj: adapters change no such matrix"):
        read(tmp_path, MLA)
    width = MOE.experts.intermediate_size
    write(tmp_path, {"0.mlp.experts.7.gate_proj": (2, 48, width)})
    with pytest.raises(AdapterError, match="started with lora_experts"):
        read(tmp_path, MOE)
    with_experts = replace(MOE, lora=LoraSlots(1, 8, of_experts=True))
    assert [*read(tmp_path, with_experts).factors] == [
        "model.layers.0.mlp.experts.7.gate_proj.weight"
    ]
    assert "model.layers.1.mlp.experts.0.down_proj.weight" in adapted(with_experts)


def test_equal_files_are_one_adapter_and_others_are_not(tmp_path):
    keys = set()
    for number, (rank, alpha) in enumerate([(4, 6), (4, 6), (4, 7), (3, 6)]):
        path = tmp_path / str(number)
        path.mkdir()
        write(path, {"0.self_attn.q_proj": (rank, 48, 64)}, lora_alpha=alpha)
        keys.add(read(path).key)
    assert len(keys) == 3 and all(key.startswith("own@") for key in keys)


Q = {"0.self_attn.q_proj": (4, 48, 64)}


@pytest.mark.parametrize(
    ("shapes", "config", "words"),
    [
        (Q, {"use_dora": True}, "'use_dora' is not served: merge it"),
        (Q, {"modules_to_save": ["lm_head"]}, "'modules_to_save' is not served"),
        (Q, {"bias": "all"}, "bias = 'all' is not served"),
        (Q, {"lora_bias": True}, "'lora_bias' is not served"),
        (Q, {"target_parameters": ["embed.weight"]}, "target_parameters: 'embed.weight' is not"),
        ({"0.mlp.experts": (4, 48, 160)}, {}, "experts of layer 0: adapters change no such"),
        (Q, {"trainable_token_indices": [1]}, "'trainable_token_indices' is not served"),
        (Q, {"a_new_field": 3}, "'a_new_field' is not served"),
        (Q, {"peft_type": "IA3"}, "peft_type is 'IA3'"),
        (Q, {"r": 0}, "r must be a whole number above 0"),
        (Q, {"lora_alpha": "much"}, "lora_alpha must be a number"),
        (Q, {"alpha_pattern": {"(a+)+": 1}}, "must be the name of a module"),
        (Q, {"lora_alpha": 10**400}, "lora_alpha must be a number"),
        (Q, {"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' changes the model's"),
        (Q, {"init_lora_weights": "olora"}, "init_lora_weights = 'olora' changes"),
        (Q, {"use_rslora": "false"}, "use_rslora must be true or false"),
        (Q, {"alpha_pattern": [1]}, "alpha_pattern must be an object"),
        ({"0.self_attn.q_proj": (32, 48, 64)}, {}, "rank 32 is more than max_lora_rank = 16"),
        ({"0.self_attn.q_proj": (4, 47, 64)}, {}, "expected factors of .4, 48. and .64, 4."),
        ({"0.self_attn.q_proj": (4, 48, 65)}, {}, r"expected factors of .* found .*65"),
        ({"9.self_attn.q_proj": (4, 48, 64)}, {}, "adapters change no such matrix"),
        ({"0.input_layernorm": (4, 48, 48)}, {}, "adapters change no such matrix"),
        ({}, {}, "has no factors"),
    ],
)
def test_what_is_not_served_is_refused_by_name(shapes, config, words, tmp_path):
    write(tmp_path, shapes, **config)
    with pytest.raises(AdapterError, match=words):
        read(tmp_path)


def test_other_tensors_lonely_factors_and_numbers_that_are_not_finite_are_refused(tmp_path):
    tensors = write(tmp_path, Q)
    name = f"{PREFIX}.0.self_attn.q_proj.lora_A.weight"
    for changed, words in (
        ({name: np.full_like(tensors[name], np.nan)}, "not finite"),
        ({"base_model.model.lm_head.weight": np.zeros((2, 2), np.float32)}, "no factor a or b"),
        ({f"{PREFIX}.1.self_attn.q_proj.lora_A.weight": tensors[name]}, "has no lora_B"),
        ({name: tensors[name][0]}, "expected a matrix"),
        ({name: tensors[name].astype(np.float64)}, "expected dtype"),
        ({name.replace("lora_A", "lora_A.default"): tensors[name]}, "has lora_A twice"),
        ({name: tensors[name][:0]}, "is empty"),
    ):
        save_file(tensors | changed, tmp_path / TENSORS)
        with pytest.raises(AdapterError, match=words):
            read(tmp_path)


def test_a_scale_that_the_numbers_cannot_have_is_refused(tmp_path):
    write(tmp_path, Q, lora_alpha=1e6)
    with pytest.raises(AdapterError, match="too large for float16"):
        read_adapter("own", tmp_path, LLAMA, np.dtype(np.float16), 16)
    assert read(tmp_path).rank == 4


def test_files_that_are_missing_or_pickled_are_named(tmp_path):
    with pytest.raises(AdapterError, match="is no directory with an adapter_config"):
        read(tmp_path / "nowhere")
    write(tmp_path, Q)
    (tmp_path / TENSORS).rename(tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterError, match="a pickle runs code"):
        read(tmp_path)


def test_broken_files_end_in_one_error(tmp_path):
    write(tmp_path, Q)
    whole = {name: (tmp_path / name).read_bytes() for name in (CONFIG, TENSORS)}
    draw = random.Random(0)
    for _ in range(60):
        for name, data in whole.items():
            (tmp_path / name).write_bytes(data)
        name = draw.choice((CONFIG, TENSORS))
        data = bytearray(whole[name])
        if draw.random() < 0.5:
            data = data[: draw.randrange(len(data))]
        else:
            for _ in range(draw.randrange(1, 4)):
                data[draw.randrange(min(len(data), 300))] = draw.randrange(256)
        (tmp_path / name).write_bytes(bytes(data))
        try:
            read(tmp_path)
        except AdapterError as error:
            assert str(error).startswith("own: ") and len(str(error)) < 600


def test_paths_stay_in_their_folder(tmp_path):
    inside, outside = tmp_path / "allowed" / "one", tmp_path / "secret"
    for each in (inside, outside):
        each.mkdir(parents=True)
    root = tmp_path / "allowed"
    (root / "link").symlink_to(outside)
    assert path_within(root, "one") == path_within(root, str(inside)) == inside.resolve()
    for path in ("../secret", str(outside), "link", ".", "one/../..", "\0", "/etc"):
        with pytest.raises(AdapterError, match=r"outside of|cannot be read"):
            path_within(root, path)
    with pytest.raises(AdapterError, match="--lora-folder"):
        path_within(None, "one")
