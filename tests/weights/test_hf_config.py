"""config.json: what transformers writes is understood, what we cannot compute is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import edit_json

from shiftjax.arch.config import LayerKind, RopeScaling
from shiftjax.arch.presets import PRESETS
from shiftjax.weights.hf_config import parse_config, read_config, to_json
from shiftjax.weights.source import CheckpointError
from shiftjax.weights.typed_fields import read_json

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
PARITY = CONFIGS.parent / "parity"


def load(name: str, **changes: object):
    data = read_json(CONFIGS / f"{name}.json") | changes
    data = {key: value for key, value in data.items() if value is not ...}
    return parse_config(data, name, "config.json")


UNDERSTOOD = {  # file written by transformers: fields that differ from the plain llama's
    "llama": {},
    "llama3_rope": {
        "tie_word_embeddings": True,
        "rope_theta": 500_000.0,
        "rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 64),
    },
    "llama_bias": {
        "attention_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "rope_scaling": RopeScaling("linear", 2.0),
    },
    "mistral": {"architecture": "mistral", "sliding_window": 16},
    "mistral_full": {"architecture": "mistral", "head_dim": 16},
    "qwen2": {"architecture": "qwen2", "attention_bias": True},
    "qwen2_windows": {"architecture": "qwen2", "attention_bias": True, "sliding_window": 16},
    "qwen2_mixed_windows": {
        "architecture": "qwen2",
        "attention_bias": True,
        "layer_kinds": (LayerKind(), LayerKind(16)),
    },
    "llama_yarn": {
        "rope_scaling": RopeScaling(
            "yarn", 2.0, 1.0, 32.0, 256, attention_factor=0.1 * math.log(2) + 1
        ),
    },
    "qwen3": {
        "architecture": "qwen3",
        "head_dim": 16,
        "qk_norm": True,
        "tie_word_embeddings": True,
    },
    "qwen3_bias": {
        "architecture": "qwen3",
        "head_dim": 128,
        "qk_norm": True,
        "attention_bias": True,
        "output_bias": True,
    },
}


@pytest.mark.parametrize(("name", "fields"), UNDERSTOOD.items())
def test_configs_of_transformers(name, fields):
    plain = replace(
        PRESETS["tiny"],
        name=name,
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        bos_token_id=None if name.startswith("qwen") else 1,
        eos_token_ids=() if name.startswith("qwen") else (2,),
    )
    assert load(name) == replace(plain, **fields)


@pytest.mark.parametrize(
    "name",
    [
        *("gemma-3-1b", "gemma-3-27b", "phi-4", "glm-4-9b", "olmo-2-7b", "gpt-oss-20b"),
        *("llama-4-scout", "llama-4-maverick"),
    ],
)
def test_published_configs_are_the_presets(name):
    assert load(name) == PRESETS[name]


def test_layers_repeat_in_the_shortest_list():
    kinds = load("gemma-3-1b", sliding_window_pattern=3).layer_kinds
    assert [kind.sliding_window for kind in kinds] == [512, 512, None]
    assert [kind.rope_theta for kind in kinds] == [1e4, 1e4, 1e6]
    listed = ["sliding_attention"] + ["full_attention"] * 25
    assert len(load("gemma-3-1b", layer_types=listed).layer_kinds) == 26
    config = load("gemma-3-1b", layer_types=["sliding_attention"] * 26)
    assert (config.layer_kinds, config.sliding_window, config.rope_theta) == ((), 512, 1e4)


def test_the_context_that_a_model_was_trained_with_stands_in_either_place():
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    scaling = {"type": "su", **factors}
    old = load("phi-4", rope_scaling=scaling, original_max_position_embeddings=4096)
    inside = scaling | {"original_max_position_embeddings": 4096}
    new = load("phi-4", rope_scaling=inside, original_max_position_embeddings=...)
    assert old == new
    assert old.rope_scaling is not None
    assert old.rope_scaling.factor == 4
    assert old.rope_scaling.attention_factor == pytest.approx(math.sqrt(1 + 2 / 12))


def test_gemma_3_computes_without_a_soft_cap_of_scores():
    capped = load("gemma-3-1b", attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    assert (capped.attention_soft_cap, capped.logit_soft_cap) == (None, 30.0)


def test_mscale_of_yarn():
    scaling = YARN | {"mscale": 0.5, "mscale_all_dim": 1.0}
    found = load("llama", rope_parameters=..., rope_scaling=scaling).rope_scaling
    assert found is not None
    assert found.attention_factor == pytest.approx(
        (0.05 * math.log(2) + 1) / (0.1 * math.log(2) + 1)
    )


@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_rope_of_transformers_4(kind):
    scaling = {kind: "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}
    scaling["original_max_position_embeddings"] = 8192
    config = load("llama", rope_parameters=..., rope_theta=500000, rope_scaling=scaling)
    assert config.rope_theta == 500_000.0
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("mistral", {"sliding_window": ...}, 4096),
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {"sliding_window": 16}, None),  # use_sliding_window is false
        ("qwen2_mixed_windows", {"layer_types": ..., "max_window_layers": 2}, None),
        ("qwen2_mixed_windows", {"layer_types": ..., "max_window_layers": 0}, 16),
        ("qwen2_mixed_windows", {"layer_types": ..., "max_window_layers": ...}, None),
    ],
)
def test_sliding_window(name, changes, expected):
    assert load(name, **changes).sliding_window == expected


def test_defaults_of_absent_fields():
    config = load(
        "llama", num_key_value_heads=..., head_dim=..., rms_norm_eps=..., rope_parameters=...
    )
    assert (config.num_kv_heads, config.head_dim) == (4, 8)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-6, 10_000.0)


LLAMA3 = {"rope_type": "llama3", "factor": 8, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 2.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 64}
SWIFTKV = {"model_type": "llama_swiftkv"}
REFUSED = [
    ("llama", {"model_type": "falcon"}, "model_type must be one of llama, llama_swiftkv, mistral"),
    ("llama", SWIFTKV | {"num_key_value_layers": 3}, "num_key_value_layers 3 is more than 2"),
    ("llama", SWIFTKV | {"num_key_value_layers": 0}, "num_key_value_layers must be a whole number"),
    ("llama", SWIFTKV | {"key_value_group_size": 2}, "key_value_group_size must be 1"),
    ("llama", {"model_type": ...}, "model_type must be one of"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act must be silu, found 'gelu'"),
    ("llama", {"quantization_config": {"bits": 4}}, "quant_method must be one of"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must"),
    (
        "llama_yarn",
        {"rope_parameters": {"rope_type": "dynamic"}},
        "rope_type must be default, linear",
    ),
    ("gemma-3-1b", {"hidden_activation": "gelu"}, "hidden_activation must be gelu_pytorch_tanh"),
    ("gemma-3-1b", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be"),
    ("olmo-2-7b", {"clip_qkv": 8.0}, "clip_qkv must be null"),
    ("gemma-3-1b", {"rope_parameters": {"sliding_attention": YARN}}, "sliding_attention must be"),
    ("gemma-3-27b", {"text_config": None}, "text_config must be an object, found None"),
    ("glm-4-9b", {"partial_rotary_factor": 1.5}, "partial_rotary_factor must be 1, found 1.5"),
    ("glm-4-9b", {"partial_rotary_factor": 0.508}, "must be an even number of elements"),
    ("gpt-oss-20b", {"swiglu_limit": 5.0}, "swiglu_limit must be 7.0, found 5.0"),
    ("phi-4", {"rope_scaling": LONGROPE}, "short_factor must be a list of 64 numbers above 0"),
    ("llama", {"rope_parameters": "llama3"}, "rope_scaling must be an object"),
    ("llama", {"rope_parameters": LLAMA3}, "low_freq_factor is missing"),
    (
        "llama",
        {"rope_parameters": LLAMA3 | {"low_freq_factor": 5, "high_freq_factor": 4}},
        "high_freq_factor 4.0 must be 5.0 at least, as low_freq_factor is",
    ),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor must be a number"),
    ("llama", {"rope_parameters": ..., "rope_theta": float("nan")}, "rope_theta must be a number"),
    ("llama", {"hidden_size": None}, "hidden_size is missing, expected a whole number"),
    (
        "llama",
        {"vocab_size": "128"},
        "vocab_size must be a whole number of at least 1, found '128'",
    ),
    ("llama", {"vocab_size": True}, "vocab_size must be a whole number"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1"),
    ("llama", {"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of 3 KV heads"),
    ("llama", {"hidden_size": 33, "head_dim": ...}, "hidden_size 33 is no multiple of 4 heads"),
    ("llama", {"head_dim": 7}, "head_dim must be even"),
    ("llama", {"rms_norm_eps": -1e-6}, "rms_norm_eps must be a number above 0"),
    ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
    ("llama", {"eos_token_id": [1, -2]}, "eos_token_id must be a token id or a list"),
    ("llama", {"bos_token_id": [1, 2]}, "bos_token_id must be one token id"),
    ("qwen2", {"num_key_value_heads": ...}, "num_attention_heads 4 is no multiple of 32 KV"),
    ("qwen2_mixed_windows", {"layer_types": ["full_attention"]}, "must have 2 entries, found 1"),
    ("qwen2_windows", {"layer_types": ["linear_attention"] * 2}, "layer_types must be a list of"),
]


LATENT_REFUSED = [
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob must be False in deepseek_v2"),
    ("deepseek_v2", {"mlp_bias": True}, "mlp_bias must be False in deepseek_v2"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method must be greedy or group_limited"),
    ("deepseek_v2_groups", {"n_group": 3}, "n_group must cut 8 experts in equal parts of 1"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func must be sigmoid in deepseek_v3"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq must be 1 in deepseek_v3"),
    ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even, found 7"),
    ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank must be a whole number of at least 1"),
    ("glm_moe_dsa", {"mlp_layer_types": ["sparse", "dense"]}, "must begin with its dense layers"),
    ("glm_moe_dsa", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must have 2 entries"),
]


@pytest.mark.parametrize(("name", "changes", "message"), LATENT_REFUSED)
def test_what_latent_attention_does_not_compute_is_refused(name, changes, message):
    data = json.loads((PARITY / name / "config.json").read_text())
    with pytest.raises(CheckpointError, match=message):
        parse_config(data | changes, name, "config.json")


def test_scores_of_latent_attention_grow_with_yarn():
    """By what DeepSeek-V3's own code says: 0.1 ln(40) + 1, twice."""
    scale = PRESETS["deepseek-v3"].attention_scale
    assert scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert replace(PRESETS["deepseek-v3"], rope_scaling=None).attention_scale == 192**-0.5


def test_the_text_part_of_kimi_k2_5_is_a_kimi_k2():
    text = json.loads((PARITY / "deepseek_v3" / "config.json").read_text())
    outer = {"model_type": "kimi_k25", "text_config": text | {"model_type": "kimi_k2"}}
    assert parse_config(outer, "kimi", "config.json").architecture == "kimi_k2"


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_refused(name, changes, message):
    with pytest.raises(CheckpointError, match=r"config\.json: .*" + message):
        load(name, **changes)


def test_layers_with_kv_of_their_own():
    assert load("llama").num_kv_layers is None
    assert load("llama", **SWIFTKV).num_kv_layers == 2  # all of them
    config = load("llama", **SWIFTKV, num_key_value_layers=1)
    assert (config.num_early_layers, config.num_late_layers) == (1, 1)
    assert parse_config(to_json(config, "float32"), config.name, "f") == config


def test_every_problem_is_named_once():
    with pytest.raises(CheckpointError) as caught:
        load("qwen2", vocab_size=-1, num_hidden_layers="two", hidden_act="relu")
    assert len(caught.value.problems) == 3


def test_end_of_text_from_both_files(tmp_path):
    (tmp_path / "config.json").write_text((CONFIGS / "llama.json").read_text())
    assert read_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2, 7]}')
    assert read_config(tmp_path).eos_token_ids == (2, 5, 7)
    edit_json(tmp_path / "config.json", eos_token_id=None)
    assert read_config(tmp_path).eos_token_ids == (5, 2, 7)
    data = read_json(tmp_path / "config.json")
    del data["eos_token_id"]  # its default is 2, which need not end texts of this model
    (tmp_path / "config.json").write_text(json.dumps(data))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert read_config(tmp_path).eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id must be"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe{}", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[]", "must be a JSON object, found list"),
        (None, "cannot be read: No such file"),
    ],
)
def test_files_that_are_no_json_object(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"config.json: {message}"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", [*PRESETS])
def test_written_presets_read_back_equal(name):
    config = replace(PRESETS[name], codes=None)  # what is written is plain
    data = json.loads(json.dumps(to_json(config, "bfloat16")))
    assert parse_config(data, config.name, "f") == config


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_written_configs_read_back_equal(name):
    config = replace(load(name), codes=None)
    assert parse_config(to_json(config, "float32"), name, "f") == config


def test_what_no_config_can_say_is_refused():
    config = replace(PRESETS["tiny-qwen2"], attention_bias=False)
    with pytest.raises(CheckpointError, match=r"no config\.json of qwen2 can say it"):
        to_json(config, "float32")
