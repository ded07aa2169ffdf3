"""Grammars of arguments that are no JSON object, in llguidance's dialect of Lark. No JAX.

Each function returns the rule of all arguments of one call, between what stands before and behind
them. Arguments come in the order of the schema, and none besides those that it names.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from serving.server.errors import invalid
from serving.server.fields import Function
from serving.server.formats.json_types import referred, types_of

Json = Any
_PLAIN_KEY = re.compile(r"[\w.-]+")
_TAG_KEY = re.compile(r"[^<>\"'\n]{1,256}")
_NOT_KEPT = ("format", "contentEncoding", "contentMediaType")  # of bare strings


class Rules(Protocol):
    """Rules of a grammar as they are needed."""

    rules: list[str]

    def text(self, text: str) -> str:
        """The text, and nothing else."""
        ...


def tagged(before: str, after: str, behind: str, rules: Rules, function: Function) -> str:
    """Arguments between tags: `before`, key, `after`, the value, `behind`. Raises `ServeError`."""
    root = function.parameters or {}
    made = []
    for key, schema, is_needed in _properties(root):
        if not _TAG_KEY.fullmatch(key):
            continue
        value = _bare_value(rules, schema, function, behind)
        name = _added(rules, f"{rules.text(before + key + after)} {value}")
        made.append(name if is_needed else f"{name}?")
    return " ".join(made) or '""'


def keywords(rules: Rules, function: Function) -> str:
    """Arguments as those of a call in Python, with values in JSON."""
    made = []
    for key, schema, is_needed in _properties(function.parameters or {}):
        word = key if _PLAIN_KEY.fullmatch(key) else json.dumps(key)
        value = f"%json {_json(schema, function)}"
        made.append((_added(rules, f"{rules.text(f'{word}=')} {value}"), is_needed))
    return _separated(rules, made, ", ")


def with_quotes(quote: str, rules: Rules, function: Function) -> str:
    """Arguments as `key:value`, strings between marks of their own."""
    return _Quoted(quote, rules, function).fields(function.parameters or {})


class _Quoted:
    """Values of a schema whose strings stand between two `quote`s, in one grammar."""

    def __init__(self, quote: str, rules: Rules, function: Function):
        self._quote, self._rules, self._function = quote, rules, function
        self._root: dict[str, Json] = function.parameters or {}
        self._named: dict[str, str] = {}  # references and the rules that they became

    def fields(self, schema: dict[str, Json]) -> str:
        """What stands between the braces of an object."""
        made = []
        for key, each, is_needed in _properties(schema):
            word = key if _PLAIN_KEY.fullmatch(key) else f"{self._quote}{key}{self._quote}"
            body = f"{self._rules.text(f'{word}:')} {self._value(each)}"
            made.append((_added(self._rules, body), is_needed))
        return _separated(self._rules, made, ",")

    def _value(self, schema: Json) -> str:
        if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
            return self._referred(schema["$ref"])
        if not isinstance(schema, dict):
            return self._any()
        if kinds := _choices(schema):
            return f"({' | '.join(map(self._value, kinds))})"
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return f"({' | '.join(self._rules.text(self._literal(each)) for each in values)})"
        made = [self._typed(each, schema) for each in sorted(types_of(schema, self._root))]
        return f"({' | '.join(made)})" if made else self._any()

    def _typed(self, kind: str, schema: dict[str, Json]) -> str:
        text = self._rules.text
        if kind == "string":
            return f"{text(self._quote)} {_string(self._rules, schema, self._quote)}"
        if kind == "object":
            return f"{text('{')} {self.fields(schema)} {text('}')}"
        if kind == "array":
            items = self._value(schema.get("items"))
            low, high = schema.get("minItems", 0), schema.get("maxItems")
            many = f"{{{max(0, low - 1)},{'' if high is None else max(0, high - 1)}}}"
            list_of = f"{items} ({text(',')} {items}){many}"
            return f"{text('[')} {list_of if low else f'({list_of})?'} {text(']')}"
        return f"%json {_json(schema | {'type': kind}, self._function)}"

    def _referred(self, reference: str) -> str:
        if reference not in self._named:
            self._named[reference] = f"named_{len(self._named)}_{len(self._rules.rules)}"
            value = self._value(referred(reference, self._root))
            self._rules.rules.append(f"{self._named[reference]}: {value}")
        return self._named[reference]

    def _any(self) -> str:
        if "" not in self._named:
            self._named[""] = name = f"any_{len(self._rules.rules)}"
            text = self._rules.text
            string = f"{text(self._quote)} {_string(self._rules, {}, self._quote)}"
            scalar = '%json {"type": ["number", "boolean", "null"]}'
            listed = f"{text('[')} ({name} ({text(',')} {name})*)? {text(']')}"
            self._rules.rules.append(f"{name}: {string} | {scalar} | {listed}")
        return self._named[""]

    def _literal(self, value: Json) -> str:
        if isinstance(value, str):
            return f"{self._quote}{value}{self._quote}"
        if isinstance(value, list):
            return f"[{','.join(map(self._literal, value))}]"
        if isinstance(value, dict):
            pairs = (f"{self._literal(key)}:{self._literal(each)}" for key, each in value.items())
            return f"{{{','.join(pairs)}}}"
        return json.dumps(value)


def _properties(schema: dict[str, Json]) -> Sequence[tuple[str, Json, bool]]:
    """(name, schema, whether it is required) of each property."""
    properties, needed = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return ()
    names = needed if isinstance(needed, list) else ()
    return [(key, value, key in names) for key, value in properties.items()]


def _choices(schema: Json) -> list[Json]:
    """The schemas of which one must hold."""
    words = (schema.get(word) for word in ("anyOf", "oneOf")) if isinstance(schema, dict) else ()
    return next((found for found in words if isinstance(found, list)), [])


def _separated(rules: Rules, made: Sequence[tuple[str, bool]], comma: str) -> str:
    """The rules in their order, with commas between those that are there."""
    first, later = '""', '""'  # the rest, when nothing has been written, and when something has
    for name, is_needed in reversed(made):
        begun = f"{name} {later}"
        first = _added(rules, begun if is_needed else f"{begun} | {first}")
        more = f"{rules.text(comma)} {begun}"
        later = _added(rules, more if is_needed else f"{more} | {later}")
    return first


def _bare_value(rules: Rules, schema: Json, function: Function, behind: str) -> str:
    """A value without quotes, and what is behind it."""
    root = function.parameters or {}
    types = types_of(schema, root)
    if types and "string" not in types:
        return f"%json {_json(schema, function)} {rules.text(behind)}"
    while isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        schema = referred(schema["$ref"], root)
    kinds = _choices(schema)
    if kinds:
        return f"({' | '.join(_bare_value(rules, each, function, behind) for each in kinds)})"
    if types != {"string"} or not isinstance(schema, dict):
        return _string(rules, {}, behind)
    if function.strict and (word := next((each for each in _NOT_KEPT if each in schema), None)):
        raise invalid("tools", f"have the keyword {word}, which cannot be kept with strict")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return f"({' | '.join(rules.text(str(each) + behind) for each in values)})"
    return _string(rules, schema, behind)


def _string(rules: Rules, schema: dict[str, Json], behind: str) -> str:
    """Text up to the first `behind`, and that: as long as the schema says, or as its pattern."""
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    content = f"(.|\\n){{{low},{high}}}" if low or high != "" else "(.|\\n)*"
    if isinstance(schema.get("pattern"), str):
        content = _anchored(schema["pattern"])
    if "<[" in rules.text(behind):  # a special token, which is no text
        name = f"STRING_{len(rules.rules)}"
        rules.rules.append(f"{name}: /{content}/")
        return f"{name} {rules.text(behind.lstrip())}"
    name = f"string_{len(rules.rules)}"
    rules.rules.append(f"{name}[lazy]: /{content}{_in_regex(behind)}/")
    return name


def _anchored(pattern: str) -> str:
    """A pattern that may be anywhere in a text, as one of all of the text."""
    head = "" if pattern.startswith("^") else "(.|\\n)*"
    tail = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(.|\\n)*"
    inner = pattern.removeprefix("^")
    inner = inner[:-1] if not tail else inner
    return f"{head}({re.sub(r'(?<!\\)/', r'\\/', inner)}){tail}"


def _in_regex(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")


def _json(schema: Json, function: Function) -> str:
    """The schema of one value, with the definitions to which it may refer."""
    root = function.parameters or {}
    made = dict(schema) if isinstance(schema, dict) else {}
    made |= {word: root[word] for word in ("$defs", "definitions") if word in root}
    made["x-guidance"] = {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
        "lenient": not function.strict,
    }
    return json.dumps(made)


def _added(rules: Rules, body: str) -> str:
    """The name of a new rule."""
    name = f"part_{len(rules.rules)}"
    rules.rules.append(f"{name}: {body}")
    return name
