"""GGUF files of families that llama.cpp knows: metadata as a `config.json`, tensors by our names.

What a file says becomes the fields of a `config.json`, which `hf_config.py` reads; what it leaves
out is constant in llama.cpp. Names of tensors are those of the `gguf` library. Experts lie in one
tensor, and some projections of one input: theirs are ranges of its bytes.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import gguf
import numpy as np

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.weights import expected_tensors
from shiftjax.gguf_header import GgufHeader, GgufTensor
from shiftjax.weights.expert_config import expert_fields
from shiftjax.weights.family_config import bias_fields
from shiftjax.weights.hf_config import parse_config
from shiftjax.weights.hf_layers import FULL, SLIDING
from shiftjax.weights.hf_names import rows_of, stored_name
from shiftjax.weights.typed_fields import Fields


class GgufFamily(NamedTuple):
    """A `general.architecture` of llama.cpp."""

    model_type: str
    is_permuted: bool = False  # rows of q and k, as `gguf.py` says
    adds_one: bool = False  # to the weights of norms
    constants: Mapping[str, Any] = MappingProxyType({})  # fields that no file states


_GEMMA3 = {"rope_local_base_freq": 10_000.0}
FAMILIES: Mapping[str, GgufFamily] = MappingProxyType(
    {
        "llama": GgufFamily("mixtral", is_permuted=True),  # with experts
        "gemma2": GgufFamily("gemma2", adds_one=True),
        "gemma3": GgufFamily("gemma3_text", adds_one=True, constants=_GEMMA3),
        "phi3": GgufFamily("phi3"),
        "qwen2moe": GgufFamily("qwen2_moe"),
        "qwen3moe": GgufFamily("qwen3_moe", constants={"norm_topk_prob": True}),
        "olmo2": GgufFamily("olmo2"),
        "olmoe": GgufFamily("olmoe"),
        "glm4": GgufFamily("glm4"),
        "glm4moe": GgufFamily("glm4_moe"),
        "gpt-oss": GgufFamily("gpt_oss"),
        "seed_oss": GgufFamily("seed_oss"),
        "granite": GgufFamily("granite", is_permuted=True),
        "smollm3": GgufFamily("smollm3", is_permuted=True),
        "ernie4_5": GgufFamily("ernie4_5"),
        "exaone4": GgufFamily("exaone4"),
        "command-r": GgufFamily("cohere"),
        "cohere2": GgufFamily("cohere2"),
        "minimax-m2": GgufFamily("minimax_m2"),
        "llama4": GgufFamily("llama4_text"),
    }
)
_NUMBERS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
}
_REQUIRED = ("context_length", "embedding_length", "attention.head_count")
_REALS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "expert_weights_scale": "routed_scaling_factor",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logit_scale",
}
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}  # layers of 27B, which scales its scores otherwise
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_EXPERT = re.compile(r"(model\.layers\.\d+\.\w+\.experts)\.(\d+)\.(\w+)\.(weight|bias)")
_LAYER = re.compile(r"blk\.(\d+)\.")
logger = logging.getLogger(__name__)


def as_written(value: float) -> float:
    """GGUF stores float32; return the short decimal that was meant (1e-05, not 9.99999975e-06)."""
    return float(str(np.float32(value)))


def family_of(header: GgufHeader) -> GgufFamily | None:
    """Return the family of a file; None for one that `gguf_config.py` reads."""
    architecture = header.metadata.get("general.architecture")
    if architecture == "llama" and not header.metadata.get("llama.expert_count"):
        return None
    return FAMILIES.get(str(architecture))


def read_family(
    path: Path, header: GgufHeader, fields: Fields, longrope: Mapping[str, list[float]]
) -> ModelConfig:
    """Return the model of a file, whose keys `fields` have without the architecture's name.

    `longrope` are the numbers of the tensors that `is_longrope` knows.
    Raises CheckpointError with one line per problem.
    """
    family, architecture = family_of(header), header.metadata["general.architecture"]
    assert family is not None
    for name in _REQUIRED:
        fields.count(name)
    layers = fields.count("block_count") - fields.count("nextn_predict_layers", 0, minimum=0)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        fields.problem("tensor token_embd.weight: expected the embedding, found nothing")
    if fields.data.get("rope.scale_linear") is not None:
        fields.problem("rope.scale_linear is an old key; convert the model again")
    fields.raise_problems()
    assert embedding is not None
    heads = fields.count("attention.head_count")
    width = fields.count("embedding_length")
    head_dim = fields.count("attention.key_length", width // heads)
    data = {name: fields.data[key] for key, name in _NUMBERS.items() if fields.has(key)}
    data |= {n: as_written(fields.positive(k)) for k, n in _REALS.items() if fields.has(k)}
    model_type = _model_type(fields, family)
    data = {"rope_theta": 10_000.0, **family.constants, **data}
    data |= {
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "num_hidden_layers": layers,
        "head_dim": head_dim,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": fields.data.get("bos_token_id"),
        "eos_token_id": _end_ids(fields),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
        "rope_scaling": _scaling(fields, architecture, longrope),
        "partial_rotary_factor": fields.count("rope.dimension_count", head_dim) / head_dim,
        **_windows(fields, architecture, layers),
        **expert_fields(model_type, *(fields.data.get(k) for k in _OF_EXPERTS)),
        **_biases(model_type, header),
    }
    if model_type == "phi3":
        original = fields.data.get("rope.scaling.original_context_length")
        data["original_max_position_embeddings"] = original or data["max_position_embeddings"]
    if architecture in _LARGEST_GEMMA:
        is_largest = layers == _LARGEST_GEMMA[architecture]
        data["query_pre_attn_scalar"] = width // heads if is_largest else head_dim
    if model_type == "llama4_text":
        data |= _llama4(fields, layers)
    if model_type == "granite" and "logit_scale" in data:
        data["logits_scaling"] = data.pop("logit_scale")
    fields.raise_problems()
    return parse_config(data, path.stem, fields.file)


_EXPERTS_OF_MAVERICK = 128
_OF_EXPERTS = ("expert_count", "expert_feed_forward_length")


def _llama4(fields: Fields, layers: int) -> dict[str, Any]:
    """Return what llama.cpp assumes of Llama 4: chunks, unless a file says that it has no window.

    What it takes for Maverick, by the number of experts, has no norms.
    """
    own = {
        "intermediate_size_mlp": fields.count("feed_forward_length"),
        "use_qk_norm": fields.data.get("expert_count") != _EXPERTS_OF_MAVERICK,
    }
    if fields.data.get("attention.sliding_window") == 0:  # nor layers without positions
        return own | {"attention_chunk_size": None, "no_rope_layers": [1] * layers}
    return own


def _model_type(fields: Fields, family: GgufFamily) -> str:
    """Return it: OLMo 3 is OLMo 2 with windows to llama.cpp."""
    has_window = bool(fields.data.get("attention.sliding_window"))
    return "olmo3" if family.model_type == "olmo2" and has_window else family.model_type


def _end_ids(fields: Fields) -> list[int]:
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    return list(dict.fromkeys(token for name in names for token in fields.token_ids(name)))


def _windows(fields: Fields, architecture: str, layers: int) -> dict[str, Any]:
    """Return the window, and which layers have it where the file lists them."""
    if architecture == "gemma2" and not fields.has("attention.sliding_window"):
        return {}
    window = fields.count("attention.sliding_window", 0, minimum=0) or None
    pattern = fields.data.get("attention.sliding_window_pattern")
    if type(pattern) is int and pattern > 0:
        pattern = [i % pattern < pattern - 1 for i in range(layers)]
    if window is None or not isinstance(pattern, list):
        return {"sliding_window": window}
    kinds = [SLIDING if slides else FULL for slides in pattern[:layers]]
    return {"sliding_window": window, "layer_types": kinds}


def _scaling(
    fields: Fields, architecture: str, longrope: Mapping[str, list[float]]
) -> dict[str, Any] | None:
    """Return the scaling of rotary embeddings; Llama 3's is a tensor, and added later."""
    kind, factor = fields.data.get("rope.scaling.type", "none"), "rope.scaling.factor"
    original = fields.data.get("rope.scaling.original_context_length")
    gain = fields.data.get("rope.scaling.attn_factor")
    if longrope:
        scaling = {"rope_type": "longrope", **longrope}
        return scaling if gain is None else scaling | {"attention_factor": as_written(gain)}
    if kind == "linear":
        return {"rope_type": "linear", "factor": as_written(fields.positive(factor))}
    if kind == "yarn":
        if gain not in (None, 1.0):
            fields.problem(f"rope.scaling.attn_factor must be 1, found {gain}")
        names = {
            "rope.scaling.yarn_beta_fast": "beta_fast",
            "rope.scaling.yarn_beta_slow": "beta_slow",
        }
        betas = {n: as_written(fields.positive(k)) for k, n in names.items() if fields.has(k)}
        more = {"truncate": False} if architecture == "gpt-oss" else {}
        own = {"original_max_position_embeddings": original} if original else {}
        return {
            "rope_type": "yarn",
            "factor": as_written(fields.positive(factor)),
            **own,
            **betas,
            **more,
        }
    if kind not in ("none", "longrope"):
        fields.problem(f"rope.scaling.type must be none, linear or yarn, found {kind!r}")
    return {"rope_type": "default"}


def _biases(model_type: str, header: GgufHeader) -> dict[str, bool]:
    """Return the fields that say which matrices have a bias."""
    stored = (("attn_q.bias", "attn_qkv.bias"), ("attn_output.bias",), ("ffn_up.bias",))
    return {
        field: any(f"blk.0.{name}" in header.tensors for name in names)
        for field, names in reversed(list(zip(bias_fields(model_type), stored, strict=True)))
        if field is not None
    }


def is_longrope(name: str) -> str | None:
    """Return the parameter of rotary embeddings that a tensor is; None: it is a weight."""
    return {_LONG: "long_factor", _SHORT: "short_factor"}.get(name)


def tensors_of(
    config: ModelConfig, architecture: str, stored: Mapping[str, GgufTensor]
) -> dict[str, GgufTensor]:
    """Return the tensors by our names; those that no weight has keep theirs.

    Layers behind the last, which draft tokens, are left out.
    """
    inverse = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(inverse[architecture], config.num_layers)
    found: dict[str, GgufTensor] = {}
    claimed: set[str] = set()
    for name, shape in expected_tensors(config).items():
        for source, tensor in _part(config, names, name, stored):
            claimed.add(source)
            same = int(np.prod(shape)) == int(np.prod(tensor.shape))
            found[name] = tensor._replace(shape=shape) if same else tensor
    rest = {name: tensor for name, tensor in stored.items() if name not in claimed}
    behind = [name for name in rest if (m := _LAYER.match(name)) and int(m[1]) >= config.num_layers]
    if behind:
        logger.info("%s: %d tensors of layers that draft are not loaded", config.name, len(behind))
    return found | {name: tensor for name, tensor in rest.items() if name not in behind}


def _part(
    config: ModelConfig,
    names: gguf.TensorNameMap,
    name: str,
    stored: Mapping[str, GgufTensor],
) -> Iterator[tuple[str, GgufTensor]]:
    """Yield the stored tensor that has one of ours, cut to it; nothing where there is none."""
    stack = stored_name(config, name)
    match = _EXPERT.fullmatch(name)
    base, _, suffix = (f"{match[1]}.{match[3]}.{match[4]}" if match else stack).rpartition(".")
    if suffix == "sinks":
        base, suffix = f"{base}.sinks", "weight"
    if suffix == "e_score_correction_bias":
        base, suffix = f"{base}.e_score_correction", "bias"
    source = f"{names.get_name(base)}.{suffix}"
    if source not in stored:
        return
    tensor = stored[source]
    if match:
        yield source, _cut(tensor, int(match[2]), int(match[2]) + 1, drop=True)
    elif stack != name:
        yield source, _cut(tensor, *rows_of(config, name, stack))
    else:
        yield source, tensor


def _cut(tensor: GgufTensor, first: int, last: int, *, drop: bool = False) -> GgufTensor:
    """Return rows [first, last) of a tensor; with `drop` the only one, without its dimension."""
    row_bytes = tensor.num_bytes // tensor.shape[0]
    shape = tensor.shape[1:] if drop else (last - first, *tensor.shape[1:])
    offset, size = tensor.offset + first * row_bytes, (last - first) * row_bytes
    return tensor._replace(shape=shape, offset=offset, num_bytes=size)
