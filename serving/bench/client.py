"""A lean HTTP/1.1 client for streamed completions, so that the client is not what is measured."""

import asyncio
import itertools
import re
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from shiftjax.options import ConfigError, shown

MAX_LINE = 1 << 20
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})( .*)?")


class AnswerError(ValueError):
    """An answer that is no HTTP, or not what OpenAI's interface says."""


FAILURES = (OSError, EOFError, ValueError)  # what may come of talking to a server; JSON's too


@dataclass(frozen=True)
class Target:
    """A server and what its requests need."""

    host: str
    port: int
    path: str  # that the URL began with, without /v1
    tls: bool
    key: str | None = None


@dataclass
class Sample:
    """One request as its client saw it. Times are of `time.perf_counter()`."""

    sent_at: float
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    token_times: list[float] = field(default_factory=list)  # of events that carry tokens
    texts: dict[int, str] = field(default_factory=dict)  # by continuation
    finish_reasons: dict[int, str] = field(default_factory=dict)  # by continuation
    ended_at: float = 0.0
    error: str | None = None
    retry_after: str | None = None  # of a refusal

    @staticmethod
    def begin() -> "Sample":
        """A request that is sent now."""
        return Sample(time.perf_counter())

    def end(self, error: str | None = None) -> None:
        """It has ended now."""
        self.ended_at, self.error = time.perf_counter(), error or self.error

    def add_text(self, index: int, text: str) -> None:
        """An event with tokens of a continuation has come now."""
        self.token_times.append(time.perf_counter())
        self.texts[index] = self.texts.get(index, "") + text

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return self.token_times[0] - self.sent_at if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first."""
        later = self.num_output_tokens - 1
        return (self.token_times[-1] - self.token_times[0]) / later if later > 0 else None

    @property
    def completion(self) -> float:
        """Seconds from the request to its end."""
        return self.ended_at - self.sent_at

    @property
    def gaps(self) -> list[float]:
        """Seconds between events that carry tokens."""
        times = self.token_times
        return [after - before for before, after in itertools.pairwise(times)]


def parse_url(url: str, key: str | None = None) -> Target:
    """The target that a URL names. Raises ConfigError."""
    problem = ConfigError([f"--url must be like http://127.0.0.1:8000, got {shown(url)}"])
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # half an IPv6 address, a port that is none
        raise problem from None
    is_plain = url.isascii() and url.isprintable()
    if parts.scheme not in ("http", "https") or not host or not is_plain:
        raise problem
    tls = parts.scheme == "https"
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Target(host, port or (443 if tls else 80), path, tls, key)


async def get(target: Target, path: str) -> tuple[int, bytes]:
    """(status, body) of a GET. Raises one of `FAILURES`."""
    connection = await _open(target)
    try:
        reader, writer = connection
        writer.write(_head(target, "GET", path))
        status, headers = await _read_head(reader)
        return status, b"".join([chunk async for chunk in _chunks(reader, headers)])
    finally:
        await _close(connection)


async def complete(target: Target, body: dict[str, Any], *, streams: bool = True) -> Sample:
    """Send one completion, by default streamed with its usage; failures are in the sample."""
    if streams:
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
    sample = Sample.begin()
    try:
        connection = await _open(target)
        try:
            await _exchange(target, connection, msgspec.json.encode(body), sample)
        finally:
            await _close(connection)
    except FAILURES as error:
        sample.error = f"{type(error).__name__}: {error}"
    if sample.error is None and sample.num_prompt_tokens == 0:
        sample.error = "the answer says nothing of its usage: its tokens cannot be counted"
    sample.end()
    return sample


async def _exchange(target: Target, connection: Any, body: bytes, sample: Sample) -> None:
    reader, writer = connection
    writer.write(_head(target, "POST", "/v1/completions", body) + body)
    status, headers = await _read_head(reader)
    if status != 200:
        text = b"".join([chunk async for chunk in _chunks(reader, headers)])
        sample.error = f"{status}: {text[:200].decode('utf-8', 'replace')}"
        sample.retry_after = headers.get(b"retry-after", b"").decode() or None
    elif headers.get(b"content-type", b"").startswith(b"text/event-stream"):
        await _read_events(reader, headers, sample)
    else:
        text = b"".join([chunk async for chunk in _chunks(reader, headers)])
        _note(sample, text)
        sample.token_times.clear()  # nobody saw when a token came


async def _read_events(
    reader: asyncio.StreamReader, headers: dict[bytes, bytes], sample: Sample
) -> None:
    rest, is_done = b"", False
    async for chunk in _chunks(reader, headers):
        *events, rest = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            data = _data_of(event)
            is_done = is_done or data == b"[DONE]"
            if data.startswith(b"{"):
                _note(sample, data)
    if not is_done:
        sample.error = sample.error or "the stream broke off"


def _data_of(event: bytes) -> bytes:
    """What a server-sent event carries; nothing for a comment."""
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_EVENT = msgspec.json.Decoder(_Event)


def _note(sample: Sample, data: bytes) -> None:
    event = _EVENT.decode(data)
    if isinstance(event.error, dict):
        sample.error = f"{event.error.get('code')}: {event.error.get('message')}"
    elif event.error is not None:
        sample.error = str(event.error)
    for choice in event.choices or ():
        sample.add_text(choice.index, choice.text or "")
        if choice.finish_reason is not None:
            sample.finish_reasons[choice.index] = choice.finish_reason
    if event.usage is not None:
        sample.num_prompt_tokens = event.usage.prompt_tokens
        sample.num_output_tokens = event.usage.completion_tokens


# ---------------------------------------------------------------- HTTP/1.1


async def _open(target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.create_default_context() if target.tls else None
    return await asyncio.open_connection(target.host, target.port, ssl=context, limit=MAX_LINE)


async def _close(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    connection[1].close()
    try:
        await connection[1].wait_closed()
    except OSError:
        return


def _head(target: Target, method: str, path: str, body: bytes = b"") -> bytes:
    host = f"[{target.host}]" if ":" in target.host else target.host
    lines = [f"{method} {target.path}{path} HTTP/1.1", f"Host: {host}:{target.port}"]
    lines += ["Connection: close", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}"] if body else []
    lines += [f"Authorization: Bearer {target.key}"] if target.key else []
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return (await reader.readline()).strip()
    except ValueError:
        raise AnswerError("a line of the answer is too long") from None


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes]]:
    first = await _line(reader)
    status = _STATUS.fullmatch(first)
    if status is None:
        raise AnswerError("the answer is not HTTP" if first else "there was no answer")
    headers = {}
    while (line := await _line(reader)) != b"":
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip()
    return int(status[1]), headers


async def _chunks(reader: asyncio.StreamReader, headers: dict[bytes, bytes]):
    """The body in the pieces in which it comes. Raises EOFError where it breaks off."""
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        while size := await _size_of_chunk(reader):
            yield (await reader.readexactly(size + 2))[:-2]
        return
    rest = headers.get(b"content-length")
    if rest is None:  # it ends with the connection
        while chunk := await reader.read(MAX_LINE):
            yield chunk
    elif rest.isdigit():
        yield await reader.readexactly(int(rest))
    else:
        raise AnswerError("the Content-Length of the answer is no number")


async def _size_of_chunk(reader: asyncio.StreamReader) -> int:
    line = await _line(reader)
    try:
        return int(line.split(b";")[0], 16)
    except ValueError:
        words = "the answer has a chunk without a size" if line else "the answer broke off"
        raise AnswerError(words) from None
