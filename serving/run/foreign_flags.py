"""Flags of vLLM, SGLang and Arctic Inference: what each becomes here. No JAX.

A flag that this project has under another name is translated. One that has nothing to do here is
taken, and a line says why. Any other is refused by its own name, with what to use instead.
"""

import argparse
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from serving.run import foreign_table as table

Kind = Literal["alias", "ignored", "refused"]


class Foreign(NamedTuple):
    """What a flag of another engine comes to; a switch takes no value."""

    kind: Kind
    words: str  # of an alias our flags; else why, or what to use
    is_switch: bool = False


class Translated(NamedTuple):
    """A command line in this project's flags."""

    argv: list[str]
    notes: list[str]  # of flags without effect
    problems: list[str]  # of flags that are refused


OFF = "it is off anyway"


def _negated(switch: str) -> str:
    return switch.replace("--", "--no-", 1)


def _rows() -> Iterator[tuple[str, Foreign]]:
    """Every flag of the table, and the negations of switches."""
    for name, words in table.ALIASES.items():
        yield name.removesuffix("="), Foreign("alias", words, not name.endswith("="))
    groups: Mapping[Kind, Mapping[str, str]] = {"ignored": table.IGNORED, "refused": table.REFUSED}
    for kind, rows in groups.items():
        for words, names in rows.items():
            for name in _names(names):
                is_switch = not name.endswith("=") and " " not in name
                yield name.removesuffix("="), Foreign(kind, words, is_switch)
                if is_switch and name.startswith("--"):
                    off = words if kind == "ignored" else OFF
                    yield _negated(name), Foreign("ignored", off, True)


def _names(text: str) -> Iterator[str]:
    """The flags of a group; one value may stand behind a flag that is refused with it alone."""
    words = text.split()
    for word, behind in zip(words, [*words[1:], "-"], strict=True):
        if word.startswith("-"):
            yield word if behind.startswith("-") else f"{word} {behind}"


FOREIGN: Mapping[str, Foreign] = MappingProxyType(dict(_rows()))
"""Flags that other engines have and this one lacks, by name, of some with one value."""


def translated(argv: Sequence[str], known: Collection[str]) -> Translated:
    """Return a command line in our own flags; those that are `known` are left as they are."""
    words = _joined(argv, known)
    found = Translated([], [], [])
    while words and words[0] != "--":
        word = words.pop(0)
        name, equals, value = word.partition("=")
        name = _spelled(name, known)
        taken = [value] if equals else []
        if name in table.MODULES:
            follows = taken or words[:1]
            del words[: 0 if taken else 1]
            while words and _is_module(words[0]):
                follows.append(words.pop(0))
            found.argv.extend([table.MODULES[0], *([_modules(follows)] if follows else [])])
        elif is_foreign(name):
            if not taken and not _is_switch(name) and words and not words[0].startswith("--"):
                taken = [words.pop(0)]
            _translate(name, taken, known, found)
        elif name in table.MOST:
            value, most = value if equals else "".join(words[:1]), table.MOST[name]
            del words[: 0 if equals else 1]
            if re.fullmatch(r"-1|\d+", value) and not 0 <= int(value) <= most:
                found.notes.append(f"{name} {value} is {most} here, which is the most")
                value = str(most)
            found.argv.extend([name, value])
        elif name in table.LISTS:
            follows = taken or words[:1]
            del words[: 0 if taken else 1]
            while _has_model(found.argv) and words and not words[0].startswith("-"):
                follows.append(words.pop(0))
            found.argv.extend([name, *([",".join(map(_listed, follows))] if follows else [])])
        elif name.startswith("-O") and name not in known:
            found.notes.append(f"{word}: steps are compiled ahead, so it has no effect")
            if name == "-O" and not taken and words and words[0].isdigit():
                words.pop(0)
        else:
            found.argv.append(name + equals + value)
    found.argv.extend(words)
    return found


def _joined(argv: Sequence[str], known: Collection[str]) -> list[str]:
    """The words with `--flag.key value` of one flag as its JSON value, as vLLM has them."""
    words, joined = list(argv), list[str]()
    objects: dict[str, tuple[int, dict[str, Any]]] = {}
    while words and words[0] != "--":
        word = words.pop(0)
        name, equals, value = word.partition("=")
        flag, dot, path = name.partition(".")
        if not (dot and flag.startswith("-") and (flag in known or is_foreign(flag))):
            joined.append(word)
            continue
        if not equals:
            value = words.pop(0) if words and not words[0].startswith("--") else "true"
        place, entries = objects.setdefault(flag, (len(joined), {}))
        joined[place:] = joined[place:] or [""]
        *outer, last = path.split(".")
        for each in outer:
            entries[each] = entries[each] if isinstance(entries.get(each), dict) else {}
            entries = entries[each]
        entries[last] = _json(value)
    for flag, (place, entries) in objects.items():
        joined[place] = f"{flag}={json.dumps(entries)}"
    return [*joined, *words]


def _json(text: str) -> Any:
    """The value that a text spells; a text that spells none is itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _translate(name: str, taken: list[str], known: Collection[str], found: Translated) -> None:
    """Add what a flag with its value comes to."""
    if name in table.SIZES:
        found.argv.extend([table.SIZES[name], *(f"{value}GiB" for value in taken)])
    elif name in table.VALUES and (name in known or (taken and taken[0] in table.VALUES[name])):
        values = [table.VALUES[name].get(value, value) for value in taken]
        is_flag = any(value.startswith("--") for value in values)
        found.argv.extend(" ".join(values).split() if is_flag else [name, *values])
    elif name in known or name not in FOREIGN:
        found.argv.extend([name, *taken])
    else:
        given = " ".join([name, *taken])
        given = given if given in FOREIGN else name
        kind, told, _ = FOREIGN[given]
        if kind == "alias":
            found.argv.extend([told, *taken])
        elif kind == "ignored":
            found.notes.append(f"{given} has no effect: {told}")
        else:
            found.problems.append(f"{given} is not a flag here: {told}")


def _has_model(argv: Sequence[str]) -> bool:
    """Whether a command is followed by its model, so that no later word can be that."""
    return "--model" in argv or (len(argv) > 1 and not argv[1].startswith("-"))


def _listed(text: str) -> str:
    """The entries of a JSON list of texts with commas; any other text as it is."""
    values = _json(text)
    return ",".join(map(str, values)) if isinstance(values, list) else text


def _is_module(word: str) -> bool:
    """Whether a word behind adapters is one more of them: NAME=PATH, or JSON."""
    return not word.startswith("-") and ("=" in word or word.startswith(("{", "[")))


def _modules(words: Sequence[str]) -> str:
    """Adapters as our setting has them; others write a word or an object for each."""
    entries: list[Any] = []
    for word in words:
        value = _json(word) if word.startswith(("{", "[")) else None
        entries.extend(value if isinstance(value, list) else [value or word])
    if not any(isinstance(each, dict) for each in entries):
        return ",".join(map(str, entries))
    return json.dumps([_module(each) for each in entries])


def _module(entry: Any) -> Any:
    """An object with the name and the path of an adapter; SGLang has other names for them."""
    if isinstance(entry, str):
        name, _, path = entry.partition("=")
        return {"name": name, "path": path}
    if not isinstance(entry, dict):
        return entry
    renamed = {"lora_name": "name", "lora_path": "path"}
    named = {renamed.get(key, key): value for key, value in entry.items()}
    return {key: value for key, value in named.items() if (key, value) != ("pinned", False)}


def _is_switch(name: str) -> bool:
    return name in FOREIGN and FOREIGN[name].is_switch


def is_foreign(name: str) -> bool:
    """Whether a flag is one of another engine."""
    return name in FOREIGN or name in table.VALUES or name in table.SIZES


def values_of(name: str) -> Collection[str]:
    """Values of a flag that other engines have, and that are others here."""
    return table.VALUES.get(name, {})


def _spelled(name: str, known: Collection[str]) -> str:
    """The flag as the table has it: others write underscores, too."""
    plain = name.replace("_", "-") if name.startswith("--") else name
    return plain if plain in known or is_foreign(plain) else name


def known_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> set[str]:
    """The flags of the command that a command line names."""
    for word in argv:
        choices = next((a.choices for a in parser._actions if isinstance(a.choices, dict)), {})
        if word in choices:
            parser = choices[word]
    return {flag for action in parser._actions for flag in action.option_strings}
