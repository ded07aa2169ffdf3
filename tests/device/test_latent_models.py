"""Models with latent attention (MLA): the engine's tokens are transformers', whatever it does."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from engines import RandomPolicy, build_tiny, run, tokens
from harness import forward, silent
from oracle import quantised_files as files
from safetensors.numpy import load_file
from spent import quick

from shiftjax.arch.formats import Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.config import EngineConfig
from shiftjax.core.request import SamplingParams
from shiftjax.costs.memory import kv_token_bytes
from shiftjax.deploy.deployment import Devices
from shiftjax.device.mesh import make_mesh
from shiftjax.device.place import define, load
from shiftjax.embed.embed_settings import check_embedding
from shiftjax.options import ConfigError
from shiftjax.parallel.blocks import rows_of_scale
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout
from shiftjax.weights.hf_config import parse_config, to_json
from shiftjax.weights.huggingface import HuggingFaceSource
from shiftjax.weights.typed_fields import read_json

PARITY = Path(__file__).parent.parent / "data" / "parity"
MESHES = [(1, 1), (2, 2), (4, 2), (2, 4), (1, 8), (8, 1)]
# A Kimi K2 is a DeepSeek-V3 of one group of experts, and of another name.
RENAMED = {"kimi_k2": ("deepseek_v3_halves", {"model_type": "kimi_k2"})}
CASES = [
    *((name, *mesh) for name in ("deepseek_v2", "deepseek_v3", "glm_moe_dsa") for mesh in MESHES),
    *((name, 4, 2) for name in ("deepseek_v2_groups", "kimi_k2")),
    ("kimi_k2", 1, 8),
    ("deepseek_v3", 3, 2),  # whose heads are padded
]
LONGEST = 480  # tokens of long sequences, which an indexer is told to choose, too
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@cache
def expected(name: str) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and what follows them."""
    data = np.load(PARITY / RENAMED.get(name, (name,))[0] / "expected.npz")
    return [data[f"token_ids_{i}"].tolist() for i in range(2)], [
        data[f"greedy_{i}"].tolist() for i in range(2)
    ]


def serve(name: str, folder: Path, **options: Any):
    """Serve prompts three times at once, and all again; return the engine after it."""
    longest = 64 if name == "glm_moe_dsa" else 128
    directory = folder_of(name, folder) if name in RENAMED else PARITY / name
    built = build_tiny(directory, max_model_len=longest, **options)
    if not options.get("fleet"):
        built.engine.policy = RandomPolicy(5)
    prompts, wanted = expected(name)
    for _ in range(2):
        events = run(built.engine, prompts * 3, [GREEDY] * 6)
        found = [tokens(events[i, 0]) for i in range(6)]
        assert found == wanted * 3
    return built


def folder_of(name: str, folder: Path) -> Path:
    """A checkpoint that may be asked for long contexts."""
    source, changes = RENAMED.get(name, (name, {}))
    config = read_json(PARITY / source / "config.json") | changes
    if "index_topk" in config:
        config["index_topk"] = LONGEST
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(PARITY / source / "model.safetensors")
    return folder


def serve_long(name: str, folder: Path, sp: int, tp: int, kv_split: str):
    """Serve two long prompts at once, and again; return the engine after it."""
    data = np.load(PARITY / RENAMED.get(name, (name,))[0] / "long.npz")
    prompts, wanted = (
        [data[f"{what}_{i}"].tolist() for i in (0, 1)] for what in ("token_ids", "greedy")
    )
    sizes = {"max_model_len": LONGEST, "max_num_batched_tokens": 64, "token_buckets": [64]}
    ways = sp * tp if kv_split == "position" else 1
    options = {"sp": sp, "tp": tp, "kv_split": kv_split, "num_blocks": 240 // ways + 8}
    built = build_tiny(folder_of(name, folder), max_num_seqs=2, **sizes, **options)
    assert built.runners[0].step.layout.position_ways == ways
    built.engine.policy = RandomPolicy(5)
    for _ in range(2):
        events = run(built.engine, prompts, [GREEDY] * 2)
        assert [tokens(events[i, 0]) for i in (0, 1)] == wanted
    return built


@pytest.mark.costs(15)
@pytest.mark.parametrize(("name", "sp", "tp"), quick(CASES, ("deepseek_v3", 4, 2)))
def test_tokens_are_those_of_transformers_under_random_modes(name, sp, tp, tmp_path):
    """Prompts come in chunks, and begin the second time with blocks of the first.

    Devices split positions, and gather what tiles see in several exchanges.
    """
    stats = serve_long(name, tmp_path, sp, tp, "position").engine.stats()
    assert stats.num_prefix_hit_tokens > 0
    assert sp == 1 or min(stats.mode_switches.values()) > 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "sp", "tp"), [("deepseek_v2", 1, 8), ("deepseek_v3", 4, 2), ("glm_moe_dsa", 2, 2)]
)
def test_copies_of_latents_give_the_same_tokens(name, sp, tp, tmp_path):
    assert serve_long(name, tmp_path, sp, tp, "replicate").engine.stats().num_prefix_hit_tokens > 0


SMALL = {"sp": 2, "tp": 1, "num_blocks": 40}
FEW = SMALL | {"num_blocks": 20}
FEATURES: dict[str, dict[str, Any]] = {
    "recompute": SMALL,
    "swap": SMALL | {"preemption": "swap", "host_memory": "1m"},
    "drafts": {"sp": 2, "tp": 1, "speculation": "suffix"},
    "stages": {"sp": 1, "tp": 2, "pp": 2},
    "gather": {"sp": 2, "tp": 1, "weights": "gather"},
    "fleet": {"fleet": True, "tp": 1, "devices": 4},
    "deterministic": {"sp": 2, "tp": 1, "deterministic": True},
    "positions": {"sp": 2, "tp": 2, "kv_split": "position"},
    "positions, drafts": {"sp": 4, "tp": 2, "kv_split": "position", "speculation": "suffix"},
    "positions, recompute": FEW | {"kv_split": "position"},
    "positions, swap": FEW | {"kv_split": "position", "preemption": "swap", "host_memory": "1m"},
    "positions, fleet": {"fleet": True, "tp": 1, "devices": 4, "kv_split": "position"},
    "positions, stages": {"sp": 2, "tp": 1, "pp": 2, "kv_split": "position"},
    "positions, replicas": {"dp": 2, "sp": 2, "tp": 2, "kv_split": "position"},
    "positions, fixed drafts": {
        **{"sp": 2, "tp": 2, "kv_split": "position", "speculation": "suffix"},
        "controls": {"fixed_drafts": True, "max_draft_rows": 24},
    },
}
# Other families, where their layers are not those of DeepSeek-V3: V2's queries are made at once,
# Kimi K2 has another name, and GLM-5 an index.
OF_FAMILIES = [
    *(("deepseek_v2", f"positions, {kind}") for kind in ("fleet", "stages", "replicas", "drafts")),
    *(("glm_moe_dsa", f"positions, {kind}") for kind in ("fleet", "stages", "swap", "drafts")),
    *(("kimi_k2", f"positions, {kind}") for kind in ("replicas", "swap")),
]
OF_V3 = [("deepseek_v3", feature) for feature in FEATURES]


@pytest.mark.costs(50)
@pytest.mark.parametrize(("name", "feature"), quick([*OF_V3, *OF_FAMILIES], OF_V3[0], OF_V3[7]))
def test_what_the_engine_does_beside_steps_changes_no_token(name, feature, tmp_path):
    built = serve(name, tmp_path, **FEATURES[feature])
    preemptions = built.engine.stats().num_preemptions
    kind = feature.removeprefix("positions, ")
    assert kind not in preemptions or preemptions[kind] > 0
    layout = built.runners[0].step.layout
    assert layout.position_ways == (layout.num_devices if "positions" in feature else 1)


def test_a_token_takes_one_latent_on_every_device():
    layout = Layout(PRESETS["deepseek-v3"], 8, 1)
    bfloat16 = Formats("bfloat16", "bfloat16", "bfloat16")
    assert kv_token_bytes(layout, bfloat16) == 61 * 576 * 2
    assert kv_token_bytes(Layout(layout.model, 1, 1), bfloat16) == 61 * 576 * 2
    assert kv_token_bytes(replace(layout, by_position=True), bfloat16) == 61 * 576 * 2 // 8


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2"])
def test_presets_have_the_blocks_of_their_checkpoints(name):
    codes = PRESETS[name].codes
    assert codes is not None and codes.rows_of_scale == rows_of_scale(PRESETS[name])


LINEAR = ("_proj.weight", "_proj_with_mqa.weight")


@cache
def quantised(folder: Path) -> tuple[Path, Path, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A checkpoint of blocks of 128 x 128, as published; and one of the numbers that it says."""
    stored, numbers = {}, {}
    for name, x in load_file(PARITY / "deepseek_v3" / "model.safetensors").items():
        stored[name] = numbers[name] = x
        if name.endswith(LINEAR):
            parts, wide = files.fp8_blocks(x, (128, 128))
            numbers[name] = wide.astype(np.float32)
            stored |= {f"{name.removesuffix('.weight')}.{key}": x for key, x in parts.items()}
    config = read_json(PARITY / "deepseek_v3" / "config.json")
    method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    for kind, tensors, more in (
        ("fp8", stored, {"quantization_config": method | {"activation_scheme": "dynamic"}}),
        ("plain", numbers, {}),
    ):
        (folder / kind).mkdir()
        files.save(tensors, folder / kind / "model.safetensors")
        (folder / kind / "config.json").write_text(json.dumps(config | more))
    return folder / "fp8", folder / "plain", stored, numbers


@pytest.fixture(scope="module")
def in_blocks(tmp_path_factory):
    return quantised(tmp_path_factory.mktemp("latents"))


def test_blocks_of_a_checkpoint_are_widened_where_they_are_asked_to_be(in_blocks):
    fp8, plain, *_ = in_blocks
    prompt = expected("deepseek_v3")[0][0]
    (_, wide, _), (_, want, _) = (
        forward(each, prompt, 2, 2, Mode(2, 2), "alias") for each in (fp8, plain)
    )
    np.testing.assert_array_equal(wide, want)


@pytest.mark.costs(8)
def test_what_makes_keys_and_values_is_plain_beside_codes(in_blocks):
    """It is used in both directions, and codes would be taken for numbers."""
    fp8, plain, stored, numbers = in_blocks
    source, mesh = HuggingFaceSource(fp8), make_mesh(jax.devices()[:4], 2, 2)
    formats = Formats("fp8", "float32", "float32")
    model = define(Layout(source.config, 2, 2), formats)
    arrays = load(model, Layout(source.config, 2, 2), mesh, source, silent)
    held = {w.name: np.asarray(x) for w, x in zip(model.declared, arrays, strict=True)}
    at, ours = "model.layers.1.self_attn", "layers.1.attention"
    for name, theirs in (
        ("q_down", "q_a_proj"),
        ("kv_down", "kv_a_proj_with_mqa"),
        ("kv_up", "kv_b_proj"),
    ):
        assert f"{ours}.{name}_scale" not in held
        want = numbers[f"{at}.{theirs}.weight"]
        np.testing.assert_array_equal(held[f"{ours}.{name}"].reshape(want.shape), want)
    codes, want = held[f"{ours}.q"], stored[f"{at}.q_b_proj.weight"]
    assert codes.reshape(want.shape).tobytes() == want.tobytes()
    prompt = expected("deepseek_v3")[0][0]
    (_, got, _), (_, exact, _) = (
        forward(folder, prompt, 2, 2, Mode(2, 1), "slice", None, own)
        for folder, own in ((fp8, formats), (plain, None))
    )
    assert np.median(np.abs(got - exact)) < 0.1 * exact.std()  # some tokens change experts


def test_a_kimi_is_a_deepseek_v3_of_another_name():
    data = read_json(PARITY / "deepseek_v3" / "config.json")
    kimi = parse_config(data | {"model_type": "kimi_k2"}, "deepseek_v3", "config.json")
    assert to_json(kimi, "float32")["architectures"] == ["DeepseekV3ForCausalLM"]
    source = HuggingFaceSource(PARITY / "deepseek_v3")
    assert replace(kimi, architecture="deepseek_v3") == source.config


def test_texts_are_not_embedded():
    config = EngineConfig.from_options(task="embed")
    model = replace(PRESETS["tiny-deepseek-v3"], experts=None)
    with pytest.raises(ConfigError, match="has latent attention: it generates, and embeds no"):
        check_embedding(config, model, Devices(1, 1 << 40, 1 << 40))
