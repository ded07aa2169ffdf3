"""A whole step is one CUDA graph, with the newest JAX and with the oldest that is supported.

Two versions of JAX in one process would be one too many, so a process of its own runs these tests
with the older one.
"""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import aot
import pytest

aot.require()

from lean import greedy  # noqa: E402
from steps import Case, Compiler  # noqa: E402

from serving.bench.thunks import top_level  # noqa: E402
from shiftjax.device.sampling import sample  # noqa: E402
from shiftjax.parallel.grid import Mode  # noqa: E402

pytestmark = pytest.mark.thorough

OLDEST = "0.11.2"  # of jax, as in pyproject.toml
TESTS = Path(__file__).parent.parent
CASES = [  # the sampler of the engine is most of what a step takes to compile
    Case(1, 8, Mode(1, 1), "bf16", sampler=sample),
    Case(1, 1, Mode(1, 1), "fp8", sampler=greedy),
]


@pytest.fixture(scope="module")
def compiled() -> Compiler:
    return Compiler()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.size}-tp{case.tp}")
def test_a_step_is_one_launch_by_the_host(case, compiled):
    assert top_level(compiled(case).thunks) == ["CommandBuffer"]


def test_so_it_is_with_the_oldest_jax():
    wheels = Path(str(importlib.metadata.distribution(aot.packages(13)[0]).locate_file("")))
    oldest = wheels.parent / "jax011"
    if not oldest.is_dir() and os.environ.get("CI") != "true":
        pytest.skip(f"make test-all installs jax {OLDEST} into {oldest}")
    path = os.pathsep.join(map(str, (TESTS.parent, oldest, wheels)))  # the last has ptxas
    assert _run(path, "-c", "import jax; print(jax.__version__)") == f"{OLDEST}\n"
    name = test_a_step_is_one_launch_by_the_host.__name__
    said = _run(path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", name, __file__)
    assert f"{len(CASES)} passed" in said and "skipped" not in said


def _run(path: str, *command: str) -> str:
    """Return what Python says with these folders first on its path."""
    run = subprocess.run(
        [sys.executable, *command],
        check=False,
        cwd=TESTS,
        env=os.environ | {"PYTHONPATH": path, "CI": "true"},  # nothing is skipped
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return run.stdout
