"""A copy of the sources, in which a recipe of `docs/CORE.md` is carried out."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("pallas_kernels", "serving", "shiftjax")
KITS = (ROOT / "tests", ROOT / "tests" / "serving")


def copy_tree(tmp_path: Path) -> Path:
    """Copy the packages, with what Python compiled of them; return the folder that has them."""
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name)
    return tmp_path


def change(copy: Path, file: str, old: str, new: str) -> None:
    """Replace a text that the file has once."""
    text = (copy / file).read_text()
    assert text.count(old) == 1, f"the recipe does not fit {file}, which has {old!r} not once"
    (copy / file).write_text(text.replace(old, new))


def changed_files(copy: Path) -> set[str]:
    """Return the files of the packages whose text is not that of the repository."""
    names = [path.relative_to(copy) for package in PACKAGES for path in (copy / package).rglob("*")]
    sources = [name for name in names if name.suffix in (".py", ".proto", ".yaml")]
    return {
        str(name) for name in sources if (copy / name).read_bytes() != (ROOT / name).read_bytes()
    }


def run(copy: Path, *words: str) -> str:
    """Return what Python, given these words, prints with the copy's packages and tests' kits."""
    before = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(map(str, (copy, *KITS, before))).rstrip(os.pathsep)
    command, environment = [sys.executable, *words], os.environ | {"PYTHONPATH": path}
    return subprocess.run(
        command, cwd=copy, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def run_in(copy: Path, code: str) -> None:
    """Run a program, which lies in a file, so that tracebacks show its lines."""
    code = f"import shiftjax\nassert shiftjax.__file__.startswith({str(copy)!r})\n{code}"
    (copy / "check.py").write_text(code)
    run(copy, "check.py")
