"""What the host does for one step on a GPU: XLA's thunks, read from its dump.

A thunk is one thing that XLA's runtime does: launch a kernel, start a collective, wait for a
stream, or launch a command buffer (a CUDA graph) that holds thunks of its own. What stands at the
top level costs the host, every step; a conditional or a loop there even makes it wait for the
device, because the host decides which branch comes next.
"""

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

# An index and a kind; what a thunk holds is indented below it.
_THUNK = re.compile(r"^( *)\d+: k(\w+)", re.MULTILINE)
HOST_DECIDES = ("Conditional", "While")


class Thunk(NamedTuple):
    """One line of a thunk sequence."""

    kind: str  # XLA's name without its k: Kernel, Gemm, CommandBuffer, AllReduce ...
    depth: int  # blanks before it: 0 at the top level


def read_thunks(text: str) -> list[Thunk]:
    """Read a dumped sequence, all levels, in order."""
    return [Thunk(kind, len(blanks)) for blanks, kind in _THUNK.findall(text)]


def top_level(thunks: list[Thunk]) -> list[str]:
    """Kinds of what the host does itself."""
    return [thunk.kind for thunk in thunks if thunk.depth == 0]


@contextmanager
def dumped_thunks() -> Iterator[tuple[Mapping[str, str], Callable[[], list[Thunk]]]]:
    """Yield compiler options that dump one program, and what reads its thunks after that."""
    with tempfile.TemporaryDirectory(prefix="shiftjax-dump-") as folder:
        yield {"xla_dump_to": folder}, lambda: _read(Path(folder))


def _read(folder: Path) -> list[Thunk]:
    """Read the sequence that runs: the one after XLA's passes, if these changed anything."""
    for ending in ("thunk_sequence_after_thunk_passes", "thunk_sequence"):
        for path in folder.glob(f"*{ending}.txt"):
            return read_thunks(path.read_text(encoding="utf-8", errors="replace"))
    raise FileNotFoundError(f"XLA dumped no thunks into {folder}: are these programs for GPUs?")
