"""GGUF: every supported type, the order of q and k rows, metadata, and broken files."""

import os
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoints import assert_ranges, assert_same, random_tensors
from gguf import GGMLQuantizationType as Kind

from shiftjax.arch.config import ModelConfig, RopeScaling
from shiftjax.arch.presets import PRESETS
from shiftjax.weights.gguf import GgufSource
from shiftjax.weights.locate import open_source, resolve_model
from shiftjax.weights.source import CheckpointError, check_complete

MODEL = replace(PRESETS["tiny"], name="tiny", hidden_size=256, intermediate_size=512, head_dim=32)
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "rope_freqs": "rope_freqs",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{LAYER[rest]}.{kind}"


def interleave(array: np.ndarray, head_dim: int) -> np.ndarray:
    """llama.cpp's order of q and k rows, one row at a time: halves a, b become a0 b0 a1 b1 ..."""
    rows = []
    for head in range(0, len(array), head_dim):
        for pair in range(head_dim // 2):
            rows += [array[head + pair], array[head + head_dim // 2 + pair]]
    return np.stack(rows)


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    config: ModelConfig = MODEL,
    *,
    kind: Kind | None = None,
    architecture: str = "llama",
    extra: Mapping[str, object] | None = None,
) -> Path:
    """Write Hugging Face tensors as llama.cpp's converter would; matrices are stored as `kind`."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for key, value in (extra or {}).items():
        writer.add_key_value(key, value, TYPES[type(value)])
    for name, tensor in tensors.items():
        permuted = architecture == "llama" and (".q_proj." in name or ".k_proj." in name)
        array = interleave(tensor, config.head_dim) if permuted else tensor
        if kind is not None and array.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


TYPES = {
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
    str: gguf.GGUFValueType.STRING,
    bool: gguf.GGUFValueType.BOOL,
}


@pytest.fixture
def path(tmp_path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", random_tensors(MODEL))


def test_float32_model_is_returned_bit_by_bit(path):
    source = GgufSource(path, "tiny")
    assert source.config == MODEL
    check_complete(source)
    assert_same(source, random_tensors(MODEL))
    assert_ranges(source)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16])
def test_16_bit_types_stay_what_they_are(tmp_path, kind):
    dtype = {Kind.F16: "float16", Kind.BF16: "bfloat16"}[kind]
    tensors = random_tensors(MODEL)
    source = GgufSource(write_gguf(tmp_path / "m.gguf", tensors, kind=kind))
    assert_same(source, {n: t.astype(dtype) if t.ndim > 1 else t for n, t in tensors.items()})
    assert_ranges(source)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_quantised_types(tmp_path, kind):
    """Blocks lie within a row, so that the permutation of rows commutes with quantisation."""
    tensors = random_tensors(MODEL)
    source = GgufSource(write_gguf(tmp_path / "m.gguf", tensors, kind=kind))
    expected = {
        n: gguf.dequantize(gguf.quantize(t, kind), kind) if t.ndim > 1 else t
        for n, t in tensors.items()
    }
    assert_same(source, expected)
    assert_ranges(source)


@pytest.mark.parametrize(
    "kind",
    [
        *(Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K),
        *(Kind.IQ1_S, Kind.IQ1_M, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S),
        *(Kind.IQ3_XXS, Kind.IQ3_S, Kind.IQ4_NL, Kind.IQ4_XS, Kind.TQ1_0, Kind.TQ2_0),
        Kind.MXFP4,
    ],
)
def test_types_of_codes(tmp_path, kind):
    """The library cannot quantise to most of these: bytes with finite scales are a tensor."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = MODEL.vocab_size, MODEL.hidden_size
    generator = np.random.default_rng(0)
    raw = generator.integers(0, 120, (shape[0], shape[1] // block_size * block_bytes), np.uint8)
    tensors = random_tensors(MODEL)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length"):
        writer.add_uint32(f"llama.{key}", 256)
    writer.add_head_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", tensors["model.norm.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GgufSource(path)
    name = "model.embed_tokens.weight"
    assert source.tensors[name].shape == shape
    assert source.read(name).tobytes() == gguf.dequantize(raw, kind).tobytes()
    assert_ranges(source)


VARIANTS = {
    "qwen2": replace(MODEL, architecture="qwen2", attention_bias=True),
    "qwen3": replace(MODEL, architecture="qwen3", qk_norm=True, tie_word_embeddings=True),
    "llama": replace(MODEL, attention_bias=True, output_bias=True, mlp_bias=True),
    "mistral": replace(MODEL, architecture="mistral", sliding_window=128),
}


@pytest.mark.parametrize(("name", "config"), VARIANTS.items())
def test_variants(tmp_path, name, config):
    """Biases are permuted like their rows; Qwen is not permuted; Mistral is called llama."""
    architecture = "llama" if name == "mistral" else name
    extra = {"llama.attention.sliding_window": 128} if name == "mistral" else {}
    tensors = random_tensors(config)
    path = tmp_path / "m.gguf"
    write_gguf(path, tensors, config, architecture=architecture, extra=extra)
    source = GgufSource(path, "tiny")
    assert source.config == config
    assert_same(source, tensors)
    assert_ranges(source)


def test_metadata(tmp_path):
    extra = {
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.ggml.eot_token_id": 7,
        "general.alignment": 64,
        "custom.flag": True,
        "general.name": "Tiny One",
    }
    source = GgufSource(write_gguf(tmp_path / "m.gguf", random_tensors(MODEL), extra=extra))
    assert {key: source.metadata[key] for key in extra} == extra
    assert source.config.eos_token_ids == (1, 7)
    assert source.config.name == "Tiny One"


def llama3_divisors(factor: float, original: int = 8192, high: float = 4.0) -> np.ndarray:
    """The published rule, one frequency at a time."""
    divisors = []
    for i in range(0, MODEL.head_dim, 2):
        wavelength = 2 * np.pi * MODEL.rope_theta ** (i / MODEL.head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - 1) / (high - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def write_rope_freqs(path: Path, divisors: np.ndarray) -> Path:
    return write_gguf(path, {**random_tensors(MODEL), "rope_freqs.weight": divisors})


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_is_recognised(tmp_path, factor):
    source = GgufSource(write_rope_freqs(tmp_path / "m.gguf", llama3_divisors(factor)))
    assert source.config.rope_scaling == RopeScaling("llama3", factor, 1.0, 4.0, 8192)
    assert_same(source, random_tensors(MODEL))


@pytest.mark.parametrize("divisors", [llama3_divisors(8.0, 4096), llama3_divisors(8.0)[:-1]])
def test_other_frequency_factors_are_refused(tmp_path, divisors):
    path = write_rope_freqs(tmp_path / "m.gguf", divisors)
    with pytest.raises(
        CheckpointError, match=r"rope_freqs\.weight: expected the frequency factors"
    ):
        GgufSource(path)


def test_linear_rope(tmp_path):
    extra = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    source = GgufSource(write_gguf(tmp_path / "m.gguf", random_tensors(MODEL), extra=extra))
    assert source.config.rope_scaling == RopeScaling("linear", 4.0)


@pytest.mark.parametrize(
    ("architecture", "extra", "message"),
    [
        ("gemma", {}, "general.architecture must be one of llama, qwen2, qwen3, gemma2, gemma3"),
        ("llama", {"llama.rope.scaling.type": "yarn"}, "rope.scaling.type must be none or linear"),
        ("llama", {"llama.rope.scale_linear": 2.0}, "rope.scale_linear is an old key"),
        ("llama", {"llama.rope.dimension_count": 16}, "rope.dimension_count must equal head_dim"),
        ("llama", {"general.alignment": 48}, "general.alignment must be a power of two, found 48"),
        ("llama", {"general.alignment": 0}, "general.alignment must be a power of two, found 0"),
    ],
)
def test_unsupported_metadata(tmp_path, architecture, extra, message):
    path = tmp_path / "m.gguf"
    tensors = random_tensors(MODEL)
    alignment = extra.pop("general.alignment", None)
    if alignment is not None:  # the writer refuses it too
        write_gguf(path, tensors, extra={"general.alignment": 64})
        value = b"general.alignment" + struct.pack("<I", 4)
        content = path.read_bytes().replace(
            value + struct.pack("<I", 64), value + struct.pack("<I", alignment)
        )
        path.write_bytes(content)
    else:
        write_gguf(path, tensors, architecture=architecture, extra=extra)
    with pytest.raises(CheckpointError, match=message):
        GgufSource(path)


def test_missing_metadata_is_named(path):
    content = path.read_bytes().replace(b"llama.embedding_length", b"llama.embedding_Length")
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="embedding_length is missing, expected a whole"):
        GgufSource(path)


# ------------------------------------------------------------------------ broken files


def info_offset(content: bytes, name: bytes) -> int:
    """Where the fields after a tensor's name begin: dimensions, type, offset."""
    return content.rindex(name) + len(name)


def patch(name: bytes, position: int, code: str, value: int):
    """A corruption of one field of a tensor's entry."""

    def corrupt(path: Path) -> None:
        content = bytearray(path.read_bytes())
        struct.pack_into(code, content, info_offset(bytes(content), name) + position, value)
        path.write_bytes(content)

    return corrupt


def write_at(position: int, raw: bytes):
    def corrupt(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[position : position + len(raw)] = raw
        path.write_bytes(content)

    return corrupt


def after(marker: bytes, raw: bytes):
    """Overwrite what follows the first occurrence of `marker`."""

    def corrupt(path: Path) -> None:
        position = path.read_bytes().index(marker) + len(marker)
        write_at(position, raw)(path)

    return corrupt


def swap(old: bytes, new: bytes):
    return lambda path: path.write_bytes(path.read_bytes().replace(old, new))


Q, NORM = b"blk.0.attn_q.weight", b"output_norm.weight"
# A matrix's entry after its name: dimensions 0, columns 4, rows 12, type 20, offset 24.
CORRUPTIONS = {
    "empty": (lambda path: path.write_bytes(b""), "expected a GGUF file, found 0 bytes"),
    "three bytes": (lambda path: os.truncate(path, 3), "magic needs 4 bytes at byte 0"),
    "another format": (write_at(0, b"PK\x03\x04"), r"expected a GGUF file, found b'PK"),
    "version 1": (write_at(4, b"\x01"), "expected GGUF version 2 or 3 .*, found 1"),
    "big endian": (write_at(4, b"\0\0\0\3"), "expected GGUF version 2 or 3"),
    "truncated early": (lambda path: os.truncate(path, 300), "keys, too many for 300 bytes"),
    "truncated header": (lambda path: os.truncate(path, 1000), "the file ends after 1000; it was"),
    "truncated data": (
        lambda path: os.truncate(path, path.stat().st_size - 1000),
        r"tensor .* the file has \d+; it was truncated or an offset is wrong",
    ),
    "too many tensors": (write_at(8, b"\xff" * 8), "header says 18446744073709551615 tensors and"),
    "too many keys": (
        write_at(16, b"\xff" * 8),
        "and 18446744073709551615 metadata keys, too many for",
    ),
    "key length lies": (write_at(24, b"\xff" * 8), "key 1 of .* needs 18446744073709551615 bytes"),
    "string length lies": (
        after(b"general.architecture\x08\0\0\0", b"\xff" * 8),
        "general.architecture needs 18446744073709551615 bytes",
    ),
    "value type": (after(b"general.architecture", b"\x63"), "architecture has the unknown value"),
    "no UTF-8": (after(b"general.architecture\x08\0\0\0" + b"\x05" + b"\0" * 7, b"\xff"), "UTF-8"),
    "key twice": (
        swap(b"tokenizer.ggml.eos_token_id", b"tokenizer.ggml.bos_token_id"),
        r"metadata key tokenizer\.ggml\.bos_token_id appears twice",
    ),
    "type unknown": (patch(Q, 20, "<I", 999), r"attn_q\.weight: unknown tensor type 999"),
    "type unsupported": (patch(Q, 20, "<I", Kind.I32), r"attn_q\.weight: .* found I32"),
    "type integer": (patch(Q, 20, "<I", Kind.I8), r"attn_q\.weight: expected one of F32, .* I8"),
    "vector quantised": (patch(NORM, 12, "<I", Kind.Q8_0), r"norm\.weight: .* Q8_0 of shape \[256"),
    "dimensions 9": (patch(Q, 0, "<I", 9), "expected 1 to 4 dimensions, found 9"),
    "dimensions 0": (patch(Q, 0, "<I", 0), "expected 1 to 4 dimensions, found 0"),
    "rows overflow": (patch(Q, 12, "<Q", 2**62), r"attn_q\.weight: .* needs bytes"),
    "no rows": (patch(Q, 12, "<Q", 0), r"attn_q\.weight: shape \[0, 256\] is empty"),
    "offset beyond": (patch(Q, 24, "<Q", 2**60), r"attn_q\.weight: .* an offset is wrong"),
    "offset overlaps": (patch(Q, 24, "<Q", 0), r"starts at byte \d+ inside tensor .*, which ends"),
    "tensor twice": (
        swap(b"blk.1.attn_q.weight", Q),
        r"tensor blk\.0\.attn_q\.weight appears twic",
    ),
    "directory": (lambda path: (path.unlink(), path.mkdir()), "cannot be read: Is a directory"),
    "absent": (lambda path: path.unlink(), "cannot be read: No such file"),
}


@pytest.mark.parametrize(("corrupt", "message"), CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_broken_file(path, corrupt, message):
    corrupt(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        GgufSource(path)
    assert all(line.startswith(str(path)) for line in str(caught.value).splitlines())


def test_row_size_must_be_whole_blocks(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", random_tensors(MODEL), kind=Kind.Q8_0)
    patch(Q, 4, "<Q", 255)(path)
    with pytest.raises(CheckpointError, match="rows of 255 are no multiple of Q8_0's 32"):
        GgufSource(path)


def test_more_tokens_than_embedding_rows(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"t{i}" for i in range(257)])
    writer.add_tensor("token_embd.weight", np.ones((256, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="expected a row for each of 257 tokens, found 256"):
        GgufSource(path)


def test_no_prefix_of_a_file_crashes(path):
    """Truncated anywhere in its header, a file is refused with a message, never a traceback."""
    content = path.read_bytes()
    end = info_offset(content, b"blk.1.ffn_norm.weight")
    for size in range(0, end, 7):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError):
            GgufSource(path)


@pytest.mark.thorough
def test_smollm2():
    source = open_source(resolve_model("smollm2-135m"))
    assert source.config == PRESETS["smollm2-135m"]
    check_complete(source)
    name = "model.layers.0.self_attn.q_proj.weight"
    part = source.read(name, (slice(100, 300), slice(10, 90)))
    np.testing.assert_array_equal(part, source.read(name)[100:300, 10:90])
