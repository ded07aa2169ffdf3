"""Configuration files in vLLM's spelling, where a name is a flag without its dashes. No JAX."""

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml

from serving.run import foreign_flags, speculative_config
from serving.run.foreign_flags import is_foreign
from serving.run.foreign_table import MODULES
from serving.server.options import SERVER_SETTINGS
from shiftjax.config import CONTROLS, SETTINGS
from shiftjax.options import ConfigError, Setting, from_text

_OWN: Mapping[str, Setting] = MappingProxyType({**SETTINGS, **SERVER_SETTINGS})
_FLAGS = MappingProxyType({flag: each for each in _OWN.values() for flag in each.flags})
_SPECULATIVE = speculative_config.FLAG


class OwnFile(NamedTuple):
    """A file whose names are those of settings, with lines where they were."""

    text: str
    notes: list[str]  # of entries without effect
    controls: dict[str, Any]  # that an entry comes to, and that are no settings


def in_our_words(text: str, name: str) -> OwnFile:
    """Return the file with every foreign entry as the settings that it comes to.

    Raises ConfigError for entries that are refused. What is no mapping is returned as it is.
    """
    lines, notes, problems, controls = text.splitlines(), [], [], {}
    for key, first, last, value in _foreign_entries(text, len(lines)):
        found = foreign_flags.translated(_words(key, value), (*_FLAGS, _SPECULATIVE, *_negated()))
        notes += [f"{name}, line {first + 1}: {note}" for note in found.notes]
        problems += [f"{name}, line {first + 1}: {problem}" for problem in found.problems]
        try:
            settings = _settings(found.argv)
        except ConfigError as error:
            problems += [f"{name}, line {first + 1}: {each}" for each in error.problems]
            continue
        controls |= {
            n: from_text(CONTROLS[n], str(settings.pop(n))) for n in CONTROLS if n in settings
        }
        # More than one setting may come of a line, which a flow mapping holds nowhere else.
        lines[first:last] = [""] * (last - first)
        lines[first] = "\n".join(f"{n}: {json.dumps(v)}" for n, v in settings.items())
    if problems:
        raise ConfigError(problems)
    return OwnFile("\n".join(lines), notes, controls)


def _foreign_entries(text: str, num_lines: int) -> Iterator[tuple[str, int, int, Any]]:
    """(name, first line, line behind, value) of the entries that are no settings, but known."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        return
    starts = [key.start_mark.line for key, _ in root.value]
    for (key, node), first, last in zip(root.value, starts, [*starts[1:], num_lines], strict=True):
        name, flag = str(key.value), "--" + str(key.value).replace("_", "-")
        is_ours = name in _OWN and not (
            isinstance(node.value, str) and node.value in foreign_flags.values_of(flag)
        )
        is_known = flag in (*_FLAGS, *_negated(), _SPECULATIVE) or is_foreign(flag)
        if is_ours or not is_known:
            continue
        try:
            value = yaml.SafeLoader("").construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError, RecursionError):
            continue
        yield name, first, last, value


def _negated() -> Iterator[str]:
    return ("--no-" + flag.removeprefix("--") for flag, each in _FLAGS.items() if each.kind is bool)


def _words(name: str, value: Any) -> list[str]:
    """The flag that an entry stands for, with its value."""
    flag = name.replace("_", "-")
    if isinstance(value, bool) or value is None:
        return ["--" + flag] if value is not False else ["--no-" + flag]
    if isinstance(value, list) and "--" + flag in MODULES:
        words = (each if isinstance(each, str) else json.dumps(each) for each in value)
        return ["--" + flag, *words]
    if isinstance(value, list) and all(isinstance(each, (str, int, float)) for each in value):
        return [f"--{flag}={','.join(map(str, value))}"]
    return [f"--{flag}={value if isinstance(value, (str, int, float)) else json.dumps(value)}"]


def _settings(argv: list[str]) -> dict[str, Any]:
    """The settings that flags give, by name. Raises ConfigError."""
    found, words = {}, list(argv)
    while words:
        flag, equals, value = words.pop(0).partition("=")
        positive = "--" + flag.removeprefix("--no-") if flag in _negated() else flag
        setting = _FLAGS.get(positive)
        if setting is not None and setting.kind is bool and not equals:
            found[setting.name] = positive == flag
            continue
        if not equals and not words:
            raise ConfigError([f"{flag} needs a value"])
        value = value if equals else words.pop(0)
        if setting is None:
            found |= speculative_config.translated(value)
        else:
            found[setting.name] = from_text(setting, value)
    return found
