"""Pruning by compilation: what fits a chip is kept, what does not is refused with the reason."""

import sys
from pathlib import Path

import aot
import pytest

aot.require()
pytestmark = pytest.mark.thorough
sys.path.insert(0, str(Path(__file__).parent.parent.parent / "scripts"))

from tune_kernels import Candidate, candidates_for, small_call  # noqa: E402


@pytest.fixture(scope="module")
def mesh():
    return aot.make_mesh("h200", (1,), ("x",))


@pytest.mark.parametrize("kernel", ["prefill", "decode"])
def test_kept_candidates_compile(kernel, mesh):
    """The first, the last, and the first whose products overlap the softmax: a GPU has to decide.

    `scripts/tune_kernels.py prune` has compiled them all.
    """
    kept = candidates_for(kernel, 128, 16)
    overlapped = [settings for settings in kept if settings.get("overlap")]
    assert bool(overlapped) == (kernel == "prefill")
    for settings in (kept[0], kept[-1], *overlapped[:1]):
        aot.compile_for(mesh, *small_call(Candidate(kernel, 128, 16, settings), mesh, aot))


@pytest.mark.parametrize(
    ("kernel", "settings", "reason"),
    [
        ("prefill", {"kv_tile": 128, "stages": 4}, "shared memory"),
        ("prefill", {"kv_tile": 128, "overlap": True}, "registers spill"),
        ("decode", {"shared_memory_bytes": 20_000}, "shared memory"),
    ],
)
def test_what_does_not_fit_is_refused(kernel, settings, reason, mesh):
    call = small_call(Candidate(kernel, 128, 16, settings), mesh, aot)
    with pytest.raises(Exception, match=reason):
        aot.compile_for(mesh, *call)
