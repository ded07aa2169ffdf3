"""SHA-256 sums beside a checkpoint, in the format of `sha256sum -c`.

safetensors and Orbax hold no sums of their own: a flipped bit in a weight is found only by these.
"""

import hashlib
from pathlib import Path

from shiftjax.weights.source import CheckpointError

SUMS_FILE = "SHA256SUMS"


def write_checksums(directory: Path) -> None:
    """Write SHA256SUMS over every file below the directory."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    lines = [f"{_digest(path)}  {path.relative_to(directory)}\n" for path in files]
    (directory / SUMS_FILE).write_text("".join(lines))


def verify_checksums(directory: Path) -> int:
    """Compare every file that SHA256SUMS names; return how many there were, 0 without sums.

    Reads the whole checkpoint (about 1 GB/s). Raises CheckpointError with a line per bad file.
    """
    sums = directory / SUMS_FILE
    if not sums.exists():
        return 0
    problems, lines = [], sums.read_text(errors="replace").splitlines()
    for line in lines:
        expected, _, name = line.partition("  ")
        path = directory / name
        if len(expected) != 64 or not path.resolve().is_relative_to(directory.resolve()):
            problems.append(f"{sums}: expected lines of a SHA-256 sum and a file, found {line!r}")
        elif not path.is_file():
            problems.append(f"{path}: expected because {SUMS_FILE} names it, found no such file")
        elif (found := _digest(path)) != expected:
            problems.append(f"{path}: expected SHA-256 {expected}, found {found}; it was changed")
    if problems:
        raise CheckpointError(*problems)
    return len(lines)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
