"""LSTM and MLP speculators in NumPy float64, one token of one sequence at a time.

Reads what Arctic Inference writes (`config.json` and tensor names) and imports neither JAX nor
anything of ShiftJAX.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from scipy.special import erf, expit

from oracle.numpy_sampling import softmax

Tensors = dict[str, np.ndarray]


def example(method: str, inner_dim: int, n_predict: int = 3, **flags: bool) -> dict:
    """A `config.json` for a target of 256 token ids and hidden states of 64."""
    config = {"vocab_size": 256, "n_predict": n_predict, "num_lookahead_tokens": n_predict}
    config |= {"base_model_archs": ["LlamaForCausalLM"], "inner_dim": inner_dim}
    config |= {"scale_input": False, "tie_weights": method == "lstm", "tie_lstm_embs": False}
    if method == "mlp":
        config |= {"architectures": ["ArcticMLPSpeculatorPreTrainedModel"], "emb_dim": 64}
    else:
        config |= {"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"], "method": "sum_lstm"}
        config |= {"input_hidden_dim": 64, "proj_dim": inner_dim, "emb_dim": inner_dim}
    return config | flags


EXAMPLES = {
    "mlp": example("mlp", 64, scale_input=True),
    "mlp tied": example("mlp", 40, tie_weights=True),
    "lstm": example("lstm", 40),
    "lstm tied": example("lstm", 72, tie_lstm_embs=True, scale_input=True),
}
"""Every way to tie weights; narrower than the target, as wide, and wider."""


def gelu(x: np.ndarray) -> np.ndarray:
    """The exact one."""
    return x * (1 + erf(x / np.sqrt(2))) / 2


def norm(x: np.ndarray, tensors: Tensors, name: str | None = None) -> np.ndarray:
    """Over the root mean square; with the parameters of `name`."""
    x = x / np.sqrt(np.mean(x**2) + 1e-6)
    return x if name is None else x * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]


def mlp(config: dict, tensors: Tensors, i: int, state: np.ndarray, token: int) -> np.ndarray:
    """State after draft i; `state` is what was before it."""
    own, proj = (0, min(i, 1)) if config["tie_weights"] else (i, i)
    x = tensors[f"proj.{proj}.weight"] @ state
    x = x + alpha(config, len(x)) * tensors[f"emb.{own}.weight"][token]
    return gelu(norm(x, tensors, f"ln.{own}"))


def lstm(
    config: dict, tensors: Tensors, i: int, state: np.ndarray, cell: np.ndarray, token: int
) -> tuple[np.ndarray, np.ndarray]:
    """State and cell after draft i."""
    x = {}
    for gate in ("forget", "input", "output", "cell"):
        owner = "forget" if config["tie_lstm_embs"] else gate
        x[gate] = tensors[f"{gate}_proj.{min(i, 1)}.weight"] @ state
        x[gate] = x[gate] + alpha(config, len(cell)) * tensors[f"{owner}_emb.0.weight"][token]
    candidate = gelu(norm(x["cell"], tensors, "cell_ln.0"))
    cell = cell * expit(x["forget"]) + candidate * expit(x["input"])
    return gelu(norm(cell, tensors, "state_ln.0")) * expit(x["output"]), cell


def alpha(config: dict, inner: int) -> float:
    """Weight of a token's embedding against the state's projection."""
    state_weight = 0.5 ** (0.5 / config["n_predict"])
    return np.sqrt((1 - state_weight**2) * inner / 2) / state_weight


def logits_of(config: dict, tensors: Tensors, hidden: np.ndarray, tokens: list[int]) -> np.ndarray:
    """Logits of the draft after `tokens`: what the target sampled, and the drafts so far."""
    tensors = {name: x.astype(np.float64) for name, x in tensors.items()}
    state = hidden.astype(np.float64)
    if config["scale_input"]:
        state = norm(state, tensors) / np.sqrt(2)
    is_lstm = any(name.startswith("forget_proj") for name in tensors)
    cell = np.zeros(len(tensors["state_ln.0.bias"])) if is_lstm else np.zeros(0)
    for i, token in enumerate(tokens):
        if is_lstm:
            state, cell = lstm(config, tensors, i, state, cell, token)
        else:
            state = mlp(config, tensors, i, state, token)
    head = 0 if config["tie_weights"] else len(tokens) - 1
    return tensors[f"head.{head}.weight"] @ state


def draft(
    config: dict,
    tensors: Tensors,
    hidden: np.ndarray,
    token: int,
    num: int,
    vocab: int | None = None,
    temperature: float = 0.0,
    noise: np.ndarray | None = None,
) -> tuple[list[int], list[float]]:
    """The drafts after `token` and the probability of each; `noise[i]` is that of draft i."""
    tokens, probabilities = [token], []
    for i in range(num):
        p = softmax(logits_of(config, tensors, hidden, tokens)[:vocab] / (temperature or 1.0))
        tokens.append(int(np.argmax(p if temperature == 0 else p / noise[i][: len(p)])))
        probabilities.append(float(p[tokens[-1]]))
    return tokens[1:], probabilities


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor that a file must have."""
    vocab, inner, n = config["vocab_size"], config["inner_dim"], config["n_predict"]
    width = config.get("input_hidden_dim", config["emb_dim"])
    shapes: dict[str, tuple[int, ...]] = {}
    if config.get("method") == "sum_lstm":
        for gate in ("forget", "input", "output", "cell"):
            shapes[f"{gate}_proj.0.weight"] = inner, width
            shapes[f"{gate}_proj.1.weight"] = inner, inner
            if gate == "forget" or not config["tie_lstm_embs"]:
                shapes[f"{gate}_emb.0.weight"] = vocab, inner
        norms, heads = ["cell_ln.0", "state_ln.0"], 1
    else:
        heads = 1 if config["tie_weights"] else n
        shapes |= {f"emb.{i}.weight": (vocab, inner) for i in range(heads)}
        projs = 2 if config["tie_weights"] else n
        shapes |= {f"proj.{i}.weight": (inner, inner if i else width) for i in range(projs)}
        norms = [f"ln.{i}" for i in range(heads)]
    for name in norms:
        shapes |= {f"{name}.weight": (inner,), f"{name}.bias": (inner,)}
    return shapes | {f"head.{i}.weight": (vocab, inner) for i in range(heads)}


def random_tensors(config: dict, seed: int) -> Tensors:
    """Float32 values under which states are of the order of 1 and drafts differ."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        spread = {"emb": 0.5, "head": 0.7}.get(name.split(".")[0].split("_")[-1], 0.3)
        shift = 1.0 if "ln" in name and name.endswith("weight") else 0.0
        tensors[name] = (shift + spread * rng.standard_normal(shape)).astype(np.float32)
    return tensors


def save(directory: Path, config: dict, tensors: Tensors, prefix: str = "speculator.") -> Path:
    """Write a checkpoint as Arctic Inference's training does."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    named = {f"{prefix}{name}": x for name, x in tensors.items()}
    save_file(named, directory / "model.safetensors")
    return directory
