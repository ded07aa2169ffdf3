"""The constraint that a request gives, by `response_format` or `structured_outputs`."""

import re
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from serving.server.errors import invalid
from serving.server.fields import GenerationFields, ResponseFormat, StructuredOutputs

MAX_CHOICES = 1024
MAX_WHITESPACE_CHARACTERS = 64
_WHITESPACE = re.compile(
    r"([ \t\n\r]|\\[tnr]|\[([ \t\n\r]|\\[tnr])+\]|\{\d{1,2}(,\d{0,2})?\}|[?*+|()])*"
)


@dataclass(frozen=True)
class GrammarSource:
    """A constraint as the request gives it: json (a schema), regex, choice or grammar (Lark).

    The kind tools is made of a request's tools, in Lark; there `@answer` is the form of an answer.
    """

    kind: str
    text: str
    field: str = field(default="response_format", compare=False)  # where it stood
    whitespace: str | None = None  # a regex for that between tokens of JSON; None: any
    answer: "GrammarSource | None" = None  # beside calls


def grammar_source_of(fields: GenerationFields) -> GrammarSource | None:
    """Return the only constraint of a request; None: it has none. Raises `ServeError`."""
    sources = [*_from_format(fields.response_format), *_from_outputs(fields.structured_outputs)]
    if len(sources) > 1:
        raise invalid("structured_outputs", "and response_format hold more than one constraint")
    whitespace = _whitespace(fields.structured_outputs, sources)
    return replace(sources[0], whitespace=whitespace) if sources else None


def _whitespace(wanted: StructuredOutputs | None, sources: list[GrammarSource]) -> str | None:
    """The whitespace that JSON may have; with any other than its own it would not be JSON."""
    if wanted is None or not (wanted.whitespace_pattern or wanted.disable_any_whitespace):
        return None
    name = "disable_any_whitespace" if wanted.disable_any_whitespace else "whitespace_pattern"
    if [source.kind for source in sources] != ["json"]:
        raise invalid(f"structured_outputs.{name}", "needs output that is JSON")
    if wanted.disable_any_whitespace and wanted.whitespace_pattern:
        raise invalid(f"structured_outputs.{name}", "leaves no room for a whitespace_pattern")
    pattern = wanted.whitespace_pattern or ""
    if len(pattern) > MAX_WHITESPACE_CHARACTERS or not _WHITESPACE.fullmatch(pattern):
        words = (
            f"must be a regex of spaces, \\t, \\n and \\r, sets and repetitions of them, "
            f"with at most {MAX_WHITESPACE_CHARACTERS} characters"
        )
        raise invalid("structured_outputs.whitespace_pattern", words)
    return pattern


def _from_format(wanted: ResponseFormat | None) -> list[GrammarSource]:
    if wanted is None:
        return []
    if wanted.json_schema is not None and wanted.type in ("text", "json_object"):
        raise invalid("response_format.json_schema", "needs the type json_schema")
    if wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [GrammarSource("json", '{"type":"object"}')]
    if wanted.type != "json_schema":
        raise invalid("response_format.type", "must be text, json_object or json_schema")
    if wanted.json_schema is None:
        words = "is missing: json_schema needs one"
        raise invalid("response_format.json_schema", words, "missing_required_parameter")
    return [GrammarSource("json", _to_json(wanted.json_schema.schema))]


def _from_outputs(wanted: StructuredOutputs | None) -> list[GrammarSource]:
    if wanted is None:
        return []
    sources = []
    if wanted.json is not None:
        is_text = isinstance(wanted.json, str)
        sources.append(_output("json", wanted.json if is_text else _to_json(wanted.json)))
    for kind in ("regex", "grammar"):
        text = getattr(wanted, kind)
        if text is not None:
            sources.append(_output(kind, text))
    if wanted.choice is not None:
        if not 0 < len(wanted.choice) <= MAX_CHOICES:
            raise invalid("structured_outputs.choice", f"must have 1 to {MAX_CHOICES} entries")
        sources.append(_output("choice", _to_json(wanted.choice)))
    if wanted.json_object is not None:
        if not wanted.json_object:
            raise invalid("structured_outputs.json_object", "must be true or left out")
        sources.append(_output("json", '{"type":"object"}'))
    if not sources and not (wanted.whitespace_pattern or wanted.disable_any_whitespace):
        raise invalid("structured_outputs", "must hold a constraint")
    if any(not source.text for source in sources):
        raise invalid("structured_outputs", "must not be empty")
    return sources


def _output(kind: str, text: Any) -> GrammarSource:
    return GrammarSource(kind, text, "structured_outputs")


def _to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
