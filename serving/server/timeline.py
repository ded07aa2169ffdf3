"""The last minutes of the engine, for the page: steps by mode, batch, queue, recent requests."""

import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from serving.server.embed_thread import EmbedTurn
from serving.server.engine_thread import Turn
from serving.server.errors import ServeError
from serving.server.handle import RequestHandle
from serving.server.history import KINDS, History, kind_of
from shiftjax.core.stats import EngineStats
from shiftjax.drafts.speculation import DraftStats
from shiftjax.embed.embed_engine import EmbedStats
from shiftjax.fleet.state import FleetState
from shiftjax.metric import Metric, counter
from shiftjax.targets import NO_TARGETS, Target

SLOT_SECONDS = {60: 0.5, 600: 5.0}  # by the span in seconds: how fine the past is kept
STRIP_SECONDS, NUM_STRIPS = 0.5, 120  # of the groups of a fleet
NUM_REQUESTS = 40
NUM_LATENCIES = 512
NUM_BEGUN = 4096  # requests of which it is known when their first step was planned
PEAK_SECONDS = 1.0
NOW_SECONDS = 5.0  # of which rates and means of now are
PERCENTILES = (0, 10, 25, 50, 75, 90, 95, 99, 100)  # of the curves


class Timeline:
    """An `Observer` that keeps a bounded past. Times are seconds of `time.monotonic()`."""

    def __init__(self) -> None:
        self.targets = NO_TARGETS
        self._past = {
            span: History(seconds, round(span / seconds)) for span, seconds in SLOT_SECONDS.items()
        }
        self._requests: deque[dict[str, Any]] = deque(maxlen=NUM_REQUESTS)
        self._by_targets: Counter[str] = Counter()  # requests that ended well
        self._queue: deque[float] = deque(maxlen=NUM_LATENCIES)
        self._ttft: deque[float] = deque(maxlen=NUM_LATENCIES)
        self._tpot: deque[float] = deque(maxlen=NUM_LATENCIES)
        self._strip: deque[dict[str, Any]] = deque(maxlen=NUM_STRIPS)
        self._last_step: dict[str, Any] | None = None
        self._totals: dict[str, int] = {}  # counters of the engine at the last turn
        self._begun: dict[str, float] = {}  # engine's name of a request -> its first step's plan
        self._first: dict[str, float] = {}  # the same -> its first token
        self._fresh: dict[str, float] = {}  # the same, of this turn -> its arrival

    def rejected(self, error: ServeError) -> None:
        """Refused requests leave no trace here."""

    def tokens(self, handle: RequestHandle, index: int, num: int, now: float) -> None:
        """Count generated tokens; the first one begins a request's decoding."""
        self._count(now, tokens=num)
        name = handle.request.request_id
        if not handle.is_ended and name not in self._first:
            self._first[name] = now
            self._fresh[name] = handle.request.arrival_seconds

    def stepped(self, turn: Turn) -> None:
        """Note the steps that ended and the state after them."""
        stats = turn.stats
        for step in turn.steps:
            kind = kind_of(step.mode)
            self._last_step = {
                "mode": step.mode,
                "kind": kind,
                "tokens": step.num_tokens,
                "seconds": step.seconds,
                "at": turn.at,
            }
            for past in self._past.values():
                past.step(kind, turn.at, step.seconds, step.num_tokens)
            self._begun |= step.begun
            self._count(turn.at, prompt=step.num_prompt_tokens)
        took = turn.steps[-1].seconds if turn.steps else 0.0
        for name, arrival in self._fresh.items():
            first = self._first[name]  # a prompt of one token is not told to have begun
            begun = self._begun.get(name, max(arrival, first - took))
            self._note_first(first, begun - arrival, first - begun)
        self._fresh.clear()
        while len(self._begun) > NUM_BEGUN:
            del self._begun[next(iter(self._begun))]
        totals = _totals(stats)
        self._count(turn.at, **{k: v - self._totals.get(k, 0) for k, v in totals.items()})
        self._totals = totals
        for past in self._past.values():
            running, waiting = stats.num_running, stats.num_waiting
            past.look(turn.at, running=running, waiting=waiting, kv=stats.kv_usage)
        if (fleet := stats.find(FleetState)) is not None:
            self._note_groups(turn.at // STRIP_SECONDS * STRIP_SECONDS, fleet)

    def embedded(self, turn: EmbedTurn, before: EmbedStats) -> None:
        """Count texts and tokens of an embedder's step, and what it computed."""
        stats = turn.stats
        self._count(
            turn.at,
            texts=len(turn.results),
            tokens=stats.num_tokens - before.num_tokens,
            computed=stats.num_computed_tokens - before.num_computed_tokens,
        )
        running = max(before.num_running, len(turn.results))
        for past in self._past.values():  # the most, then how it is after the step
            past.look(turn.at, running=running, waiting=before.num_waiting)
            past.look(turn.at, running=stats.num_running, waiting=stats.num_waiting)

    def _note_first(self, at: float, queue: float, prompt: float) -> None:
        """A first token has come after so many seconds of waiting, and of its prompt."""
        self._count(at, firsts=1, queued=queue, prefilled=prompt)

    def _count(self, at: float, **counts: float) -> None:
        for past in self._past.values():
            past.count(at, **counts)

    def embedding_ended(self, num_tokens: int, seconds: float, error: ServeError | None) -> None:
        """Nor do requests for embeddings, which have no phases."""

    def ended(self, handle: RequestHandle, now: float) -> None:
        """Keep the phases of a request."""
        metrics, name = handle.output.metrics, handle.request.request_id
        self._requests.append(self.row_of(handle, now))
        if metrics is not None and metrics.ttft_seconds is not None:
            queue, ttft = metrics.queue_seconds or 0.0, metrics.ttft_seconds
            self._queue.append(queue)
            if name not in self._first or self._fresh.pop(name, None) is not None:
                at = handle.request.arrival_seconds + ttft
                self._note_first(max(at, now - NOW_SECONDS), queue, ttft - queue)
            if handle.error is None:
                target = self.targets.of(handle.request.priority)
                good = target.is_met(ttft, metrics.tpot_seconds)
                self._count(now, ended=1, good=int(good))
                self._by_targets["met" if good else "missed"] += 1
        for known in (self._begun, self._first, self._fresh):
            known.pop(name, None)
        if metrics is not None and metrics.ttft_seconds is not None:
            self._ttft.append(metrics.ttft_seconds)
        if metrics is not None and metrics.tpot_seconds is not None:
            self._tpot.append(metrics.tpot_seconds)

    def _note_groups(self, at: float, fleet: FleetState) -> None:
        """Keep the groups at the end of a stretch, each with the most load that it had in it."""
        is_new = not self._strip or self._strip[-1]["at"] < at
        before = {} if is_new else {each[:2]: each[3] for each in self._strip[-1]["groups"]}
        if not is_new:
            self._strip.pop()
        rows = []
        for each in fleet.groups:
            if each.group in fleet.arrangement:
                load = max(each.num_running + each.num_waiting, before.get(each.group, 0))
                rows.append((*each.group, each.mode, load))
        self._strip.append({"at": at, "groups": rows})

    def snapshot(self, span: int) -> dict[str, Any]:
        """All of it as plain values, the past as far back as `span` (of `SLOT_SECONDS`) says."""
        now = time.monotonic()
        return self._past[span].columns(now) | {
            "now": now,
            "span": span,
            "last_step": self._last_step,
            "strip": {"seconds": STRIP_SECONDS, "entries": list(self._strip)},
            "requests": list(self._requests),
            "ttft": _percentiles(self._ttft),
            "tpot": _percentiles(self._tpot),
            "curves": {
                "percentiles": PERCENTILES,
                "queue": _percentiles(self._queue, PERCENTILES),
                "ttft": _percentiles(self._ttft, PERCENTILES),
                "tpot": _percentiles(self._tpot, PERCENTILES),
            },
            "targets": _shown(self.targets.default),
        }

    def metrics(self) -> Iterator[Metric]:
        """How many requests kept to the targets; nothing where there are none."""
        if not self.targets.are_none:
            found = {(outcome,): self._by_targets[outcome] for outcome in ("met", "missed")}
            text = "Requests that ended well, by whether they kept to the latency targets."
            yield counter("requests_by_targets", text, found, "outcome")

    def recent(self) -> dict[str, Any]:
        """Rates and means of the last `NOW_SECONDS`, as `bottleneck.Look` names them."""
        past, now = self._past[60], time.monotonic()
        found = past.sums(now, NOW_SECONDS)
        of = lambda name: sum(found.get(f"{kind}_{name}", 0.0) for kind in KINDS)  # noqa: E731
        steps, busy, firsts = of("steps"), of("busy"), found.get("firsts", 0.0)
        tokens, prompt = found.get("tokens", 0.0), found.get("prompt", 0.0)
        mean = lambda name: found.get(name, 0.0) / firsts if firsts else None  # noqa: E731
        return {
            "step_seconds": of("seconds") / steps if steps else None,
            "step_tokens": of("load") / busy if busy else None,
            "mode": "" if self._last_step is None else self._last_step["mode"],
            "prompt_rate": prompt / NOW_SECONDS,
            "prompt_share": prompt / (prompt + tokens) if prompt else 0.0,
            "queue_seconds": mean("queued"),
            "prompt_seconds": mean("prefilled"),
            "peak_running": round(past.peak("running", now, PEAK_SECONDS)),
            "num_preempted": round(found.get("preempted", 0)),
        }

    def row_of(self, handle: RequestHandle, end: float | None) -> dict[str, Any]:
        """A request as plain values; `end` None: it goes on."""
        metrics, name = handle.output.metrics, handle.request.request_id
        arrival = handle.request.arrival_seconds
        begun, first = self._begun.get(name), self._first.get(name)
        queue = None if begun is None else begun - arrival
        ttft = None if first is None else first - arrival
        return {
            "id": handle.public_id[:24],
            "arrival": arrival,
            "end": end,
            "reason": "finished" if handle.error is None else handle.error.code,
            "prompt_tokens": len(handle.request.prompt_token_ids),
            "output_tokens": handle.num_output_tokens,
            "queue": metrics.queue_seconds if metrics else queue,
            "ttft": metrics.ttft_seconds if metrics else ttft,
            "cached_tokens": metrics.num_cached_tokens if metrics else None,
            "preemptions": metrics.num_preemptions if metrics else 0,
        }


def _totals(stats: EngineStats) -> dict[str, int]:
    """Counters since the start whose differences the page shows over time."""
    return {
        "switches": sum(stats.mode_switches.values()),
        "preempted": sum(stats.num_preemptions.values()),
        "failed": stats.num_failed_steps,
        "accepted": 0 if (drafts := stats.find(DraftStats)) is None else drafts.num_accepted,
    }


def _shown(target: Target) -> dict[str, float | None]:
    """A target as the page has it; None: any."""
    return {name: None if s == math.inf else s for name, s in target._asdict().items()}


def _percentiles(values: deque[float], of: Sequence[float] = (50, 90, 99)) -> list[float]:
    """Return the percentiles; an empty list without values."""
    return np.percentile(values, of).tolist() if values else []
