"""Hugging Face directories: reading, ranges, writing, and every way a file can be broken."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from checkpoints import (
    TINY,
    assert_ranges,
    assert_same,
    random_tensors,
    write_config,
    write_shards,
    write_single,
)
from safetensors import safe_open

from shiftjax.weights.huggingface import INDEX_FILE, HuggingFaceSource, save_huggingface
from shiftjax.weights.random import RandomSource
from shiftjax.weights.source import CheckpointError

SINGLE = "model.safetensors"
SECOND = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("write", [write_single, write_shards])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_reads_what_the_safetensors_library_wrote(tmp_path, write, dtype):
    tensors = random_tensors(dtype=dtype)
    source = HuggingFaceSource(write(tmp_path / "tiny", tensors))
    assert source.config == TINY
    assert_same(source, tensors)
    assert_ranges(source)


def test_reads_data_that_is_not_aligned(tmp_path):
    tensors = random_tensors(dtype="bfloat16")
    path = write_single(tmp_path, tensors) / SINGLE
    header, data = split(path.read_bytes())
    join(path, header + b" ", data)
    assert_same(HuggingFaceSource(tmp_path), tensors)


@pytest.mark.parametrize("max_shard_bytes", [1, 100_000, 10**9])
def test_writes_what_the_safetensors_library_reads(tmp_path, max_shard_bytes):
    source = RandomSource(TINY, dtype="bfloat16")
    save_huggingface(source, tmp_path, max_shard_bytes=max_shard_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    found = {}
    for file in files:
        with safe_open(file, "np") as reader:
            names = list(reader.keys())
            assert reader.metadata() == {"format": "pt"}  # transformers refuses what says nothing
            found |= {name: reader.get_tensor(name) for name in names}
            assert len(names) == 1 or file.stat().st_size < max_shard_bytes + 10_000
    assert len(files) == {1: len(source.tensors), 100_000: 3, 10**9: 1}[max_shard_bytes]
    assert (tmp_path / INDEX_FILE).exists() == (len(files) > 1)
    assert_same(source, found)
    assert_same(HuggingFaceSource(tmp_path, "tiny"), found)
    assert HuggingFaceSource(tmp_path, "tiny").config == TINY


def test_writing_casts(tmp_path):
    source = RandomSource(TINY)
    save_huggingface(source, tmp_path, "bfloat16")
    written = HuggingFaceSource(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    assert written.tensors[name].dtype == "bfloat16"
    assert (written.read(name) == source.read(name).astype("bfloat16")).all()
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_writing_refuses_a_cast_that_overflows(tmp_path):
    tensors = random_tensors()
    tensors["model.norm.weight"][5] = 1e30
    source = HuggingFaceSource(write_single(tmp_path / "in", tensors))
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: .* 1 NaN or infinite of 64"):
        save_huggingface(source, tmp_path / "out", "float16")


# ------------------------------------------------------------------------ broken files


def split(content: bytes) -> tuple[bytes, bytes]:
    size = int.from_bytes(content[:8], "little")
    return content[8 : 8 + size], content[8 + size :]


def join(path: Path, header: bytes, data: bytes, size: int | None = None) -> None:
    length = len(header) if size is None else size
    path.write_bytes(length.to_bytes(8, "little") + header + data)


def edit_entry(**changes):
    """A corruption that changes the header entry of the final norm."""

    def corrupt(path: Path) -> None:
        header, data = split(path.read_bytes())
        entries = json.loads(header)
        entries["model.norm.weight"] |= changes
        join(path, json.dumps(entries).encode(), data)

    return corrupt


def edit_offsets(start: int, end: int):
    """A corruption that moves the final norm's range."""

    def corrupt(path: Path) -> None:
        header, _ = split(path.read_bytes())
        first, last = json.loads(header)["model.norm.weight"]["data_offsets"]
        edit_entry(data_offsets=[first + start, last + end])(path)

    return corrupt


def edit_header(change):
    """A corruption of the header's bytes; the length in front stays right."""

    def corrupt(path: Path) -> None:
        header, data = split(path.read_bytes())
        join(path, change(header), data)

    return corrupt


def claim(size: int):
    """A corruption of the header's length."""
    return lambda path: join(path, *split(path.read_bytes()), size=size)


def cut(num_bytes: int):
    return lambda path: os.truncate(path, path.stat().st_size - num_bytes)


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def duplicate(header: bytes) -> bytes:
    entry = json.dumps(json.loads(header)["model.norm.weight"]).encode()
    return b'{"model.norm.weight":' + entry + b"," + header[1:]


NORM = r"tensor model\.norm\.weight: "
INCOMPLETE, OFFSET = "file not fully covered", r"invalid offset for tensor `model\.norm\.weight`"
SIZES, NO_JSON = "invalid shape, data type, or offset for tensor", "invalid JSON in header: "
CORRUPTIONS = {
    "empty": (lambda path: path.write_bytes(b""), "header too small"),
    "seven bytes": (lambda path: os.truncate(path, 7), "header too small"),
    "truncated data": (cut(1), INCOMPLETE),
    "truncated header": (lambda path: os.truncate(path, 100), "invalid header length"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), INCOMPLETE),
    "length lies up": (claim(10**7), "invalid header length"),
    "length lies down": (claim(50), NO_JSON),
    "length over the limit": (claim(2**63), "header too large"),
    "no JSON": (edit_header(lambda h: b"x" * len(h)), NO_JSON),
    "nested JSON": (edit_header(lambda _: b"[" * 10**5), NO_JSON),
    "nested deeper": (edit_header(lambda _: b'{"__metadata__":' * 10**5), NO_JSON),
    "JSON list": (edit_header(lambda _: b"[]"), NO_JSON),
    "duplicate name": (edit_header(duplicate), r"names model\.norm\.weight more than once"),
    "entry no object": (edit_header(lambda _: b'{"x": 3}'), NO_JSON),
    "unsupported dtype": (edit_entry(dtype="I32"), NORM + "expected dtype F32, .* found I32"),
    "unknown dtype": (edit_entry(dtype="F31"), NO_JSON + "unknown variant `F31`"),
    "dtype no string": (edit_entry(dtype=["F32"]), NO_JSON),
    "dtype of another size": (edit_entry(dtype="F16"), SIZES),
    "shape of another size": (edit_entry(shape=[65]), SIZES),
    "shape overflows": (edit_entry(shape=[2**62, 2**62]), "overflow computing buffer size"),
    "shape negative": (edit_entry(shape=[-64]), NO_JSON),
    "shape no list": (edit_entry(shape=64), NO_JSON),
    "offsets backwards": (edit_entry(data_offsets=[512, 256]), OFFSET),
    "three offsets": (edit_entry(data_offsets=[0, 1, 256]), NO_JSON),
    "offsets overlap": (edit_offsets(-4, -4), OFFSET),
    "offsets leave a gap": (edit_offsets(4, 4), OFFSET),
    "offsets out of the file": (edit_offsets(10**9, 10**9), OFFSET),
    "missing": (lambda path: path.unlink(), r"holds no model\.safetensors"),
    "directory": (make_directory, "cannot be read: "),
}


@pytest.mark.parametrize(("corrupt", "message"), CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_broken_file(tmp_path, corrupt, message):
    path = write_single(tmp_path, random_tensors()) / SINGLE
    corrupt(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        HuggingFaceSource(tmp_path)
    assert all(line.startswith(str(tmp_path)) for line in str(caught.value).splitlines())


def remap(name: str, file: object):
    """A corruption of the index: one tensor is said to be elsewhere, or (`...`) nowhere."""

    def corrupt(directory: Path) -> None:
        index = json.loads((directory / INDEX_FILE).read_text())
        index["weight_map"][name] = file
        if file is ...:
            del index["weight_map"][name]
        (directory / INDEX_FILE).write_text(json.dumps(index))

    return corrupt


def only_pickles(directory: Path) -> None:
    for path in directory.glob("model*"):
        path.unlink()
    (directory / "pytorch_model.bin").write_bytes(b"never opened")


SHARD_CORRUPTIONS = {
    "missing shard": (lambda d: (d / SECOND).unlink(), f"names the file {SECOND}, which is not in"),
    "empty shard": (
        lambda d: (d / SECOND).write_bytes(b""),
        f"{SECOND}: cannot be read: .* too small",
    ),
    "absent file": (remap("model.norm.weight", "x.safetensors"), "names the file x.safetensors"),
    "path out": (remap("model.norm.weight", "../tiny/" + SECOND), "names the file ../tiny/"),
    "no file name": (remap("model.norm.weight", 3), "names the file 3"),
    "wrong shard": (
        remap("model.norm.weight", "model-00001-of-00002.safetensors"),
        r"says that tensor model\.norm\.weight is in model-00001-of-00002\.safetensors, which does",
    ),
    "absent tensor": (remap("more.weight", SECOND), "says that tensor more.weight is in"),
    "unlisted tensor": (
        remap("model.norm.weight", ...),
        f"says nothing of tensor model.norm.weight, which {SECOND} holds",
    ),
    "empty index": (lambda d: (d / INDEX_FILE).write_text("{}"), "weight_map must be an object"),
    "index no JSON": (lambda d: (d / INDEX_FILE).write_text("{"), "is not valid JSON"),
    "no index": (lambda d: (d / INDEX_FILE).unlink(), "or shards with"),
    "pickles": (only_pickles, "convert them to safetensors first"),
}


@pytest.mark.parametrize(("corrupt", "message"), SHARD_CORRUPTIONS.values(), ids=SHARD_CORRUPTIONS)
def test_broken_shards(tmp_path, corrupt, message):
    directory = write_shards(tmp_path / "tiny", random_tensors())
    corrupt(directory)
    with pytest.raises(CheckpointError, match=message):
        HuggingFaceSource(directory)


def test_all_broken_shards_are_named(tmp_path):
    directory = write_shards(tmp_path, random_tensors())
    for path in directory.glob("*.safetensors"):
        os.truncate(path, 4)
    with pytest.raises(CheckpointError) as caught:
        HuggingFaceSource(directory)
    assert len(caught.value.problems) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_directory_without_permission(tmp_path):
    write_config(tmp_path / "closed")
    (tmp_path / "closed").chmod(0)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        HuggingFaceSource(tmp_path / "closed")


def test_empty_tensor(tmp_path):
    write_single(tmp_path, {"empty": np.zeros((0, 4), np.float32)})
    assert HuggingFaceSource(tmp_path).read("empty").shape == (0, 4)
