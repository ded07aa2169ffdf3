"""Request traces: loaders, synthetic arrivals, windows and rates. No JAX.

Azure LLM inference 2023   CSV    TIMESTAMP, ContextTokens, GeneratedTokens (Splitwise, 2024)
Mooncake                   JSONL  timestamp (ms), input_length, output_length, hash_ids
vLLM's bench, patched      JSONL  timestamp (ms), input_length, output_length (arXiv 2509.16495)
BurstGPT                   CSV    Timestamp (s), Model, Request tokens, Response tokens, ...
our own                    JSONL  arrival_seconds, prompt_tokens, output_tokens, and, if any,
                                  prefix_ids, priority
"""

import csv
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from shiftjax.options import ConfigError, shown

MOONCAKE_BLOCK_TOKENS = 512
MOONCAKE_TICK_SECONDS = 3.0  # arrivals were recorded on ticks
MOST_TOKENS = 2**31 - 1  # of a request's prompt, and of its output
MOST_REQUESTS = 10_000_000  # that are made up at once
MOST_CV = 100.0  # of gaps and lengths: beyond it nearly all of them are nothing


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: when it came and how long it is.

    Equal numbers at the same place of `prefix_ids` stand for equal blocks of `prefix_block_tokens`
    prompt tokens, after equal blocks before them.
    """

    arrival_seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    prefix_block_tokens: int = MOONCAKE_BLOCK_TOKENS
    priority: int = 0

    def prompt(self, number: int, vocab_size: int) -> list[int]:
        """Token ids that are shared with other requests exactly where the trace says so.

        Without prefix ids the prompt is like no other's: `number` is spelled in its first tokens.
        """
        if not self.prefix_ids:
            head = [*_spelled(number, vocab_size), 1]
            return (head + [0] * self.num_prompt_tokens)[: self.num_prompt_tokens]
        tokens: list[int] = []
        for block in self.prefix_ids[: -(-self.num_prompt_tokens // self.prefix_block_tokens)]:
            head = [*_spelled(block, vocab_size), 2]
            tokens += head + [0] * (self.prefix_block_tokens - len(head))
        own = [*_spelled(number, vocab_size), 3] + [0] * self.num_prompt_tokens
        return (tokens + own)[: self.num_prompt_tokens]


def _spelled(number: int, base: int) -> list[int]:
    """A number as three digits to this base: different for different numbers."""
    return [number % base, number // base % base, number // base**2 % base]


# ------------------------------------------------------------------ files


def load_trace(path: str | Path) -> list[TraceRequest]:
    """A trace file of any known kind, sorted, starting at 0 seconds. Raises ConfigError."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from None
    lines = text.splitlines()
    if not lines:
        raise ConfigError([f"{path}: is empty"])
    read = _reader_for(lines[0])
    if read is None:
        raise ConfigError([f"{path}: neither an Azure, BurstGPT, Mooncake nor shiftjax trace"])
    rows, make = read
    requests = []
    for number, row in rows(lines):
        try:
            requests.append(_checked(make(row)))
        except (KeyError, TypeError, ValueError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError([f"{path}, line {number}: {what}"]) from None
    requests = _spread_ticks(requests) if make is _mooncake else requests
    return _from_zero([r for r in requests if r.num_prompt_tokens and r.num_output_tokens])


Rows = Callable[[Sequence[str]], Iterator[tuple[int, Any]]]
Make = Callable[[Any], TraceRequest]


def _reader_for(first: str) -> tuple[Rows, Make] | None:
    """What splits a file with this first line into numbered rows, and what reads a row."""
    marks: dict[str, tuple[Rows, Make]] = {
        "ContextTokens": (_csv_rows, _azure),
        "Request tokens": (_csv_rows, _burstgpt),
        '"hash_ids"': (_json_rows, _mooncake),
        '"input_length"': (_json_rows, _timed),
        '"arrival_seconds"': (_json_rows, _own),
    }
    return next((read for mark, read in marks.items() if mark in first), None)


def _csv_rows(lines: Sequence[str]) -> Iterator[tuple[int, Mapping[str, str]]]:
    reader = csv.DictReader(lines)
    return ((reader.line_num, row) for row in reader)


def _json_rows(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _checked(request: TraceRequest) -> TraceRequest:
    """The request. Raises ValueError for what no request can have."""
    if not math.isfinite(request.arrival_seconds):
        raise ValueError(f"arrives at {request.arrival_seconds} s")
    for count in (request.num_prompt_tokens, request.num_output_tokens):
        if not 0 <= count <= MOST_TOKENS:
            raise ValueError(f"{shown(count)} tokens; there can be 0 to {MOST_TOKENS}")
    if not all(type(block) is int and block >= 0 for block in request.prefix_ids):
        raise ValueError("ids of prefixes must be a list of whole numbers of at least 0")
    return request


def _list(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"ids of prefixes must be a list, got {shown(value)}")
    return tuple(value)


def _azure(row: Mapping[str, str]) -> TraceRequest:
    at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
    return TraceRequest(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _burstgpt(row: Mapping[str, str]) -> TraceRequest:
    lengths = int(row["Request tokens"]), int(row["Response tokens"])
    return TraceRequest(float(row["Timestamp"]), *lengths)


def _mooncake(line: str) -> TraceRequest:
    row = json.loads(line)
    lengths = int(row["input_length"]), int(row["output_length"])
    return TraceRequest(row["timestamp"] / 1000, *lengths, _list(row["hash_ids"]))


def _timed(line: str) -> TraceRequest:
    row = json.loads(line)
    lengths = int(row["input_length"]), int(row["output_length"])
    return TraceRequest(row["timestamp"] / 1000, *lengths)


def _own(line: str) -> TraceRequest:
    row = json.loads(line)
    lengths = int(row["prompt_tokens"]), int(row["output_tokens"])
    return TraceRequest(
        float(row["arrival_seconds"]),
        *lengths,
        _list(row.get("prefix_ids", [])),
        priority=int(row.get("priority", 0)),
    )


def _spread_ticks(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Spread the arrivals of a tick evenly inside it."""
    at: dict[float, list[TraceRequest]] = {}
    for request in requests:
        at.setdefault(request.arrival_seconds, []).append(request)
    return [
        replace(request, arrival_seconds=tick + MOONCAKE_TICK_SECONDS * place / len(group))
        for tick, group in at.items()
        for place, request in enumerate(group)
    ]


# ------------------------------------------------------------------ windows and rates


def _from_zero(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    ordered = sorted(requests, key=lambda r: r.arrival_seconds)
    first = ordered[0].arrival_seconds if ordered else 0.0
    return [replace(r, arrival_seconds=r.arrival_seconds - first) for r in ordered]


def window(requests: Iterable[TraceRequest], start: float, seconds: float) -> list[TraceRequest]:
    """The requests that arrive in [start, start + seconds), from 0 on. Raises ValueError."""
    if not (start >= 0 and seconds > 0):  # NaN is neither
        raise ValueError(f"a window of {seconds:g} s from {start:g} s on is empty")
    inside = [r for r in requests if start <= r.arrival_seconds < start + seconds]
    return [replace(r, arrival_seconds=r.arrival_seconds - start) for r in inside]


def scale_rate(requests: Iterable[TraceRequest], factor: float) -> list[TraceRequest]:
    """The same requests `factor` times as fast."""
    if not 0 < factor < math.inf:
        raise ValueError(f"a rate can only be scaled by a number above 0, not by {factor}")
    return [replace(r, arrival_seconds=r.arrival_seconds / factor) for r in requests]


# ------------------------------------------------------------------ synthetic


def _above_zero(**arguments: float) -> None:
    for name, number in arguments.items():
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise ValueError(f"{name} must be a number, got {shown(number)}")
        if not 0 < number < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, got {shown(number)}")


def _lengths(prompt_tokens: float, output_tokens: float) -> tuple[int, int]:
    """Numbers of tokens, which may be spelled as 1e3."""
    _above_zero(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    for count in (prompt_tokens, output_tokens):
        if count != int(count) or count > MOST_TOKENS:
            words = f"numbers of tokens must be whole and at most {MOST_TOKENS}"
            raise ValueError(f"{words}, got {shown(count)}")
    return int(prompt_tokens), int(output_tokens)


def _check_number(rate: float, seconds: float) -> None:
    if rate * seconds > MOST_REQUESTS:
        words = f"{rate:g} requests/s for {seconds:g} s are more than {MOST_REQUESTS:,} requests"
        raise ValueError(words)


def _maker(
    prompt_tokens: float, output_tokens: float, cv: float, seed: int
) -> Callable[[float], TraceRequest]:
    """What makes the request of an arrival: of these mean lengths, log-normal by `cv`."""
    prompt, output = _lengths(prompt_tokens, output_tokens)
    if isinstance(cv, bool) or not isinstance(cv, (int, float)) or not 0 <= cv <= MOST_CV:
        raise ValueError(f"length_cv must be a number from 0 to {MOST_CV:g}, got {shown(cv)}")
    if cv == 0:
        return lambda at: TraceRequest(at, prompt, output)
    rng, sigma = random.Random(f"lengths {seed}"), math.sqrt(math.log1p(cv**2))

    def drawn(mean: int) -> int:
        length = rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
        return min(MOST_TOKENS, max(1, round(length)))

    return lambda at: TraceRequest(at, drawn(prompt), drawn(output))


def requests_at(
    times: Iterable[float],
    prompt_tokens: float,
    output_tokens: float,
    length_cv: float = 0.0,
    seed: int = 0,
) -> list[TraceRequest]:
    """A request at each moment; lengths are all alike, or log-normal around these means.

    Raises:
        ValueError: a length is not above 0 or too large, or `length_cv` is no coefficient of
            variation from 0 to `MOST_CV`.
    """
    make = _maker(prompt_tokens, output_tokens, length_cv, seed)
    return [make(at) for at in times]


def poisson(
    rate: float,
    seconds: float,
    prompt_tokens: float,
    output_tokens: float,
    seed: int = 0,
    length_cv: float = 0.0,
) -> list[TraceRequest]:
    """Independent arrivals at `rate` per second; lengths as those of `requests_at`."""
    times = arrival_times(rate, seconds, seed=seed)
    return requests_at(times, prompt_tokens, output_tokens, length_cv, seed)


def arrival_times(rate: float, seconds: float, cv: float = 1.0, seed: int = 0) -> list[float]:
    """Moments whose gaps are gamma-distributed: `cv` = 1 is Poisson, more is bursty.

    `rate` is per second, `cv` the gaps' coefficient of variation.

    Raises:
        ValueError: an argument is not above 0, or too large.
    """
    _above_zero(rate=rate, cv=cv, seconds=seconds)
    _check_number(rate, seconds)
    if cv > MOST_CV:
        raise ValueError(f"cv must be at most {MOST_CV:g}, got {cv:g}")
    rng, shape, at = random.Random(seed), 1 / cv**2, 0.0
    times = []
    while (at := at + rng.gammavariate(shape, 1 / (rate * shape))) < seconds:
        times.append(at)
    return times


def on_off_times(
    quiet_rate: float,
    burst_rate: float,
    period_seconds: float,
    burst_seconds: float,
    seconds: float,
    seed: int = 0,
) -> list[float]:
    """Moments, Poisson at a quiet rate; the last `burst_seconds` of every period at a burst's.

    Raises:
        ValueError: an argument is not above 0, or the burst is longer than its period.
    """
    _above_zero(quiet_rate=quiet_rate, burst_rate=burst_rate, burst_seconds=burst_seconds)
    _above_zero(period_seconds=period_seconds, seconds=seconds)
    most = max(quiet_rate, burst_rate)
    _check_number(most, seconds)
    if burst_seconds > period_seconds:
        raise ValueError(f"a burst of {burst_seconds:g} s in a period of {period_seconds:g} s")
    rng, at = random.Random(seed), 0.0
    times = []
    while (at := at + rng.expovariate(most)) < seconds:  # thinning
        is_burst = at % period_seconds >= period_seconds - burst_seconds
        if rng.random() * most < (burst_rate if is_burst else quiet_rate):
            times.append(at)
    return times
