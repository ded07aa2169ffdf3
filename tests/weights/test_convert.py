"""Converting between formats, Orbax, checksums: bit by bit, all or nothing."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import TINY, assert_ranges, assert_same, random_tensors, write_shards, write_single
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from shiftjax import LLM
from shiftjax.text.tokenizer import load_tokenizer
from shiftjax.weights import orbax
from shiftjax.weights.checksums import SUMS_FILE, verify_checksums
from shiftjax.weights.convert import convert
from shiftjax.weights.huggingface import HuggingFaceSource
from shiftjax.weights.locate import open_source, resolve_model
from shiftjax.weights.orbax import OrbaxSource
from shiftjax.weights.source import CheckpointError

FORMATS = ["huggingface", "orbax"]
TOKENIZER = Tokenizer(WordLevel({"a": 0}, unk_token="a")).to_str()


@pytest.fixture
def tiny(tmp_path) -> Path:
    directory = write_shards(tmp_path / "tiny", random_tensors(dtype="bfloat16"))
    (directory / "tokenizer.json").write_text(TOKENIZER)
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_round_trip_is_exact(tmp_path, dtype):
    tensors = random_tensors(dtype=dtype)
    start = write_single(tmp_path / "tiny", tensors)
    middle = convert(str(start), tmp_path / "a" / "tiny", "orbax")
    end = convert(str(middle), tmp_path / "b" / "tiny", "huggingface")
    for directory, kind in ((middle, "orbax"), (end, "huggingface")):
        location = resolve_model(str(directory))
        assert location.kind == kind
        source = open_source(location)
        assert source.config == TINY
        assert_same(source, tensors)
        assert_ranges(source)


def test_orbax_in_several_groups_and_chunks(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(orbax, "_GROUP_BYTES", 40_000)
    monkeypatch.setattr(orbax, "_CHUNK_BYTES", 2048)
    source = open_source(resolve_model(str(convert(str(tiny), tmp_path / "out", "orbax"))))
    assert_same(source, random_tensors(dtype="bfloat16"))
    assert_ranges(source)


@pytest.mark.parametrize("format", FORMATS)
def test_tokenizer_and_end_of_text_travel(tmp_path, tiny, format):
    out = convert(str(tiny), tmp_path / "out", format)
    assert (out / "tokenizer.json").read_text() == TOKENIZER
    assert open_source(resolve_model(str(out))).config.eos_token_ids == (1, 3)


@pytest.mark.parametrize("format", FORMATS)
def test_dtype(tmp_path, tiny, format):
    out = convert(str(tiny), tmp_path / "out", format, dtype="float32")
    expected = {n: t.astype(np.float32) for n, t in random_tensors(dtype="bfloat16").items()}
    assert_same(open_source(resolve_model(str(out))), expected)
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16"):
        convert(str(tiny), tmp_path / "out2", dtype="int8")


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_is_left_of_a_failure(tmp_path, format):
    """The bad value is in the last tensor: everything before it had been written."""
    tensors = random_tensors()
    tensors["lm_head.weight"][255, 63] = np.nan
    source = write_single(tmp_path / "tiny", tensors)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: .* found 1 NaN or infinite"):
        convert(str(source), tmp_path / "out", format)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_incomplete_source_is_refused(tmp_path):
    tensors = random_tensors()
    del tensors["model.norm.weight"]
    source = write_single(tmp_path / "tiny", tensors)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: expected shape \[64\]"):
        convert(str(source), tmp_path / "out")


def test_destination_must_be_new_or_empty(tmp_path, tiny):
    (tmp_path / "empty").mkdir()
    out = convert(str(tiny), tmp_path / "empty")
    assert verify_checksums(out) > 0
    for taken in (out, out / "config.json"):
        with pytest.raises(CheckpointError, match="exists and is not an empty directory"):
            convert(str(tiny), taken)


def test_destination_that_cannot_be_written(tmp_path, tiny):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file/out: cannot be written: .*exists"):
        convert(str(tiny), tmp_path / "file" / "out")


# ------------------------------------------------------------------------ broken Orbax


@pytest.fixture
def checkpoint(tmp_path, tiny) -> Path:
    return convert(str(tiny), tmp_path / "checkpoint", "orbax")


DAMAGED = "/orbax: its Orbax metadata (cannot be read|names no)"


def largest(directory: Path) -> Path:
    files = (directory / "orbax").rglob("*")
    return max((f for f in files if f.is_file()), key=lambda f: f.stat().st_size)


def test_orbax_without_its_data(checkpoint):
    largest(checkpoint).unlink()
    source = OrbaxSource(checkpoint)
    with pytest.raises(CheckpointError, match=r"tensor .* the checkpoint is damaged") as caught:
        for name in source.tensors:
            source.read(name)
    assert str(checkpoint) in str(caught.value)


def test_orbax_truncated(checkpoint):
    path = largest(checkpoint)
    path.write_bytes(path.read_bytes()[:-2000])
    source = OrbaxSource(checkpoint)
    with pytest.raises(CheckpointError, match=r"tensor .* the checkpoint is damaged"):
        for name in source.tensors:
            source.read(name)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "cannot be read: No such file"),
        ("orbax/_CHECKPOINT_METADATA", None, "expected a finished Orbax checkpoint, found none"),
        ("orbax/_CHECKPOINT_METADATA", b"{", "is not valid JSON"),
        ("orbax/state/_METADATA", None, DAMAGED),
        ("orbax/state/_METADATA", b"{", DAMAGED),
        ("orbax/state/manifest.ocdbt", b"x" * 100, DAMAGED),
    ],
)
def test_orbax_with_a_broken_file(checkpoint, file, content, message):
    path = checkpoint / file
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        OrbaxSource(checkpoint)


# -------------------------------------------------------------------------- checksums


@pytest.mark.parametrize("format", FORMATS)
def test_one_flipped_bit_is_found(tmp_path, tiny, format):
    out = convert(str(tiny), tmp_path / "out", format)
    verify_checksums(out)
    path = max((f for f in out.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{path.name}: expected SHA-256 .* was changed"):
        verify_checksums(out)


def test_sums_name_missing_files_and_bad_lines(tmp_path, tiny):
    assert verify_checksums(tiny) == 0
    out = convert(str(tiny), tmp_path / "out")
    (out / "tokenizer.json").unlink()
    with (out / SUMS_FILE).open("a") as file:
        file.write(f"nonsense\n{'0' * 64}  ../tiny/config.json\n")
    with pytest.raises(CheckpointError) as caught:
        verify_checksums(out)
    missing, nonsense, outside = sorted(caught.value.problems, key=lambda p: "expected lines" in p)
    assert missing.endswith(
        "tokenizer.json: expected because SHA256SUMS names it, found no such file"
    )
    assert "'nonsense'" in nonsense
    assert "../tiny/config.json" in outside


def test_of_a_file_only_its_own_sum_counts(tmp_path):
    file, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    file.write_bytes(b"some bytes")
    digest = hashlib.sha256(b"some bytes").hexdigest()
    (tmp_path / SUMS_FILE).write_text(f"{digest} *{file.name}\n{'0' * 64}  {other.name}\n")
    assert verify_checksums(file) == 1
    with pytest.raises(CheckpointError, match=r"other\.gguf: expected because"):
        verify_checksums(tmp_path)
    file.write_bytes(b"some bytez")
    with pytest.raises(CheckpointError, match=rf"model\.gguf: expected SHA-256 {digest}, found"):
        verify_checksums(file)


@pytest.mark.parametrize("format", FORMATS)
def test_a_flipped_bit_of_a_weight_stops_the_start(tmp_path, tiny, format):
    """The values stay finite: nothing but the sum can tell."""
    out = convert(str(tiny), tmp_path / "out", format)
    path = max((f for f in out.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{path.name}: expected SHA-256"):
        LLM(str(out))


@pytest.mark.thorough
def test_smollm2_to_huggingface(tmp_path):
    """GGUF to bfloat16 safetensors, with the tokenizer rebuilt."""
    out = convert("smollm2-135m", tmp_path / "smollm2-135m", dtype="bfloat16")
    before, after = open_source(resolve_model("smollm2-135m")), HuggingFaceSource(out)
    assert after.config == before.config
    name = "model.layers.29.self_attn.k_proj.weight"
    assert (after.read(name) == before.read(name).astype(after.tensors[name].dtype)).all()
    text = "Parallelism is chosen at run time, 1024 tokens later."
    path = resolve_model("smollm2-135m").path
    assert path is not None
    assert load_tokenizer(out).encode(text) == load_tokenizer(path).encode(text)
    assert json.loads((out / "tokenizer_config.json").read_text())["chat_template"]
