"""The lines of a batch's input: where each stands, and what is wrong with them. No JAX."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from serving.server.errors import ServeError, invalid
from serving.server.json_body import parse_json

MAX_LINES = 100_000
MAX_ID_CHARACTERS = 256
MAX_PROBLEMS = 50  # that a batch tells of
ID_PREFIX = "batch_req_"  # and the number of the line

Json = dict[str, Any]


class Line(NamedTuple):
    """A line that can be run."""

    number: int  # from 1
    name: str  # its custom_id
    start: int  # byte in the file
    size: int


class Problem(NamedTuple):
    """What is wrong with a line, as the errors of a batch have it."""

    code: str
    line: int | None
    message: str
    param: str | None = None


class _Fields(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw  # is checked when it is asked: to build it may take long
    method: str = "POST"


def read_lines(path: Path, url: str, most_bytes: int) -> tuple[list[Line], list[Problem]]:
    """The lines of a file, all for one endpoint; a line may have `most_bytes`. Raises OSError."""
    lines: list[Line] = []
    problems: list[Problem] = []
    numbers: dict[str, int] = {}
    start = number = 0
    with path.open("rb") as file:
        while (text := file.readline(most_bytes + 1)) and len(problems) < MAX_PROBLEMS:
            number += 1
            if len(text) > most_bytes:
                problems.append(Problem("line_too_large", number, f"more than {most_bytes} bytes"))
                break
            if text.strip():
                read = _read(text, number, url, numbers)
                if isinstance(read, Problem):
                    problems.append(read)
                else:
                    lines.append(Line(number, read, start, len(text)))
                    numbers[read] = number
            if len(lines) > MAX_LINES:
                problems.append(Problem("too_many_lines", number, f"more than {MAX_LINES} lines"))
                break
            start += len(text)
    if not lines and not problems:
        problems.append(Problem("empty_file", None, "The file has no lines."))
    return lines, problems


def _read(text: bytes, number: int, url: str, numbers: dict[str, int]) -> str | Problem:
    """The custom_id of a line."""
    try:
        fields = msgspec.json.decode(text, type=_Fields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return Problem("invalid_json_line", number, f"No line of a batch: {str(error)[:200]}.")
    wrong = _wrong(fields, url, numbers)
    return fields.custom_id if wrong is None else Problem(wrong[0], number, *wrong[1:])


def _wrong(fields: _Fields, url: str, numbers: dict[str, int]) -> tuple[str, str, str] | None:
    """Code, words and field of what is wrong with a line."""
    first = numbers.get(fields.custom_id)
    if not 0 < len(fields.custom_id) <= MAX_ID_CHARACTERS:
        words = f"custom_id must have 1 to {MAX_ID_CHARACTERS} characters."
        return "invalid_custom_id", words, "custom_id"
    if first is not None:
        words = f"custom_id is also that of line {first}."
        return "duplicate_custom_id", words, "custom_id"
    if fields.method != "POST":
        return "invalid_method", "method must be POST.", "method"
    if fields.url != url:
        return "mismatched_endpoint", f"url must be {url}, as the batch says.", "url"
    if bytes(fields.body)[:1] != b"{":
        return "invalid_body", "body must be an object.", "body"
    return None


def body_of(path: Path, line: Line) -> Json:
    """What a line asks for. Raises OSError, and `ServeError` for what no request may hold."""
    with path.open("rb") as file:
        file.seek(line.start)
        fields = msgspec.json.decode(file.read(line.size), type=_Fields)
    values = parse_json(bytes(fields.body))
    if values.get("stream"):
        raise invalid("stream", "has no meaning in a batch")
    return values


def answered(line: Line, status: int, request_id: str, body: Any) -> bytes:
    """The record of a line that has been asked."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    error = None if status == 200 else body.get("error")
    return _record(line, response, error)


def unasked(line: Line, error: ServeError) -> bytes:
    """The record of a line that was not even tried."""
    return _record(line, None, error.body()["error"])


def _record(line: Line, response: Any, error: Any) -> bytes:
    head = {"id": f"{ID_PREFIX}{line.number}", "custom_id": line.name}
    return msgspec.json.encode(head | {"response": response, "error": error}) + b"\n"


class _Head(msgspec.Struct):
    id: str


def number_of(record: bytes) -> int:
    """The number of the line that a record is of."""
    return int(msgspec.json.decode(record, type=_Head).id.removeprefix(ID_PREFIX))
