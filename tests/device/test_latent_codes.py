"""A cache of codes of latents: as if latents had been rounded to codes, whoever serves them."""

import shutil
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from engines import RandomPolicy, build_tiny, run, tokens
from harness import forward
from safetensors.numpy import load_file, save_file
from spent import exhaustive, quick, thorough

from shiftjax.arch.formats import Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.core.request import SamplingParams
from shiftjax.costs.memory import kv_token_bytes
from shiftjax.models.mla import LatentAttention
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout
from shiftjax.weights.huggingface import HuggingFaceSource
from shiftjax.weights.kv_scales import identify_scales
from shiftjax.weights.typed_fields import read_json

PARITY = Path(__file__).parent.parent / "data" / "parity"
FP8_KV = Formats("float32", "fp8", "float32")
CODE, LARGEST = jnp.float8_e4m3fn, 448.0
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def scale_of(layer: int) -> np.float32:
    """Of the first layer some latents are beyond the largest code."""
    return np.float32((0.002, 0.013)[layer % 2])


def scaled(name: str, folder: Path) -> Path:
    """A checkpoint with scales of latents; that of values, of which there are none, is ignored."""
    tensors, config = load_file(PARITY / name / "model.safetensors"), PARITY / name / "config.json"
    for layer in range(read_json(config)["num_hidden_layers"]):
        at = f"model.layers.{layer}.self_attn"
        tensors |= {f"{at}.k_scale": scale_of(layer).reshape(1), f"{at}.v_scale": np.float32([9])}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(config, folder)
    return folder


def prompts_of(name: str) -> list[list[int]]:
    data = np.load(PARITY / name / "expected.npz")
    return [data[f"token_ids_{i}"].tolist() for i in range(2)]


@pytest.mark.costs(15)
@pytest.mark.parametrize("name", ["deepseek_v3", *exhaustive("deepseek_v2", "glm_moe_dsa")])
def test_logits_are_those_of_rounded_latents(name, tmp_path, monkeypatch):
    folder, prompt = scaled(name, tmp_path), prompts_of(name)[0]
    found = [
        forward(folder, prompt, 2, 2, mode, "alias", formats=FP8_KV)[1]
        for mode in (Mode(2, 2), Mode(2, 1))
    ]
    (_, plain, _) = forward(folder, prompt, 1, 1, Mode(1, 1), "alias")
    numbers = LatentAttention._latents

    def rounded(self, x, context):
        layer = int(self.nth)
        codes = numbers(self, x, context) / scale_of(layer)
        return jnp.clip(codes, -LARGEST, LARGEST).astype(CODE).astype(x.dtype) * scale_of(layer)

    layers = iter(range(99))
    made = LatentAttention.__init__

    def numbered(self, *arguments):
        made(self, *arguments)
        self.nth = next(layers)

    monkeypatch.setattr(LatentAttention, "__init__", numbered)
    monkeypatch.setattr(LatentAttention, "_latents", rounded)
    (_, expected, _) = forward(folder, prompt, 1, 1, Mode(1, 1), "alias")
    for logits in found:
        np.testing.assert_allclose(logits, expected, atol=2e-3)
        assert np.median(np.abs(logits - plain)) > 0.1


@pytest.mark.costs(12)
@pytest.mark.parametrize("name", ["deepseek_v3", *exhaustive("deepseek_v2")])
def test_codes_without_scales_are_near_to_numbers(name):
    """They keep 4 bits. Some tokens change experts, hence the median."""
    prompt, bfloat16 = prompts_of(name)[0], Formats("float32", "bfloat16", "float32")
    exact, *others = (
        forward(PARITY / name, prompt, 1, 1, Mode(1, 1), "alias", formats=formats)[1]
        for formats in (None, bfloat16, FP8_KV)
    )
    of_numbers, of_codes = (np.median(np.abs(x - exact)) / exact.std() for x in others)
    assert 0 < of_numbers < 1e-2 and 4 * of_numbers < of_codes < 0.1


@cache
def served_alone(folder: Path, name: str) -> list[list[int]]:
    """What one device makes of the prompts."""
    return serve(folder, name, sp=1, tp=1)


def serve(folder: Path, name: str, **options) -> list[list[int]]:
    """Serve prompts three times at once in modes drawn at random, and all again, by prefix hits."""
    longest = 64 if name == "glm_moe_dsa" else 128
    built = build_tiny(folder, kv_cache_dtype="fp8", max_model_len=longest, **options)
    if not options.get("fleet"):
        built.engine.policy = RandomPolicy(5)
    assert built.deployment.budgets.kv == f"fp8 {identify_scales(HuggingFaceSource(folder))}"
    prompts, found = prompts_of(name) * 3, []
    for _ in range(2):
        events = run(built.engine, prompts, [GREEDY] * 6)
        found += [tokens(events[i, 0]) for i in range(6)]
    assert found == found[:2] * 6
    preemptions = built.engine.stats().num_preemptions
    assert "preemption" not in options or preemptions["swap"] > 0
    return found[:2]


SERVED = {
    "positions": {"sp": 2, "tp": 2, "kv_split": "position"},
    "copies": {"sp": 2, "tp": 2, "kv_split": "replicate"},
    "swap": {
        **{"sp": 2, "tp": 1, "num_blocks": 20, "kv_split": "position"},
        **{"preemption": "swap", "host_memory": "1m"},
    },
    "fleet": {"fleet": True, "tp": 1, "devices": 4, "kv_split": "position"},
    "stages": {"sp": 2, "tp": 1, "pp": 2, "kv_split": "position"},
}


@pytest.mark.costs(40)
@pytest.mark.parametrize("kind", quick(SERVED, "positions"))
def test_tokens_are_those_of_one_device(kind, tmp_path):
    folder = scaled("deepseek_v3", tmp_path)
    assert serve(folder, "deepseek_v3", **SERVED[kind]) == served_alone(folder, "deepseek_v3")


@pytest.mark.parametrize("name", [*thorough("glm_moe_dsa"), *exhaustive("deepseek_v2")])
def test_other_families_split_codes_of_latents(name, tmp_path):
    folder = scaled(name, tmp_path)
    assert serve(folder, name, **SERVED["positions"]) == served_alone(folder, name)


def test_codes_take_half_the_bytes():
    layout = Layout(PRESETS["deepseek-v3"], 8, 1, by_position=True)
    sizes = [
        kv_token_bytes(layout, Formats("bfloat16", kv, "bfloat16")) for kv in ("bfloat16", "fp8")
    ]
    assert sizes == [61 * 576 * 2 // 8, 61 * 576 // 8]
