"""Drafts of a simulated engine, right as often as was measured elsewhere. No JAX.

The engine's own choice, acceptance table and records; only the tokens are made up: simulated steps
sample nothing but 0, so a guess of 0 is right and one of 1 is wrong.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from shiftjax.core.proposal import ModelGuess, Proposal
from shiftjax.draft_options import DraftOptions
from shiftjax.drafts.drafting import Drafting
from shiftjax.options import ConfigError, shown

RIGHT, WRONG = 0, 1
REPLAYED = ("tokens_per_step", "accepted_of_drafted")
FORMS = (
    "acceptance must be a probability, a list of them by place in the draft, or what "
    "scripts/labs/replay_drafts.py prints: tokens_per_step and accepted_of_drafted"
)


@dataclass(frozen=True)
class AcceptanceModel:
    """How often guessed tokens are right.

    `rates` are by place in a draft, given that all before are right; the last holds from there on.
    A draft has `mean_tokens` on average, if the engine wants as many; None: all that it wants.
    """

    rates: tuple[float, ...]
    mean_tokens: float | None = None
    seed: int = 0

    def rate(self, place: int) -> float:
        """Of one place in a draft."""
        return self.rates[min(place, len(self.rates) - 1)]

    def length(self, number: int) -> int | None:
        """Tokens of a sequence's draft of this number: whole ones, `mean_tokens` on average."""
        if self.mean_tokens is None:
            return None
        return int(self.mean_tokens * (number + 1)) - int(self.mean_tokens * number)


def acceptance_from(options: Any) -> AcceptanceModel:
    """An acceptance out of a file's or flag's value, see `FORMS`. Raises ConfigError.

    Of a replay two figures are known: how much longer a step of one sequence was than a token, and
    which share of the drafted tokens that was. They give the mean length of drafts, and the one
    probability for all places with which drafts of that length are accepted so far.
    """
    try:
        if isinstance(options, Mapping):
            figures = {name: float(value) for name, value in options.items()}
            if set(figures) != set(REPLAYED):
                raise ValueError
            return _replayed(*(figures[name] for name in REPLAYED))
        rates = tuple(float(rate) for rate in _listed(options))
    except (TypeError, ValueError):
        raise ConfigError([f"{FORMS}; got {shown(options)}"]) from None
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise ConfigError([f"{FORMS}; got {shown(options)}"])
    return AcceptanceModel(rates)


def _listed(options: Any) -> Sequence[Any]:
    return options if isinstance(options, list | tuple) else [options]


def _replayed(tokens_per_step: float, accepted_of_drafted: float) -> AcceptanceModel:
    accepted = tokens_per_step - 1
    if not (accepted >= 0 and 0 < accepted_of_drafted <= 1):
        raise ValueError
    mean = accepted / accepted_of_drafted
    low, high = 0.0, 1.0
    for _ in range(50):  # the expectation grows with the rate
        rate = (low + high) / 2
        low, high = (low, rate) if _expected(rate, mean) > accepted else (rate, high)
    return AcceptanceModel((high,), mean)


def _expected(rate: float, mean_tokens: float) -> float:
    """Accepted tokens of a draft whose length is `mean_tokens` rounded down, or up."""
    whole = int(mean_tokens)
    paths = [rate ** (place + 1) for place in range(whole + 1)]
    return sum(paths[:whole]) + (mean_tokens - whole) * paths[whole]


@dataclass(slots=True)
class _Luck:
    """One sequence: a number for each place of its output decides whether it can be guessed."""

    random: Random
    num_output: int = 0
    num_drafts: int = 0
    numbers: list[float] = field(default_factory=list)


class ModelledDrafting(Drafting):
    """Drafts that are right as an `AcceptanceModel` says; each takes virtual seconds of the host.

    Whether a place of an output can be guessed does not depend on what else is done. `seconds` is
    the time that drafting has taken since the start.
    """

    def __init__(self, options: DraftOptions, model: AcceptanceModel, draft_seconds: float):
        super().__init__(replace(options, speculation="none"))  # nothing is copied
        self.seconds = 0.0
        self._model, self._draft_seconds = model, draft_seconds
        self._lucks: dict[Hashable, _Luck] = {}
        self._num_started = 0

    def clock(self) -> float:
        """The host's seconds, as far as they are drafting."""
        return self.seconds

    def start(
        self,
        name: Hashable,
        prompt: Sequence[int],
        corpus: Hashable,
        prediction: Sequence[int] | None = None,
        parent: Hashable | None = None,
    ) -> None:
        """A sequence begins; its prompt does not matter."""
        super().start(name, (), corpus, None, parent)
        self._lucks[name] = _Luck(Random(f"{self._model.seed}/{self._num_started}"))
        self._num_started += 1

    def extend(
        self, name: Hashable, tokens: Sequence[int], guess: ModelGuess | None = None
    ) -> None:
        """Tokens were committed; which ones does not matter."""
        self._lucks[name].num_output += len(tokens)

    def draft(self, name: Hashable, most: int) -> Proposal | None:
        """At most `most` tokens, right and wrong."""
        luck, model = self._lucks[name], self._model
        self.seconds += self._draft_seconds
        length, first = model.length(luck.num_drafts), luck.num_output
        luck.num_drafts += 1
        most = min(most, self.options.max_draft_tokens)
        num = most if length is None else min(most, length)
        if num < 1:
            return None
        luck.numbers += [luck.random.random() for _ in range(first + num - len(luck.numbers))]
        rates = [model.rate(place) for place in range(num)]
        is_right = [luck.numbers[first + place] < rate for place, rate in enumerate(rates)]
        tokens = [RIGHT if right else WRONG for right in is_right]
        return self.rated(name, tokens, rates, "model")

    def end(self, name: Hashable, finished: bool) -> None:
        """A sequence is over."""
        super().end(name, finished)
        del self._lucks[name]
