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

JAX_PACKAGES = {"jax", "jaxlib", "flax", "jaxtyping", "orbax"}
NO_JAX, JAX = False, True

# The floors, from the bottom up: a module imports from its own folder and from the floors below.
# Whether it may import JAX, be it in a function, is a property of the folder too, but for modules
# of features that are named `*_device`.
FLOORS = (
    ("pallas_kernels", JAX),
    ("shiftjax.options", NO_JAX),
    ("shiftjax.gguf_header", NO_JAX),
    ("shiftjax.metric", NO_JAX),
    ("shiftjax.draft_options", NO_JAX),
    ("shiftjax.targets", NO_JAX),
    ("shiftjax.lora_options", NO_JAX),
    ("shiftjax.arch", NO_JAX),
    ("shiftjax.parallel", NO_JAX),
    ("shiftjax.costs", NO_JAX),
    ("shiftjax.core.policy", NO_JAX),
    ("shiftjax.core.policies", NO_JAX),  # whose table the settings read
    ("shiftjax.config", NO_JAX),
    ("shiftjax.core", NO_JAX),
    ("shiftjax.host_tier", NO_JAX),
    ("shiftjax.disk_tier", NO_JAX),
    ("shiftjax.deploy", NO_JAX),
    ("shiftjax.sizing", NO_JAX),
    ("shiftjax.routing", NO_JAX),
    ("shiftjax.drafts", NO_JAX),
    ("shiftjax.fleet", NO_JAX),
    ("shiftjax.phases", NO_JAX),
    ("shiftjax.hosts", NO_JAX),
    ("shiftjax.rollouts", NO_JAX),
    ("shiftjax.adapters", NO_JAX),
    ("shiftjax.embed", NO_JAX),
    ("shiftjax.explain", NO_JAX),
    ("shiftjax.assembly", NO_JAX),
    ("shiftjax.sim", NO_JAX),
    ("shiftjax.reproduce", NO_JAX),
    ("shiftjax.text", NO_JAX),
    ("shiftjax.weights", JAX),
    ("shiftjax.models", JAX),
    ("shiftjax.device", JAX),
    ("shiftjax", JAX),
    ("serving", NO_JAX),
    ("serving.proto", NO_JAX),
    ("serving.server", NO_JAX),
    ("serving.stored", NO_JAX),
    ("serving.traces", NO_JAX),
    ("serving.http", NO_JAX),
    ("serving.rpc", JAX),
    ("serving.hosts", NO_JAX),
    ("serving.run", JAX),
    ("serving.bench", JAX),
    ("serving.cli", JAX),
    ("shiftjax.__main__", JAX),  # `python -m shiftjax` is the command line
    ("scripts", JAX),
)


# Words of features that the core does not say: what a feature needs is a seam (docs/house.md).
FEATURES = re.compile(r"fleet|phase|stage|draft|host|disk|expert|embed", re.IGNORECASE)
# Names that one place may use.
SINGLE_HOMES = {
    "PartitionSpec": "shiftjax.device.mesh",
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
    "opentelemetry": "opentelemetry_sdk",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


# Who may speak of KV heads. All others ask for the entries of a cache (`shiftjax/arch/cache.py`).
KV_HEADS = re.compile(r"kv[ _-]head", re.IGNORECASE)
KNOW_KV_HEADS = {
    *(f"shiftjax.arch.{name}" for name in ("cache", "config", "presets", "weights")),
    *("shiftjax.parallel.layout", "shiftjax.parallel.stored"),
    *(f"shiftjax.weights.{name}" for name in ("encoder_config", "gguf_config", "hf_config")),
    *(
        f"shiftjax.weights.{name}"
        for name in ("gemma4_config", "hf_names", "kv_scales", "quantised")
    ),
    "shiftjax.device.place",  # which reads such weights
    *(
        f"shiftjax.models.{name}"
        for name in ("attention", "attention_backend", "entry", "entry_backend", "position_backend")
    ),
    *(f"shiftjax.models.{name}" for name in ("exchange", "gathered_tiles", "llama")),
    # attention kernels by themselves
    *(f"shiftjax.device.{name}" for name in ("attention_check", "attention_steps", "write_cases")),
    "shiftjax.device.entry_cases",
    *("shiftjax.sim.measured_kernels", "serving.bench.kernels"),
    # what users are told of their padding
    *("shiftjax.deploy.resolve", "serving.cli.check"),
}


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


def imports_of(name: str, modules: dict[str, ast.Module]) -> set[str]:
    """Dotted names that a module imports, in functions too; `from a import b`: a.b if a module."""
    found = set()
    for node in executed(modules[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            assert node.level == 0, "relative imports are not used here"
            for alias in node.names:
                full = f"{base}.{alias.name}"
                is_module = script_named(full, name, modules) in modules
                found.add(full if is_module else base)
    return {script_named(target, name, modules) for target in found}


def script_named(target: str, importer: str, modules: dict[str, ast.Module]) -> str:
    """The dotted name of what a script imports by its bare name, from its folder or `scripts`."""
    if importer.startswith("scripts."):
        for folder in (importer.rpartition(".")[0], "scripts"):
            if f"{folder}.{target}" in modules:
                return f"{folder}.{target}"
    return target


def floor_of(module: str) -> int:
    """The floor of a module: that of the folder or module with the longest name that fits.

    The part of a feature that devices run, by its name, is as high as all that they run.
    """
    if module.startswith("shiftjax.") and module.endswith("_device"):
        module = "shiftjax.device"
    fitting = [
        (len(folder), floor)
        for floor, (folder, _) in enumerate(FLOORS)
        if module == folder or module.startswith(folder + ".")
    ]
    return max(fitting)[1]


def wrong_arrows(modules: dict[str, ast.Module]) -> list[str]:
    """Imports that point up."""
    return [
        f"{name} imports {target}"
        for name in modules
        for target in sorted(imports_of(name, modules))
        if target.split(".")[0] in OURS and target != "shiftjax"
        if floor_of(target) > floor_of(name)
    ]


def jax_where_it_may_not_be(modules: dict[str, ast.Module]) -> list[str]:
    """Modules of JAX-free folders that import JAX, or what cannot be had without it."""
    return [
        f"{name} imports JAX"
        for name in modules
        if FLOORS[floor_of(name)][1] is NO_JAX
        and {target.split(".")[0] for target in imports_of(name, modules)} & JAX_PACKAGES
    ]


def import_cycle(modules: dict[str, ast.Module]) -> list[str]:
    """The names of a cycle of imports, or nothing."""
    graph = {name: imports_of(name, modules) & set(modules) for name in modules}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def forbidden_things(modules: dict[str, ast.Module]) -> list[str]:
    """Imports of forbidden packages, and calls that run text as code."""
    wrong = []
    for name, tree in modules.items():
        tops = {target.split(".")[0] for target in imports_of(name, modules)}
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
    for name in modules:
        if name.split(".")[0] in tops:
            found |= {target.split(".")[0] for target in imports_of(name, modules)}
    return {INSTALLED_AS.get(top, top) for top in found - sys.stdlib_module_names - set(OURS)}


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    return find_modules(ROOT)


def test_the_walk_sees_the_code(modules):
    some = {"shiftjax", "shiftjax.config", "shiftjax.device.mesh", "serving.cli.main"}
    assert some <= set(modules)
    assert "shiftjax.options" in imports_of("shiftjax.config", modules)


def test_no_arrow_points_up(modules):
    assert wrong_arrows(modules) == []


def test_no_imports_go_round(modules):
    assert import_cycle(modules) == []


def test_kernels_import_nothing_of_ours(modules):
    for name in (name for name in modules if name.split(".")[0] == "pallas_kernels"):
        tops = {m.split(".")[0] for m in imports_of(name, modules)}
        assert not tops & set(OURS) - {"pallas_kernels"}, name


def test_models_do_not_know_the_control_plane(modules):
    """Although it stands below them: they compute arrays, whoever asks."""
    for name in (name for name in modules if name.startswith("shiftjax.models")):
        known = {m for m in imports_of(name, modules) if m in modules}
        assert not {m for m in known if m.startswith(("shiftjax.core", "shiftjax.config"))}, name


def test_jax_stays_in_its_folders(modules):
    assert jax_where_it_may_not_be(modules) == []


def test_importing_what_is_free_of_jax_pulls_in_none(modules):
    """`shiftjax` and the command line, too, although functions of theirs import it."""
    names = [name for name in modules if FLOORS[floor_of(name)][1] is NO_JAX]
    assert len(names) > 60
    lines = [f"import {name}" for name in (*names, "shiftjax", "serving.cli.main")]
    code = "\n".join((*lines, "import sys", "print(sorted({'jax', 'flax'} & set(sys.modules)))"))
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_every_folder_of_the_house_has_its_floor(modules):
    """A new folder is placed on purpose, not by falling through to its parent's floor."""
    folders = {".".join(n.split(".")[:2]) for n in modules if n.count(".") > 1}
    ours = {folder for folder in folders if folder.split(".")[0] in ("shiftjax", "serving")}
    assert ours <= {folder for folder, _ in FLOORS}


def test_the_core_names_no_feature():
    files = (ROOT / "shiftjax" / "core").glob("*.py")
    found = {path.stem: FEATURES.findall(path.read_text("utf-8")) for path in files}
    assert not {name: words for name, words in found.items() if words}


def test_few_modules_know_kv_heads():
    paths = [path for top in ("shiftjax", "serving") for path in (ROOT / top).rglob("*.py")]
    found = [path for path in paths if KV_HEADS.search(path.read_text("utf-8"))]
    assert {
        ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in found
    } == KNOW_KV_HEADS


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
    served = always | optional | extras["serving"] | extras["events"] | extras["traces"]
    assert third_party_imports(shipped, {"serving"}) <= served


def test_every_shape_annotation_is_checked_in_tests(modules, pytestconfig):
    *checked, typechecker = pytestconfig.getoption("--jaxtyping-packages").split(",")
    assert typechecker == "beartype.beartype"
    for name in modules:
        if "jaxtyping" in imports_of(name, modules):
            assert any(f"{name}.".startswith(f"{package}.") for package in checked), name


# ---------------------------------------------------------------- the walk itself can fail


def synthetic(**sources: str) -> dict[str, ast.Module]:
    return {name.replace("__", "."): ast.parse(text) for name, text in sources.items()}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shiftjax.config", "import shiftjax.llm"),
        ("shiftjax.costs.step_costs", "from shiftjax.core import request"),
        ("shiftjax.models.llama", "def f():\n    from shiftjax.device.runner import DeviceRunner"),
        ("shiftjax.weights.load", "from shiftjax.device.pool import make_pools"),
        ("shiftjax.llm", "if True:\n    import serving.cli"),
        ("pallas_kernels.attention", "from shiftjax.options import shown"),
        ("serving.server.service", "from serving.http.app import make_app"),
    ],
)
def test_a_wrong_arrow_is_found(name, text):
    assert len(wrong_arrows({name: ast.parse(text)})) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shiftjax.llm", "from shiftjax.core.engine import Engine"),
        ("shiftjax.device.runner", "import shiftjax.device.step, shiftjax.models.llama, jax"),
        ("shiftjax.config", "if TYPE_CHECKING:\n    from shiftjax.llm import LLM"),
        ("serving.cli.main", "import shiftjax\nfrom serving.run.flags import settle"),
    ],
)
def test_a_right_arrow_is_not_found(name, text):
    assert wrong_arrows({name: ast.parse(text)}) == []


@pytest.mark.parametrize("text", ["import jax.numpy as jnp", "def f():\n    from flax import nnx"])
def test_jax_in_a_wrong_folder_is_found(text):
    assert jax_where_it_may_not_be({"shiftjax.core.x": ast.parse(text)})
    assert not jax_where_it_may_not_be({"shiftjax.device.x": ast.parse(text)})


def test_a_cycle_is_found():
    cycle = synthetic(shiftjax__a="import shiftjax.b", shiftjax__b="from shiftjax import a")
    assert set(import_cycle(cycle)) == {"shiftjax.a", "shiftjax.b"}


def test_a_cycle_of_scripts_that_import_each_other_in_functions_is_found():
    cycle = synthetic(
        scripts__a="def f():\n    from labs import b",
        scripts__labs__b="import c",
        scripts__labs__c="def f():\n    import a",
    )
    assert set(import_cycle(cycle)) == {"scripts.a", "scripts.labs.b", "scripts.labs.c"}


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
