"""The loop that embeds texts: a queue, rows that are packed full, two steps in flight. No JAX.

    waiting -> pack -> run -> fetch -> one result per text

Nothing waits for a timer: a step takes what is there when it can be launched, and what comes while
it runs makes up the next one. Time is passed in.
"""

import heapq
import itertools
import logging
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

logger = logging.getLogger(__name__)

IN_FLIGHT = 2  # steps: one is computed while the next one is packed
# Operations of a product with weights: 15% at width 256 over 128 (docs/results/embeddings.md).
ATTENTION_COST = 3
LOOKAHEAD = 64  # texts behind those of a step that may fill its holes


def slots_of(width: int) -> int:
    """How many texts a row of so many tokens may hold: one for 8 tokens."""
    return max(1, width // 8)


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A text or a pair, as its token ids. A lower `priority` runs earlier, then the earlier one."""

    key: Hashable
    token_ids: Sequence[int]
    priority: int = 0
    arrival_seconds: float = 0.0
    second_from: int | None = None  # of a pair: the first token that belongs to its second text


class Embedded(NamedTuple):
    """What became of a text: exactly one of `embedding` and `error` is not None."""

    key: Hashable
    embedding: np.ndarray | None  # [hidden] float32
    error: str | None
    queue_seconds: float  # arrival to the step that brought the result


class EmbedPlan(NamedTuple):
    """A step: rows of `width` tokens, each with the texts that lie in it one after the other."""

    width: int
    rows: list[list[Text]]
    is_retry: bool = False

    @property
    def texts(self) -> list[Text]:
        """All of them, row by row."""
        return [text for row in self.rows for text in row]


class EmbedShape(NamedTuple):
    """The sizes of steps: rows of these widths, and for each width as many rows as are compiled."""

    widths: tuple[int, ...]  # tokens of a row, increasing; the last one holds the longest text
    rows: tuple[tuple[int, ...], ...]  # of all devices together, increasing, for each width
    max_texts: int  # in a step
    hidden_size: int
    num_scores: int = 0  # of a text that is scored; 0: it is embedded

    @property
    def dim(self) -> int:
        """The numbers that come of a text."""
        return self.num_scores or self.hidden_size

    def num_rows(self, width: int, least: int) -> int:
        """The rows that are computed for `least` of them."""
        return next(n for n in self.rows[self.widths.index(width)] if n >= least)

    def most_rows(self, width: int) -> int:
        """The rows of the largest step of this width."""
        return self.rows[self.widths.index(width)][-1]


class EmbedRunner(Protocol):
    """What computes steps, as `core.request.Runner` does for a decoder."""

    shape: EmbedShape

    def run(self, plan: EmbedPlan) -> Any:
        """Dispatch a step without waiting for it; returns a handle."""
        ...

    def fetch(self, handle: Any) -> np.ndarray:
        """Wait for a step: float32 `[texts, hidden]` in the order of `plan.texts`."""
        ...


class EmbedStats(NamedTuple):
    """Counters since the start, and how much is there now."""

    num_steps: int = 0
    num_failed_steps: int = 0
    num_tokens: int = 0  # of texts, in steps that ended
    num_computed_tokens: int = 0  # with padding
    num_waiting: int = 0
    num_running: int = 0


class _InFlight(NamedTuple):
    plan: EmbedPlan
    handle: Any
    launched: float


class EmbedEngine:
    """Texts go in by `add`; `step` brings each of them out, once, with a result or an error."""

    def __init__(self, runner: EmbedRunner):
        self.runner = runner
        self._waiting: list[tuple[int, int, Text]] = []  # a heap
        self._numbers = itertools.count()
        self._open: dict[Hashable, Text] = {}  # what has not come out
        self._retries: deque[EmbedPlan] = deque()
        self._in_flight: deque[_InFlight] = deque()
        self._steps = self._failed = self._tokens = self._computed = 0

    def add(self, text: Text) -> None:
        """Queue a text. Raises ValueError for one that no row holds, and for a key in use."""
        longest = self.runner.shape.widths[-1]
        if not 0 < len(text.token_ids) <= longest:
            raise ValueError(f"a text has 1 to {longest} tokens, not {len(text.token_ids)}")
        if text.key in self._open:
            raise ValueError(f"the key {text.key!r} is in use")
        self._open[text.key] = text
        heapq.heappush(self._waiting, (text.priority, next(self._numbers), text))

    def cancel(self, key: Hashable) -> None:
        """Forget a text: it never comes out."""
        self._open.pop(key, None)

    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._open or self._in_flight)

    @property
    def stats(self) -> EmbedStats:
        """Counters and gauges of now."""
        running = sum(len(step.plan.texts) for step in self._in_flight)
        waiting = max(0, len(self._open) - running)
        counters = (self._steps, self._failed, self._tokens, self._computed)
        return EmbedStats(*counters, waiting, running)

    def step(self, now: float) -> list[Embedded]:
        """Launch what can be in flight, then wait for the oldest step; `now` in seconds."""
        results: list[Embedded] = []
        while len(self._in_flight) < IN_FLIGHT and (plan := self._next_plan()):
            results += self._launch(plan, now)
        if self._in_flight:
            results += self._finish(self._in_flight.popleft())
        return results

    # ------------------------------------------------------------------ steps

    def _launch(self, plan: EmbedPlan, now: float) -> list[Embedded]:
        try:
            self._in_flight.append(_InFlight(plan, self.runner.run(plan), now))
        except Exception as error:
            return self._failed_step(plan, error, now)
        return []

    def _finish(self, step: _InFlight) -> list[Embedded]:
        plan = step.plan
        try:
            embeddings = self.runner.fetch(step.handle)
        except Exception as error:
            return self._failed_step(plan, error, step.launched)
        texts = plan.texts
        self._steps += 1
        self._tokens += sum(len(text.token_ids) for text in texts)
        self._computed += plan.width * self.runner.shape.num_rows(plan.width, len(plan.rows))
        is_finite = np.isfinite(embeddings).all(axis=1)
        broken = [text for text, fine in zip(texts, is_finite, strict=True) if not fine]
        if broken and not plan.is_retry:  # by a neighbour in the row, perhaps
            self._retry([[text] for text in broken], plan.width)
        results = []
        for text, embedding, fine in zip(texts, embeddings, is_finite, strict=True):
            if fine:
                results += self._end(text, step.launched, embedding=embedding)
            elif plan.is_retry:
                error = "The embedding of this text has numbers that are not finite."
                results += self._end(text, step.launched, error=error)
        return results

    def _failed_step(self, plan: EmbedPlan, error: Exception, now: float) -> list[Embedded]:
        """Try again with half the rows (of one row, half the texts), once; then that half fails."""
        self._failed += 1
        logger.exception("A step of %d texts failed.", len(plan.texts), exc_info=error)
        if not plan.is_retry:
            rows = plan.rows if len(plan.rows) > 1 else [[text] for text in plan.texts]
            half = -(-len(rows) // 2)
            self._retry(rows[:half], plan.width)
            self._retry(rows[half:], plan.width)
            return []
        words = "The step that was to embed this text failed."
        return [out for text in plan.texts for out in self._end(text, now, error=words)]

    def _retry(self, rows: list[list[Text]], width: int) -> None:
        most = self.runner.shape.most_rows(width)
        for start in range(0, len(rows), most):
            self._retries.append(EmbedPlan(width, rows[start : start + most], is_retry=True))

    def _end(
        self,
        text: Text,
        now: float,
        embedding: np.ndarray | None = None,
        error: str | None = None,
    ) -> list[Embedded]:
        if self._open.get(text.key) is not text:
            return []  # cancelled meanwhile
        del self._open[text.key]
        return [Embedded(text.key, embedding, error, max(0.0, now - text.arrival_seconds))]

    # ------------------------------------------------------------------ packing

    def _next_plan(self) -> EmbedPlan | None:
        if self._retries:
            return self._retries.popleft()
        shape = self.runner.shape
        room = max(width * shape.most_rows(width) for width in shape.widths)
        taken, more = self._take(room, shape.max_texts), []
        if not taken:
            return None
        if self._waiting:
            more = self._take(room, LOOKAHEAD)
        longest = max(len(text.token_ids) for _, _, text in taken)
        plans = [_pack(taken, more, width, shape) for width in shape.widths if width >= longest]
        best = min(plans, key=lambda plan: _cost_per_token(plan, shape))
        placed = {id(text) for text in best.texts}
        for entry in (*taken, *more):
            if id(entry[2]) not in placed:
                heapq.heappush(self._waiting, entry)
        return best

    def _take(self, num_tokens: int, num_texts: int) -> list[tuple[int, int, Text]]:
        """The next texts, so many tokens and texts at most, one at least; no cancelled ones."""
        taken, tokens = [], 0
        while self._waiting and len(taken) < num_texts:
            entry = self._waiting[0]
            tokens += len(entry[2].token_ids)
            if taken and tokens > num_tokens:
                break
            heapq.heappop(self._waiting)
            if self._open.get(entry[2].key) is entry[2]:
                taken.append(entry)
            else:
                tokens -= len(entry[2].token_ids)
        return taken


def _pack(taken: Sequence, more: Sequence, width: int, shape: EmbedShape) -> EmbedPlan:
    """Fill rows: the oldest text first, so that it cannot starve, then first-fit decreasing.

    `more` are later texts, which only fill holes: no row is begun for them.
    """
    rest = sorted(taken[1:], key=lambda entry: -len(entry[2].token_ids))
    rows: list[list[Text]] = []
    room: list[int] = []
    num_texts, most_rows, slots = 0, shape.most_rows(width), slots_of(width)
    for number, (_, _, text) in enumerate((taken[0], *rest, *more)):
        size = len(text.token_ids)
        if num_texts == shape.max_texts:
            break
        place = next(
            (i for i, left in enumerate(room) if left >= size and len(rows[i]) < slots), None
        )
        if place is None:
            if number >= len(taken) or len(rows) == most_rows:
                continue
            place = len(rows)
            rows.append([])
            room.append(width)
        rows[place].append(text)
        room[place] -= size
        num_texts += 1
    return EmbedPlan(width, rows)


def _cost_per_token(plan: EmbedPlan, shape: EmbedShape) -> float:
    """Work for each real token: products with weights, and with the tokens of the same row.

    A layer has 24 * hidden**2 operations a token, with `intermediate_size = 4 * hidden` as encoders
    have it, and 4 * width * hidden of attention, each of which takes as long as `ATTENTION_COST`.
    """
    computed = plan.width * shape.num_rows(plan.width, len(plan.rows))
    real = sum(len(text.token_ids) for text in plan.texts)
    attention = ATTENTION_COST * plan.width / (6 * shape.hidden_size)
    return computed * (1 + attention) / real
