"""Values that a model writes without JSON's quotes, by the types that a schema names. No JAX."""

import ast
import json
from typing import Any

import msgspec

Json = Any
MAX_LITERAL = 1 << 16  # characters of a value that may be a literal of Python
_DEEP = 8  # references that are followed
_NAMES = {
    **{str: "string", bool: "boolean", int: "integer", float: "number"},
    **{dict: "object", list: "array", type(None): "null"},
}


def types_of(schema: Json, root: Json, depth: int = 0) -> frozenset[str]:
    """The JSON types that values of `schema` may have; empty: any. `root` has its definitions."""
    if not isinstance(schema, dict) or depth > _DEEP:
        return frozenset()
    stated = schema.get("type")
    if isinstance(stated, str | list):
        names = [stated] if isinstance(stated, str) else stated
        return frozenset(each for each in names if isinstance(each, str))
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(_NAMES[type(value)] for value in values if type(value) in _NAMES)
    if isinstance(schema.get("$ref"), str):
        return types_of(referred(schema["$ref"], root), root, depth + 1)
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(word), list):
            found = [types_of(each, root, depth + 1) for each in schema[word]]
            return frozenset().union(*found) if all(found) else frozenset()
    return frozenset()


def referred(reference: str, root: Json) -> Json:
    """What `#/a/b` refers to in a schema; None: nothing."""
    found = root
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found


def quoted(text: str) -> str:
    """The text as a JSON string."""
    return dumped(text)


def dumped(value: Json) -> str:
    """The value as JSON text; half a surrogate pair is escaped. Raises `ValueError` for nan."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def escaped(text: str) -> str:
    """The text as it stands between the quotes of a JSON string."""
    return quoted(text)[1:-1]


def as_json(text: str, types: frozenset[str]) -> str:
    """A bare value as JSON: by its own looks, but a string where only a string is allowed.

    JSON is passed on as it is written; a literal of Python (None, True, {'a': 1}) becomes JSON.
    """
    bare = text.strip()
    made = _written(bare)
    if made is None:
        return quoted(text)
    kind = _NAMES[type(made[1])]
    if kind == "string" and (not types or "string" in types):
        return quoted(text)  # quotes of its own
    if "string" in types and not _is_of(kind, types):
        return quoted(text)
    return made[0]


def _is_of(kind: str, types: frozenset[str]) -> bool:
    return kind in types or (kind == "integer" and "number" in types)


def _written(bare: str) -> tuple[str, Json] | None:
    """(JSON text, value) of a value in JSON or in Python's literals."""
    try:
        return bare, msgspec.json.decode(bare)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        pass
    if bare.lower() in ("true", "false", "null"):
        return bare.lower(), json.loads(bare.lower())
    if len(bare) > MAX_LITERAL:
        return None
    try:
        value = ast.literal_eval(bare)
        text = dumped(value)
        return text, json.loads(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
