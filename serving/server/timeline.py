"""The last minutes of the engine, for the page: steps by mode, batch, queue, recent requests."""

import time
from collections import deque
from typing import Any

import numpy as np

from serving.server.embed_thread import EmbedTurn
from serving.server.engine_thread import Turn
from serving.server.errors import ServeError
from serving.server.handle import RequestHandle
from serving.server.history import History, kind_of
from shiftjax.core.stats import EngineStats
from shiftjax.drafts.speculation import DraftStats
from shiftjax.embed.embed_engine import EmbedStats
from shiftjax.fleet.state import FleetState

SLOT_SECONDS = {60: 0.5, 600: 5.0}  # by the span in seconds: how fine the past is kept
STRIP_SECONDS, NUM_STRIPS = 0.5, 120  # of the groups of a fleet
NUM_REQUESTS = 40
NUM_LATENCIES = 512
NUM_BEGUN = 4096  # requests of which it is known when their first step was planned


class Timeline:
    """An `Observer` that keeps a bounded past. Times are seconds of `time.monotonic()`."""

    def __init__(self) -> None:
        self._past = {
            span: History(seconds, round(span / seconds)) for span, seconds in SLOT_SECONDS.items()
        }
        self._requests: deque[dict[str, Any]] = deque(maxlen=NUM_REQUESTS)
        self._ttft: deque[float] = deque(maxlen=NUM_LATENCIES)
        self._tpot: deque[float] = deque(maxlen=NUM_LATENCIES)
        self._strip: deque[dict[str, Any]] = deque(maxlen=NUM_STRIPS)
        self._last_step: dict[str, Any] | None = None
        self._totals: dict[str, int] = {}  # counters of the engine at the last turn
        self._begun: dict[str, float] = {}  # engine's name of a request -> its first step's plan
        self._first: dict[str, float] = {}  # the same -> its first token

    def rejected(self, error: ServeError) -> None:
        """Refused requests leave no trace here."""

    def tokens(self, handle: RequestHandle, index: int, num: int, now: float) -> None:
        """Count generated tokens; the first one begins a request's decoding."""
        self._count(now, tokens=num)
        if not handle.is_ended:
            self._first.setdefault(handle.request.request_id, now)

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

    def _count(self, at: float, **counts: int) -> None:
        for past in self._past.values():
            past.count(at, **counts)

    def embedding_ended(self, num_tokens: int, seconds: float, error: ServeError | None) -> None:
        """Nor do requests for embeddings, which have no phases."""

    def ended(self, handle: RequestHandle, now: float) -> None:
        """Keep the phases of a request."""
        metrics = handle.output.metrics
        self._requests.append(self.row_of(handle, now))
        for known in (self._begun, self._first):
            known.pop(handle.request.request_id, None)
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


def _percentiles(values: deque[float]) -> list[float]:
    """Return p50, p90 and p99; an empty list without values."""
    return np.percentile(values, (50, 90, 99)).tolist() if values else []
