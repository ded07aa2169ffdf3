"""Settings as dataclass fields: how one is declared, described and checked. No JAX."""

import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from fractions import Fraction
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """Settings that cannot be used; `problems` holds one line for each of them."""

    def __init__(self, problems: Iterable[str]):
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def option(
    default: Any,
    help: str,
    *,
    flags: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    check: Callable[[Any], str | None] | None = None,
) -> Any:
    """A dataclass field that is a setting; `check` returns what is wrong with a value, or None.

    `choices` are for a `str` whose values another table names; others have them in a `Literal`.
    """
    metadata = {"help": help, "flags": flags, "low": low, "high": high, "check": check}
    metadata["choices"] = choices
    return field(default=default, metadata=metadata)


def control(default: Any, help: str, *, low: float | None = None, high: float | None = None) -> Any:
    """A dataclass field that is no setting: no flag, variable or file sets it.

    It is a baseline that tests and benchmarks measure against, or a limit that they vary.
    """
    metadata = {"help": help, "low": low, "high": high, "is_control": True}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Setting:
    """One field as the outside sees it."""

    name: str
    kind: type  # bool, int, float, str, tuple or another class
    item: type  # what a tuple holds
    optional: bool  # None is allowed and means: derive it
    choices: tuple[str, ...]
    default: Any
    help: str = ""
    flags: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    check: Callable[[Any], str | None] | None = None


def settings_of(options: type) -> dict[str, Setting]:
    """The fields of a dataclass that are settings, whether declared with `option` or plainly."""
    return _fields_of(options, is_control=False)


def controls_of(options: type) -> dict[str, Setting]:
    """The fields of a dataclass that are declared with `control`, to be checked as settings are."""
    return _fields_of(options, is_control=True)


def _fields_of(options: type, is_control: bool) -> dict[str, Setting]:
    hints = get_type_hints(options)
    return {
        f.name: _setting(f, hints[f.name])
        for f in fields(options)
        if f.metadata.get("is_control", False) == is_control
    }


def _setting(f: Any, hint: Any) -> Setting:
    kind, item, optional, choices = _kind_of(hint)
    known = f.metadata.keys() & Setting.__annotations__.keys()
    metadata = {name: f.metadata[name] for name in known}
    choices = metadata.pop("choices", ()) or choices
    metadata["flags"] = metadata.get("flags") or ("--" + f.name.replace("_", "-"),)
    return Setting(f.name, kind, item, optional, choices, f.default, **metadata)


def _kind_of(hint: Any) -> tuple[type, type, bool, tuple[str, ...]]:
    """(kind, item, optional, choices) of a field's annotation."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    bare = next(member for member in members if member is not types.NoneType)
    optional = types.NoneType in members
    if get_origin(bare) is Literal:
        return str, str, optional, get_args(bare)
    return get_origin(bare) or bare, (get_args(bare) or (str,))[0], optional, ()


_KIND_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple: "a list of whole numbers",
}


_MORE: dict[str, list[str]] = {}  # choices beside those that are declared, by setting


def add_choice(name: str, choice: str) -> None:
    """Let the setting of this name, which has choices, take one more."""
    _MORE.setdefault(name, []).append(choice)


def choices_of(setting: Setting) -> tuple[str, ...]:
    """All that the setting may be; (): anything of its kind."""
    return (*setting.choices, *_MORE.get(setting.name, ()))


def problem_with(setting: Setting, value: Any) -> str | None:
    """What is wrong with `value` by itself, as "must be ..., got ..."; None if nothing is."""
    if value is None and setting.optional:
        return None
    if not _has_kind(value, setting.kind):
        return f"must be {_wanted(setting)}, got {shown(value)}"
    if isinstance(value, str) and not value.strip():
        return "must not be empty"
    problem = setting.check(value) if setting.check else None
    if problem:
        return problem
    if setting.choices and value not in choices_of(setting):
        return f"must be {_wanted(setting)}, got {shown(value)}"
    return _out_of_bounds(setting, value)


def _wanted(setting: Setting) -> str:
    one_of = f"one of {', '.join(choices_of(setting))}"
    return one_of if setting.choices else _KIND_NAMES[setting.kind]


def _has_kind(value: object, kind: type) -> bool:
    if kind is tuple:
        return isinstance(value, tuple) and all(_has_kind(item, int) for item in value)
    if isinstance(value, bool):  # bool is an int in Python, not in a config
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _out_of_bounds(setting: Setting, value: Any) -> str | None:
    low, high = setting.low, setting.high
    if setting.kind is float and isinstance(value, float) and not math.isfinite(value):
        return f"must be a finite number, got {value}"
    if low is not None and value < low:
        return f"must be at least {low}, got {shown(value)}"
    if high is not None and value > high:
        return f"must be at most {high}, got {shown(value)}"
    return None


def from_text(setting: Setting, text: str) -> Any:
    """The value that a flag or a variable spells; the text itself where it spells none.

    `auto` stands for None where None is allowed and `auto` is no value of its own, `1,2` is a
    tuple, `1:0.5,2:1` a mapping. Text that is no value of the setting's kind is left for the check
    of values, which says so.
    """
    is_own = setting.kind is str and setting.check is not None and setting.check("auto") is None
    if setting.optional and text == "auto" and not is_own:
        return None
    try:
        if setting.kind is tuple:
            return tuple(_PARSERS[setting.item](item) for item in text.split(","))
        return _PARSERS[setting.kind](text)
    except (KeyError, ValueError):
        return text


def _mapping(text: str) -> dict[int, float]:
    pairs = (pair.split(":", 1) for pair in text.split(","))
    return {int(key): float(value) for key, value in pairs}


_PARSERS: Mapping[type, Callable[[str], Any]] = types.MappingProxyType(
    {
        int: int,
        float: float,
        str: str,
        bool: lambda text: {"1": True, "true": True, "0": False, "false": False}[text.lower()],
        Mapping: _mapping,
    }
)


def shown(value: object) -> str:
    """A value in an error message: one short line, whatever was given."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, (tuple, list)):
        kinds = (shown(item) for item in value[:6] if not isinstance(item, (tuple, list)))
        return f"[{', '.join(kinds)}{', ...' if len(value) > 6 else ''}]"
    text = repr(value) if isinstance(value, (str, int, float, type(None))) else ""
    text = text or f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def printable(text: str) -> str:
    """A text that repeats what somebody gave, in one line that commands no terminal."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


RENAMED = types.MappingProxyType(  # settings, by the names they had
    {"stages": "phases", "ttft_target": "target_ttft", "tpot_target": "target_tpot"}
)


def unknown_name(name: str, known: Iterable[str], what: str = "option") -> str:
    """The sentence about a name nobody knows, with its new name or the nearest known one."""
    known = list(known)
    new = RENAMED.get(name.lower().lstrip("-"))
    renamed = [each for each in known if each.lower().lstrip("-") == new]
    near = get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]}?" if near else ""
    hint = f"; it is now called {renamed[0]}" if renamed else hint
    return f"unknown {what} {shown(name)}{hint}"


_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?([KMGT]?)(i?)(B?)", re.IGNORECASE)


def num_bytes_of(text: str) -> int:
    """The bytes that a size spells: 8GiB, 500MB, or a plain number. Raises ValueError."""
    found = _SIZE.fullmatch(text.strip())
    if not found or (found[3] and not found[2]):
        raise ValueError(f"must be a size like 8GiB, 500MB or 0, got {shown(text)}")
    unit = 1024 if found[3] else 1000
    return int(Fraction(found[1]) * unit ** " KMGT".index(found[2].upper() or " "))


def xla_options(text: str) -> dict[str, str]:
    """XLA's options by name, spelled as in XLA_FLAGS: NAME=VALUE, blanks between, `--` or not.

    Raises ValueError with what is no option.
    """
    pairs = (word.removeprefix("--").partition("=") for word in text.split())
    found = {name: value for name, _, value in pairs}
    for name, value in found.items():
        if not name.startswith("xla_") or not value:
            raise ValueError(f"must be auto, none or xla_NAME=VALUE ..., got {shown(name)}")
    return found
