"""Batch files: lines of JSON in, a record for every line out, in order, resumable. No JAX."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.run.flags import make_sampling
from shiftjax.control.request import SamplingParams, TokenLogprobs
from shiftjax.options import ConfigError, shown

if TYPE_CHECKING:
    from shiftjax.outputs import CompletionOutput, RequestOutput

Record = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One line that can be run: either a prompt or messages."""

    line: int  # of the input file, from 1
    id: str
    prompt: str | None
    messages: list[Any] | None
    sampling: SamplingParams


@dataclass(frozen=True)
class Refused:
    """One line that cannot be run, and why."""

    line: int
    id: str
    error: str

    def record(self) -> Record:
        """What the output file says in place of a result."""
        return {"id": self.id, "line": self.line, "error": self.error}


def parse_jobs(lines: Iterable[bytes], defaults: Mapping[str, Any]) -> list[Job | Refused]:
    """One entry per line that is not blank; `defaults` are sampling fields of lines without them.

    A line is an object with `prompt` or `messages`, and perhaps with `id` and fields of
    SamplingParams. Ids are unique; that of line 7 is `line-7` unless it says otherwise.
    """
    entries: list[Job | Refused] = []
    line_of: dict[str, int] = {}
    for line, data in enumerate(lines, start=1):
        if not data.strip():
            continue
        entry = _parse_line(line, data, defaults)
        if entry.id in line_of:
            first = line_of[entry.id]
            entry = Refused(line, entry.id, f"id {shown(entry.id)} is also that of line {first}")
        line_of.setdefault(entry.id, line)
        entries.append(entry)
    return entries


def _parse_line(line: int, data: bytes, defaults: Mapping[str, Any]) -> Job | Refused:
    name = f"line-{line}"
    problems: list[str] = []
    try:
        fields = _parse_object(data)
        name = _parse_id(fields.pop("id", name))
        prompt, messages = fields.pop("prompt", None), fields.pop("messages", None)
        problems += _prompt_problems(prompt, messages)
        sampling = make_sampling({**defaults, **fields})
    except ConfigError as error:
        return Refused(line, name, "; ".join([*problems, *error.problems]))
    if problems:
        return Refused(line, name, "; ".join(problems))
    return Job(line, name, prompt, messages, sampling)


def _parse_object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError([f"not UTF-8 text (byte {error.start})"]) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"not JSON: {error}"]) from None
    if not isinstance(value, dict):
        raise ConfigError([f"must be a JSON object, got {shown(value)}"])
    return value


def _parse_id(value: Any) -> str:
    if isinstance(value, str) and 0 < len(value) <= 256:
        return value
    raise ConfigError([f"id must be text of 1 to 256 characters, got {shown(value)}"])


def _prompt_problems(prompt: Any, messages: Any) -> Iterator[str]:
    if (prompt is None) == (messages is None):
        yield "must have either prompt or messages"
    if prompt is not None and not isinstance(prompt, str):
        yield f"prompt must be text, got {shown(prompt)}"
    if messages is not None and not isinstance(messages, list):
        yield f"messages must be a list, got {shown(messages)}"


# ---------------------------------------------------------------- results


def result_record(job: Job, output: "RequestOutput") -> Record:
    """What the output file says about a finished job; `error` is there if it failed."""
    record: Record = {
        "id": job.id,
        "line": job.line,
        "outputs": [_completion(one) for one in output.outputs],
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": sum(len(one.token_ids) for one in output.outputs),
        },
    }
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [_logprobs(entry) for entry in output.prompt_logprobs]
    errors = [one.error for one in output.outputs if one.error]
    return record | {"error": errors[0]} if errors else record


def _completion(output: "CompletionOutput") -> Record:
    record = {
        "index": output.index,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    if output.logprobs is not None:
        record["logprobs"] = [_logprobs(entry) for entry in output.logprobs]
    return record


def _logprobs(entry: TokenLogprobs | None) -> Record | None:
    return None if entry is None else entry._asdict()


def in_order[T](pairs: Iterable[tuple[int, T]]) -> Iterator[T]:
    """The values of (place, value) pairs by place from 0, each as soon as those before it."""
    waiting: dict[int, T] = {}
    place = 0
    for key, value in pairs:
        waiting[key] = value
        while place in waiting:
            yield waiting.pop(place)
            place += 1


def write_record(file: Any, record: Record) -> None:
    """Append one line and hand it to the operating system."""
    file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
    file.flush()


# ---------------------------------------------------------------- resuming


def repair(path: Path) -> dict[int, str]:
    """The id of every line that an output file has a record of, by line number.

    A last record that was cut off is removed from the file. Raises ConfigError for anything else
    that is no record: the file is then not ours to continue.
    """
    done: dict[int, str] = {}
    end = 0
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        key = _record_key(line)
        if key is None and number == len(lines):
            break
        if key is None:
            raise ConfigError([f"{path}, line {number}: no record of a batch; not resumed"])
        done[key[0]] = key[1]
        end += len(line)
    if end < len(data):
        with path.open("r+b") as file:
            file.truncate(end)
    return done


def _record_key(line: bytes) -> tuple[int, str] | None:
    try:
        record = json.loads(line)
        key = record["line"], record["id"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    whole = line.endswith(b"\n") and isinstance(key[0], int) and isinstance(key[1], str)
    return key if whole else None


def left_to_do(
    entries: list[Job | Refused], done: Mapping[int, str], path: Path
) -> list[Job | Refused]:
    """The entries without a record; raises ConfigError if the records are of another input."""
    id_of = {entry.line: entry.id for entry in entries}
    for line, name in done.items():
        if id_of.get(line) != name:
            raise ConfigError([f"{path} is of another input: it has id {shown(name)} at {line}"])
    return [entry for entry in entries if entry.line not in done]
