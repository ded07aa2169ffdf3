"""A chunk is read as it was written, or not at all."""

import subprocess
import sys

import numpy as np
import pytest
from disk_kit import EchoPayloads, SlowDisk
from hypothesis import given, settings
from hypothesis import strategies as st
from traffic_kit import FAST

from shiftjax.core.blocks import CachedPrefix
from shiftjax.disk_tier.chunk_file import (
    ChunkError,
    Contents,
    most_bytes,
    read_chunk,
    read_header,
    write_chunk,
)
from shiftjax.disk_tier.chunk_index import Chunk, ChunkIndex
from shiftjax.disk_tier.disk import DiskPlace

UNITS = [
    CachedPrefix(b"a" * 16, [1, 2, 3, 130_000]),
    None,
    CachedPrefix(b"b" * 16, [4, 5, 6, 2_147_483_647]),
]
PIECES = [np.arange(24, dtype=np.float32).reshape(2, 3, 4), np.arange(10, dtype=np.int8)]
CONTENTS = Contents("model", 4, 4, UNITS, [])


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "one.kv"
    num_bytes = write_chunk(path, CONTENTS, PIECES)
    assert num_bytes == path.stat().st_size <= most_bytes(3, 4, 106)
    return path


def test_a_chunk_comes_back(path):
    contents, pieces = read_chunk(path)
    assert contents == CONTENTS._replace(sizes=[96, 10]) == read_header(path).contents
    assert [piece.tobytes() for piece in pieces] == [each.tobytes() for each in PIECES]
    assert path.stat().st_mode & 0o077 == 0  # others' prompts
    assert [each.name for each in path.parent.iterdir()] == ["one.kv"]


@settings(FAST, max_examples=60)
@given(st.data())
def test_no_damage_is_read(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("chunks") / "one.kv"
    write_chunk(path, CONTENTS, PIECES)
    whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "longer"]))
    damaged = {
        "flip": whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :],
        "cut": whole[:place],
        "longer": whole + b"x",
    }[kind]
    path.write_bytes(damaged)
    with pytest.raises(ChunkError):
        read_chunk(path)


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(file, part):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shiftjax.disk_tier.chunk_file._write_all", full)
    with pytest.raises(OSError, match="No space"):
        write_chunk(tmp_path / "one.kv", CONTENTS, PIECES)
    assert list(tmp_path.iterdir()) == []


def test_what_was_used_longest_ago_goes_first(tmp_path):
    """Chunks of earlier processes come in from the youngest on, beside what is written by then."""
    index = ChunkIndex(40)

    def chunk(name: str, is_oldest: bool = False) -> list[str] | None:
        own = Chunk(tmp_path / name, 10, [(4, name.encode())])
        removed = index.add(own, is_oldest=is_oldest)
        index.check()
        return None if removed is None else [each.path.name for each in removed]

    assert chunk("written") == chunk("young", True) == chunk("old", True) == []
    assert chunk("new") == [] and chunk("too old", True) is None
    assert chunk("newer") == ["old"]
    assert index.touch_all([(4, b"young")]) and not index.touch_all([(4, b"young"), (4, b"old")])
    assert chunk("newest") == ["written"]
    assert [each.path.name for each in index.chunks()] == ["new", "newer", "young", "newest"]


WRITER = """
import itertools, pathlib, resource, signal, sys
import numpy as np
from shiftjax.disk_tier.chunk_file import Contents, write_chunk
directory, limit = pathlib.Path(sys.argv[1]), int(sys.argv[2])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
contents, piece = Contents("model", 4, 4, [], []), np.ones(2_000_000, np.uint8)
for number in itertools.count():
    write_chunk(directory / f"{number}.kv", contents, [piece])
    print(number, flush=True)
"""


def test_a_process_that_is_killed_leaves_whole_chunks_alone(tmp_path):
    words = [sys.executable, "-c", WRITER, str(tmp_path), "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as writer:
        for line in writer.stdout:
            if int(line) == 5:
                writer.kill()
                break
    (tmp_path / "killed.tmp").write_bytes(b"half")  # be it there or not
    disk = SlowDisk(DiskPlace(tmp_path, 1 << 30, "model", EchoPayloads({})), [1 << 30])
    disk.settle()
    assert not list(tmp_path.glob("*.tmp")) and disk.stats.num_bad_chunks == 0
    chunks = [path for path in tmp_path.glob("*.kv") if read_chunk(path)]
    assert len(chunks) >= 6 and disk.index.num_used_bytes == sum(c.stat().st_size for c in chunks)
    disk.close()


def test_a_file_that_may_not_grow_leaves_nothing(tmp_path):
    words = [sys.executable, "-c", WRITER, str(tmp_path), "1000000"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "File too large" in ended.stderr and not list(tmp_path.iterdir())
