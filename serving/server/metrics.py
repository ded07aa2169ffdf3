"""Prometheus metrics under the names, labels and buckets that vLLM's users know. No JAX."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, permutations
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from serving.server.async_embedder import AsyncEmbedder
from serving.server.async_engine import AsyncEngine
from serving.server.embed_thread import EmbedTurn
from serving.server.engine_thread import Turn
from serving.server.errors import ServeError
from serving.server.handle import RequestHandle
from serving.server.phases import Phases
from shiftjax.drafts.speculation import DraftStats
from shiftjax.embed.engine import EmbedStats
from shiftjax.fleet.state import FleetState
from shiftjax.host_tier.stats import HostStats
from shiftjax.phases.control import PHASES, ReshardingState

FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
FILL_BUCKETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
OWN_PRIORITIES = range(-9, 10)  # clients choose them: others share two labels
SIZE_BUCKETS = tuple(float(n * 10**e) for e in range(6) for n in (1, 2, 5))

HISTOGRAMS: Mapping[str, tuple[Any, ...]] = {
    "time_to_first_token_seconds": ("Arrival to first token.", FIRST_TOKEN_BUCKETS),
    "inter_token_latency_seconds": ("Time between tokens of a sequence.", TOKEN_BUCKETS),
    "request_time_per_output_token_seconds": ("Mean time per later token.", TOKEN_BUCKETS),
    "e2e_request_latency_seconds": ("Arrival to end.", REQUEST_BUCKETS),
    "request_queue_time_seconds": ("Arrival to first scheduled.", REQUEST_BUCKETS),
    "request_prefill_time_seconds": ("First scheduled to first token.", REQUEST_BUCKETS),
    "request_decode_time_seconds": ("First token to last.", REQUEST_BUCKETS),
    "request_inference_time_seconds": ("First scheduled to last token.", REQUEST_BUCKETS),
    "request_prompt_tokens": ("Prompt tokens of a request.", SIZE_BUCKETS),
    "request_generation_tokens": ("Generated tokens of a request.", SIZE_BUCKETS),
    "request_params_n": ("Continuations asked for.", (1.0, 2.0, 5.0, 10.0, 20.0)),
    "step_duration_seconds": ("Duration of a step.", STEP_BUCKETS, "mode"),
    "queue_seconds": ("Arrival to first scheduled, by class.", REQUEST_BUCKETS, "priority"),
    "move_seconds": ("Host time of a change of groups.", STEP_BUCKETS),
    "draft_seconds": ("Host time to guess ahead in a turn.", STEP_BUCKETS),
    "embedding_queue_time_seconds": ("Arrival of a text to its step.", FIRST_TOKEN_BUCKETS),
    "embedding_rows_fill": ("Tokens of texts over tokens computed.", FILL_BUCKETS),
}
COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "prompt_tokens": ("Prompt tokens of accepted requests.", ()),
    "generation_tokens": ("Generated tokens.", ()),
    "request_success": ("Requests that ended.", ("finished_reason",)),
    "requests_rejected": ("Requests refused at the door.", ("reason",)),
    "requests_aborted": ("Requests ended before they were complete.", ("reason",)),
    "embedding_texts": ("Texts that came out of an embedder.", ("outcome",)),
    "embedding_texts_moved": ("Texts of an instance that stalled or ended.", ()),
    "nan_rows": ("Requests ended by numbers that are not finite.", ()),
}
# Names that vLLM has given up and routers still ask for: production-stack's (`engine_stats.py`),
# and endpoint pickers of the first form of the inference extension's proposal 003.
OLD_NAMES: Mapping[str, str] = {
    "vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_queries": "vllm:gpu_prefix_cache_queries",
    "vllm:prefix_cache_hits": "vllm:gpu_prefix_cache_hits",
}

Series = tuple[str, tuple[str, ...]]  # a name, and the values of its extra labels


class Counts:
    """A histogram without labels: plain numbers, because every token passes here."""

    __slots__ = ("bounds", "numbers", "total")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.numbers = [0] * (len(bounds) + 1)  # the last one is beyond all bounds
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.numbers[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, int]]:
        """(bound, how many values are not above it), as Prometheus has them."""
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.numbers), strict=True))


class Metrics(Collector):
    """Counters and histograms of requests; gauges of the engine, read when they are asked for."""

    def __init__(self, prefix: str = "shiftjax", start: Phases | None = None):
        self.prefix = prefix
        self._start = start or Phases()
        self.registry = CollectorRegistry(auto_describe=False)
        self.hosts: Callable[[], Mapping[int, float]] = dict  # seconds since the step of each
        self._engine: AsyncEngine | AsyncEmbedder | None = None
        self._labels = {"model_name": "", "engine": "0"}
        self._info: Mapping[str, str] = {}
        self._attention: Mapping[str, str] = {}
        self._num_programs, self._num_compiles = 0, lambda: 0
        self._draft_seconds = 0.0  # until the last turn
        self._num_changes = 0  # of groups, until then
        self._counters: dict[Series, int] = {
            (name, ()): 0 for name, (_, extra) in COUNTERS.items() if not extra
        }
        self._histograms: dict[Series, Counts] = {
            (name, ()): Counts(buckets)
            for name, (_, buckets, *extra) in HISTOGRAMS.items()
            if not extra
        }
        self.registry.register(self)

    def open(
        self,
        model_name: str,
        engine: AsyncEngine | AsyncEmbedder,
        info: Mapping[str, str],
        num_programs: int,
        num_compiles: Callable[[], int],
        attention: Mapping[str, str],
    ) -> None:
        """Begin to show the numbers of an engine; `attention` is why its implementation is used."""
        self._engine, self._info, self._attention = engine, info, attention
        self._num_programs, self._num_compiles = num_programs, num_compiles
        self._labels["model_name"] = model_name

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    # ------------------------------------------------------------------ what happens

    def rejected(self, error: ServeError) -> None:
        """A request was refused at the door."""
        self._count("requests_rejected", 1, error.code)

    def tokens(self, handle: RequestHandle, index: int, num: int, now: float) -> None:
        """One step brought `num` tokens of a continuation."""
        self._count("generation_tokens", num)
        last = handle.last_token_at.get(index)
        handle.last_token_at[index] = now
        if last is not None:
            self._observe("inter_token_latency_seconds", now - last)
        elif len(handle.last_token_at) == 1:
            arrival = handle.request.arrival_seconds
            self._observe("time_to_first_token_seconds", now - arrival)

    def ended(self, handle: RequestHandle, now: float) -> None:
        """A request has ended."""
        request, error = handle.request, handle.error
        num_prompt = len(request.prompt_token_ids)
        self._count("prompt_tokens", num_prompt)
        self._observe("request_prompt_tokens", num_prompt)
        self._observe("request_generation_tokens", handle.num_output_tokens)
        self._observe("request_params_n", request.sampling.n)
        self._observe("e2e_request_latency_seconds", now - request.arrival_seconds)
        if error is None:
            for output in handle.output.outputs:
                self._count("request_success", 1, output.finish_reason or "stop")
            self._observe_times(handle)
            return
        is_abort = error.kind.status in (499, 504, 409)
        reason = "abort" if is_abort else "error"
        self._count("request_success", 1, reason)
        self._count("requests_aborted", 1, error.code)
        self._count("nan_rows", int("not finite" in error.message))

    def _observe_times(self, handle: RequestHandle) -> None:
        metrics = handle.output.metrics
        if metrics is None or metrics.queue_seconds is None or metrics.ttft_seconds is None:
            return
        later = metrics.num_output_tokens - 1
        decode = (metrics.tpot_seconds or 0.0) * later
        prefill = metrics.ttft_seconds - metrics.queue_seconds
        self._observe("request_queue_time_seconds", metrics.queue_seconds)
        priority = _priority_label(handle.request.priority)
        self._observe("queue_seconds", metrics.queue_seconds, priority)
        self._observe("request_prefill_time_seconds", prefill)
        self._observe("request_decode_time_seconds", decode)
        self._observe("request_inference_time_seconds", prefill + decode)
        if metrics.tpot_seconds is not None:
            self._observe("request_time_per_output_token_seconds", metrics.tpot_seconds)

    def stepped(self, turn: Turn) -> None:
        """The engine has finished a turn."""
        for step in turn.steps:
            self._observe("step_duration_seconds", step.seconds, step.mode)
        drafts = turn.stats.find(DraftStats)
        if drafts is not None and drafts.seconds > self._draft_seconds:
            self._observe("draft_seconds", drafts.seconds - self._draft_seconds)
            self._draft_seconds = drafts.seconds
        fleet = turn.stats.find(FleetState)
        if fleet is not None:
            for change in fleet.changes_since(self._num_changes):
                self._observe("move_seconds", change.host_seconds)
            self._num_changes = fleet.stats.num_changes

    def embedded(self, turn: EmbedTurn, before: EmbedStats) -> None:
        """An instance of an embedder has finished a turn."""
        computed = turn.stats.num_computed_tokens - before.num_computed_tokens
        if computed:
            real = turn.stats.num_tokens - before.num_tokens
            self._observe("embedding_rows_fill", real / computed)
        for result in turn.results:
            self._count("embedding_texts", 1, "ok" if result.error is None else "error")
            self._observe("embedding_queue_time_seconds", result.queue_seconds)

    def moved(self, num_texts: int) -> None:
        """Texts went from one instance to others."""
        self._count("embedding_texts_moved", num_texts)

    def embedding_ended(self, num_tokens: int, seconds: float, error: ServeError | None) -> None:
        """A request for embeddings has ended."""
        self._count("prompt_tokens", num_tokens)
        self._observe("request_prompt_tokens", num_tokens)
        self._observe("e2e_request_latency_seconds", seconds)
        if error is None:
            self._count("request_success", 1, "stop")
            return
        is_abort = error.kind.status in (499, 504, 409)
        self._count("request_success", 1, "abort" if is_abort else "error")
        self._count("requests_aborted", 1, error.code)

    def _count(self, name: str, amount: int, *labels: str) -> None:
        self._counters[name, labels] = self._counters.get((name, labels), 0) + amount

    def _observe(self, name: str, value: float, *labels: str) -> None:
        counts = self._histograms.get((name, labels))
        if counts is None:
            counts = self._histograms[name, labels] = Counts(HISTOGRAMS[name][1])
        counts.observe(max(0.0, value))

    # ------------------------------------------------------------------ gauges

    def collect(self) -> Iterator[Metric]:
        """Everything as of now; with vLLM's prefix some of it by its older name, too."""
        for metric in self._all():
            yield metric
            if metric.name in OLD_NAMES:
                yield _renamed(metric, OLD_NAMES[metric.name])

    def _all(self) -> Iterator[Metric]:
        """While there is no engine, the start alone."""
        yield from self._start_metrics()
        engine = self._engine
        if engine is None:
            return
        yield from self._request_metrics()
        stats = engine.stats
        yield self._gauge("num_requests_running", "Sequences that run.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait.", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks held.", stats.kv_usage)
        yield self._gauge("last_step_age_seconds", "Since the last step.", engine.last_step_age)
        if ages := self.hosts():
            yield self._host_ages(ages)
        yield from self._engine_counters(stats)
        if isinstance(engine, AsyncEngine) and engine.kv_events is not None:
            counts = engine.kv_events.counts
            sent = {(outcome,): counts[outcome] for outcome in ("sent", "dropped")}
            text = "Messages about changes of cached blocks."
            yield self._total("kv_event_batches", text, sent, "outcome")
            text = "Replays of KV events that subscribers have asked for."
            yield self._total("kv_event_replays", text, {(): counts["replays"]})
        if (drafts := stats.find(DraftStats)) is not None:
            yield from self._draft_metrics(drafts)
        if (fleet := stats.find(FleetState)) is not None:
            yield from self._fleet_metrics(fleet)
            text = "Sequences whose prefix only groups of other widths have."
            missed = stats.num_prefix_hits_elsewhere
            yield self._total("prefix_hits_elsewhere", text, {(): missed})
        if (state := stats.find(ReshardingState)) is not None:
            yield from self._resharding_metrics(state)
        info = InfoMetricFamily(f"{self.prefix}:config", "The deployment.", labels=[*self._labels])
        info.add_metric([*self._labels.values()], dict(self._info))
        yield info
        cache = GaugeMetricFamily(
            f"{self.prefix}:cache_config_info", "The KV cache.", labels=["engine", *self._info]
        )
        cache.add_metric(["0", *self._info.values()], 1)
        yield cache
        text, labels = "1 for the attention that steps use, and why.", ("name", "reason")
        attention = GaugeMetricFamily(
            f"{self.prefix}:attention_backend", text, labels=[*self._labels, *labels]
        )
        for pair in self._attention.items():
            attention.add_metric([*self._labels.values(), *pair], 1)
        yield attention

    def _start_metrics(self) -> Iterator[Metric]:
        """Without the labels of a model, which is not known yet."""
        name = f"{self.prefix}:start_phase"
        seconds = GaugeMetricFamily(f"{name}_seconds", "Phases of the start.", labels=["phase"])
        done = GaugeMetricFamily(f"{name}_progress", "Share that is done.", labels=["phase"])
        for phase, value in self._start.seconds.items():
            seconds.add_metric([phase], value)
        if (now := self._start.state()) is not None:
            seconds.add_metric([now["phase"]], now["phase_seconds"])
            done.add_metric([now["phase"]], now["done"] / max(1, now["total"]))
        yield from (seconds, done)

    def _request_metrics(self) -> Iterator[Metric]:
        for name, (text, extra) in COUNTERS.items():
            values = {key: value for (of, key), value in self._counters.items() if of == name}
            yield self._total(name, text, values, *extra)
        for name, (text, _, *extra) in HISTOGRAMS.items():
            full, labels = f"{self.prefix}:{name}", [*self._labels, *extra]
            family = HistogramMetricFamily(full, text, labels=labels)
            for (of, key), counts in self._histograms.items():
                if of == name:
                    values = [*self._labels.values(), *key]
                    family.add_metric(values, counts.buckets(), sum_value=counts.total)
            yield family

    def _engine_counters(self, stats: Any) -> Iterator[Metric]:
        preempted = sum(stats.num_preemptions.values())
        yield self._total("num_preemptions", "Sequences preempted.", {(): preempted})
        queries, hits = stats.num_prefix_query_tokens, stats.num_prefix_hit_tokens
        yield self._total("prefix_cache_queries", "Prompt tokens looked up.", {(): queries})
        yield self._total("prefix_cache_hits", "Prompt tokens found.", {(): hits})
        if (host := stats.find(HostStats)) is not None:
            yield from self._host_metrics(host)
        yield self._total("failed_steps", "Steps that failed.", {(): stats.num_failed_steps})
        compiles = self._num_compiles()
        yield self._total("recompiles_after_warmup", "Must be 0.", {(): compiles})
        compiled = self._num_programs + compiles
        yield self._total("compile", "Programs compiled.", {(): compiled})
        steps = {(mode, str(width)): count for (mode, width), count in stats.steps.items()}
        yield self._total("steps", "Steps by mode, and units of a group.", steps, "mode", "width")
        pairs = permutations(stats.steps_by_mode, 2)
        switches = {pair: stats.mode_switches.get(pair, 0) for pair in pairs}
        yield self._total("mode_switches", "Changes of mode.", switches, "from", "to")

    def _host_metrics(self, host: HostStats) -> Iterator[Metric]:
        """The host tier: tokens looked up and found there, bytes moved and held."""
        text = "Prompt tokens looked up on the host, because the devices did not have them."
        yield self._total("host_cache_queries", text, {(): host.num_query_tokens})
        yield self._total("host_cache_hits", "Of them, those found.", {(): host.num_hit_tokens})
        moved = {("out",): host.num_offloaded_bytes, ("in",): host.num_restored_bytes}
        text = "KV copied to the host and back."
        yield self._total("host_cache_moved_bytes", text, moved, "direction")
        text = "Chunks of KV brought to devices ahead of the admission that needs them."
        yield self._total("host_cache_prefetches", text, {(): host.num_prefetches})
        text = "Of them, those that an admission then used."
        yield self._total("host_cache_prefetch_hits", text, {(): host.num_prefetch_hits})
        yield self._gauge("host_cache_used_bytes", "KV on the host.", host.num_used_bytes)
        yield self._gauge("host_cache_size_bytes", "The budget of it.", host.num_bytes)

    def _draft_metrics(self, drafts: DraftStats) -> Iterator[Metric]:
        """vLLM's counters of speculation, then ours."""
        yield self._total("spec_decode_num_drafts", "Drafts.", {(): drafts.num_drafts})
        num_tokens, num_accepted = drafts.tokens.total(), drafts.num_accepted
        yield self._total("spec_decode_num_draft_tokens", "Guessed tokens.", {(): num_tokens})
        name = "spec_decode_num_accepted_tokens"
        yield self._total(name, "Guessed tokens that were right.", {(): num_accepted})
        places = {(str(place),): count for place, count in sorted(drafts.accepted_at.items())}
        yield self._total(f"{name}_per_pos", "Right ones by place.", places, "position")
        labels = "drafter", "outcome"
        yield self._total("draft_tokens", "Guessed tokens by source.", drafts.tokens, *labels)
        steps = {(mode,): count for mode, count in drafts.steps.items()}
        yield self._total("draft_steps", "Steps with drafts.", steps, "mode")
        size = drafts.num_corpus_tokens
        yield self._gauge("draft_corpus_tokens", "Tokens of finished outputs kept.", size)

    def _fleet_metrics(self, fleet: FleetState) -> Iterator[Metric]:
        """What groups there are, and what their changes have taken."""
        stats, open_widths = fleet.stats, [group.width for group in fleet.arrangement]
        groups = GaugeMetricFamily(
            f"{self.prefix}:fleet_groups", "Groups by units.", labels=[*self._labels, "width"]
        )
        for width in fleet.widths:
            groups.add_metric([*self._labels.values(), str(width)], open_widths.count(width))
        yield groups
        binds = {(str(width), *why): count for (width, *why), count in stats.binds.items()}
        yield self._total("fleet_binds", "Groups bound.", binds, "width", "kind", "reason")
        releases = {(str(width),): stats.releases[width] for width in fleet.widths[1:]}
        yield self._total("fleet_releases", "Groups released.", releases, "width")
        failed = {(reason,): count for reason, count in stats.failed_changes.items()}
        yield self._total("binds_failed", "Changes of groups that failed.", failed, "reason")
        moved = {(way,): stats.moved_bytes[way] for way in ("bind", "release")}
        yield self._total("kv_moved_bytes", "Keys and values moved.", moved, "direction")
        copied = stats.num_compacted_blocks
        yield self._total("kv_compacted_blocks", "KV blocks copied to make room.", {(): copied})
        text = "Seconds that groups paused, of pauses that have ended."
        yield self._total("paused_seconds", text, {(): stats.paused_seconds})
        paused = fleet.num_paused_sequences
        yield self._gauge("sequences_paused", "Sequences of groups that pause.", paused)

    def _resharding_metrics(self, state: ReshardingState) -> Iterator[Metric]:
        """Which phase is on, what changing it has taken, and what waits on the host."""
        phases = GaugeMetricFamily(
            f"{self.prefix}:phase", "1 for the phase that is on.", labels=[*self._labels, "phase"]
        )
        for phase in PHASES:
            phases.add_metric([*self._labels.values(), phase], float(phase == state.phase))
        yield phases
        yield self._total("phase_switches", "Changes of phase.", {(): state.num_switches})
        text = "Seconds of the host that they took."
        yield self._total("phase_switch_seconds", text, {(): state.switch_seconds})
        text = "Sequences whose prompts are computed, and that wait to be decoded."
        yield self._gauge("sequences_parked", text, state.num_parked)
        text = "Bytes of the host that sequences need or have reserved."
        yield self._gauge("host_cache_held_bytes", text, state.num_held_bytes)

    def _host_ages(self, ages: Mapping[int, float]) -> Metric:
        name, text = f"{self.prefix}:follower_last_step_age_seconds", "Since a host did a step."
        family = GaugeMetricFamily(name, text, labels=[*self._labels, "host"])
        for host, age in ages.items():
            family.add_metric([*self._labels.values(), str(host)], age)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{self.prefix}:{name}", text, labels=[*self._labels])
        family.add_metric([*self._labels.values()], value)
        return family

    def _total(
        self, name: str, text: str, values: Mapping[tuple[str, ...], float], *extra: str
    ) -> Metric:
        full = f"{self.prefix}:{name}"
        family = CounterMetricFamily(full, text, labels=[*self._labels, *extra])
        for labels, value in values.items():
            family.add_metric([*self._labels.values(), *labels], value)
        return family


def _renamed(metric: Metric, name: str) -> Metric:
    again = Metric(name, metric.documentation, metric.type)
    for sample in metric.samples:  # of a counter they are called ..._total
        again.samples.append(sample._replace(name=name + sample.name.removeprefix(metric.name)))
    return again


def _priority_label(priority: int) -> str:
    """A bounded number of labels, whatever clients choose."""
    if priority in OWN_PRIORITIES:
        return str(priority)
    return f"below {OWN_PRIORITIES[0]}" if priority < 0 else f"above {OWN_PRIORITIES[-1]}"
