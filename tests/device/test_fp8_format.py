"""Codes and scales are the same bits on all devices, in all modes; and those of checkpoints."""

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from engines import MOE, RandomPolicy, checkpoint, make, run, tokens
from harness import BIASED, forward, held_bytes, silent
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import numpy_fp8, numpy_llama
from oracle import quantised_files as files
from spent import exhaustive, quick, thorough

from shiftjax.arch.config import Codes as ModelCodes
from shiftjax.arch.config import Experts
from shiftjax.arch.formats import Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.core.request import SamplingParams
from shiftjax.costs.memory import shift_copy_bytes, weight_bytes
from shiftjax.device.mesh import make_mesh, mesh_of
from shiftjax.device.mode_weights import ModeWeights
from shiftjax.device.place import HostWeights, define, load, load_rows
from shiftjax.local_deployment import host_copy_bytes
from shiftjax.models.products import Matrix, project_in, project_out, quantise_blocks
from shiftjax.parallel.grid import TOKEN_AXES, WEIGHT_AXES, Mode
from shiftjax.parallel.layout import Layout
from shiftjax.weights.huggingface import HuggingFaceSource
from shiftjax.weights.random import RandomSource
from shiftjax.weights.source import TensorSource

FP8 = Formats("fp8", "float32", "float32")
PROMPT = [5, 17, 99, 3, 42, 7, 7, 121, 64, 30, 11, 150]
MESHES = [(1, 1), (2, 2), (4, 2), (8, 1), (1, 8)]
# A block of hidden states and a half; blocks of o are two heads, a part of one, or one. What is
# padded on some devices: heads, and the width of the MLP.
EVEN = replace(
    *(PRESETS["tiny"],),
    hidden_size=192,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    intermediate_size=1024,
)
UNEVEN = replace(BIASED, hidden_size=192, head_dim=256, intermediate_size=18 * 128)
SWIFTKV = replace(EVEN, architecture="llama_swiftkv", num_kv_layers=1)
EXPERTS = replace(
    *(PRESETS["tiny-qwen2-moe"],),
    hidden_size=192,
    experts=Experts(11, 2, 160, 1024, has_shared_gate=True),
)
CONFIGS = {"even": EVEN, "uneven": UNEVEN, "swiftkv": SWIFTKV, "experts": EXPERTS}
SQUARES: dict[str, Any] = {
    "hidden_size": 320,
    "intermediate_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}


def in_mode(source: TensorSource, sp: int, tp: int, mode: Mode, *, from_host: bool = False):
    """Every part of a quantised matrix, row by row of the checkpoint, as a mode has it."""
    layout, mesh = Layout(source.config, sp, tp), make_mesh(jax.devices()[: sp * tp], sp, tp)
    model = define(layout, FP8)
    weights = ModeWeights(model, layout, "alias")
    if from_host:
        rows = HostWeights(source, "float32")
        arrays = load_rows(model, layout, mesh, rows, silent)
        assert rows.num_bytes == host_copy_bytes(source.config, FP8)
    else:
        arrays = load(model, layout, mesh, source, silent)
    stored = weights.with_head(arrays)
    arrays = weights.of(mode, stored)
    if mode == layout.shift:  # a switch has moved nothing but small copies
        expected = weight_bytes(layout, FP8) + shift_copy_bytes(layout, FP8, "alias")
        assert set(held_bytes([*stored, *arrays]).values()) == {expected}
    found = {}
    for weight, array in zip(model.declared, arrays, strict=True):
        if weight.kind not in ("codes", "scale"):
            continue
        values, axis = np.asarray(array), weight.axes[0]
        used = layout.used_in(weight, mode)
        rows = np.arange(len(values)) if axis is None else layout.source_rows(axis, used)
        for row, value in zip(rows, values, strict=True):
            if row >= 0:
                same = found.setdefault((weight.name, int(row)), value)
                assert same.tobytes() == value.tobytes()
            elif weight.kind == "codes":
                assert not value.astype(np.float32).any()
    return found


def same(found: dict, expected: dict) -> bool:
    """Whether all have the same bits."""
    return found.keys() == expected.keys() and all(
        found[key].tobytes() == value.tobytes() for key, value in expected.items()
    )


@cache
def on_one_device(name: str) -> dict:
    return in_mode(RandomSource(CONFIGS[name]), 1, 1, Mode(1, 1))


@pytest.mark.costs(8)
@pytest.mark.parametrize(
    ("name", "sp", "tp"),
    quick(
        [(name, *mesh) for name in CONFIGS for mesh in MESHES[1:]],
        *(("even", 8, 1), ("uneven", 4, 2)),
    ),
)
def test_codes_and_scales_are_the_same_bits_in_every_mode(name, sp, tp):
    expected, source = on_one_device(name), RandomSource(CONFIGS[name])
    for mode in Layout(source.config, sp, tp).modes:
        assert same(in_mode(source, sp, tp, mode), expected)


@pytest.mark.parametrize("fixed", [None, 0.01])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(("sp", "tp"), MESHES)
def test_codes_of_activations_are_the_same_bits_in_every_mode(sp, tp, block, fixed):
    x = np.random.default_rng(3).standard_normal((16, 1024)).astype(np.float32)
    x[3, 100] = 1e4
    fixed = None if fixed is None else jnp.full(1, fixed, jnp.float32)
    alone = quantise_blocks(jnp.asarray(x), block, fixed)
    tree, codes, scale = jax.tree.structure(alone), *map(np.asarray, alone)
    for row, token in enumerate(x):
        parts = np.split(token, 1024 // block)
        for nth, part in enumerate(parts):
            unit = np.abs(part).max() * np.float32(1 / 448) if fixed is None else np.float32(0.01)
            assert scale[nth, row] == unit
            own = np.clip(part / unit, -448, 448).astype(ml_dtypes.float8_e4m3fn)
            assert codes[row, nth * block : (nth + 1) * block].tobytes() == own.tobytes()
    base = make_mesh(jax.devices()[: sp * tp], sp, tp)
    for mode in Layout(EVEN, sp, tp).modes:
        mesh, spec = mesh_of(base, mode), P(TOKEN_AXES, WEIGHT_AXES)
        split = jax.shard_map(
            lambda part: quantise_blocks(part, block, fixed),
            mesh=mesh,
            in_specs=spec,
            out_specs=jax.tree.unflatten(tree, (spec, P(WEIGHT_AXES, TOKEN_AXES))),
            check_vma=False,
        )
        found = jax.jit(split)(jax.device_put(x, NamedSharding(mesh, spec)))
        assert np.asarray(found.values).tobytes() == codes.tobytes()
        assert np.asarray(found.scale).tobytes() == scale.tobytes()


# ------------------------------------------------------------------------ checkpoints in squares


@cache
def written(format: str) -> tuple[Path, dict, files.Tensors, files.Tensors]:
    directory = Path(tempfile.mkdtemp(prefix="shiftjax-test-"))
    return directory, *files.write(directory, format, **SQUARES)


def numbers_of(found: dict, name: str, rows: int = 64) -> np.ndarray:
    """What codes and scales of squares say, float64 `[out, in]`, by rows as they are stored."""
    own = (key for key in found if key[0] == name)
    codes = np.stack([found[key] for key in sorted(own, key=lambda key: key[1])])
    own = (key for key in found if key[0] == f"{name}_scale")
    scale = np.stack([found[key] for key in sorted(own, key=lambda key: key[1])])
    if name.endswith(("o", "down")):
        wide = codes.astype(np.float64) * scale.repeat(rows, axis=1)[..., None]
        return wide.swapaxes(0, 1).reshape(codes.shape[1], -1)
    codes, scale = codes.reshape(-1, codes.shape[-1]), scale.reshape(-1, scale.shape[-1])
    wide = scale.repeat(len(codes) // len(scale), axis=0).repeat(128, axis=1)
    return codes.astype(np.float64) * wide[:, : codes.shape[1]]


@pytest.mark.costs(8)
@pytest.mark.parametrize(
    ("format", "sp", "tp", "from_host"),
    [
        ("fp8-squares", 2, 2, False),
        ("compressed-tensors-squares", 2, 2, True),
        *thorough(("fp8-squares", 8, 1, True), ("fp8-squares", 4, 2, False)),
        *exhaustive(("fp8-squares", 1, 8, False), ("fp8-squares", 1, 1, False)),
    ],
)
def test_squares_of_a_checkpoint_are_kept_exactly(format, sp, tp, from_host):
    directory, _, tensors, numbers = written(format)
    source = HuggingFaceSource(directory)
    assert source.config.codes == ModelCodes(rows_of_scale=64) and source.config.has_codes
    names = {
        **{f"attention.{x}": f"self_attn.{x}_proj" for x in "qkvo"},
        **{f"mlp.{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
    }
    for mode in Layout(source.config, sp, tp).modes:
        found = in_mode(source, sp, tp, mode, from_host=from_host)
        for name, theirs in names.items():
            expected = numbers[f"model.layers.1.{theirs}.weight"]
            assert np.array_equal(numbers_of(found, f"layers.1.{name}"), expected)
            own = [value for key, value in found.items() if key[0] == f"layers.1.{name}"]
            own, codes = np.stack(own), tensors[f"model.layers.1.{theirs}.weight"]
            bytes_of = [np.bincount(x.view(np.uint8).ravel(), minlength=256) for x in (own, codes)]
            assert np.array_equal(bytes_of[0], bytes_of[1])


@pytest.mark.parametrize(("sp", "tp"), [(2, 2), *thorough((8, 1)), *exhaustive((1, 8), (4, 2))])
def test_logits_of_squares_are_those_of_the_same_codes_in_numpy(sp, tp):
    directory, config, _, numbers = written("fp8-squares")
    with numpy_fp8.quantised(coded=numbers.keys()):
        expected = numpy_llama.forward(config, numbers, PROMPT)["logits"]
    for mode in dict.fromkeys((Mode(sp, sp), Mode(sp, 1))):
        _, logits, _ = forward(directory, PROMPT, sp, tp, mode, "alias", formats=FP8)
        far = np.abs(logits - expected).max(axis=-1)
        assert np.median(far) < 1e-3 and (logits.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.costs(9)
@pytest.mark.parametrize(("sp", "tp"), [(2, 2), *thorough((4, 1)), *exhaustive((1, 4))])
def test_experts_in_squares_are_those_of_the_same_codes_in_numpy(sp, tp, tmp_path):
    """In each mode the same, and the shared one too."""
    experts: dict[str, Any] = {
        "moe_intermediate_size": 160,
        "shared_expert_intermediate_size": 1024,
    }
    config, _, numbers = files.write(
        tmp_path, "fp8-squares", lambda name: name.endswith("gate"), **SQUARES | MOE | experts
    )
    with numpy_fp8.quantised(o=64, coded=numbers.keys()):
        expected = numpy_llama.forward(config, numbers, PROMPT)["logits"]
    for mode in dict.fromkeys((Mode(sp, sp), Mode(sp, 1))):
        _, logits, _ = forward(tmp_path, PROMPT, sp, tp, mode, "alias", formats=FP8)
        far = np.abs(logits - expected).max(axis=-1)
        assert np.median(far) < 1e-3 and (logits.argmax(-1) == expected.argmax(-1)).all()


@cache
def expected_tokens(static: bool) -> tuple[Path, list[int]]:
    """A tiny checkpoint of two layers, and what an engine of the format in NumPy continues with."""
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4}
    blocks: dict[str, Any] = {"o": 16, "down": 8}
    if not static:
        directory, config, numbers = checkpoint(**heads)
    else:
        directory = Path(tempfile.mkdtemp(prefix="shiftjax-test-"))
        config, _, numbers = files.write(directory, "fp8-static", **heads)
        blocks |= {"coded": numbers.keys(), "input_scale": 0.01}
    with numpy_fp8.quantised(**blocks):
        return directory, numpy_llama.greedy(config, numbers, PROMPT, 8)


@pytest.mark.costs(9)
@pytest.mark.parametrize(
    ("sp", "tp", "static"),
    quick([(*mesh, static) for mesh in MESHES for static in (False, True)], (2, 2, False)),
)
def test_tokens_are_those_of_the_format_on_all_devices(sp, tp, static):
    directory, expected = expected_tokens(static)
    sizes = {"num_blocks": 42, "token_buckets": [32], "max_num_seqs": 2}
    built = make(directory, sp, tp, quantization="fp8", **sizes)
    sampling = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)]
    for seed in range(2 if sp > 1 else 1):
        built.engine.policy = RandomPolicy(seed)
        built.engine.flush_prefix_cache()
        assert tokens(run(built.engine, [PROMPT], sampling)[0, 0]) == expected


# Blocks of what experts multiply: hidden states and what is between, the last of both not whole.
OF_EXPERTS: dict[str, Any] = MOE | {
    "hidden_size": 192,
    "moe_intermediate_size": 160,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


@cache
def expected_of_experts() -> tuple[Path, list[int]]:
    directory, config, numbers = checkpoint(**OF_EXPERTS)
    with numpy_fp8.quantised(o=24, down=8):
        return directory, numpy_llama.greedy(config, numbers, PROMPT, 8)


@pytest.mark.costs(12)
@pytest.mark.parametrize(
    ("sp", "tp", "experts_as"),
    [(4, 2, 2), *thorough((8, 1, 1)), *exhaustive((4, 2, 4), (4, 2, 1), (8, 1, 8), (1, 8, 1))],
)
def test_tokens_of_experts_are_those_of_the_format_however_they_are_divided(sp, tp, experts_as):
    """Whole, over all devices, or between, in every mode."""
    directory, expected = expected_of_experts()
    sizes = {"num_blocks": 42, "token_buckets": [32], "max_num_seqs": 2}
    how = {"experts_as": experts_as}
    built = make(directory, sp, tp, quantization="fp8", **sizes, controls=how)
    sampling = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)]
    for seed in range(2 if sp > 1 else 1):
        built.engine.policy = RandomPolicy(seed)
        built.engine.flush_prefix_cache()
        assert tokens(run(built.engine, [PROMPT], sampling)[0, 0]) == expected


# ------------------------------------------------------------------------ products


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("tokens", [3, 40])
def test_products_are_those_of_the_definition(tokens, dtype):
    """Of a ragged last block, of blocks of inputs, of channels and of squares."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((tokens, 320)).astype(np.float32)
    x[:, 256:] *= 20  # the scale of another block would be far off
    codes = rng.standard_normal((256, 320)).astype(ml_dtypes.float8_e4m3fn)
    channel = rng.uniform(0.5, 2, 256).astype(np.float32)
    squares = rng.uniform(0.5, 2, (2, 3)).astype(np.float32)
    numbers, wide = numpy_fp8.by_blocks(x, 128), codes.astype(np.float64)
    given = jnp.asarray(x)
    most = 1e-5 if dtype == jnp.float32 else 1e-2
    spread = squares.repeat(128, 0).repeat(128, 1)[:, :320]
    for scale, weight in ((channel, wide * channel[:, None]), (squares, wide * spread)):
        matrix = Matrix(jnp.asarray(codes), jnp.asarray(scale))
        expected = numbers @ weight.T
        for own in (given, quantise_blocks(given)):
            found = np.asarray(project_out(own, matrix, dtype=dtype), np.float64)
            assert np.abs(found - expected).max() < most * np.abs(expected).max()
    blocks = codes[:, :256].reshape(256, 4, 64).swapaxes(0, 1)
    of_blocks = rng.uniform(0.5, 2, (4, 2)).astype(np.float32)
    numbers, wide = numpy_fp8.by_blocks(x[:, :256], 64), wide[:, :256]
    spread = of_blocks.T.repeat(128, 0).repeat(64, 1)
    for scale, weight in ((channel, wide * channel[:, None]), (of_blocks, wide * spread)):
        matrix = Matrix(jnp.asarray(blocks), jnp.asarray(scale))
        expected = numbers @ weight.T
        for own in (given[:, :256], quantise_blocks(given[:, :256], 64)):
            found = np.asarray(project_in(own, matrix, dtype=dtype), np.float64)
            assert np.abs(found - expected).max() < most * np.abs(expected).max()
