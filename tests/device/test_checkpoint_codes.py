"""Codes of checkpoints on devices: the bytes of the file, and the tokens of those numbers."""

import tempfile
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from engines import RandomPolicy, make, run, tokens
from harness import forward, silent
from oracle import numpy_fp8, numpy_llama
from oracle import quantised_files as files

from shiftjax.arch.formats import Formats
from shiftjax.core.request import SamplingParams
from shiftjax.costs.memory import weight_bytes
from shiftjax.device.mesh import make_mesh
from shiftjax.device.place import HostWeights, define, load, load_rows
from shiftjax.local_deployment import host_copy_bytes
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout
from shiftjax.weights.huggingface import HuggingFaceSource
from shiftjax.weights.source import CheckpointError

FP8 = Formats("fp8", "float32", "float32")
PROMPT = [5, 17, 99, 3, 42, 7, 7, 121, 64, 30, 11, 150]
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
PLAIN = "model.layers.1.mlp.up_proj"


@cache
def written(format: str, plain: str = "") -> tuple[Path, dict, files.Tensors, files.Tensors]:
    """A tiny checkpoint in which one matrix may be plain."""
    directory = Path(tempfile.mkdtemp(prefix="shiftjax-test-"))

    def edit(config, _):
        field = "ignore" if "ignore" in config["quantization_config"] else "modules_to_not_convert"
        config["quantization_config"][field] = ["lm_head", *([plain] if plain else [])]

    return directory, *files.write(directory, format, lambda name: name == plain, edit, **HEADS)


def loaded(format: str, sp: int, tp: int, dtype: str, *, from_host: bool = False):
    """The stored weights of a layout, by name."""
    source = HuggingFaceSource(written(format)[0])
    layout, mesh = Layout(source.config, sp, tp), make_mesh(jax.devices()[: sp * tp], sp, tp)
    model = define(layout, Formats("fp8", dtype, dtype))
    if from_host:
        rows = HostWeights(source, dtype)
        arrays = load_rows(model, layout, mesh, rows, silent)
        assert rows.num_bytes == host_copy_bytes(source.config, model.formats)
    else:
        arrays = load(model, layout, mesh, source, silent)
    stored = {weight.name: x for weight, x in zip(model.declared, arrays, strict=True)}
    held = sum(each.data.nbytes for x in arrays if x is not None for each in x.addressable_shards)
    assert held == sp * tp * weight_bytes(layout, model.formats)
    return stored


@pytest.mark.parametrize("from_host", [False, True])
@pytest.mark.parametrize("format", files.NATIVE)
def test_codes_on_devices_are_the_bytes_of_the_file(format, from_host):
    stored, tensors = loaded(format, 2, 2, "float16", from_host=from_host), written(format)[2]
    for name, source in (("mlp.up", "mlp.up_proj"), ("attention.q", "self_attn.q_proj")):
        codes, scale = (np.asarray(stored[f"layers.1.{name}{x}"]) for x in ("", "_scale"))
        expected, units = of_file(tensors, f"model.layers.1.{source}.weight")
        assert codes.reshape(expected.shape).tobytes() == expected.tobytes()
        assert np.array_equal(scale.reshape(-1), units)
    for name, source in (("mlp.down", "mlp.down_proj"), ("attention.o", "self_attn.o_proj")):
        blocks, scale = (np.asarray(stored[f"layers.1.{name}{x}"]) for x in ("", "_scale"))
        expected, units = of_file(tensors, f"model.layers.1.{source}.weight")
        assert blocks.shape[2] == {"mlp.down": 8, "attention.o": 16}[name]
        assert np.concatenate(list(blocks), axis=1).tobytes() == expected.tobytes()
        assert np.array_equal(scale, units)


@pytest.mark.parametrize("format", files.BLOCKS)
def test_codes_of_blocks_are_made_anew_and_what_that_adds_is_told(format, caplog):
    with caplog.at_level("INFO", "shiftjax.device.place"):
        stored, numbers = loaded(format, 2, 2, "float32"), written(format)[3]
    [record] = caplog.records
    mean, most, worst = record.args[1:]
    errors = {}
    for name, source in (("mlp.up", "mlp.up_proj"), ("mlp.down", "mlp.down_proj")):
        codes, scale = (np.asarray(stored[f"layers.1.{name}{x}"]) for x in ("", "_scale"))
        if codes.ndim == 3:
            codes = np.concatenate(list(codes), axis=1)
        expected = numbers[f"model.layers.1.{source}.weight"]
        far = np.abs(codes.astype(np.float64) * scale[:, None] - expected)
        assert np.array_equal(
            scale, np.abs(expected).max(1).astype(np.float32) * np.float32(1 / 448)
        )
        errors[name] = 100 * np.mean(far[expected != 0] / np.abs(expected[expected != 0]))
    assert 1 < mean < most < 4 and all(error < most + 1e-3 for error in errors.values())
    name = worst.removeprefix("layers.1.")
    assert name not in errors or most == pytest.approx(errors[name], rel=1e-4)


def test_what_no_scale_of_a_channel_can_say_is_refused(tmp_path):
    """A block of one channel is far larger than its others, which all become zeros."""

    def edit(_, stored):
        stored[f"{PLAIN}.weight_scale_inv"] *= np.float32([[1e-7, 1]] * 3)

    files.write(tmp_path, "fp8-blocks", edit=edit, **HEADS)
    source = HuggingFaceSource(tmp_path)
    layout, mesh = Layout(source.config, 1, 1), make_mesh(jax.devices()[:1], 1, 1)
    words = r"layers\.1\.mlp\.up cannot be had with a scale .* by 6\d\.\d% .* 6\.2% .* none"
    with pytest.raises(CheckpointError, match=words):
        load(define(layout, FP8), layout, mesh, source, silent)
    plain = define(layout, Formats("float32", "float32", "float32"))
    arrays = load(plain, layout, mesh, source, silent)
    names = [weight.name for weight in plain.declared]
    assert np.isfinite(np.asarray(arrays[names.index("layers.1.mlp.up")])).all()


@pytest.mark.parametrize("mode", [Mode(2, 2), Mode(2, 1)])
def test_inputs_are_in_units_of_the_checkpoint(mode):
    directory, config, _, numbers = written("fp8-static")
    with numpy_fp8.quantised(16, 8, numbers.keys(), 0.01):
        expected = numpy_llama.forward(config, numbers, PROMPT)["logits"]
    with numpy_fp8.quantised(16, 8, numbers.keys()):
        own = numpy_llama.forward(config, numbers, PROMPT)["logits"]
    _, logits, _ = forward(directory, PROMPT, 2, 2, mode, "alias", formats=FP8)
    far = np.abs(logits - expected).max(axis=-1)
    assert np.median(far) < 1e-3 and (logits.argmax(-1) == expected.argmax(-1)).all()
    assert np.abs(logits - own).max() > 10 * np.median(far)


def of_file(tensors: files.Tensors, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes of a matrix, and the scale of each of its channels."""
    scale = next(x for key, x in tensors.items() if key.startswith(f"{name}_scale"))
    scale = scale.astype(np.float32).reshape(-1)
    return tensors[name], np.broadcast_to(scale, tensors[name].shape[:1])


@pytest.mark.parametrize("plain", ["", PLAIN])
def test_logits_are_those_of_the_same_codes_in_numpy(plain):
    sp, tp = 2, 2
    directory, config, _, numbers = written("compressed-tensors-tensor", plain)
    with numpy_fp8.quantised(16, 8, numbers.keys() - {f"{plain}.weight"}):
        expected = numpy_llama.forward(config, numbers, PROMPT)["logits"]
    for mode in dict.fromkeys((Mode(sp, sp), Mode(sp, 1))):
        _, logits, _ = forward(directory, PROMPT, sp, tp, mode, "alias", formats=FP8)
        far = np.abs(logits - expected).max(axis=-1)
        # Where a number lies at the border of two codes, float32 and float64 may differ.
        assert np.median(far) < 1e-3 and (logits.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.thorough
def test_tokens_are_those_of_the_checkpoint_in_every_mode():
    """Without being asked: a checkpoint of codes is computed with as codes."""
    directory, config, _, numbers = written("fp8")
    with numpy_fp8.quantised(16, 8, numbers.keys()):
        expected = numpy_llama.greedy(config, numbers, PROMPT, 8)
    built = make(directory, 2, 1, num_blocks=42, token_buckets=[32], max_num_seqs=2)
    assert built.deployment.formats.weights == "fp8"
    sampling = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)]
    for seed in range(2):
        built.engine.policy = RandomPolicy(seed)
        built.engine.flush_prefix_cache()
        assert tokens(run(built.engine, [PROMPT], sampling)[0, 0]) == expected
    assert built.engine.stats().steps_by_mode.keys() >= {"base", "shift"}
