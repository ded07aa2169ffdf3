"""Kernels with one fault in their sources: for tests of what the checks of kernels find."""

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pallas_kernels

FOLDER = Path(pallas_kernels.__path__[0])


def fit(faults: Collection[Sequence[Any]], prefix: str = "") -> None:
    """Check that each fault `(module, what it replaces, ...)` is at one place of its source."""
    sources = {module: (FOLDER / f"{prefix}{module}.py").read_text() for module, *_ in faults}
    wrong = [(module, old) for module, old, *_ in faults if sources[module].count(old) != 1]
    assert not wrong, wrong


def load(modules: Sequence[str], changed: str = "", old: str = "", new: str = "") -> ModuleType:
    """Return the last of the modules that `load_all` makes."""
    return load_all(modules, changed, old, new)[modules[-1]]


def load_all(
    modules: Sequence[str], changed: str = "", old: str = "", new: str = ""
) -> dict[str, ModuleType]:
    """Make a kernel's modules anew from their sources, with one thing changed in one of them.

    Each may import those before it.
    """
    made = {}
    with mock.patch.dict(sys.modules):
        for name in modules:
            source = (FOLDER / f"{name}.py").read_text()
            if name == changed:
                assert source.count(old) == 1, "the fault does not fit the source any more"
                source = source.replace(old, new)
            made[name] = sys.modules[f"pallas_kernels.{name}"] = ModuleType(name)
            exec(compile(source, f"{name}.py", "exec"), vars(made[name]))
    return made
