"""Quantised checkpoints: the numbers that they say, their own codes, and every way to be wrong."""

import json
import re
import tempfile
import tracemalloc
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle import quantised_files as files

from shiftjax.arch.config import Codes
from shiftjax.arch.presets import PRESETS
from shiftjax.weights.convert import convert
from shiftjax.weights.hf_config import parse_config
from shiftjax.weights.huggingface import HuggingFaceSource
from shiftjax.weights.locate import open_source, resolve_model
from shiftjax.weights.quant_config import parse_method
from shiftjax.weights.quantised import Presented, present
from shiftjax.weights.safetensors_file import read_header
from shiftjax.weights.source import (
    OF_CODES,
    OF_INPUTS,
    OF_SCALE,
    OF_ZEROS,
    CheckpointError,
    check_complete,
)
from shiftjax.weights.typed_fields import Fields

UP = "model.layers.1.mlp.up_proj"
GOLDEN = Path(__file__).parent.parent / "data" / "quantised"
STATIC = ("modelopt", "compressed-tensors-static", "fp8-static")
TINY = {"num_attention_heads": 4, "num_key_value_heads": 2}


@cache
def written(format: str) -> tuple[HuggingFaceSource, files.Tensors, files.Tensors]:
    """A source of a tiny checkpoint; the tensors that lie there, and the numbers that they say."""
    directory = Path(tempfile.mkdtemp(prefix="shiftjax-test-"))
    _, stored, numbers = files.write(directory, format, **TINY)
    return HuggingFaceSource(directory), stored, numbers


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("format", files.FORMATS)
def test_a_matrix_is_what_its_tensors_say(format):
    source, _, numbers = written(format)
    check_complete(source)
    assert source.tensors.keys() == numbers.keys()
    for name, expected in numbers.items():
        found = source.read(name)
        assert found.dtype == source.tensors[name].dtype == np.float32
        close(found, expected)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(list(files.FORMATS)), st.tuples(*[st.integers(0, 96)] * 4), st.booleans())
def test_every_range_is_read_alone(format, ends, is_down):
    source, _, numbers = written(format)
    name = f"model.layers.0.mlp.{'down' if is_down else 'up'}_proj.weight"
    sizes = zip(ends[:2], ends[2:], numbers[name].shape, strict=True)
    index = tuple(slice(*sorted((min(a, size), min(b, size)))) for a, b, size in sizes)
    found = source.read(name, index)
    assert found.flags.c_contiguous
    close(found, numbers[name][index])


@pytest.mark.parametrize("format", files.NATIVE)
def test_codes_are_the_bytes_of_the_file(format):
    source, stored, _ = written(format)
    static = format in STATIC
    assert source.config.codes == Codes(have_input_scales=static) and source.config.has_codes
    coded = [name for name, x in stored.items() if x.dtype == files.E4M3]
    assert len(coded) == 14
    for name in coded:
        codes, scales = source.read(name + OF_CODES), source.read(name + OF_SCALE)
        assert codes.tobytes() == stored[name].tobytes()
        scale = next(
            stored[each] for each in (f"{name}_scale", f"{name}_scale_inv") if each in stored
        )
        scale = np.broadcast_to(scale.astype(np.float32).reshape(-1), codes.shape[:1])
        assert scales.dtype == np.float32 and np.array_equal(scales, scale)
        if static:
            assert source.read(name + OF_INPUTS).tolist() == [np.float32(0.01)]
        part = slice(5, 9), slice(3, 8)
        assert source.read(name + OF_CODES, part).tobytes() == stored[name][part].tobytes()
        assert np.array_equal(source.read(name + OF_SCALE, part[:1]), scale[5:9])


def test_a_bound_of_the_scales_of_inputs_is_told_of(tmp_path, caplog):
    files.write(tmp_path, "fbgemm", **TINY)
    HuggingFaceSource(tmp_path)
    assert any("activation_scale_ub = 1200.0 is not applied" in line for line in caplog.messages)


@pytest.mark.parametrize("format", files.SQUARES)
def test_scales_of_squares_are_those_of_the_file(format):
    """Of matrices that are smaller than a block, by as many outputs as all sizes allow."""
    source, stored, _ = written(format)
    assert source.config.codes == Codes(rows_of_scale=8) and source.config.has_codes
    codes, scales = source.read(f"{UP}.weight{OF_CODES}"), source.read(f"{UP}.weight{OF_SCALE}")
    assert codes.tobytes() == stored[f"{UP}.weight"].tobytes()
    suffix = "weight_scale_inv" if format.startswith("fp8") else "weight_scale"
    assert np.array_equal(scales, stored[f"{UP}.{suffix}"].repeat(12, axis=0))
    few = slice(3, 7), slice(0, 1)
    assert np.array_equal(source.read(f"{UP}.weight{OF_SCALE}", few), scales[few])


WIDENED = ("weight-only-fp8", "w8a8", "int8-groups", "w8a16", "gptq-2", "gptq-8")
ORDERED = ("gptq-ordered", "w4a16-ordered")
FOUR_BITS = [each for each in files.PLAIN if each not in (*WIDENED, *ORDERED)]


@pytest.mark.parametrize("format", [*files.BLOCKS, *WIDENED, *ORDERED])
def test_what_no_device_computes_with_has_no_codes(format, caplog):
    directory = written(format)[0].location
    config = HuggingFaceSource(Path(directory)).config
    assert not config.has_codes and (config.codes is not None) == (format in files.BLOCKS)
    told = [line for line in caplog.messages if "14 matrices of 4 bits are widened" in line]
    assert len(told) == (format in ORDERED)


@pytest.mark.parametrize("format", FOUR_BITS)
def test_four_bits_are_read_in_ranges(format):
    source, _, numbers = written(format)
    group = 0 if format == "awq-channel" else 16
    has_zeros = format != "w4a16"
    assert source.config.codes == Codes(format="int4", group=group, has_zeros=has_zeros)
    for name in (f"{UP}.weight", "model.layers.0.mlp.down_proj.weight"):
        codes, scales = source.read(name + OF_CODES), source.read(name + OF_SCALE)
        zeros = source.read(name + OF_ZEROS) if has_zeros else np.full(scales.shape, 8)
        wide = np.stack([codes & 15, codes >> 4], axis=-1).reshape(numbers[name].shape)
        size = wide.shape[1] // scales.shape[1]
        assert scales.dtype == np.float32 and codes.dtype == np.uint8
        close((wide - zeros.repeat(size, 1).astype(int)) * scales.repeat(size, 1), numbers[name])
        part = slice(5, 22), slice(3, 17)
        assert np.array_equal(source.read(name + OF_CODES, part), codes[part])
        few = slice(9, 10), slice(0, 1)
        assert np.array_equal(source.read(name + OF_SCALE, few), scales[few])
        if has_zeros:
            assert np.array_equal(source.read(name + OF_ZEROS, few), zeros[few])


@pytest.mark.parametrize("format", ["w4a16-zeros", "gptq", "awq"])
def test_reading_codes_widens_nothing(tmp_path, format):
    files.write(tmp_path, format, hidden_size=512, intermediate_size=2048, **TINY)
    source, name = HuggingFaceSource(tmp_path), f"{UP}.weight"
    tracemalloc.start()
    codes = source.read(name + OF_CODES)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert codes.nbytes == 512 * 2048 / 2 < peak < 512 * 2048 * 4  # which float32 would take


def test_symmetric_codes_have_no_zero_points(tmp_path):
    def edit(config, _):
        config["quantization_config"]["sym"] = True

    with patch.dict(
        files.FORMATS, sym=(files.PLAIN["gptq"][0], partial(files.gptq, symmetric=True))
    ):
        files.write(tmp_path, "sym", edit=edit, **TINY)
    source = HuggingFaceSource(tmp_path)
    assert source.config.codes == Codes(format="int4", group=16)
    source.read(f"{UP}.weight{OF_SCALE}")
    files.write(tmp_path, "gptq", edit=edit, **TINY)
    with pytest.raises(CheckpointError, match=r"expected zero points of 8, .* none"):
        HuggingFaceSource(tmp_path).read(f"{UP}.weight{OF_SCALE}")


def test_an_order_that_the_configuration_does_not_say_is_refused(tmp_path):
    def edit(config, _):
        config["quantization_config"]["desc_act"] = False

    files.write(tmp_path, "gptq-ordered", edit=edit, **TINY)
    source = HuggingFaceSource(tmp_path)
    with pytest.raises(CheckpointError, match=r"groups of inputs that are no neighbours, .* none"):
        source.read(f"{UP}.weight{OF_CODES}")


@pytest.mark.parametrize("format", ["fp8", "awq"])
def test_converted_it_is_plain(tmp_path, format):
    source, _, numbers = written(format)
    copy = HuggingFaceSource(convert(source.location, tmp_path / "plain", dtype="float32"))
    assert copy.config.codes is None and copy.tensors.keys() == numbers.keys()
    for name, expected in numbers.items():
        close(copy.read(name), expected)


def test_modelopt_says_it_in_a_file_of_its_own(tmp_path):
    def edit(config, _):
        del config["quantization_config"]
        inner = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": inner}))

    _, _, numbers = files.write(tmp_path, "modelopt", edit=edit, **TINY)
    source = HuggingFaceSource(tmp_path)
    assert source.config.codes == Codes(have_input_scales=True)
    close(source.read(f"{UP}.weight"), numbers[f"{UP}.weight"])


def test_random_weights_of_such_a_configuration_are_made_codes():
    directory = written("fp8")[0].location
    source = open_source(resolve_model(f"random:{directory}"))
    assert source.config.codes == Codes(are_made_anew=True)


# ------------------------------------------------------------------------ what stays plain

IGNORED = {
    "name": [UP],
    "expression": [r"re:.*layers\.1\.mlp\.up_proj$"],
    "stars": ["model.layers.*.mlp.up_proj"],
    "end": ["mlp.up_proj"],
    "beginning": ["model.layers.1"],
    "none": ["model.layers.1.mlp.up", "up_pro", "layers.11", r"re:up_proj"],
}


@pytest.mark.parametrize("kind", IGNORED)
@pytest.mark.parametrize("format", ["compressed-tensors-channel", "fp8", "modelopt"])
def test_what_is_left_out_stays_plain(tmp_path, format, kind):
    names = {
        "name": [UP],
        "expression": [UP],
        "stars": ["model.layers.0.mlp.up_proj", UP],
        "end": ["model.layers.0.mlp.up_proj", UP],
        "beginning": [f"model.layers.1.self_attn.{x}_proj" for x in "qkvo"]
        + [f"model.layers.1.mlp.{x}_proj" for x in ("gate", "up", "down")],
        "none": [],
    }[kind]

    def edit(config, _):
        method = config["quantization_config"]
        field = "modules_to_not_convert" if format == "fp8" else "ignore"
        method[field] = ["lm_head", *IGNORED[kind]]

    files.write(tmp_path, format, keep=lambda module: module in names, edit=edit, **TINY)
    source = HuggingFaceSource(tmp_path)
    check_complete(source)
    plain = tuple(f"{name}.weight" for name in names)
    assert source.config.codes == Codes(plain, have_input_scales=format in STATIC)


def test_groups_have_schemes_of_their_own(tmp_path):
    """The name of a module comes before an expression, and that before the class of all."""

    def edit(config, stored):
        groups = config["quantization_config"]["config_groups"]
        eight = groups["group_0"]
        four = {"weights": files.PLAIN["w4a16"][0]["config_groups"]["group_0"]["weights"]}
        four["format"] = "pack-quantized"
        groups["group_1"] = four | {"targets": [r"re:.*up_proj"]}
        groups["group_2"] = eight | {"targets": ["model.layers.0.mlp.up_proj"]}
        parts, numbers[UP] = files.packed(plain)
        del stored[f"{UP}.weight"], stored[f"{UP}.weight_scale"]
        stored |= {f"{UP}.{suffix}": part for suffix, part in parts.items()}

    plain, numbers = np.random.default_rng(0).standard_normal((96, 48)).astype(np.float32), {}
    files.write(tmp_path, "compressed-tensors-channel", edit=edit, **TINY)
    source = HuggingFaceSource(tmp_path)
    assert source.config.codes == Codes(plain=(f"{UP}.weight",))
    close(source.read(f"{UP}.weight"), numbers[UP])


@pytest.mark.parametrize("left_out", [[], ["model.layers.1.mlp.gate_up_proj"]])
def test_stacks_are_quantised_and_left_out_by_the_names_that_files_have(tmp_path, left_out):
    """Phi-3 has q, k and v in one matrix, and gate and up."""

    def edit(config, stored):
        config["quantization_config"]["modules_to_not_convert"] = left_out
        config |= {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "pad_token_id": 0}
        for i in range(2):
            for stack, parts in (
                ("self_attn.qkv", ["self_attn.q", "self_attn.k", "self_attn.v"]),
                ("mlp.gate_up", ["mlp.gate", "mlp.up"]),
            ):
                found = [f"model.layers.{i}.{part}_proj.weight" for part in parts]
                name = f"model.layers.{i}.{stack}_proj"
                whole = np.concatenate([numbers.pop(each) for each in found]).astype(np.float32)
                for each in found:
                    del stored[each], stored[f"{each}_scale"], stored[f"{each[:-6]}input_scale"]
                if name in left_out:
                    numbers[name] = stored[f"{name}.weight"] = whole
                    continue
                new, numbers[name] = files.with_inputs(partial(files.fp8, scales="flat"))(whole)
                stored |= {f"{name}.{suffix}": x for suffix, x in new.items()}

    numbers = {}
    static = files.with_inputs(partial(files.fp8, scales="flat"))
    with patch.dict(files.FORMATS, fused=(files.NATIVE["fp8-static"][0], static)):
        numbers |= files.write(tmp_path, "fused", **TINY)[2]
        files.write(tmp_path, "fused", edit=edit, **TINY)
    source = HuggingFaceSource(tmp_path)
    check_complete(source)
    parts = [f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up")]
    plain = tuple(parts) if left_out else ()
    assert source.config.codes == Codes(plain, have_input_scales=True)
    whole = numbers["model.layers.1.mlp.gate_up_proj"]
    close(np.concatenate([source.read(name) for name in parts]), whole)
    v = "model.layers.0.self_attn.v_proj.weight"
    close(source.read(v, (slice(3, 9),)), numbers["model.layers.0.self_attn.qkv_proj"][99:105])
    codes, scale = source.read(v + OF_CODES), source.read(v + OF_SCALE)
    close(codes.astype(np.float32) * scale[:, None], source.read(v))
    assert source.read(v + OF_INPUTS).tolist() == [np.float32(0.01)]


# ------------------------------------------------------------------------ scales of KV

KV_NAMES = {
    "self_attn.k_scale": "self_attn.v_scale",
    "self_attn.k_proj.k_scale": "self_attn.v_proj.v_scale",
    "self_attn.k_proj.output_scale": "self_attn.v_proj.output_scale",
}


@pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 1, 1)])
@pytest.mark.parametrize("name", KV_NAMES)
def test_scales_of_keys_and_values_have_one_name(tmp_path, name, shape):
    def edit(config, stored):
        for i in range(2):
            stored[f"model.layers.{i}.{name}"] = np.full(shape, 0.5 + i, np.float16)
            stored[f"model.layers.{i}.{KV_NAMES[name]}"] = np.full(shape, 0.25, np.float32)

    files.write(tmp_path, "fp8", edit=edit, **TINY)
    source = HuggingFaceSource(tmp_path)
    check_complete(source)
    size = int(np.prod(shape))
    for x, value in (("k", 1.5), ("v", 0.25)):
        scale = f"model.layers.1.self_attn.{x}_scale"
        assert source.tensors[scale].shape == (size,)
        assert source.read(scale).dtype == np.float32
        assert np.array_equal(source.read(scale), np.full(size, value))


# ------------------------------------------------------------------------ what is wrong


def setting(**changes):
    def edit(config, _):
        config["quantization_config"] |= changes

    return edit


def weights_setting(**changes):
    def edit(config, _):
        config["quantization_config"]["config_groups"]["group_0"]["weights"] |= changes

    return edit


def tensor(suffix: str, change):
    def edit(_, stored):
        stored[f"{UP}.{suffix}"] = change(stored[f"{UP}.{suffix}"])

    return edit


def gone(suffix: str):
    def edit(_, stored):
        del stored[f"{UP}.{suffix}"]

    return edit


def added(suffix: str, value):
    def edit(_, stored):
        stored[f"{UP}.{suffix}"] = value

    return edit


def first(value: float):
    def change(x):
        x = x.copy()
        x.reshape(-1)[0] = value
        return x

    return change


def float_inputs(**changes):
    def edit(config, _):
        group = config["quantization_config"]["config_groups"]["group_0"]
        group["input_activations"] |= changes

    return edit


def unsaid(config, _):
    del config["quantization_config"]


WRONG = [
    ("fp8", setting(quant_method="bitsandbytes"), "quant_method must be one of .*'bitsandbytes'"),
    ("fp8", setting(quant_method=None), "quant_method must be one of"),
    ("fp8", setting(activation_scheme="static"), "has no input_scale beside it"),
    ("fp8", setting(activation_scheme="token"), "activation_scheme must be dynamic or static"),
    ("fp8-blocks", setting(activation_scheme="static"), "activation_scheme must be dynamic, found"),
    ("fp8-static", tensor("input_scale", lambda x: -x), "input_scale: expected scales above 0"),
    ("fp8-static", tensor("input_scale", lambda x: x.repeat(2)), r"expected shape \[\] or \[1\]"),
    ("fp8-static", setting(activation_scheme="dynamic"), "input_scale: is of no use to fp8"),
    ("fp8", setting(fmt="e5m2"), "fmt must be e4m3, found 'e5m2'"),
    ("fp8", setting(modules_to_not_convert="lm_head"), "must be a list of names"),
    ("fp8", setting(modules_to_not_convert=["re:("]), r"'re:\(' is no regular expression"),
    ("fp8", setting(weight_block_size=[0, 128]), "weight_block_size must be two whole numbers"),
    ("fp8", setting(weight_block_size=[32, 32]), r"weight_scale_inv: expected shape \[3, 2\]"),
    ("fp8-blocks", setting(weight_block_size=[64, 64]), r"expected shape \[1, 1\], found \[2, 2\]"),
    ("modelopt", setting(quant_algo="NVFP4"), "quant_algo must be FP8, found 'NVFP4'"),
    ("awq", setting(bits=3), "bits must be 4, found 3"),
    ("awq", setting(version="gemv"), "version must be gemm, found 'gemv'"),
    ("gptq", setting(bits=3), "bits must be 2 or 4 or 8, found 3"),
    ("gptq", setting(dynamic={"-:.*": {}}), "dynamic .* is not supported"),
    ("gptq", setting(group_size=0), "group_size must be a whole number of at least 1"),
    ("w4a16", setting(format="marlin-24"), "format must be .*, found 'marlin-24'"),
    ("w4a16", setting(config_groups={}), "names no group"),
    ("w4a16", setting(sparsity_config={"format": "sparse-24"}), "sparsity_config is not supp"),
    ("w4a16", weights_setting(num_bits=3), "num_bits must be 4 or 8, found 3"),
    ("w4a16", weights_setting(group_size=32), r"weight_scale: expected shape \[\d+, 2\]"),
    ("w4a16", weights_setting(symmetric=False), "has no weight_zero_point beside it"),
    ("w4a16-zeros", weights_setting(symmetric=True), "weight_zero_point: is of no use to packed"),
    ("compressed-tensors-channel", weights_setting(num_bits=4), "num_bits must be 8, found 4"),
    ("compressed-tensors-channel", float_inputs(dynamic="local"), "dynamic must be True or False"),
    ("compressed-tensors-channel", float_inputs(dynamic=False), "strategy must be tensor"),
    ("compressed-tensors-channel", float_inputs(strategy="tensor"), "strategy must be token"),
    ("fp8", gone("weight_scale_inv"), f"{UP}.weight: has no weight_scale beside it"),
    ("gptq", gone("qzeros"), "has no qzeros beside it"),
    ("fp8", gone("weight"), "has no weight beside it"),
    ("w4a16", gone("weight_shape"), "has no weight_shape beside it"),
    ("fp8", added("input_scale", np.ones(1, np.float32)), "input_scale: is of no use to fp8"),
    (
        "fp8",
        added("weight_scale", np.ones(1, np.float32)),
        "expected one weight_scale, found .*_scale_inv, too",
    ),
    *[
        (format, tensor(suffix, first(value)), f"{suffix}: expected scales above 0, found 1 of")
        for format, suffix in (
            ("compressed-tensors-channel", "weight_scale"),
            ("fp8", "weight_scale_inv"),
            ("fp8-blocks", "weight_scale_inv"),
            ("w8a8", "weight_scale"),
            ("gptq", "scales"),
        )
        for value in (np.nan, np.inf, -np.inf, 0.0, -1.0)
    ],
    (
        "fp8-channel",
        tensor("weight_scale", lambda x: x[1:]),
        r"weight_scale: expected shape .* or \[96\] or \[96, 1\], found \[95\]",
    ),
    (
        "fp8",
        tensor("weight", lambda x: x.astype(np.int8)),
        "expected float8_e4m3fn, because quantization_config says fp8, found int8",
    ),
    (
        "fp8",
        tensor("weight", lambda x: x.astype(np.float32)),
        f"{UP}.weight: expected it quantised",
    ),
    ("fp8", setting(modules_to_not_convert=[UP]), f"leaves {UP} out, found weight, weight_scale"),
    ("fp8", unsaid, "found F8_E4M3, and config.json has no quantization_config"),
    ("w4a16", unsaid, "found I32, and config.json has no quantization_config"),
]


@pytest.mark.parametrize(("format", "edit", "message"), WRONG)
def test_what_is_wrong_is_said_before_anything_is_loaded(tmp_path, format, edit, message):
    files.write(tmp_path, format, edit=edit, **TINY)
    with pytest.raises(CheckpointError, match=message) as caught:
        HuggingFaceSource(tmp_path)
    assert all(line.startswith(str(tmp_path)) for line in caught.value.problems)


def test_experts_of_a_layer_are_quantised_alike():
    """Of a stack in which one expert were plain, devices could not have the codes."""
    left_out = "model.layers.0.mlp.experts.3.up_proj"
    data = {"quant_method": "fp8", "modules_to_not_convert": [left_out]}
    method = parse_method(Fields({"quantization_config": data}, "config.json"))
    with pytest.raises(CheckpointError) as caught:
        present(method, PRESETS["tiny-qwen3-moe"], {})
    words = "quantization_config says otherwise of it than of the other experts of its layer"
    assert caught.value.problems == (f"{left_out}.weight: {words}",)


def test_what_stands_outside_of_the_text_model_is_of_it():
    """Gemma 3 with images has a configuration of its text model, and the quantisation beside it."""
    data = json.loads((GOLDEN.parent / "configs" / "gemma-3-27b.json").read_text())
    data["quantization_config"] = {"quant_method": "fp8", "modules_to_not_convert": ["vision"]}
    assert parse_config(data, "gemma", "config.json").codes == Codes()


def test_a_matrix_that_is_not_left_out_must_be_quantised(tmp_path):
    files.write(tmp_path, "fp8", keep=lambda module: module == UP, **TINY)
    words = f"{UP}.weight: expected it quantised, because quantization_config (fp8) does not leave"
    with pytest.raises(CheckpointError, match=re.escape(words)):
        HuggingFaceSource(tmp_path)


@settings(deadline=None, max_examples=150)
@given(
    st.dictionaries(
        st.sampled_from(
            ["quant_method", "bits", "group_size", "ignore", "config_groups", "format"]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers(-2, 9) | st.sampled_from(list(files.FORMATS)),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(st.sampled_from(["targets", "weights", "group_0"]), inner)
            ),
            max_leaves=4,
        ),
    )
)
@example({"quant_method": "fp8"})
def test_no_configuration_is_anything_but_read_or_refused(method):
    source, _, _ = written("fp8")
    directory = Path(source.location)
    data = json.loads((directory / "config.json").read_text()) | {"quantization_config": method}
    with tempfile.TemporaryDirectory() as copy:
        (Path(copy) / "config.json").write_text(json.dumps(data))
        (Path(copy) / "model.safetensors").symlink_to(directory / "model.safetensors")
        try:
            found = HuggingFaceSource(Path(copy))
        except CheckpointError:
            return
        assert method["quant_method"] == "fp8"  # which it is: all else is refused
        assert found.read(f"{UP}.weight").tobytes() == source.read(f"{UP}.weight").tobytes()


# ------------------------------------------------------------------------ single matrices


def one(method: dict, tensors: files.Tensors, directory: Path) -> Presented:
    """What is made of the tensors of a file that is no whole model."""
    files.save(tensors, directory / "model.safetensors")
    return opened(method, directory / "model.safetensors")


def opened(method: dict, file: Path) -> Presented:
    fields = Fields({"quantization_config": method}, "config.json")
    parsed = parse_method(fields)
    fields.raise_problems()
    return present(parsed, PRESETS["tiny"], read_header(file, is_quantised=True))


CASES = json.loads((GOLDEN / "cases.json").read_text())["cases"]


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_the_formats_owners(name):
    """Those of four libraries, written by `tests/oracle/make_quantised.py`."""
    source = opened(CASES[name], GOLDEN / f"{name}.safetensors")
    [matrix] = source.tensors.keys() - {"expected"}
    assert matrix == ("experts.proj" if name == "mxfp4" else "proj.weight")
    np.testing.assert_allclose(source.read(matrix), source.read("expected"), rtol=1e-6)
    assert source.read("expected").any()


EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize("exponents", [np.uint8, ml_dtypes.float8_e8m0fnu])
def test_stacks_of_experts_in_mxfp4_are_as_unquantised_ones(tmp_path, exponents):
    """`[experts, in, out]`, the way round that GPT-OSS has them in bfloat16."""
    weight = np.random.default_rng(0).standard_normal((3, 20, 96))
    tensors, numbers = files.mxfp4(weight)
    tensors["scales"] = tensors["scales"].view(exponents)
    bias = np.zeros((3, 20), np.float32)
    stored = {f"{EXPERTS}_{suffix}": x for suffix, x in tensors.items()}
    source = one({"quant_method": "mxfp4"}, stored | {f"{EXPERTS}_bias": bias}, tmp_path)
    assert source.tensors.keys() == {EXPERTS, f"{EXPERTS}_bias"}
    assert source.tensors[EXPERTS].shape == (3, 96, 20)
    assert np.array_equal(source.read(EXPERTS), numbers)
    part = slice(1, 2), slice(33, 70), slice(5, 9)
    assert np.array_equal(source.read(EXPERTS, part), numbers[part])
    assert np.array_equal(source.read(EXPERTS, (slice(0, 1), slice(40, 40))), numbers[:1, 40:40])


def test_an_exponent_that_is_none_gives_no_number(tmp_path):
    tensors, _ = files.mxfp4(np.ones((1, 8, 32)))
    tensors["scales"][0, 3] = 255
    stored = {f"{EXPERTS}_{suffix}": x for suffix, x in tensors.items()}
    found = one({"quant_method": "mxfp4"}, stored, tmp_path).read(EXPERTS)
    assert np.isnan(found[0, :, 3]).all() and np.isnan(found).sum() == 32


def test_scales_of_blocks_may_be_powers_of_two(tmp_path):
    """DeepSeek's `scale_fmt: ue8m0`."""
    codes = np.arange(1, 49).reshape(4, 12).astype(files.E4M3)
    scale = np.array([[0.5, 2, 0.25], [1, 4, 8]]).astype(ml_dtypes.float8_e8m0fnu)
    method = {"quant_method": "fp8", "weight_block_size": [2, 4], "scale_fmt": "ue8m0"}
    source = one(method, {"a.weight": codes, "a.weight_scale_inv": scale}, tmp_path)
    wide = scale.astype(np.float32).repeat(2, 0).repeat(4, 1)
    assert np.array_equal(source.read("a.weight"), codes.astype(np.float32) * wide)
