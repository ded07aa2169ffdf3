"""SHA-256 sums beside a checkpoint, in the format of `sha256sum -c`.

safetensors, GGUF and Orbax hold no sums: a flipped bit in a weight is found only by these.
`shiftjax convert` writes them, and `LLM` compares them before it loads anything.
"""

import hashlib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shiftjax.weights.source import CheckpointError

SUMS_FILE = "SHA256SUMS"
Progress = Callable[[str, int, int], None]
_LINE = re.compile(r"(?P<sum>[0-9a-f]{64}) [ *](?P<name>.+)")  # *: read as binary, as here always
_THREADS = 4


def write_checksums(directory: Path) -> None:
    """Write SHA256SUMS over every file below the directory."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    lines = [f"{_digest(path)}  {path.relative_to(directory)}\n" for path in files]
    (directory / SUMS_FILE).write_text("".join(lines))


def verify_checksums(path: Path, progress: Progress | None = None) -> int:
    """Compare a checkpoint, a directory or one file, with the SHA256SUMS in its directory.

    Of a directory every file that the sums name is read, of a file the file itself; returns how
    many they were, 0 without sums. That costs a second per GB and thread (`_THREADS` files at a
    time), and leaves the files in the page cache for what reads them next.

    Raises:
        CheckpointError: a line per file that is missing or was changed.
    """
    directory = path if path.is_dir() else path.parent
    sums = directory / SUMS_FILE
    if not sums.exists():
        return 0
    problems, expected = [], {}
    for line in sums.read_text(errors="replace").splitlines():
        match = _LINE.fullmatch(line)
        if match is None or not _is_inside(match["name"]):
            problems.append(f"{sums}: expected lines of a SHA-256 sum and a file, found {line!r}")
        elif path in (directory, directory / match["name"]):
            expected[directory / match["name"]] = match["sum"]
    problems += _compare(expected, progress)
    if problems:
        raise CheckpointError(*problems)
    return len(expected)


def _is_inside(name: str) -> bool:
    return not Path(name).is_absolute() and ".." not in Path(name).parts


def _compare(expected: dict[Path, str], progress: Progress | None) -> list[str]:
    problems = []
    with ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(lambda path: _digest(path) if path.is_file() else None, expected)
        for done, (path, digest) in enumerate(zip(expected, found, strict=True), 1):
            if digest is None:
                problems.append(
                    f"{path}: expected because {SUMS_FILE} names it, found no such file"
                )
            elif digest != expected[path]:
                problems.append(
                    f"{path}: expected SHA-256 {expected[path]}, found {digest}; it was changed"
                )
            if progress:
                progress("checksums", done, len(expected))
    return problems


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
