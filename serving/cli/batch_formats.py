"""The two formats of a batch: what a line asks for, and how its answer is recorded. No JAX.

A line of OpenAI's format has `custom_id`, `method`, `url` and `body`, or is the request itself:
`prompt` or `messages`, fields of either endpoint, and perhaps an `id`. Of the plain format
(`--format plain`) the fields are those of SamplingParams, with defaults on the command line, and a
field that nobody knows is wrong.
"""

import codecs
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from serving.run.flags import make_sampling
from serving.server.errors import ServeError
from serving.server.fields import ChatFields, CompletionFields
from serving.server.responses import Writer
from serving.server.schema import Wish
from serving.server.served import Generation
from serving.server.service import Service
from shiftjax.options import ConfigError, shown
from shiftjax.outputs import CompletionOutput, RequestOutput

ENDPOINTS = COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MAX_ID_CHARACTERS = 256
ID_PREFIX = "batch_req_"  # and the number of the line

Record = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """One line that is not blank; `problem` if it cannot be run."""

    number: int  # in the input file, from 1
    name: str  # custom_id or id
    url: str
    body: Any  # of a request; of the plain format, its `Wish`
    problem: str | None = None
    unknown: tuple[str, ...] = ()  # fields beside the body


class Format(NamedTuple):
    """How lines are read and recorded."""

    read: Callable[[int, str, Record, Mapping[str, Any]], Line]  # number, name, fields, defaults
    failure: Callable[[Line, ServeError], Record]
    answer: Callable[[Service, Line, Generation], Record]  # may raise the failure
    key: Callable[[Record], tuple[int, Any]]  # number and name of the line; may raise anything
    start: bytes  # of every record
    usage: Callable[[Record], Record | None]  # tokens of an answer


def read_lines(
    data: Iterable[bytes], form: Format, defaults: Mapping[str, Any] | None = None
) -> list[Line]:
    """Parse a file; what is wrong with a line is kept with it.

    `defaults` are sampling fields of plain lines without them.
    """
    lines: list[Line] = []
    seen: dict[str, int] = {}
    for number, raw in enumerate(data, start=1):
        text = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
        if not text.strip():
            continue
        line = _read_line(number, text, form, defaults or {})
        if line.name in seen:
            words = f"id {shown(line.name)} is also that of line {seen[line.name]}"
            line = Line(number, line.name, line.url, None, words)
        seen.setdefault(line.name, number)
        lines.append(line)
    return lines


def _read_line(number: int, text: bytes, form: Format, defaults: Mapping[str, Any]) -> Line:
    name = f"line-{number}"
    try:
        values = _parse_object(text)
        given = values.pop("custom_id" if "custom_id" in values else "id", name)
        if not (isinstance(given, str) and 0 < len(given) <= MAX_ID_CHARACTERS):
            words = f"id must be text of 1 to {MAX_ID_CHARACTERS} characters, got {shown(given)}"
            raise ConfigError([words])
        name = given
        return form.read(number, name, values, defaults)
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


# ---------------------------------------------------------------- OpenAI's


def _openai_line(number: int, name: str, values: Record, _: Mapping[str, Any]) -> Line:
    """OpenAI's line, or one whose fields are those of a request."""
    if values.keys().isdisjoint(("method", "url", "body")):
        return Line(number, name, ENDPOINTS["messages" in values], values)
    url, method = values.pop("url", None), values.pop("method", "POST")
    if url not in ENDPOINTS or method != "POST":
        raise ConfigError([f"must be POST to one of {', '.join(ENDPOINTS)}"])
    if "body" not in values:
        raise ConfigError(["body is missing"])
    return Line(number, name, url, values.pop("body"), unknown=tuple(sorted(values)))


def _openai_head(line: Line) -> Record:
    return {"id": f"{ID_PREFIX}{line.number}", "custom_id": line.name}


def _openai_failure(line: Line, error: ServeError) -> Record:
    """A line that was not even tried has no response."""
    response = {"status_code": error.kind.status, "body": error.body()}
    response = response if line.problem is None else None
    return _openai_head(line) | {"response": response, "error": error.body()["error"]}


def _openai_answer(service: Service, line: Line, generation: Generation) -> Record:
    """The server's response; fields that nobody knows are in `ignored_fields`."""
    for handle in generation.handles:
        if handle.error is not None:
            raise handle.error
    model, _ = service.running()
    response = {"status_code": 200, "body": Writer(generation, model.tokenizer).response()}
    record = _openai_head(line) | {"response": response, "error": None}
    ignored = (*line.unknown, *generation.wish.ignored)
    return record | ({"ignored_fields": ignored} if ignored else {})


OPENAI = Format(
    _openai_line,
    _openai_failure,
    _openai_answer,
    key=lambda record: (int(record["id"].removeprefix(ID_PREFIX)), record["custom_id"]),
    start=f'{{"id":"{ID_PREFIX}'.encode(),
    usage=lambda record: (record["response"] or {}).get("body", {}).get("usage"),
)


# ---------------------------------------------------------------- plain


def _plain_line(number: int, name: str, values: Record, defaults: Mapping[str, Any]) -> Line:
    """A prompt or messages with fields of SamplingParams. Raises ConfigError."""
    prompt, messages = values.pop("prompt", None), values.pop("messages", None)
    problems = list(_prompt_problems(prompt, messages))
    given = {**defaults, **values}
    try:
        sampling = make_sampling(given)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    if messages is None:
        wish = Wish(CompletionFields(prompt=prompt), sampling, None, (), given=frozenset(given))
        return Line(number, name, COMPLETIONS, wish)
    wish = Wish(ChatFields(messages=messages), sampling, None, (), given=frozenset(given))
    return Line(number, name, CHATS, wish)


def _prompt_problems(prompt: Any, messages: Any) -> Iterator[str]:
    if (prompt is None) == (messages is None):
        yield "must have either prompt or messages"
    if prompt is not None and not isinstance(prompt, str):
        yield f"prompt must be text, got {shown(prompt)}"
    if messages is not None and not isinstance(messages, list):
        yield f"messages must be a list, got {shown(messages)}"
    elif messages == [] or any(not isinstance(each, dict) for each in messages or ()):
        yield f"messages must hold objects, and at least one, got {shown(messages)}"


def _plain_failure(line: Line, error: ServeError) -> Record:
    return {"id": line.name, "line": line.number, "error": line.problem or error.message}


def _plain_answer(service: Service, line: Line, generation: Generation) -> Record:
    (handle,) = generation.handles
    record = plain_record(line, handle.output)
    if handle.error is not None:
        record.setdefault("error", handle.error.message)
    return record


def plain_record(line: Line, output: RequestOutput) -> Record:
    """All that came for a line; `error` is there if a continuation failed."""
    record: Record = {
        "id": line.name,
        "line": line.number,
        "outputs": [_completion(one) for one in output.outputs],
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": sum(len(one.token_ids) for one in output.outputs),
        },
    }
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [each and each._asdict() for each in output.prompt_logprobs]
    errors = [one.error for one in output.outputs if one.error]
    return record | {"error": errors[0]} if errors else record


def _completion(output: CompletionOutput) -> Record:
    names = ("index", "text", "token_ids", "finish_reason", "stop_reason")
    record = {name: getattr(output, name) for name in names}
    if output.logprobs is not None:
        record["logprobs"] = [each._asdict() for each in output.logprobs]
    return record


PLAIN = Format(
    _plain_line,
    _plain_failure,
    _plain_answer,
    key=lambda record: (record["line"], record["id"]),
    start=b'{"id":',
    usage=lambda record: record.get("usage"),
)
FORMATS: Mapping[str, Format] = {"openai": OPENAI, "plain": PLAIN}
