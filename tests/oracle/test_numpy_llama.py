"""The NumPy oracle agrees with what Hugging Face transformers recorded, layer by layer."""

import json
from pathlib import Path

import numpy as np
import pytest

from oracle.numpy_llama import (
    ARCHITECTURES,
    forward,
    greedy,
    load_checkpoint,
    random_checkpoint,
    rope_settings,
)

PARITY = Path(__file__).parent.parent / "data" / "parity"
NAMES = sorted(path.parent.name for path in PARITY.glob("*/expected.npz"))
ROPES = ("default", "linear", "llama3")


def is_known(name: str) -> bool:
    """Whether this oracle computes such models; others have transformers' word alone."""
    config = json.loads((PARITY / name / "config.json").read_text())
    return config["model_type"] in ARCHITECTURES and rope_settings(config)["rope_type"] in ROPES


def test_all_variants_are_recorded():
    recorded = json.loads((PARITY / "versions.json").read_text())["least_greedy_margin"]
    assert sorted(recorded) == NAMES


@pytest.mark.parametrize("prompt", [0, 1])
@pytest.mark.parametrize("name", list(filter(is_known, NAMES)))
def test_numpy_matches_transformers(name: str, prompt: int):
    config, tensors = load_checkpoint(PARITY / name)
    expected = np.load(PARITY / name / "expected.npz")
    token_ids = expected[f"token_ids_{prompt}"].tolist()
    seen = forward(config, tensors, token_ids)
    hidden_states = np.stack(seen["hidden_states"])
    np.testing.assert_allclose(hidden_states, expected[f"hidden_states_{prompt}"], atol=1e-5)
    np.testing.assert_allclose(seen["logits"], expected[f"logits_{prompt}"], atol=1e-5)
    assert greedy(config, tensors, token_ids, 12) == expected[f"greedy_{prompt}"].tolist()


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"model_type": "qwen3", "num_attention_heads": 9, "num_key_value_heads": 3},
        {"model_type": "qwen2", "tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True, "head_dim": 8},
        {"model_type": "mistral", "sliding_window": 4},
    ],
)
def test_every_parameter_of_a_random_checkpoint_counts(tmp_path: Path, overrides: dict):
    config, tensors = random_checkpoint(tmp_path, seed=3, **overrides)
    read_config, read_tensors = load_checkpoint(tmp_path)
    assert read_config == config
    prompt = [5, 17, 3, 150, 42, 9, 77]
    logits = forward(read_config, read_tensors, prompt)["logits"]
    without = {name: np.zeros_like(t) if t.ndim == 2 else t + 1 for name, t in tensors.items()}
    for name in tensors:
        changed = forward(config, tensors | {name: without[name]}, prompt)["logits"]
        assert np.abs(changed - logits).max() > 1e-2, name


def test_a_sliding_window_forgets(tmp_path: Path):
    config, tensors = random_checkpoint(
        tmp_path, 0, model_type="mistral", sliding_window=3, num_hidden_layers=1
    )
    last = [forward(config, tensors, [a, 8, 9, 10])["logits"][-1] for a in (5, 6)]
    np.testing.assert_array_equal(last[0], last[1])
    third = [forward(config, tensors, [a, 9, 10])["logits"][-1] for a in (5, 6)]
    assert np.abs(third[0] - third[1]).max() > 1e-3
