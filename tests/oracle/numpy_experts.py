"""A layer of experts in NumPy float64, token by token: an oracle that imports nothing of ours.

Reads the tensors of Qwen2-MoE, Qwen3-MoE and Mixtral by Hugging Face's names; what all tokens use
is an MLP of `numpy_llama`.
"""

import numpy as np

Tensors = dict[str, np.ndarray]
# Under a layer: router, experts, and an expert's gate, up and down.
QWEN_MOE = ("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")
MIXTRAL = ("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")
NAMES = {"qwen2_moe": QWEN_MOE, "qwen3_moe": QWEN_MOE, "mixtral": MIXTRAL}
SHARED, SHARED_GATE = "mlp.shared_expert", "mlp.shared_expert_gate"


def has_experts(config: dict, layer: int) -> bool:
    """Whether a layer has experts in place of an MLP."""
    every = (layer + 1) % config.get("decoder_sparse_step", 1) == 0
    listed = layer in config.get("mlp_only_layers", ())
    return config["model_type"] in NAMES and every and not listed


def sizes(config: dict) -> tuple[int, int]:
    """(experts, width of each)."""
    if config["model_type"] == "mixtral":
        return config["num_local_experts"], config["intermediate_size"]
    return config["num_experts"], config["moe_intermediate_size"]


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor of a layer's experts."""
    router, experts, *parts = NAMES[config["model_type"]]
    (num, width), hidden = sizes(config), config["hidden_size"]
    found = {f"{router}.weight": (num, hidden)}
    for expert in range(num):
        for part, shape in zip(parts, [(width, hidden)] * 2 + [(hidden, width)], strict=True):
            found[f"{experts}.{expert}.{part}.weight"] = shape
    if shared := config.get("shared_expert_intermediate_size"):
        found[f"{SHARED_GATE}.weight"] = (1, hidden)
        for part, shape in zip(parts, [(shared, hidden)] * 2 + [(hidden, shared)], strict=True):
            found[f"{SHARED}.{part}.weight"] = shape
    return found


def share_of(x: np.ndarray, tensors: Tensors, layer: str) -> np.ndarray:
    """What the expert that all tokens use is times, `[tokens, 1]`."""
    return 1 / (1 + np.exp(-x @ tensors[f"{layer}.{SHARED_GATE}.weight"].T))


def choose(x: np.ndarray, router: np.ndarray, config: dict) -> tuple[list[int], np.ndarray]:
    """The experts of one token and their weights; of equal ones those with the lower numbers."""
    probabilities = np.exp(router @ x - (router @ x).max())
    probabilities /= probabilities.sum()
    chosen = np.argsort(-probabilities, kind="stable")[: config["num_experts_per_tok"]]
    weights = probabilities[chosen]
    if config["model_type"] == "mixtral" or config["norm_topk_prob"]:
        weights = weights / weights.sum()
    return chosen.tolist(), weights


def feed_forward(x: np.ndarray, config: dict, tensors: Tensors, layer: str) -> np.ndarray:
    """What the experts make of `x[tokens, hidden]`."""
    router, experts, *parts = NAMES[config["model_type"]]
    y = np.zeros_like(x)
    for t, token in enumerate(x):
        chosen, weights = choose(token, tensors[f"{layer}.{router}.weight"], config)
        for expert, weight in zip(chosen, weights, strict=True):
            at = f"{layer}.{experts}.{expert}"
            gate, up, down = (tensors[f"{at}.{part}.weight"] for part in parts)
            inner = multiply(gate, token)
            inner = inner / (1 + np.exp(-inner)) * multiply(up, token)
            y[t] += weight * multiply(down, inner)
    return y


def multiply(matrix: np.ndarray, x: np.ndarray) -> np.ndarray:
    """An expert's product with one token."""
    return matrix @ x
