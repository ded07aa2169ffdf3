"""Which part may know which: walks the imports of the shipped code, so that arrows stay arrows."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("shiftjax", "pallas_kernels", "serving", "scripts")

# From the bottom up; the longest matching prefix counts. A module imports from lower layers, and
# from the modules of its own entry.
LAYERS = (
    ("pallas_kernels", "shiftjax.options", "shiftjax.models.config", "shiftjax.gguf_header"),
    ("shiftjax.config", "shiftjax.models.presets", "shiftjax.engine.sampling_params"),
    ("shiftjax.settings", "shiftjax.engine.request", "shiftjax.text"),
    ("shiftjax.engine.admission", "shiftjax.cache.blocks", "shiftjax.parallel"),
    (
        "shiftjax.engine.draft",
        "shiftjax.engine.block_tables",
        "shiftjax.engine.scheduler_config",
        "shiftjax.engine.logprobs",
        "shiftjax.engine.buckets",
        "shiftjax.engine.machine",
        "shiftjax.engine.shape",
        "shiftjax.engine.collectives",
    ),
    ("shiftjax.engine.costs",),
    ("shiftjax.engine.scheduler", "shiftjax.engine.policy", "shiftjax.engine.echo"),
    ("shiftjax.engine.engine", "shiftjax.models"),
    ("shiftjax.sim",),
    ("shiftjax.cache", "shiftjax.weights"),
    ("shiftjax.engine",),
    ("shiftjax",),
    ("serving",),
    ("scripts",),
)

CONTROL_PLANE = (
    "shiftjax",
    "shiftjax.config",
    "shiftjax.options",
    "shiftjax.settings",
    "shiftjax.models.config",
    "shiftjax.models.presets",
    "shiftjax.cache.blocks",
    *("shiftjax.engine." + name for name in ("sampling_params", "request", "admission", "draft")),
    *("shiftjax.engine." + name for name in ("block_tables", "scheduler_config", "scheduler")),
    "shiftjax.engine.logprobs",
    *("shiftjax.engine." + name for name in ("policy", "engine", "echo")),
    *("shiftjax.engine." + name for name in ("buckets", "machine", "shape")),
    *("shiftjax.engine." + name for name in ("collectives", "costs")),
    *("shiftjax.sim." + name for name in ("machine", "models", "trace", "deployment", "replay")),
    *("shiftjax.sim." + name for name in ("metrics", "planning", "experiments", "report")),
    "shiftjax.sim.stages",
)
JAX = {"jax", "jaxlib", "flax", "jaxtyping", "orbax"}

# Names that one place may use.
SINGLE_HOMES = {
    "PartitionSpec": "shiftjax.parallel.sharding",
    "os.environ": "shiftjax.settings",
    "os.getenv": "shiftjax.settings",
    "os.putenv": "shiftjax.settings",
}
FORBIDDEN_IMPORTS = {"torch", "transformers", "pickle", "cPickle", "dill", "cloudpickle", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}

# Where a package is imported by another name than it is installed by.
INSTALLED_AS = {
    "grpc": "grpcio",
    "grpc_health": "grpcio_health_checking",
    "grpc_reflection": "grpcio_reflection",
    "grpc_status": "grpcio_status",
    "google": "protobuf",
    "orbax": "orbax_checkpoint",
    "yaml": "pyyaml",
}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def find_modules(root: Path) -> dict[str, ast.Module]:
    """The parsed modules of the shipped code, by dotted name."""
    modules = {}
    for path in sorted(p for package in OURS for p in (root / package).rglob("*.py")):
        if "__pycache__" in path.parts or path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
            continue
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        modules[name.removesuffix(".__init__")] = ast.parse(path.read_text(), str(path))
    return modules


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below that can run: what `if TYPE_CHECKING:` guards cannot."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from executed(child)


def imports_of(tree: ast.Module, modules: dict[str, ast.Module]) -> set[str]:
    """Dotted names that a module imports, in functions too; `from a import b`: a.b if a module."""
    found = set()
    for node in executed(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            assert node.level == 0, "relative imports are not used here"
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in modules else base)
    return found


def entry_of(module: str) -> tuple[int, str]:
    """(layer, prefix) of a module."""
    matches = [
        (len(prefix), layer, prefix)
        for layer, prefixes in enumerate(LAYERS)
        for prefix in prefixes
        if module == prefix or module.startswith(prefix + ".")
    ]
    _, layer, prefix = max(matches)
    return layer, prefix


def wrong_arrows(modules: dict[str, ast.Module]) -> list[str]:
    """Imports that point up, or sideways between entries of a layer."""
    wrong = []
    for name, tree in modules.items():
        layer, prefix = entry_of(name)
        for target in sorted(imports_of(tree, modules)):
            if target.split(".")[0] not in OURS or target == "shiftjax":
                continue
            target_layer, target_prefix = entry_of(target)
            if target_layer > layer or (target_layer == layer and target_prefix != prefix):
                wrong.append(f"{name} imports {target}")
    return wrong


def import_cycle(modules: dict[str, ast.Module]) -> list[str]:
    """The names of a cycle of imports, or nothing."""
    graph = {name: imports_of(tree, modules) & set(modules) for name, tree in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def forbidden_things(modules: dict[str, ast.Module]) -> list[str]:
    """Imports of forbidden packages, and calls that run text as code."""
    wrong = []
    for name, tree in modules.items():
        tops = {target.split(".")[0] for target in imports_of(tree, modules)}
        wrong += [f"{name} imports {top}" for top in sorted(tops & FORBIDDEN_IMPORTS)]
        called = (node.func for node in executed(tree) if isinstance(node, ast.Call))
        for function in called:
            if isinstance(function, ast.Name) and function.id in FORBIDDEN_CALLS:
                wrong.append(f"{name}, line {function.lineno} calls {function.id}")
    return wrong


def misplaced_names(modules: dict[str, ast.Module]) -> list[str]:
    """Uses of names outside their single home."""
    wrong = []
    for name, tree in modules.items():
        for node in ast.walk(tree):
            used = None
            if isinstance(node, ast.Attribute):
                used = ast.unparse(node) if ast.unparse(node) in SINGLE_HOMES else node.attr
            elif isinstance(node, ast.ImportFrom):
                names = {alias.name for alias in node.names}
                full = {f"{node.module}.{alias}" for alias in names}
                used = next(iter((names | full) & set(SINGLE_HOMES)), None)
            if used in SINGLE_HOMES and SINGLE_HOMES[used] != name:
                wrong.append(f"{name}, line {node.lineno} uses {used}")
    return wrong


def packages_of(requirements: list[str]) -> set[str]:
    """Names of packages out of requirements like `jax[cuda12]>=0.11.2`."""
    names = (re.split(r"[\[<>=!~ ;]", requirement)[0] for requirement in requirements)
    return {name.lower().replace("-", "_") for name in names}


def third_party_imports(modules: dict[str, ast.Module], tops: set[str]) -> set[str]:
    """Packages, by the name they are installed by, that modules of these tops import."""
    found = set()
    for name, tree in modules.items():
        if name.split(".")[0] in tops:
            found |= {target.split(".")[0] for target in imports_of(tree, modules)}
    return {INSTALLED_AS.get(top, top) for top in found - sys.stdlib_module_names - set(OURS)}


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    return find_modules(ROOT)


def test_the_walk_sees_the_code(modules):
    assert {"shiftjax", "shiftjax.config", "shiftjax.parallel.sharding", "serving.cli"} <= set(
        modules
    )
    assert "shiftjax.options" in imports_of(modules["shiftjax.config"], modules)
    assert set(CONTROL_PLANE) <= set(modules)


def test_no_arrow_points_up_or_sideways(modules):
    assert wrong_arrows(modules) == []


def test_no_imports_go_round(modules):
    assert import_cycle(modules) == []


def test_models_do_not_know_the_engine(modules):
    allowed = {"shiftjax.engine.request"}  # Mode
    for name in (name for name in modules if name.startswith("shiftjax.models")):
        known = {m for m in imports_of(modules[name], modules) if m.startswith("shiftjax.engine")}
        assert known <= allowed, name


def test_kernels_import_nothing_of_ours(modules):
    for name in (name for name in modules if name.split(".")[0] == "pallas_kernels"):
        tops = {m.split(".")[0] for m in imports_of(modules[name], modules)}
        assert not tops & set(OURS) - {"pallas_kernels"}, name


@pytest.mark.parametrize("name", CONTROL_PLANE)
def test_the_control_plane_imports_no_jax(name, modules):
    assert not {m.split(".")[0] for m in imports_of(modules[name], modules)} & JAX


def test_importing_the_control_plane_pulls_in_no_jax():
    lines = [f"import {name}" for name in (*CONTROL_PLANE, "serving.cli")]
    code = "\n".join((*lines, "import sys", "print(sorted({'jax', 'flax'} & set(sys.modules)))"))
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_package_files_are_light(modules):
    packages = [p.parent for o in OURS for p in (ROOT / o).rglob("__init__.py")]
    for package in packages:
        name = ".".join(package.relative_to(ROOT).parts)
        tops = [n for n in modules[name].body if isinstance(n, ast.Import | ast.ImportFrom)]
        assert all(ast.unparse(n) == "from typing import TYPE_CHECKING" for n in tops), name


@pytest.fixture(scope="module")
def shipped(modules) -> dict[str, ast.Module]:
    """What is installed: scripts also start other engines, to compare with them."""
    return {name: tree for name, tree in modules.items() if name.split(".")[0] != "scripts"}


def test_nothing_forbidden_is_used(shipped):
    assert forbidden_things(shipped) == []


def test_some_names_have_one_home(shipped):
    assert misplaced_names(shipped) == []


def test_every_import_is_a_declared_dependency(shipped):
    project = PYPROJECT["project"]
    extras = {name: packages_of(some) for name, some in project["optional-dependencies"].items()}
    always = packages_of(project["dependencies"])
    library = third_party_imports(shipped, {"shiftjax", "pallas_kernels"})
    optional = extras["hub"] | extras["plots"]
    assert library - optional == always - {"rich"}  # rich is for the command line
    assert third_party_imports(shipped, {"serving"}) <= always | optional | extras["serving"]


def test_every_shape_annotation_is_checked_in_tests(modules, pytestconfig):
    *checked, typechecker = pytestconfig.getoption("--jaxtyping-packages").split(",")
    assert typechecker == "beartype.beartype"
    for name, tree in modules.items():
        if "jaxtyping" in imports_of(tree, modules):
            assert any(f"{name}.".startswith(f"{package}.") for package in checked), name


# ---------------------------------------------------------------- the walk itself can fail


def synthetic(**sources: str) -> dict[str, ast.Module]:
    return {name.replace("__", "."): ast.parse(text) for name, text in sources.items()}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shiftjax.config", "import shiftjax.llm"),
        ("shiftjax.config", "from shiftjax.engine import request"),
        ("shiftjax.models.llama", "def f():\n    from shiftjax.engine.runner import DeviceRunner"),
        ("shiftjax.weights.load", "from shiftjax.cache.pool import make_pools"),
        ("shiftjax.llm", "if True:\n    import serving.cli"),
        ("pallas_kernels.attention", "from shiftjax.options import shown"),
        ("shiftjax.engine.scheduler", "from shiftjax.engine.policy import POLICIES"),
    ],
)
def test_a_wrong_arrow_is_found(name, text):
    known = {"shiftjax.engine.request": ast.parse("")}
    assert len(wrong_arrows({name: ast.parse(text), **known})) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shiftjax.llm", "from shiftjax.engine.engine import Engine"),
        ("shiftjax.engine.runner", "import shiftjax.engine.step, shiftjax.weights.place, jax"),
        ("shiftjax.config", "if TYPE_CHECKING:\n    from shiftjax.llm import LLM"),
        ("serving.cli", "import shiftjax\nfrom serving.flags import settle"),
    ],
)
def test_a_right_arrow_is_not_found(name, text):
    assert wrong_arrows({name: ast.parse(text)}) == []


def test_a_cycle_is_found():
    cycle = synthetic(shiftjax__a="import shiftjax.b", shiftjax__b="from shiftjax import a")
    assert set(import_cycle(cycle)) == {"shiftjax.a", "shiftjax.b"}


@pytest.mark.parametrize(
    "text",
    ["import torch.nn", "from transformers import pipeline", "import pickle", "eval('1')"],
)
def test_forbidden_things_are_found(text):
    assert len(forbidden_things({"shiftjax.x": ast.parse(text)})) == 1


@pytest.mark.parametrize(
    "text",
    [
        "from jax.sharding import PartitionSpec as P",
        "import jax\nspec = jax.sharding.PartitionSpec()",
        "import os\nos.environ['A'] = '1'",
        "from os import environ",
        "import os\nos.getenv('A')",
    ],
)
def test_misplaced_names_are_found(text):
    assert len(misplaced_names({"shiftjax.models.x": ast.parse(text)})) == 1
