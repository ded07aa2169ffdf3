"""The counts of `scripts/count_house.py`, on a tree of which they are known."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/count_house.py"
TREE = {
    "shiftjax/config.py": "class EngineConfig:\n    size: int = 1\n    'tokens'\n",
    "shiftjax/build.py": (
        '"""Two\nlines."""\n\n# why\nfrom shiftjax.core.engine import step\n'
        "from shiftjax.config import EngineConfig\n\n\n"
        "def build(config: EngineConfig):\n    return step(\n        config,\n    )\n"
    ),
    "shiftjax/core/engine.py": (
        "from shiftjax.core import queue\n\n\n"
        "def step(a, b, c, d, e, f, *, g=None):\n"
        "    '''What it does.'''\n    return queue if g is None else a\n"
    ),
    "shiftjax/core/queue.py": "import shiftjax.core.request\n",
    "shiftjax/core/request.py": "class R:\n    def f(self, a, b, c, d, e, f):\n        '''x'''\n",
    "serving/core/request.py": "",
    "README.md": "# Title\n\nOne two. Three?\n\n    a command is no sentence\n\n| nor a | row |\n",
    "docs/house.md": (
        "- **Request**: `core/request` -> `core/engine.py` -> `serving/http`\n"
        "- **Other**: `core/queue`"
    ),
}
EXPECTED = {
    "code lines of shiftjax": 2 + 6,
    "code lines of shiftjax/core": 3 + 1 + 2,
    "code lines of serving/core": 0,
    "modules of shiftjax.core, the largest folder of the engine": 3,
    "its floors": 3,
    "imports among them": 2,
    "modules that build.py imports": 2,
    "`is None` and `is not None` of the engine's loop": 1,
    "files of the path of a request": 3,  # two are called core/request
    "file names that occur more than once": 1,
    "functions with more than 6 parameters": 1,
    "files with a parameter or field of type EngineConfig": 1,
    "words of a sentence, p95": 7,  # the lines of docs/house.md
}


def test_a_tree_is_counted(tmp_path):
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    file = tmp_path / "counts.json"
    command = [sys.executable, SCRIPT, "--root", tmp_path, "--json", file]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    counts = json.loads(file.read_text())
    assert {name: counts[name] for name in EXPECTED} == EXPECTED
    assert len(printed.splitlines()) == len(counts)
    listed = subprocess.run([*command, "--list"], check=True, capture_output=True, text=True).stdout
    assert listed == "  7  shiftjax/core/engine.py:4 step\n"
