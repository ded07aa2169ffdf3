"""A recipe of docs/house.md, performed: files written by hand in a copy of the tree."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("shiftjax", "serving", "pallas_kernels")


class Copy:
    """The packages in a folder of their own, and which of their files were written since."""

    def __init__(self, folder: Path):
        self.folder, self.written = folder, set()
        for name in PACKAGES:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)

    def insert(self, file: str, before: str, text: str) -> None:
        """Write a text in front of another, which stands there once."""
        path = self.folder / file
        old = path.read_text()
        assert old.count(before) == 1, f"{file} has {old.count(before)} of {before!r}"
        path.write_text(old.replace(before, text + before))
        self.written.add(file)

    def run(self, *words: str) -> str:
        """What Python, given these words, prints in the copy; it must end with 0."""
        inherited = os.environ.get("PYTHONPATH")
        path = os.pathsep.join(filter(None, (str(self.folder), inherited)))
        env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, *words]
        options = {"cwd": self.folder, "env": env, "capture_output": True, "text": True}
        done = subprocess.run(command, check=False, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout
