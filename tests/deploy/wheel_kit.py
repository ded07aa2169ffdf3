"""A wheel of this repository, built of files that git knows: others are nobody else's."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = "from setuptools.build_meta import build_wheel; print(build_wheel('out'))"


def known_files(*sources: str) -> list[str]:
    """Those that are a source, or lie in one; relative to the repository."""
    command = ["git", "ls-files", "--", *sources]
    known = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return known.stdout.splitlines()


def build_wheel(root: Path, places: Mapping[str, Path]) -> Path:
    """The wheel of these files of the repository, each copied to its place below `root`."""
    for name, place in places.items():
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, root / place)
    command = [sys.executable, "-c", BUILD]
    built = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    return root / "out" / built.stdout.splitlines()[-1]
