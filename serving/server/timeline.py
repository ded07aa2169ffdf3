"""The last minutes of the engine, for the page: steps by mode, batch, queue, recent requests."""

import time
from collections import deque
from typing import Any

import numpy as np

from serving.server.embed_thread import EmbedTurn
from serving.server.engine_thread import Turn
from serving.server.errors import ServeError
from serving.server.handle import RequestHandle
from shiftjax.control.embed import EmbedStats
from shiftjax.control.fleet_state import FleetState

BUCKET_SECONDS = 0.5
NUM_BUCKETS = 240
NUM_STRIPS = 120  # buckets of which the groups are kept: what the page shows of them
NUM_REQUESTS = 40
NUM_LATENCIES = 512


class Timeline:
    """An `Observer` that keeps a bounded past. Times are seconds of `time.monotonic()`."""

    def __init__(self) -> None:
        self._buckets: deque[dict[str, Any]] = deque(maxlen=NUM_BUCKETS)
        self._requests: deque[dict[str, Any]] = deque(maxlen=NUM_REQUESTS)
        self._ttft: deque[float] = deque(maxlen=NUM_LATENCIES)
        self._tpot: deque[float] = deque(maxlen=NUM_LATENCIES)
        self._strip: deque[dict[str, Any]] = deque(maxlen=NUM_STRIPS)
        self._num_accepted = 0  # guessed tokens that were right, until the last turn

    def rejected(self, error: ServeError) -> None:
        """Refused requests leave no trace here."""

    def tokens(self, handle: RequestHandle, index: int, num: int, now: float) -> None:
        """Count generated tokens."""
        self._bucket(now)["tokens"] += num

    def stepped(self, turn: Turn) -> None:
        """Note a step's mode and the state after it."""
        bucket, stats = self._bucket(turn.at), turn.stats
        for mode, _ in turn.steps:
            bucket[mode if mode in ("base", "shift") else "between"] += 1
        bucket["running"] = max(bucket["running"], stats.num_running)
        bucket["waiting"] = max(bucket["waiting"], stats.num_waiting)
        bucket["kv"] = max(bucket["kv"], stats.kv_usage)
        if stats.drafts is not None:
            bucket["accepted"] += stats.drafts.num_accepted - self._num_accepted
            self._num_accepted = stats.drafts.num_accepted
        if stats.fleet is not None:
            self._note_groups(bucket["at"], stats.fleet)

    def embedded(self, turn: EmbedTurn, before: EmbedStats) -> None:
        """Count texts and tokens of an embedder's step, and what it computed."""
        bucket, stats = self._bucket(turn.at), turn.stats
        bucket["texts"] += len(turn.results)
        bucket["tokens"] += stats.num_tokens - before.num_tokens
        bucket["computed"] += stats.num_computed_tokens - before.num_computed_tokens
        bucket["running"] = max(bucket["running"], before.num_running)
        bucket["waiting"] = max(bucket["waiting"], stats.num_waiting)

    def moved(self, num_texts: int) -> None:
        """Texts that went to another instance leave no trace here."""

    def embedding_ended(self, num_tokens: int, seconds: float, error: ServeError | None) -> None:
        """Nor do requests for embeddings, which have no phases."""

    def ended(self, handle: RequestHandle, now: float) -> None:
        """Keep the phases of a request."""
        metrics = handle.output.metrics
        self._requests.append(row_of(handle, now))
        if metrics is not None and metrics.ttft_seconds is not None:
            self._ttft.append(metrics.ttft_seconds)
        if metrics is not None and metrics.tpot_seconds is not None:
            self._tpot.append(metrics.tpot_seconds)

    def _note_groups(self, at: float, fleet: FleetState) -> None:
        """Keep the groups at the end of a bucket, each with the most load that it had in it."""
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

    def _bucket(self, now: float) -> dict[str, Any]:
        start = now // BUCKET_SECONDS * BUCKET_SECONDS
        if not self._buckets or self._buckets[-1]["at"] < start:
            counts = dict.fromkeys(("tokens", "accepted", "texts", "computed"), 0)
            gauges = {"running": 0, "waiting": 0, "kv": 0.0, **counts}
            self._buckets.append({"at": start, "base": 0, "between": 0, "shift": 0, **gauges})
        return self._buckets[-1]

    def snapshot(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "now": time.monotonic(),
            "bucket_seconds": BUCKET_SECONDS,
            "buckets": list(self._buckets),
            "strip": list(self._strip),
            "requests": list(self._requests),
            "ttft": _percentiles(self._ttft),
            "tpot": _percentiles(self._tpot),
        }


def row_of(handle: RequestHandle, end: float | None) -> dict[str, Any]:
    """A request as plain values; `end` None: it goes on."""
    metrics = handle.output.metrics
    return {
        "id": handle.public_id[:24],
        "arrival": handle.request.arrival_seconds,
        "end": end,
        "reason": "finished" if handle.error is None else handle.error.code,
        "prompt_tokens": len(handle.request.prompt_token_ids),
        "output_tokens": handle.num_output_tokens,
        "queue": metrics and metrics.queue_seconds,
        "ttft": metrics and metrics.ttft_seconds,
        "preemptions": metrics.num_preemptions if metrics else 0,
    }


def _percentiles(values: deque[float]) -> list[float]:
    """p50, p90 and p99; nothing for nothing."""
    return np.percentile(values, (50, 90, 99)).tolist() if values else []
