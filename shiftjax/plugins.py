"""Plugins: functions of installed packages that add rows to tables, called once a process. No JAX.

A package names them in its metadata, as it does for vLLM's general plugins:

    [project.entry-points."shiftjax.plugins"]
    modest = "my_package:register"

Such a function takes nothing and returns nothing. It calls functions of `shiftjax/registry.py`
and `serving/server/registry.py`.
"""

import logging
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from shiftjax.options import ConfigError, shown, unknown_name

logger = logging.getLogger(__name__)

GROUP = "shiftjax.plugins"
ALL, NONE = "all", "none"


class Plugin(NamedTuple):
    """A plugin that was called."""

    name: str
    package: str  # and its version
    function: str

    def __str__(self) -> str:
        return f"plugin {self.name} of {self.package} ({self.function})"


_loaded: dict[str, Plugin] = {}


def loaded_plugins() -> tuple[Plugin, ...]:
    """Those that were called, in their order."""
    return tuple(_loaded.values())


def load_plugins(wanted: Any = ALL) -> None:
    """Call the wanted plugins that were not called before: `all`, `none` or names with commas.

    Raises ConfigError for a name that no installed package has, and for a plugin that fails.
    """
    if not isinstance(wanted, str):
        raise ConfigError([f"plugins: must be text, got {shown(wanted)}"])
    installed = _installed() if wanted != NONE else {}
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    names = list(installed) if names == [ALL] else [] if names == [NONE] else names
    if unknown := [name for name in names if name not in installed]:
        known = ", ".join(installed) or "none"
        problems = [unknown_name(name, installed, "plugin") for name in unknown]
        raise ConfigError([f"plugins: {problem}; installed are {known}" for problem in problems])
    for name in names:
        if name not in _loaded:
            _loaded[name] = _called(installed[name])
            logger.info("loaded %s", _loaded[name])


@cache
def _installed() -> dict[str, EntryPoint]:
    """By name, in its order; of packages that share a name the first that is found."""
    found: dict[str, EntryPoint] = {}
    for each in entry_points(group=GROUP):
        found.setdefault(each.name, each)
    return dict(sorted(found.items()))


def _called(entry: EntryPoint) -> Plugin:
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown package"
    plugin = Plugin(entry.name, package, entry.value)
    try:
        entry.load()()
    except Exception as error:  # whatever it is, it is the plugin's
        logger.debug("%s fails", plugin, exc_info=True)
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ConfigError([f"{plugin} fails: {reason}; --plugins says which to load"]) from error
    return plugin
