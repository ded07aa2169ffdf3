"""GGUF of every family: what a converter like llama.cpp's writes is read as what it was made of.

And it has the log-probabilities that llama.cpp computes (tests/oracle/make_llama_cpp.py).
"""

import json
from pathlib import Path

import gguf
import harness
import numpy as np
import pytest
from checkpoints import random_tensors
from gguf import GGMLQuantizationType as Kind
from spent import quick
from test_gguf import interleave, llama3_divisors

from shiftjax.arch.config import ModelConfig
from shiftjax.parallel.grid import Mode
from shiftjax.weights.gguf import GgufSource
from shiftjax.weights.hf_config import parse_config
from shiftjax.weights.source import CheckpointError, check_complete

PARITY = Path(__file__).parent.parent / "data" / "parity"
EVERYWHERE = {"mlp_only_layers": []}  # no file says which layers have no experts
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
NOT_BLENDED = LLAMA3 | {"high_freq_factor": 1.0}
LLAMA4 = {  # no file says where chunks end and which layers have no positions
    **{"num_hidden_layers": 4, "moe_layers": None, "no_rope_layers": None, "layer_types": None},
    **{"attention_chunk_size": 8192, "floor_scale": 8192, "attention_bias": False, "head_dim": 32},
}
# llama.cpp's name: the configuration, and what no file can say of it.
FAMILIES = {
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 8}),
    "phi3": ("phi3", {}),
    "phi3 longrope": ("phi3_longrope", {}),
    "qwen2moe": ("qwen2_moe", EVERYWHERE),
    "qwen3moe": ("qwen3_moe", EVERYWHERE),
    "llama": ("mixtral", {}),
    "olmo2": ("olmo2", {}),
    "olmo2 windows": (
        "olmo3",
        {"rope_parameters": None, "rope_theta": 10_000.0, "num_hidden_layers": 2},
    ),
    "olmoe": ("olmoe", {}),
    "glm4": ("glm4", {}),
    "glm4moe": ("glm4_moe", {}),
    "gpt-oss": ("gpt_oss", {}),
    "gpt-oss wide": ("gpt_oss_mxfp4", {}),
    "seed_oss": ("seed_oss", {}),
    "granite": ("granite", {}),
    "smollm3": (
        "smollm3",
        {"no_rope_layers": None, "layer_types": None, "use_sliding_window": False}
        | {"num_hidden_layers": 5},
    ),
    "ernie4_5": ("ernie4_5", {}),
    "exaone4": ("exaone4", {"rope_parameters": LLAMA3, "head_dim": 32}),
    "command-r": ("cohere", {}),
    "cohere2": ("cohere2", {}),
    "minimax-m2": ("minimax_m2", {}),
    "llama4": ("llama4_text", LLAMA4 | {"rope_parameters": NOT_BLENDED}),
    "llama4 128e": (
        "llama4_text",
        LLAMA4
        | {"rope_parameters": None, "rope_theta": 10_000.0, "use_qk_norm": False}
        | {"num_local_experts": 128, "interleave_moe_layer_step": 2},
    ),
}
RENAMED = {
    "sinks": ("sinks", "weight"),
    "e_score_correction_bias": ("e_score_correction", "bias"),
}
# What llama.cpp does not compute, or not as transformers does: biases of some, the norms of
# Command R with few layers, windows of Phi-3 and of EXAONE 4 with few layers, YaRN's ranges as
# gpt-oss has them, which are not rounded.
DEFAULT_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
PLAINER: dict[str, dict[str, object]] = {
    "phi3": {"sliding_window": None},
    "qwen2moe": {"tie_word_embeddings": False},
    "olmoe": {"num_key_value_heads": 6},
    "gpt-oss": DEFAULT_ROPE,
    "gpt-oss wide": DEFAULT_ROPE,
    "seed_oss": {"attention_out_bias": False},
    "smollm3": {"attention_bias": False},
    "ernie4_5": {"use_bias": False},
    "exaone4": DEFAULT_ROPE | {"head_dim": 8, "sliding_window": None, "layer_types": None},
    "command-r": {"attention_bias": False, "use_qk_norm": False},
    "minimax-m2": {"tie_word_embeddings": False},
}
PROMPT = list(range(3, 40))
PERMUTED = ("llama", "granite", "smollm3")


def metadata(data: dict, config: ModelConfig) -> dict[str, object]:
    """What a converter writes of a configuration, without the architecture's name."""
    experts, rope = config.experts, data.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    windows = [kind.sliding_window for kind in config.kinds]
    values: dict[str, object] = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": data["intermediate_size"],
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.freq_base": rope.get("rope_theta", 10_000.0),
        "rope.dimension_count": config.rotary_dim or config.head_dim,
    }
    of_norms = "layer_norm_epsilon" if config.norm_centred else "layer_norm_rms_epsilon"
    values[f"attention.{of_norms}"] = config.rms_norm_eps
    if any(windows):
        values["attention.sliding_window"] = max(filter(None, windows))
        values["attention.sliding_window_pattern"] = [each is not None for each in windows]
    if experts is not None:
        width, shared = experts.intermediate_size, experts.shared_intermediate_size
        values |= {"expert_count": experts.num, "expert_used_count": experts.per_token}
        values |= {"expert_feed_forward_length": width}
        if experts.scores == "sigmoid":
            values["expert_gating_func"] = 2
        if data["model_type"] == "qwen2_moe":
            values["expert_shared_feed_forward_length"] = shared
        if data["model_type"] == "glm4_moe":
            values |= {
                "expert_shared_count": shared // width,
                "leading_dense_block_count": len(experts.dense_layers),
                "expert_weights_scale": experts.scale,
                "expert_weights_norm": experts.norm_topk,
                "expert_group_count": experts.num_groups,
                "expert_group_used_count": experts.groups_per_token,
            }
    values |= of_llama4(data, config)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        values |= {name: data[name]} if data.get(name) else {}
    if data["model_type"] == "granite":
        values |= {
            "attention.scale": data["attention_multiplier"],
            "embedding_scale": data["embedding_multiplier"],
            "residual_scale": data["residual_multiplier"],
            "logit_scale": data["logits_scaling"],
        }
    if "logit_scale" in data:
        values["logit_scale"] = data["logit_scale"]
    if rope.get("rope_type") in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope.get("rope_type") in ("yarn", "longrope"):
        original = rope.get("original_max_position_embeddings", data["max_position_embeddings"])
        values["rope.scaling.original_context_length"] = original
    if rope.get("rope_type") == "yarn":
        values["rope.scaling.yarn_beta_fast"] = rope["beta_fast"]
    if rope.get("rope_type") == "longrope":
        values["rope.scaling.attn_factor"] = rope["attention_factor"]
    return values


def of_llama4(data: dict, config: ModelConfig) -> dict[str, object]:
    """What only its converter writes, and what it writes otherwise; nothing for other models."""
    if data["model_type"] != "llama4_text":
        return {}
    values: dict[str, object] = {
        "feed_forward_length": config.intermediate_size,
        "interleave_moe_layer_step": data["interleave_moe_layer_step"],
    }
    if data["attention_chunk_size"] is None:
        values["attention.sliding_window"] = 0
    return values


def stored_tensors(
    architecture: str, config: ModelConfig, tensors: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The tensors as a converter stacks and changes them, by llama.cpp's names."""
    inverse = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(inverse[architecture], config.num_layers)
    stacks: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors.items():
        array = tensor
        if architecture in PERMUTED and (".q_proj." in name or ".k_proj." in name):
            array = interleave(tensor, config.head_dim)
        if config.architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = tensor + 1
        stem, _, suffix = name.rpartition(".")
        words = stem.split(".")
        if "experts" in words:  # one for each: stacked in a dimension of their own
            stem, array = ".".join(words[:5] + words[6:]), array[None]
        if suffix in RENAMED:
            stem, suffix = f"{stem}.{RENAMED[suffix][0]}", RENAMED[suffix][1]
        if config.architecture in ("phi3", "glm4") and words[-1] in ("gate_proj", "up_proj"):
            stem = stem.replace(words[-1], "gate_up_proj")
        if config.architecture == "phi3" and words[-1] in ("q_proj", "k_proj", "v_proj"):
            stem = stem.replace(words[-1], "qkv_proj")
        stacks.setdefault(f"{names.get_name(stem)}.{suffix}", []).append(array)
    return {name: np.concatenate(parts) for name, parts in stacks.items()}


def drawn(config: ModelConfig) -> dict[str, np.ndarray]:
    """Tensors whose norms and biases vary, with which logits are far apart."""
    rng, tensors = np.random.default_rng(5), {}
    for name, tensor in random_tensors(config).items():
        values = rng.standard_normal(tensor.shape)
        if name.endswith("norm.weight"):
            values = 0.3 * values + (not config.norm_offset)
        elif "bias" in name or "sinks" in name:
            values = 0.3 * values
        else:
            values = values * (0.2 if "embed_tokens" in name else tensor.shape[-1] ** -0.5)
        tensors[name] = values.astype(np.float32)
    return tensors


def write(
    path: Path,
    case: str,
    extra: dict[str, object] | None = None,
    kind: Kind | None = None,
    changes: dict[str, object] | None = None,
):
    """Write the GGUF of a case; return the model that it is, and its tensors.

    Experts are stored as `kind`.
    """
    (name, usual), architecture = FAMILIES[case], case.partition(" ")[0]
    data = json.loads((PARITY / name / "config.json").read_text()) | usual | (changes or {})
    data.pop("quantization_config", None)
    config = parse_config(data, "tiny", "config.json")
    tensors = drawn(config)
    writer = gguf.GGUFWriter(path, architecture)
    values = {f"{architecture}.{k}": v for k, v in metadata(data, config).items()}
    values |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2} | (extra or {})
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    writer.add_tokenizer_model("gpt2")  # of made-up tokens: llama.cpp starts with none else
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{number}" for number in range(config.vocab_size)])
    writer.add_token_merges(["t 1", "t 2"])
    for stored, tensor in stored_tensors(architecture, config, tensors).items():
        if kind is not None and "_exps.weight" in stored:
            writer.add_tensor(stored, gguf.quantize(tensor, kind), raw_dtype=kind)
            continue
        is_flat = "ffn_gate_inp_shexp" in stored or "attn_q_norm" in stored
        writer.add_tensor(stored, tensor.squeeze() if is_flat else tensor)
    rope = data.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        writer.add_tensor(
            "rope_freqs.weight", llama3_divisors(rope["factor"], high=rope["high_freq_factor"])
        )
    for reach in ("long", "short"):
        if f"{reach}_factor" in rope:
            factors = np.array(rope[f"{reach}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{reach}.weight", factors)
    if f"{architecture}.nextn_predict_layers" in values:
        layer = f"blk.{config.num_layers}.nextn.eh_proj.weight"
        writer.add_tensor(layer, np.ones((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config, tensors


@pytest.mark.parametrize("case", FAMILIES)
def test_a_file_is_read_as_what_it_was_made_of(tmp_path, case):
    config, tensors = write(tmp_path / "m.gguf", case)
    source = GgufSource(tmp_path / "m.gguf", "tiny")
    assert source.config == config
    check_complete(source)
    assert source.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        rounds = config.norm_offset and name.endswith("norm.weight")
        np.testing.assert_allclose(source.read(name), tensor, rtol=0, atol=1e-6 if rounds else 0)
    some = [name for name in tensors if tensors[name].ndim == 2 and len(tensors[name]) > 6]
    for name in some:
        part = source.read(name, (slice(3, 7), slice(1, 6)))
        np.testing.assert_array_equal(part, source.read(name)[3:7, 1:6])


def test_a_llama_4_without_chunks_says_so(tmp_path):
    changes: dict[str, object] = {
        "attention_chunk_size": None,
        "no_rope_layers": [1] * 4,
        "rope_parameters": None,
    }
    config, _ = write(tmp_path / "m.gguf", "llama4", changes=changes | {"rope_theta": 10_000.0})
    assert GgufSource(tmp_path / "m.gguf", "tiny").config == config
    assert config.windows == (None,) and all(kind.has_rope for kind in config.kinds)


def test_layers_that_draft_are_left_out(tmp_path):
    layers = {"glm4moe.nextn_predict_layers": 1, "glm4moe.block_count": 3}
    config, tensors = write(tmp_path / "m.gguf", "glm4moe", layers)
    source = GgufSource(tmp_path / "m.gguf", "tiny")
    check_complete(source)
    assert (source.config, source.tensors.keys()) == (config, tensors.keys())


LLAMA_CPP = json.loads((PARITY.parent / "llama_cpp_logprobs.json").read_text())
QUICK = ["gpt-oss wide", "granite", "glm4moe", "cohere2"]


@pytest.mark.parametrize("case", quick(list(FAMILIES), *QUICK))
def test_log_probabilities_are_those_of_llama_cpp(tmp_path, monkeypatch, case):
    """Its GELU is a table of half floats, so that Gemma's are not as near."""
    path, steps = tmp_path / "m.gguf", LLAMA_CPP["steps"][case]
    write(path, case, changes=PLAINER.get(case))
    monkeypatch.setattr(harness, "HuggingFaceSource", GgufSource)
    chosen = [next(iter(step)) for step in steps[:-1]]
    token_ids = [*PROMPT, *map(int, chosen)]
    _, logits, _ = harness.forward(path, token_ids, 1, 1, Mode(1, 1), "alias")
    logits = logits[len(PROMPT) - 1 :].astype(np.float64)
    found = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    far = [
        abs(row[int(token)] - wanted)
        for row, step in zip(found, steps, strict=True)
        for token, wanted in step.items()
    ]
    assert max(far) < (5e-3 if case.startswith("gemma") else 2e-5)


@pytest.mark.parametrize("kind", [Kind.MXFP4, Kind.Q8_0])
def test_experts_of_codes_are_read_one_by_one(tmp_path, kind):
    _, tensors = write(tmp_path / "m.gguf", "gpt-oss wide", kind=kind)
    source = GgufSource(tmp_path / "m.gguf")
    for name, tensor in tensors.items():
        is_stored = ".experts." in name and name.endswith(".weight")
        expected = gguf.dequantize(gguf.quantize(tensor, kind), kind) if is_stored else tensor
        np.testing.assert_array_equal(source.read(name), expected)


@pytest.mark.parametrize(
    ("case", "extra", "message"),
    [
        ("gemma2", {"gemma2.rope.scaling.type": "dynamic"}, "must be none, linear or yarn"),
        ("qwen3moe", {"qwen3moe.rope.scale_linear": 2.0}, "rope.scale_linear is an old key"),
        ("olmoe", {"olmoe.embedding_length": 0}, "embedding_length must be a whole number"),
        ("olmoe", {"olmoe.expert_used_count": 9}, "num_experts_per_tok 9 is more than 8 experts"),
        ("gpt-oss", {"gpt-oss.rope.scaling.attn_factor": 2.0}, "attn_factor must be 1, found 2"),
    ],
)
def test_what_cannot_be_computed_is_refused(tmp_path, case, extra, message):
    write(tmp_path / "m.gguf", case, extra)
    with pytest.raises(CheckpointError, match=message):
        GgufSource(tmp_path / "m.gguf")
