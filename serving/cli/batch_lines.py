"""The lines of a batch: what each asks for, or what is wrong with it. No JAX.

A line is OpenAI's (`custom_id`, `method`, `url`, `body`) or plain (`prompt` or `messages`, fields
of either endpoint, and perhaps an `id`). Of the plain format (`--format plain`) the fields are
those of SamplingParams, with defaults on the command line, and a field that nobody knows is wrong.
"""

import codecs
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from serving.run.flags import make_sampling
from serving.server.fields import ChatFields, CompletionFields
from serving.server.schema import Wish
from shiftjax.options import ConfigError, shown

ENDPOINTS = COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MAX_ID_CHARACTERS = 256


@dataclass(frozen=True)
class Line:
    """One line that is not blank; `problem` if it cannot be run."""

    number: int  # in the input file, from 1
    name: str  # custom_id or id
    url: str
    body: Any  # of a request; of the plain format, its `Wish`
    problem: str | None = None
    unknown: tuple[str, ...] = ()  # fields beside the body


ReadFields = Callable[[int, str, dict[str, Any]], Line]  # number, name and the other fields


def read_lines(
    data: Iterable[bytes], plain_defaults: Mapping[str, Any] | None = None
) -> list[Line]:
    """Parse a file; what is wrong with a line is kept with it.

    `plain_defaults` are sampling fields of lines without them: the file is of the plain format.
    """

    def plain(number: int, name: str, values: dict[str, Any]) -> Line:
        return _plain_line(number, name, values, plain_defaults or {})

    read_fields = _any_line if plain_defaults is None else plain
    lines: list[Line] = []
    seen: dict[str, int] = {}
    for number, raw in enumerate(data, start=1):
        text = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
        if not text.strip():
            continue
        line = _read_line(number, text, read_fields)
        if line.name in seen:
            words = f"id {shown(line.name)} is also that of line {seen[line.name]}"
            line = Line(number, line.name, line.url, None, words)
        seen.setdefault(line.name, number)
        lines.append(line)
    return lines


def _read_line(number: int, text: bytes, read_fields: ReadFields) -> Line:
    name = f"line-{number}"
    try:
        values = _parse_object(text)
        given = values.pop("custom_id" if "custom_id" in values else "id", name)
        if not (isinstance(given, str) and 0 < len(given) <= MAX_ID_CHARACTERS):
            words = f"id must be text of 1 to {MAX_ID_CHARACTERS} characters, got {shown(given)}"
            raise ConfigError([words])
        name = given
        return read_fields(number, name, values)
    except ConfigError as error:
        return Line(number, name, "", None, "; ".join(error.problems))


def _parse_object(text: bytes) -> dict[str, Any]:
    try:
        values = msgspec.json.decode(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError([f"not UTF-8 text (byte {error.start})"]) from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError([f"not JSON: {error}"]) from None
    if not isinstance(values, dict):
        raise ConfigError([f"must be a JSON object, got {shown(values)}"])
    return values


def _any_line(number: int, name: str, values: dict[str, Any]) -> Line:
    """OpenAI's line, or one whose fields are those of a request."""
    if values.keys().isdisjoint(("method", "url", "body")):
        return Line(number, name, ENDPOINTS["messages" in values], values)
    url, method = values.pop("url", None), values.pop("method", "POST")
    if url not in ENDPOINTS or method != "POST":
        raise ConfigError([f"must be POST to one of {', '.join(ENDPOINTS)}"])
    if "body" not in values:
        raise ConfigError(["body is missing"])
    return Line(number, name, url, values.pop("body"), unknown=tuple(sorted(values)))


def _plain_line(
    number: int, name: str, values: dict[str, Any], defaults: Mapping[str, Any]
) -> Line:
    """A prompt or messages with fields of SamplingParams. Raises ConfigError."""
    prompt, messages = values.pop("prompt", None), values.pop("messages", None)
    problems = list(_prompt_problems(prompt, messages))
    try:
        sampling = make_sampling({**defaults, **values})
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    if messages is None:
        wish = Wish(CompletionFields(prompt=prompt), sampling, None, ())
        return Line(number, name, COMPLETIONS, wish)
    return Line(number, name, CHATS, Wish(ChatFields(messages=messages), sampling, None, ()))


def _prompt_problems(prompt: Any, messages: Any) -> Iterator[str]:
    if (prompt is None) == (messages is None):
        yield "must have either prompt or messages"
    if prompt is not None and not isinstance(prompt, str):
        yield f"prompt must be text, got {shown(prompt)}"
    if messages is not None and not isinstance(messages, list):
        yield f"messages must be a list, got {shown(messages)}"
    elif messages == [] or any(not isinstance(each, dict) for each in messages or ()):
        yield f"messages must hold objects, and at least one, got {shown(messages)}"
