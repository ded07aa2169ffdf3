"""A JSON body as plain values and as fields: bounded, typed, and unknown names told.

Types are checked by msgspec, without coercion. Raises `ServeError` that names the field.
"""

import re
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec

from serving.server.errors import ServeError, invalid
from serving.server.fields import FOREIGN
from serving.server.hints import is_same
from serving.server.refused_fields import REFUSED

# What JSON may hold, whatever it means: decoding this much takes some ten milliseconds.
MAX_VALUES = 1 << 20  # separated by commas, as token ids are
MAX_NODES = 1 << 16  # lists, objects and names in objects
MAX_STRINGS = 1 << 17


def parse_json(text: bytes) -> Any:
    """The JSON value of a body. Raises `ServeError`."""
    if _has_too_much(text):
        message = "The body holds too many values, lists or objects."
        raise ServeError("invalid", message, code="invalid_json")
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise ServeError("invalid", "The body is nested too deeply.", code="invalid_json") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        message = f"The body is not JSON: {error}."
        raise ServeError("invalid", message, code="invalid_json") from None


def _has_too_much(text: bytes) -> bool:
    """Whether decoding would keep the event loop busy: eight MiB can hold four million lists."""
    if not _exceeds(text):
        return False
    bare = text.replace(rb"\\", b"").replace(rb"\"", b"")
    if bare.count(b'"') > 2 * MAX_STRINGS:
        return True
    return _exceeds(b"".join(bare.split(b'"')[::2]))  # what is not within strings


def _exceeds(text: bytes) -> bool:
    nodes = sum(text.count(mark) for mark in (b"[", b"{", b":"))
    strings = text.count(b'"') // 2
    return nodes > MAX_NODES or strings > MAX_STRINGS or text.count(b",") > MAX_VALUES


def read[T: msgspec.Struct](kind: type[T], values: Any) -> tuple[T, tuple[str, ...]]:
    """(fields, names that nobody knows) of an object of plain values."""
    unknown = unknown_names(kind, values)
    try:
        return msgspec.convert(values, kind), unknown
    except msgspec.ValidationError as error:
        raise _type_error(str(error)) from None
    except RecursionError:
        raise ServeError("invalid", "The body is nested too deeply.", code="invalid_json") from None


def unknown_names(kind: type[msgspec.Struct], values: Any) -> tuple[str, ...]:
    """What nobody knows, as `name` or `object.name`. Raises `ServeError` for what others know."""
    if not isinstance(values, dict):
        raise ServeError("invalid", "The body must be a JSON object.", code="invalid_json")
    for name, harmless in FOREIGN.get(kind, {}).items():
        _check_harmless(name, values.get(name), harmless, "is not a field of this endpoint")
    return tuple(sorted({*_unknown_in(kind, values, "")}))


def _unknown_in(kind: type[msgspec.Struct], values: dict[str, Any], place: str) -> list[str]:
    unknown: list[str] = []
    known, nested = _names_of(kind)
    for name in [each for each in values if each not in known]:
        path = place + name
        if path in REFUSED:
            instead, harmless = REFUSED[path]
            words = f"is not supported by this server: {instead}"
            _check_harmless(path, values[name], harmless, words)
        else:
            unknown.append(path)
    for name in nested.keys() & values.keys():
        value, kinds = values[name], nested[name]
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict) and (inner := _kind_of(each, kinds)):
                unknown += _unknown_in(inner, each, f"{place}{name}.")
    return unknown


# Of objects that a field may hold: by their tag; one kind alone has the tag None.
_Kinds = dict[Any, type[msgspec.Struct]]


@cache
def _names_of(kind: type[msgspec.Struct]) -> tuple[frozenset[str], dict[str, _Kinds]]:
    """(names that a kind of object may have, kinds of the objects that its fields may hold)."""
    tag = kind.__struct_config__.tag_field
    others = FOREIGN.get(kind, {}).keys() - REFUSED.keys()
    known: set[str] = {*kind.__struct_fields__, *others} | ({tag} if tag else set())
    found = {each.name: [*_structs_in(each.type)] for each in msgspec.structs.fields(kind)}
    nested = {name: _by_tag(kinds) for name, kinds in found.items() if kinds}
    return frozenset(known), nested


def _by_tag(kinds: list[type[msgspec.Struct]]) -> _Kinds:
    if len(kinds) == 1:
        return {None: kinds[0]}
    return {kind.__struct_config__.tag: kind for kind in kinds}


def _structs_in(type_: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        yield type_
    for each in typing.get_args(type_):
        yield from _structs_in(each)


def _kind_of(value: dict[str, Any], kinds: _Kinds) -> type[msgspec.Struct] | None:
    """The kind of an object; None: there is none with its tag."""
    if None in kinds:
        return kinds[None]
    tag = value.get("type")  # the tag of all that have one
    return kinds.get(tag) if isinstance(tag, str) else None


def _check_harmless(name: str, value: Any, harmless: tuple[Any, ...], words: str) -> None:
    if value is not None and not is_same(value, harmless):
        raise invalid(name, words, "unsupported_parameter")


def _type_error(message: str) -> ServeError:
    """msgspec's words (`Expected ..., got ... - at `$.field[0]``), with the field first."""
    what, _, path = message.partition(" - at ")
    field = path.strip("`").removeprefix("$").removeprefix(".")
    missing = re.fullmatch(r"Object missing required field `(\w+)`", what)
    if missing:
        field = f"{field}.{missing[1]}".strip(".")
        return invalid(field, "is missing", "missing_required_parameter")
    what = what.replace("`", "")
    what = "must be " + what[9:].replace(", got", ", not") if what.startswith("Expected ") else what
    return invalid(field or "body", what.replace(" | null", ""), "invalid_type")
