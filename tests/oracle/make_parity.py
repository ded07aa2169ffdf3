"""Write `tests/data/parity`: tiny random models and what Hugging Face transformers makes of them.

Both the script and the record of the layer-by-layer oracle. It runs in an environment with
torch and transformers, which the project itself never needs:

    python tests/oracle/make_parity.py [tests/data/parity [NAME ...]]

Every model is float32 with eager attention, and every parameter (norm weights and biases too) is
drawn at random, since a default of one or zero would hide a tensor that was never applied.
Each folder holds `config.json` and `model.safetensors` as `save_pretrained` writes them, and
`expected.npz`, for prompts i = 0, 1:

    token_ids_i      [tokens]                    int64
    hidden_states_i  [layers + 2, tokens, hidden]  embedding, every layer's output, final norm
    logits_i         [tokens, vocab]
    kept_i           [kept]                      only of these tokens, in models of `LONG_PROMPTS`
    greedy_i         [12]                        continuation, end-of-sequence ignored
    margin_i         [12]                        logit of each over its runner-up
"""
# pyright: reportMissingImports=false, reportArgumentType=false

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.utils import logging

SEED = 20260801
PROMPT_LENS = (37, 20)
LONG_PROMPTS = (768, 130)  # of models whose names begin with `llama4_chunks`
EDGES = (64, 50)  # tokens beside their multiples are kept of these: chunks, steps of growth
GREEDY_TOKENS = 12
RESEEDED = {"deepseek_v2": 100, "glm_moe_dsa": 100}  # whose usual seeds give near-ties
LEAST_MARGIN = 2e-3  # below this, float32 rounding could turn a greedy choice

COMMON = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 40,
    "tie_word_embeddings": True,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # small enough that all three bands occur
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5}
LITTLE = {"intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8}
LEAST = LITTLE | {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 24}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "beta_fast": 8.0,  # with these, frequencies of a short head lie in all three bands
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
HALF_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.3, 2.1],
    "long_factor": [1.0, 2.0, 8.0],
    "attention_factor": 1.25,
}
GEMMA4 = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,  # the tests' devices
    "num_key_value_heads": 4,
    "head_dim": 8,
    "global_head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 6,
    "final_logit_softcapping": 6.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
            "factor": 1.5,
        },
    },
    "tie_word_embeddings": True,
}

CHUNKED = LEAST | {
    "max_position_embeddings": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,  # the tests' devices
    "intermediate_size": 8,
    "intermediate_size_mlp": 24,
    "num_local_experts": 8,
}

MLA = LEAST | {
    "num_attention_heads": 8,  # the tests' devices
    "num_key_value_heads": 8,
    "head_dim": 8,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}

# name: Hugging Face model_type, what differs from COMMON
MODELS: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {"intermediate_size": 104, "rms_norm_eps": 1e-5}),
    "llama3_rope": (
        "llama",
        {"head_dim": 16, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    "linear_rope": (
        "llama",
        {"head_dim": 16, "rope_parameters": LINEAR_ROPE, "intermediate_size": 80},
    ),
    "llama_bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"head_dim": 16, "sliding_window": 8, "intermediate_size": 80}),
    "qwen2": ("qwen2", {"rope_theta": 1_000_000.0}),
    "qwen3": (
        "qwen3",
        {
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 16,
            "num_hidden_layers": 2,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe": (  # the second layer has no experts
        "qwen3_moe",
        SMALL
        | {
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": (
        "mixtral",
        SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    ),
    "phi3_longrope": (
        "phi3",
        LITTLE | {"original_max_position_embeddings": 512, "rope_parameters": LONGROPE},
    ),
    "glm": ("glm", LITTLE | {"rope_parameters": HALF_ROPE}),
    "olmo2": ("olmo2", LITTLE),
    "phi3": ("phi3", LITTLE | {"sliding_window": 8}),
    "qwen2_windows_yarn": (
        "qwen2",
        LITTLE
        | {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": YARN_ROPE,
        },
    ),
    "glm4": ("glm4", LITTLE | {"rope_parameters": HALF_ROPE}),
    "gemma3_text": (
        "gemma3_text",
        LITTLE
        | {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 8,
            "query_pre_attn_scalar": 12,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": LINEAR_ROPE | {"rope_theta": 1_000_000.0},
            },
            "tie_word_embeddings": True,
        },
    ),
    "gemma2": (
        "gemma2",
        LITTLE
        | {
            "sliding_window": 8,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,  # so small that scores come near them
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        LITTLE
        | {
            "hidden_size": 32,
            "intermediate_size": 20,
            "num_attention_heads": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_parameters": YARN_ROPE | {"truncate": False},
        },
    ),
    "olmoe": (
        "olmoe",
        LITTLE | {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 16},
    ),
    "gpt_oss_mxfp4": (  # codes in blocks of 32: one for gate and up, two for down
        "gpt_oss",
        LITTLE
        | {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_parameters": YARN_ROPE | {"truncate": False},
        },
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {name: size for name, size in SMALL.items() if name != "head_dim"}
        | {
            "mlp_only_layers": [1],
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        SMALL
        | {
            "head_dim": 8,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "use_qk_norm": True,
            "rope_parameters": HALF_ROPE,
        },
    ),
    "seed_oss": ("seed_oss", LEAST | {"attention_bias": True, "attention_out_bias": True}),
    "granite": (
        "granite",
        LEAST
        | {
            "attention_bias": True,
            "mlp_bias": True,
            "embedding_multiplier": 3.7,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.11,
            "logits_scaling": 0.4,
            "tie_word_embeddings": True,
        },
    ),
    "ernie4_5": ("ernie4_5", LEAST | {"use_bias": True, "tie_word_embeddings": True}),
    "smollm3": (
        "smollm3",
        LEAST
        | {
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 0],
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "olmo3": (
        "olmo3",
        LEAST
        | {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": YARN_ROPE,
            },
        },
    ),
    "exaone4": (
        "exaone4",
        LEAST
        | {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": LLAMA3_ROPE,
        },
    ),
    "minimax_m2": (
        "minimax_m2",
        SMALL
        | {
            "head_dim": 8,
            "intermediate_size": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rope_parameters": HALF_ROPE,
        },
    ),
    "cohere": (
        "cohere",
        LEAST
        | {
            "use_qk_norm": True,
            "attention_bias": True,
            "logit_scale": 1.7,
            "tie_word_embeddings": True,
        },
    ),
    "cohere2": (
        "cohere2",
        LEAST
        | {
            "logit_scale": 1.7,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "llama4_text": (
        "llama4_text",
        LEAST
        | {
            "num_hidden_layers": 3,
            "intermediate_size": 16,
            "intermediate_size_mlp": 24,
            "moe_layers": [0, 2],
            "num_local_experts": 4,
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 64,
            "floor_scale": 80,
            "attention_bias": True,
            "rope_parameters": LLAMA3_ROPE,
        },
    ),
    "ministral3": (  # queries grow at 16 and 32 positions
        "ministral3",
        LEAST
        | {
            "rope_parameters": YARN_ROPE
            | {
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.4,
            },
        },
    ),
    "gemma4_text": (  # two shapes of KV heads
        "gemma4_text",
        LEAST
        | GEMMA4
        | {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
        },
    ),
    "gemma4_inputs": (  # as E2B and E4B: inputs of layers, and layers that read others' cache
        "gemma4_text",
        LEAST
        | GEMMA4
        | {
            "vocab_size_per_layer_input": COMMON["vocab_size"],
            "hidden_size_per_layer_input": 16,
            "num_hidden_layers": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2
            + ["full_attention"],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "num_key_value_heads": 1,
        },
    ),
    "gemma4_experts": (  # as 26B-A4B
        "gemma4_text",
        LEAST
        | GEMMA4
        | {
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 11,
            "top_k_experts": 3,
            "moe_intermediate_size": 12,
        },
    ),
    "gemma4_unified_text": (  # of 12B
        "gemma4_unified_text",
        LEAST
        | GEMMA4
        | {
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "llama4_chunks": (  # as Scout, and every other layer without rotary positions
        "llama4_text",
        CHUNKED
        | {
            "no_rope_layer_interval": 2,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 64,
            "floor_scale": 50,
            "attn_scale": 0.4,
            "rope_parameters": LLAMA3_ROPE,
        },
    ),
    "llama4_chunks_128e": (  # as Maverick: no norms, experts in every other layer
        "llama4_text",
        CHUNKED
        | {
            "no_rope_layer_interval": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 96,
            "attention_bias": True,
            "use_qk_norm": False,
            "floor_scale": 60,
            "attn_scale": 0.4,
        },
    ),
    "deepseek_v2": (  # as V2-Lite
        "deepseek_v2",
        MLA
        | {
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.7,
            "rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek_v2_groups": (
        "deepseek_v2",
        MLA
        | {
            "q_lora_rank": 16,
            "n_shared_experts": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 3.0,
            "attention_bias": True,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        MLA
        | {
            "q_lora_rank": 16,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
            "num_mtp_layers": 0,
            "rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "deepseek_v3_halves": (  # one group, as Kimi K2; norms of latents have an epsilon of their own
        "deepseek_v3",
        MLA
        | {
            "q_lora_rank": 16,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "rms_norm_eps": 0.05,
            "num_mtp_layers": 0,
            "rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "glm_moe_dsa": (  # its indexer chooses all tokens of these prompts
        "glm_moe_dsa",
        MLA
        | {
            "q_lora_rank": 16,
            "index_topk": 64,
            "index_head_dim": 12,
            "index_n_heads": 4,
            "rms_norm_eps": 0.01,
        },
    ),
}


def build(model_type: str, overrides: dict, generator: torch.Generator) -> torch.nn.Module:
    """Make one model and draw all of its parameters."""
    config = transformers.AutoConfig.for_model(model_type, **(COMMON | overrides))
    config.dtype = torch.float32
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            x = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                adds_one = model_type in ("gemma2", "gemma3_text")
                x = 0.3 * x + (not adds_one)
            elif name.endswith("bias"):
                x = 0.3 * x
            elif "embed_tokens" in name:  # small, or a tied model only repeats its last token
                x = 0.2 * x
            else:
                x = x / parameter.shape[-1] ** 0.5
            if model_type == "gpt_oss" and name.endswith("gate_up_proj"):
                x = 4 * x  # so that some gates and ups are over the limit
            parameter.copy_(x)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.2 * torch.randn(buffer.shape, generator=generator))
    return model.eval()


def in_mxfp4(directory: Path, generator: torch.Generator) -> torch.nn.Module:
    """Draw the experts' matrices of a written model as codes, and let transformers expand them."""
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = experts, outputs, inputs // 32
        codes = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        least = 124 if name.endswith("gate_up_proj") else 121  # some gates are over the limit
        powers = torch.randint(least, least + 3, shape, dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": powers}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    method = {"quant_method": "mxfp4", "modules_to_not_convert": [*plain, "lm_head"]}
    config = json.loads((directory / "config.json").read_text())
    text = json.dumps(config | {"quantization_config": method}, indent=2)
    (directory / "config.json").write_text(text + "\n")
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    ).eval()


def run(model: torch.nn.Module, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `hidden_states[layers + 2, tokens, hidden]` and `logits[tokens, vocab]`.

    Hooks, because `output_hidden_states` gives the last layer's output only after the final norm.
    """
    inner, seen = model.model, []

    def keep(_module: object, _inputs: object, output: torch.Tensor | tuple) -> None:
        seen.append((output[0] if isinstance(output, tuple) else output)[0].float())

    hooks = [m.register_forward_hook(keep) for m in (inner.embed_tokens, *inner.layers, inner.norm)]
    logits = model(token_ids[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    seen[0] = seen[0] * getattr(model.config, "embedding_multiplier", 1)  # of Granite, outside
    return torch.stack(seen), logits


def expect(model: torch.nn.Module, token_ids: torch.Tensor) -> dict[str, np.ndarray]:
    """Everything that `expected.npz` holds for one prompt."""
    hidden_states, logits = run(model, token_ids)
    greedy, margins, longer = [], [], token_ids
    for _ in range(GREEDY_TOKENS):
        best = run(model, longer)[1][-1].topk(2)
        greedy.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        longer = torch.cat([longer, best.indices[:1]])
    return {
        "token_ids": token_ids.numpy(),
        "hidden_states": hidden_states.numpy(),
        "logits": logits.numpy(),
        "greedy": np.array(greedy),
        "margin": np.array(margins, np.float32),
    }


def kept_of(length: int) -> np.ndarray:
    """Return the tokens on both sides of edges, and the last ones."""
    edges = [edge for step in EDGES for edge in range(0, length, step)]
    near = [edge + beside for edge in edges for beside in (-1, 0)]
    return np.unique([*(token for token in near if token >= 0), length - 2, length - 1])


def write(directory: Path, name: str) -> float:
    """Write one model's folder; return the smallest margin of its greedy choices."""
    seed = SEED + list(MODELS).index(name) + RESEEDED.get(name, 0)
    generator = torch.Generator().manual_seed(seed)
    model = build(*MODELS[name], generator)
    model.save_pretrained(directory / name)
    if name.endswith("mxfp4"):
        model = in_mxfp4(directory / name, generator)
    expected: dict[str, np.ndarray] = {}
    is_long = name.startswith("llama4_chunks")
    for i, length in enumerate(LONG_PROMPTS if is_long else PROMPT_LENS):
        token_ids = torch.randint(3, COMMON["vocab_size"], (length,), generator=generator)
        found = expect(model, token_ids)
        if is_long:
            kept = found["kept"] = kept_of(length)
            found["hidden_states"] = found["hidden_states"][:, kept]
            found["logits"] = found["logits"][kept]
        expected |= {f"{key}_{i}": value for key, value in found.items()}
    np.savez_compressed(directory / name / "expected.npz", **expected)
    return min(float(expected[f"margin_{i}"].min()) for i in range(len(PROMPT_LENS)))


def main() -> None:
    """Write every model, or those named; refuse near-ties, and record the versions."""
    default = Path(__file__).parent.parent / "data" / "parity"
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    directory.mkdir(parents=True, exist_ok=True)
    logging.disable_progress_bar()
    with torch.inference_mode():
        margins = {name: write(directory, name) for name in sys.argv[2:] or MODELS}
    close = {name: margin for name, margin in margins.items() if margin < LEAST_MARGIN}
    if close:
        sys.exit(f"greedy choices closer than {LEAST_MARGIN}: {close}; change SEED")
    versions = directory / "versions.json"
    known = json.loads(versions.read_text())["least_greedy_margin"] if versions.exists() else {}
    margins = known | {name: round(margin, 4) for name, margin in margins.items()}
    record = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seed": SEED,
        "attention": "eager",
        "dtype": "float32",
        "prompt_lens": PROMPT_LENS,
        "least_greedy_margin": margins,
    }
    versions.write_text(json.dumps(record, indent=2) + "\n")
    for path in sorted(directory.rglob("*.*")):
        print(f"{path.stat().st_size:8d} {path.relative_to(directory)}")


if __name__ == "__main__":
    main()
