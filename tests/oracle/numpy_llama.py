"""A Llama-family decoder in NumPy float64: the second oracle, written from the papers' equations.

Reads what Hugging Face writes (`config.json` and safetensors names) and imports neither JAX nor
anything of ShiftJAX, so that the two can only agree by both being right. No cache, no batching:
one prompt in, every hidden state and logit out.
"""

import json
import re
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from oracle import numpy_experts

Tensors = dict[str, np.ndarray]


def load_checkpoint(directory: Path) -> tuple[dict, Tensors]:
    """Return `config.json` and all tensors of a one-file checkpoint."""
    config = json.loads((directory / "config.json").read_text())
    return config, load_file(directory / "model.safetensors")


def head_dim_of(config: dict) -> int:
    """Width of one head; configurations without `head_dim` split the hidden size."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def rope_settings(config: dict) -> dict:
    """Rotary settings, from `rope_parameters` (transformers 5) or the older two fields."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return {"rope_theta": config.get("rope_theta", 10_000.0), **scaling, "rope_type": kind}


def rope_frequencies(config: dict) -> np.ndarray:
    """Radians per position, `[head_dim / 2]` (RoFormer; llama3 as in the Llama 3.1 model card)."""
    rope, width = rope_settings(config), head_dim_of(config)
    frequencies = rope["rope_theta"] ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    if rope["rope_type"] == "default":
        return frequencies
    if rope["rope_type"] == "linear":
        return frequencies / rope["factor"]
    if rope["rope_type"] != "llama3":
        raise ValueError(f"rope_type {rope['rope_type']!r}: only default, linear and llama3")
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)  # 1: short waves stay, 0: all stretched
    return frequencies * (keep + (1 - keep) / rope["factor"])


def rotate(x: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Turn `x[tokens, heads, head_dim]` by its position; the pairs are (i, i + head_dim / 2)."""
    angles = np.outer(np.arange(len(x)), frequencies)[:, None, :]
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    """Scale to unit root mean square over the last axis, then by `weight`."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def linear(x: np.ndarray, tensors: Tensors, name: str) -> np.ndarray:
    """`x @ weight.T`, plus the bias where the checkpoint has one."""
    y = x @ tensors[f"{name}.weight"].T
    return y + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else y


def window_of(config: dict, layer: int) -> int | None:
    """Keys that a query of this layer sees, itself included; None for all before it."""
    if not config.get("use_sliding_window", True):  # Qwen keeps the number but switches it off
        return None
    kinds = config.get("layer_types")
    full = kinds is not None and kinds[layer] == "full_attention"
    return None if full else config.get("sliding_window")


def kept(x: np.ndarray, tensors: Tensors, name: str) -> np.ndarray:
    """What a cache gives back of keys or values `[tokens, heads, head_dim]`: here, all of it."""
    return x


def attention(
    x: np.ndarray,
    config: dict,
    tensors: Tensors,
    prefix: str,
    layer: int,
    shared: np.ndarray | None = None,
) -> np.ndarray:
    """Causal grouped-query attention of `x[tokens, hidden]`, output projection included.

    `shared`: what keys and values of a layer without its own are made of (SwiftKV).
    """
    tokens, width = len(x), head_dim_of(config)
    suffix, source = ("", x) if shared is None else ("_swiftkv", shared)
    q, k, v = (
        linear(y, tensors, f"{prefix}.{p}_proj{suffix}").reshape(tokens, -1, width)
        for p, y in (("q", x), ("k", source), ("v", source))
    )
    if f"{prefix}.q_norm.weight" in tensors:
        q = rms_norm(q, tensors[f"{prefix}.q_norm.weight"], config["rms_norm_eps"])
        k = rms_norm(k, tensors[f"{prefix}.k_norm.weight"], config["rms_norm_eps"])
    q, k = (rotate(each, rope_frequencies(config)) for each in (q, k))
    k, v = (kept(each, tensors, f"{prefix}.{name}_scale") for name, each in (("k", k), ("v", v)))
    k, v = (np.repeat(each, q.shape[1] // k.shape[1], axis=1) for each in (k, v))
    back = np.arange(tokens)[:, None] - np.arange(tokens)  # how far key s lies behind query t
    visible = (back >= 0) & (back < (window_of(config, layer) or tokens))
    scores = np.where(visible, np.einsum("tnh,snh->nts", q, k) / np.sqrt(width), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = np.einsum("nts,snh->tnh", weights, v).reshape(tokens, -1)
    return linear(mixed, tensors, f"{prefix}.o_proj")


def mlp(x: np.ndarray, tensors: Tensors, prefix: str) -> np.ndarray:
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""
    gate = linear(x, tensors, f"{prefix}.gate_proj")
    return linear(
        gate / (1 + np.exp(-gate)) * linear(x, tensors, f"{prefix}.up_proj"),
        tensors,
        f"{prefix}.down_proj",
    )


def forward(config: dict, tensors: Tensors, token_ids: list[int]) -> dict:
    """Run one prompt through the model.

    Returns `hidden_states`, a list of `[tokens, hidden]` (the embedding, each layer's output, the
    final norm's output: `num_hidden_layers + 2` entries), and `logits[tokens, vocab]`.
    """
    tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    epsilon, x = config["rms_norm_eps"], tensors["model.embed_tokens.weight"][token_ids]
    hidden_states, shared = [x], None
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        if i == config.get("num_key_value_layers"):  # SwiftKV (arXiv 2410.03960, section 3.1)
            shared = rms_norm(x, tensors["model.norm_swiftkv.weight"], epsilon)
        h = rms_norm(x, tensors[f"{at}.input_layernorm.weight"], epsilon)
        x = x + attention(h, config, tensors, f"{at}.self_attn", i, shared)
        h = rms_norm(x, tensors[f"{at}.post_attention_layernorm.weight"], epsilon)
        if numpy_experts.has_experts(config, i):
            x = x + numpy_experts.feed_forward(h, config, tensors, at)
            if config.get("shared_expert_intermediate_size"):
                share = numpy_experts.share_of(h, tensors, at)
                x = x + share * mlp(h, tensors, f"{at}.{numpy_experts.SHARED}")
        else:
            x = x + mlp(h, tensors, f"{at}.mlp")
        hidden_states.append(x)
    hidden_states.append(rms_norm(x, tensors["model.norm.weight"], epsilon))
    head = "model.embed_tokens" if config.get("tie_word_embeddings") else "lm_head"
    logits = hidden_states[-1] @ tensors[f"{head}.weight"].T
    return {"hidden_states": hidden_states, "logits": logits}


def greedy(config: dict, tensors: Tensors, prompt: list[int], n: int) -> list[int]:
    """Continue `prompt` by its `n` likeliest tokens; the end-of-sequence token does not stop it."""
    token_ids = list(prompt)
    for _ in range(n):
        token_ids.append(int(forward(config, tensors, token_ids)["logits"][-1].argmax()))
    return token_ids[len(prompt) :]


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this configuration holds, by its Hugging Face name."""
    hidden, inner, vocab = (config[f"{n}_size"] for n in ("hidden", "intermediate", "vocab"))
    width = head_dim_of(config)
    queries, keys = (config[f"num_{n}_heads"] * width for n in ("attention", "key_value"))
    output_bias = bool(config["attention_bias"])
    qkv_bias = output_bias or config["model_type"] in ("qwen2", "qwen2_moe")
    mlp_bias = bool(config["mlp_bias"])
    linears = {  # name: out, in, bias
        "self_attn.q_proj": (queries, hidden, qkv_bias),
        "self_attn.k_proj": (keys, hidden, qkv_bias),
        "self_attn.v_proj": (keys, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, queries, output_bias),
        "mlp.gate_proj": (inner, hidden, mlp_bias),
        "mlp.up_proj": (inner, hidden, mlp_bias),
        "mlp.down_proj": (hidden, inner, mlp_bias),
    }
    layer: dict[str, tuple[int, ...]] = {
        f"{n}.weight": (hidden,) for n in ("input_layernorm", "post_attention_layernorm")
    }
    if config["model_type"] in ("qwen3", "qwen3_moe"):
        layer |= {f"self_attn.{n}_norm.weight": (width,) for n in "qk"}
    for name, (rows, columns, bias) in linears.items():
        layer[f"{name}.weight"] = (rows, columns)
        layer |= {f"{name}.bias": (rows,)} if bias else {}
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    num_layers = config["num_hidden_layers"]
    num_kv_layers = config.get("num_key_value_layers", num_layers)
    if "num_key_value_layers" in config:
        shapes["model.norm_swiftkv.weight"] = (hidden,)
    for i in range(num_kv_layers, num_layers):
        shapes |= {f"model.layers.{i}.{swiftkv(name)}": shape for name, shape in layer.items()}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i in range(num_kv_layers):
        own = layer
        if numpy_experts.has_experts(config, i):
            own = {name: shape for name, shape in layer.items() if not name.startswith("mlp.")}
            own |= numpy_experts.shapes(config)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in own.items()}
    return shapes


def swiftkv(name: str) -> str:
    """Name of a late layer's own tensor, in SwiftKV's checkpoints."""
    return re.sub(r"\b([qkv]_proj)\b", r"\1_swiftkv", name)


def random_tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw one float32 parameter so that leaving it out or mixing it up changes the logits.

    Matrices keep the variance of their input, norms lie around one, biases are not small.
    """
    x = rng.standard_normal(shape)
    if name.endswith(("norm.weight", "norm_swiftkv.weight")):
        x = 1 + 0.3 * x
    elif name.endswith(".bias"):
        x = 0.3 * x
    elif "embed_tokens" in name:  # small, or a tied model only repeats its last token
        x = 0.2 * x
    else:
        x = x / np.sqrt(shape[-1])
    return x.astype(np.float32)


DEFAULTS = {
    "model_type": "llama",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "llama_swiftkv": "LlamaSwiftKVForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}


def random_checkpoint(directory: Path, seed: int, **overrides: object) -> tuple[dict, Tensors]:
    """Write a tiny random model as `config.json` and `model.safetensors`; return both.

    `overrides` replace or add `config.json` fields under their Hugging Face names, such as
    `num_attention_heads=9, sliding_window=8, model_type="mistral"`.
    """
    config = DEFAULTS | overrides
    if config["model_type"] not in ARCHITECTURES:
        raise ValueError(f"model_type {config['model_type']!r}: not one of {list(ARCHITECTURES)}")
    config["architectures"] = [ARCHITECTURES[str(config["model_type"])]]
    rng = np.random.default_rng(seed)
    tensors = {n: random_tensor(rng, n, shape) for n, shape in tensor_shapes(config).items()}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return config, tensors
