"""What a run amounts to, simulated or served: one row of the same columns. No JAX."""

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any, Protocol

import numpy as np

PERCENTILES = (50, 90, 99)
LATENCIES = ("ttft", "tpot", "completion")  # of every request

Row = dict[str, Any]


class Answered(Protocol):
    """A request with an answer; seconds, and None where there is no such time."""

    @property
    def ttft(self) -> float | None:
        """To the first token."""
        ...

    @property
    def tpot(self) -> float | None:
        """Per token after the first."""
        ...

    @property
    def completion(self) -> float:
        """To the end."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of its prompt."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """Tokens of its answer."""
        ...


def row_of_run(
    answered: Sequence[Answered],
    num_failed: int,
    seconds: float,
    ttft_limit: float | None = None,
    tpot_limit: float | None = None,
) -> Row:
    """Counts, tokens per second, seconds. Goodput counts requests within both limits."""
    within = [
        each
        for each in answered
        if (each.ttft or 0.0) <= (ttft_limit or inf) and (each.tpot or 0.0) <= (tpot_limit or inf)
    ]
    prompt = sum(each.num_prompt_tokens for each in answered)
    output = sum(each.num_output_tokens for each in answered)
    row: Row = {"requests": len(answered) + num_failed, "failed": num_failed, "seconds": seconds}
    row |= rates(len(answered), prompt, output, seconds)
    row["goodput_requests_per_second"] = _per_second(len(within), seconds)
    for name in LATENCIES:
        row |= percentiles(name, latencies(answered, name))
    completions = latencies(answered, "completion")
    return row | {"completion_mean_seconds": float(np.mean(completions)) if completions else None}


def rates(num_requests: int, num_prompt_tokens: int, num_output_tokens: int, seconds: float) -> Row:
    """Requests and tokens per second."""
    amounts = {
        "requests": num_requests,
        "prompt_tokens": num_prompt_tokens,
        "output_tokens": num_output_tokens,
        "tokens": num_prompt_tokens + num_output_tokens,
    }
    return {f"{name}_per_second": _per_second(n, seconds) for name, n in amounts.items()}


def _per_second(amount: int, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def latencies(answered: Iterable[Answered], name: str) -> list[float]:
    """A latency, or another attribute in seconds, of the requests that have it."""
    values = (getattr(each, name) for each in answered)
    return [value for value in values if value is not None]


def percentiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Columns of p50, p90 and p99, in seconds; None for nothing."""
    points = np.percentile(values, PERCENTILES).tolist() if len(values) else [None] * 3
    return {f"{name}_p{p}_seconds": point for p, point in zip(PERCENTILES, points, strict=True)}
