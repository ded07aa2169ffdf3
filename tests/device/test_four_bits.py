"""Checkpoints of four bits on devices: the codes of the file, and the tokens of those numbers."""

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from engines import RandomPolicy, build_tiny, make, run, tokens
from harness import forward, silent
from lean import greedy_steps
from oracle import numpy_llama
from oracle import quantised_files as files
from spent import exhaustive, thorough

from shiftjax.arch.config import Codes
from shiftjax.arch.formats import Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.build import build
from shiftjax.config import EngineConfig
from shiftjax.core.request import SamplingParams
from shiftjax.costs.memory import weight_bytes
from shiftjax.device.mesh import make_mesh
from shiftjax.device.place import HostWeights, define, load, load_rows
from shiftjax.local_deployment import host_copy_bytes
from shiftjax.options import ConfigError
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout
from shiftjax.weights.huggingface import HuggingFaceSource
from shiftjax.weights.random import RandomSource
from shiftjax.weights.source import OF_CODES, OF_SCALE

PARITY = Path(__file__).parent.parent / "data" / "parity"
INT4 = Formats("int4", "float32", "float32")
PROMPT = [5, 17, 99, 3, 42, 7, 7, 121, 64, 30, 11, 150]
PROMPTS = [PROMPT[i:] + PROMPT[: i + 3] for i in range(4)]
# Whole groups of 16 on 8 devices, and rows of 64 bytes.
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
MOE = WIDE | {
    "model_type": "qwen2_moe",
    "num_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,  # the first layer has an MLP
}
RANDOM = replace(PRESETS["tiny-gpt-oss"], codes=Codes(format="mxfp4", group=32))
KINDS = {"w4a16": WIDE, "w4a16-zeros": MOE, "gptq": WIDE, "awq": MOE, "awq-channel": WIDE}


@cache
def written(format: str, name: str = "") -> tuple[Path, dict, files.Tensors, files.Tensors]:
    """A tiny checkpoint, in which the matrices of this module may be plain."""
    directory = Path(tempfile.mkdtemp(prefix="shiftjax-test-"))

    def edit(config, _):
        field = "ignore" if "ignore" in config["quantization_config"] else "modules_to_not_convert"
        config["quantization_config"][field] = ["lm_head", *([name] if name else [])]

    keep = lambda module: bool(name) and name in module  # noqa: E731
    return directory, *files.write(directory, format, keep, edit, **KINDS[format])


def texts(built, seed: int) -> list[list[int]]:
    """Greedy continuations in modes drawn at random."""
    built.engine.policy = RandomPolicy(seed)
    built.engine.flush_prefix_cache()
    sampling = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)] * len(PROMPTS)
    events = run(built.engine, PROMPTS, sampling)
    return [tokens(events[i, 0]) for i in range(len(PROMPTS))]


@pytest.mark.costs(15)
@pytest.mark.parametrize(
    ("format", "sp", "tp"),
    [
        ("awq", 4, 2),
        *thorough(("w4a16-zeros", 8, 1), ("gptq", 1, 8)),
        *exhaustive(("w4a16", 2, 2), ("awq-channel", 1, 8)),
        *exhaustive(("w4a16-zeros", 1, 1), ("awq", 1, 8), ("gptq", 8, 1), ("w4a16", 4, 2)),
    ],
)
def test_tokens_are_those_of_the_numbers_in_every_mode(format, sp, tp):
    directory, config, _, numbers = written(format)
    expected = [numpy_llama.greedy(config, numbers, prompt, 8) for prompt in PROMPTS]
    built = make(directory, sp, tp, num_blocks=42)
    assert built.deployment.formats.weights == "int4"
    assert [texts(built, seed) for seed in range(2)] == [expected] * 2


@pytest.mark.costs(10)
@pytest.mark.parametrize(("sp", "tp"), [(2, 2), *thorough((1, 4)), *exhaustive((1, 1), (4, 1))])
def test_tokens_of_mxfp4_are_those_of_transformers(sp, tp):
    expected = np.load(PARITY / "gpt_oss_mxfp4" / "expected.npz")
    built = make(PARITY / "gpt_oss_mxfp4", sp, tp)
    assert built.deployment.formats.weights == "mxfp4"
    built.engine.policy = RandomPolicy(5)
    prompts = [expected[f"token_ids_{i}"].tolist() for i in range(2)]
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    events = run(built.engine, prompts, [sampling] * 2)
    for i in range(2):
        assert tokens(events[i, 0]) == expected[f"greedy_{i}"].tolist()


@cache
def tokens_of_random(sp: int, tp: int, quantization: str) -> tuple[list[int], ...]:
    """Greedy texts of random experts in MXFP4, in modes drawn at random."""
    options = {"num_blocks": 42, "max_num_seqs": 4, "token_buckets": [32], "block_size": 4}
    options |= {"sp": sp, "tp": tp, "max_num_batched_tokens": 32, "cache_dir": "none"}
    config = EngineConfig.from_options(dtype="float32", quantization=quantization, **options)
    with greedy_steps():
        return tuple(texts(build(config, RandomSource(RANDOM), silent, None), 3))


@pytest.mark.parametrize(("sp", "tp"), [*thorough((4, 2)), *exhaustive((8, 1), (1, 8))])
def test_random_experts_on_8_devices_are_those_of_their_numbers_on_one(sp, tp):
    assert tokens_of_random(sp, tp, "auto") == tokens_of_random(1, 1, "none")


@pytest.mark.parametrize(
    "options",
    [
        *thorough(
            {"weights": "gather", "sp": 2, "tp": 2},
            {"experts": "whole", "sp": 4, "tp": 1},
            {"phases": "pp2:tp2", "devices": 2, "host_memory": "64MiB"},
        ),
        *exhaustive(
            {"experts": "all", "sp": 2, "tp": 2},
            {"pp": 2, "sp": 2, "tp": 1},
            {"fleet": True, "devices": 4, "tp": 1},
            {"quantization": "none", "sp": 2, "tp": 2},
        ),
    ],
)
def test_tokens_of_mxfp4_are_the_same_in_every_deployment(options):
    name = "gpt_oss_mxfp4"
    expected = np.load(PARITY / name / "expected.npz")
    built = build_tiny(PARITY / name, **options)
    prompts = [expected[f"token_ids_{i}"].tolist() for i in range(2)]
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    events = run(built.engine, prompts, [sampling] * 2)
    for i in range(2):
        assert tokens(events[i, 0]) == expected[f"greedy_{i}"].tolist()


@pytest.mark.parametrize("plain", ["", "model.layers.1.mlp.up_proj"])
@pytest.mark.parametrize(
    ("format", "strategy"),
    [("w4a16", "alias"), *thorough(("w4a16", "slice"), ("gptq", "replicate"))],
)
def test_logits_are_those_of_the_numbers(format, strategy, plain):
    directory, config, _, numbers = written(format, plain)
    expected = numpy_llama.forward(config, numbers, PROMPT)["logits"]
    for mode in (Mode(2, 2), Mode(2, 1)):
        _, logits, _ = forward(directory, PROMPT, 2, 2, mode, strategy, formats=INT4)
        np.testing.assert_allclose(logits, expected, atol=2e-4)


def loaded(directory: Path, sp: int, tp: int, *, from_host: bool = False) -> dict[str, np.ndarray]:
    """The stored weights of a layout, by name."""
    source = HuggingFaceSource(directory)
    layout, mesh = Layout(source.config, sp, tp), make_mesh(jax.devices()[: sp * tp], sp, tp)
    model = define(layout, replace(INT4, weights=source.config.codes.format))
    if from_host:
        rows = HostWeights(source, np.float32)
        arrays = load_rows(model, layout, mesh, rows, silent)
        assert rows.num_bytes == host_copy_bytes(source.config, model.formats)
    else:
        arrays = load(model, layout, mesh, source, silent)
    held = sum(each.data.nbytes for x in arrays if x is not None for each in x.addressable_shards)
    assert held == sp * tp * weight_bytes(layout, model.formats)
    return {weight.name: np.asarray(x) for weight, x in zip(model.declared, arrays, strict=True)}


def numbers_of(stored: dict[str, np.ndarray], name: str) -> np.ndarray:
    """What a stored matrix says, `[.., out, in]`; written without the code under test."""
    codes, scales = stored[name], stored[f"{name}_scale"]
    zeros = stored.get(f"{name}_zero", np.full(scales.shape, 8)).astype(np.float64)
    wide = np.stack([codes % 16, codes // 16], axis=-1).reshape(*codes.shape[:-1], -1)
    if codes.ndim == 3 and not name.endswith((".q", ".k", ".v")):  # groups, then outputs
        scales, zeros = scales.swapaxes(1, 2), zeros.swapaxes(1, 2)
    group = wide.shape[-1] // scales.shape[-1]
    return (wide - zeros.repeat(group, axis=-1)) * scales.repeat(group, axis=-1).astype(np.float64)


@pytest.mark.parametrize("from_host", [False, True])
@pytest.mark.parametrize("format", KINDS)
def test_codes_on_devices_say_the_numbers_of_the_file(format, from_host):
    directory, config, _, numbers = written(format)
    stored, layer = loaded(directory, 2, 1, from_host=from_host), "model.layers.0"
    for name, source in (("mlp.up", "mlp.up_proj"), ("attention.q", "self_attn.q_proj")):
        found = numbers_of(stored, f"layers.0.{name}")
        expected = numbers[f"{layer}.{source}.weight"]
        np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-6)
    for name, source in (("mlp.down", "mlp.down_proj"), ("attention.o", "self_attn.o_proj")):
        blocks = numbers_of(stored, f"layers.0.{name}")
        assert len(blocks) == 2
        expected = numbers[f"{layer}.{source}.weight"]
        np.testing.assert_allclose(np.concatenate(list(blocks), axis=1), expected, rtol=1e-6)
    for name in ("gate", "up", "down") if "num_experts" in config else ():
        found = numbers_of(stored, f"layers.1.mlp.experts.{name}")
        for expert in range(16):
            expected = numbers[f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight"]
            np.testing.assert_allclose(found[expert], expected, rtol=1e-6)


def test_padded_heads_have_whole_groups(tmp_path):
    """3 KV heads on 2 devices become 4, whose groups are zeros."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 64}
    _, _, numbers = files.write(tmp_path, "w4a16", hidden_size=96, **heads)
    stored = loaded(tmp_path, 1, 2)
    found = np.concatenate(list(numbers_of(stored, "layers.0.attention.o")), axis=1)
    expected = numbers["model.layers.0.self_attn.o_proj.weight"]
    np.testing.assert_allclose(found[:, : expected.shape[1]], expected, rtol=1e-6)
    assert found.shape[1] > expected.shape[1] and not found[:, expected.shape[1] :].any()


def test_a_block_that_cuts_groups_is_refused_with_what_to_use():
    directory = written("w4a16")[0]
    words = (
        r"layers\.0\.mlp\.down: 3 devices have 86 inputs each, which cuts groups of 16 .* use "
        "other degrees, or --quantization none"
    )
    with pytest.raises(ConfigError, match=words):
        make(directory, 1, 3)
    assert make(directory, 3, 1, quantization="none").deployment.formats.weights == "float32"


def test_random_weights_have_codes_that_say_their_numbers():
    source = RandomSource(RANDOM)
    name = "model.layers.0.mlp.experts.3.gate_proj.weight"
    part = (slice(5, 9), slice(32, 64))
    assert np.array_equal(source.read(name, part), source.read(name)[part])
    codes, scales = source.read(name + OF_CODES), source.read(name + OF_SCALE)
    assert codes.shape == (32, 32) and scales.shape == (32, 2)
    assert 0.7 < source.read(name).std() * 8 < 1.5
