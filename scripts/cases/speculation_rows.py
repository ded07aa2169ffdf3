"""From rounds of the benchmark of drafting to its rows: ratios to the plain engine, and medians."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

PLAIN = "plain"
FIXED = "fixed"  # how the names of engines with drafts of a fixed length begin


class Answer(NamedTuple):
    """What one request got; a peer does not say what it drafted."""

    token_ids: list[int]
    tpot_seconds: float | None  # mean time per token after the first
    accepted: int | None = None
    drafted: int | None = None


class Round(NamedTuple):
    """Requests that one engine answered at once."""

    seconds: float
    answers: list[Answer]

    @property
    def speed(self) -> float:
        """Tokens per second, prefill included."""
        return sum(len(answer.token_ids) for answer in self.answers) / self.seconds

    @property
    def tpot_seconds(self) -> float | None:
        """The median over the answers; None where none has a second token."""
        known = [answer.tpot_seconds for answer in self.answers if answer.tpot_seconds]
        return statistics.median(known) if known else None


def median_ratio(
    over: list[Round], under: list[Round], measured: Callable[[Round], float | None]
) -> float | None:
    """The median over rounds of the ratio, where both have the number; None where none has."""
    pairs = [(measured(a), measured(b)) for a, b in zip(over, under, strict=True)]
    ratios = [a / b for a, b in pairs if a and b]
    return round(statistics.median(ratios), 3) if ratios else None


def speed_ratio(rounds: list[Round], others: list[Round]) -> float:
    """The median over rounds of the ratio of tokens per second."""
    return median_ratio(rounds, others, lambda one: one.speed) or 0.0


def knows_drafts(rounds: list[Round]) -> bool:
    """Whether the engine is ours: peers do not say what they drafted."""
    return rounds[0].answers[0].accepted is not None


def summary(rounds: list[Round], plain: list[Round]) -> dict:
    """One engine at one workload, beside the plain engine's rounds."""
    answers = [answer for one in rounds for answer in one.answers]
    others = [answer for one in plain for answer in one.answers]
    pairs = zip(answers, others, strict=True)
    tokens = sum(len(answer.token_ids) for answer in answers)
    accepted = sum(answer.accepted or 0 for answer in answers)
    drafted = sum(answer.drafted or 0 for answer in answers)
    tpots = [one.tpot_seconds for one in rounds if one.tpot_seconds]
    return {
        "tokens_equal": round(sum(a.token_ids == b.token_ids for a, b in pairs) / len(answers), 3),
        "tokens_per_step": round(tokens / (tokens - accepted), 3) if knows_drafts(rounds) else None,
        "accepted_of_drafted": round(accepted / drafted, 3) if drafted else None,
        "ratio_to_plain": speed_ratio(rounds, plain),
        "decode_ratio": median_ratio(plain, rounds, lambda one: one.tpot_seconds),
        "tpot_ms": round(1e3 * statistics.median(tpots), 2) if tpots else None,
        "tokens_per_second": [round(one.speed, 1) for one in rounds],
    }


def rows_of(workload: str, streams: int, rounds: Mapping[str, list[Round]]) -> Iterator[dict]:
    """A row for every engine that ran."""
    fixed = [name for name in rounds if name.startswith(FIXED)]
    best = max(fixed, key=lambda name: speed_ratio(rounds[name], rounds[PLAIN]), default=None)
    for name, of_engine in rounds.items():
        row = {"workload": workload, "streams": streams, "engine": name}
        row |= summary(of_engine, rounds[PLAIN])
        if best and name not in (PLAIN, *fixed) and knows_drafts(of_engine):
            row["of_best_fixed"] = speed_ratio(of_engine, rounds[best])
        yield row


def joined(cells: list[Mapping[str, list[Round]]]) -> dict[str, list[Round]]:
    """The rounds of several workloads as those of one."""
    return {name: [one for cell in cells for one in cell[name]] for name in cells[0]}
