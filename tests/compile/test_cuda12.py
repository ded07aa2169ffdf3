"""The kernels, compiled by CUDA 12: `shiftjax[cuda12]` has another plugin and another ptxas.

Both plugins in one process would be one too many, so a process of its own runs some of the checks.
"""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import aot
import pytest

aot.require()
pytestmark = pytest.mark.thorough

TESTS = Path(__file__).parent.parent
CHECKS = ("compile/test_prefill_compile.py", "kernels/test_decode_compile.py")
CASES = "test_it_uses_the_chip and q_per_kv and blocks or test_decode_fits_the_chip and one"


def test_the_kernels_compile_with_cuda_12():
    here = Path(str(importlib.metadata.distribution(aot.packages(13)[0]).locate_file("")))
    wheels = here.parent / "gpu12"
    if not wheels.is_dir() and os.environ.get("CI") != "true":
        pytest.skip(f"make test installs the wheels of CUDA 12 into {wheels}")
    path = os.pathsep.join((str(TESTS.parent), str(wheels)))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", CASES, *CHECKS],
        check=False,
        cwd=TESTS,
        env=os.environ | {"PYTHONPATH": path, "CI": "true"},  # nothing is skipped
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout and "skipped" not in run.stdout
