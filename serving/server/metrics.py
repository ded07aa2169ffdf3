"""Prometheus metrics under the names, labels and buckets that vLLM's users know. No JAX.

Here is what all requests and engines have; what is of a feature comes from its collector.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import permutations
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from serving.server.engine_thread import Turn
from serving.server.errors import ServeError
from serving.server.handle import RequestHandle
from serving.server.records import FIRST_TOKEN_BUCKETS, Declared, Records
from serving.server.start_phases import Phases
from shiftjax.core.stats import EngineStats
from shiftjax.metric import STEP_BUCKETS, Histogram, Metric, counter, gauge

TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
OWN_PRIORITIES = range(-9, 10)  # clients choose them: others share two labels
ITERATION_BUCKETS = (1.0, *(float(2**e) for e in range(3, 15)))
SIZE_BUCKETS = tuple(float(n * 10**e) for e in range(6) for n in (1, 2, 5))

TABLE = (
    Declared("prompt_tokens", "Prompt tokens of accepted requests."),
    Declared("generation_tokens", "Generated tokens."),
    Declared("request_success", "Requests that ended.", labels=("finished_reason",)),
    Declared("requests_rejected", "Requests refused at the door.", labels=("reason",)),
    Declared("requests_aborted", "Requests ended before they were complete.", labels=("reason",)),
    Declared("nan_rows", "Requests ended by numbers that are not finite."),
    Declared("time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_BUCKETS),
    Declared("inter_token_latency_seconds", "Time between tokens of a sequence.", TOKEN_BUCKETS),
    Declared("request_time_per_output_token_seconds", "Mean time per later token.", TOKEN_BUCKETS),
    Declared("e2e_request_latency_seconds", "Arrival to end.", REQUEST_BUCKETS),
    Declared("request_queue_time_seconds", "Arrival to first scheduled.", REQUEST_BUCKETS),
    Declared("request_prefill_time_seconds", "First scheduled to first token.", REQUEST_BUCKETS),
    Declared("request_decode_time_seconds", "First token to last.", REQUEST_BUCKETS),
    Declared("request_inference_time_seconds", "First scheduled to last token.", REQUEST_BUCKETS),
    Declared("request_prompt_tokens", "Prompt tokens of a request.", SIZE_BUCKETS),
    Declared("request_generation_tokens", "Generated tokens of a request.", SIZE_BUCKETS),
    Declared("request_max_num_generation_tokens", "Its longest continuation.", SIZE_BUCKETS),
    Declared("request_params_max_tokens", "Tokens that were allowed.", SIZE_BUCKETS),
    Declared("request_params_n", "Continuations asked for.", (1.0, 2.0, 5.0, 10.0, 20.0)),
    Declared("iteration_tokens_total", "Tokens of a step.", ITERATION_BUCKETS),
    Declared("step_duration_seconds", "Duration of a step.", STEP_BUCKETS, ("mode",)),
    Declared(
        "queue_seconds", "Arrival to first scheduled, by class.", REQUEST_BUCKETS, ("priority",)
    ),
)
FAMILIES = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
# Names that vLLM has given up and routers still ask for: production-stack's (`engine_stats.py`),
# and endpoint pickers of the first form of the inference extension's proposal 003.
OLD_NAMES: Mapping[str, str] = {
    "vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_queries": "vllm:gpu_prefix_cache_queries",
    "vllm:prefix_cache_hits": "vllm:gpu_prefix_cache_hits",
}


class Running(Protocol):
    """The engine that metrics read."""

    @property
    def stats(self) -> EngineStats:
        """Counters and gauges of the engine, as of its last turn."""
        ...

    @property
    def last_step_age(self) -> float:
        """Seconds since it last did anything."""
        ...


class Metrics(Collector):
    """Counters and histograms of requests; gauges of the engine, read when they are asked for.

    `collectors` yield what features have beside that; they are called once there is an engine.
    """

    def __init__(self, prefix: str = "shiftjax", start: Phases | None = None):
        self.prefix = prefix
        self._start = start or Phases()
        self.registry = CollectorRegistry(auto_describe=False)
        self.collectors: list[Callable[[], Iterable[Metric]]] = []
        self._engine: Running | None = None
        self._labels = {"model_name": "", "engine": "0"}
        self._info: Mapping[str, str] = {}
        self._attention: Mapping[str, str] = {}
        self._num_programs, self._num_compiles = 0, lambda: 0
        self._records = Records(TABLE)
        self.registry.register(self)

    def open(
        self,
        model_name: str,
        engine: Running,
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
        self._records.count("requests_rejected", 1, error.code)

    def tokens(self, handle: RequestHandle, index: int, num: int, now: float) -> None:
        """One step brought `num` tokens of a continuation."""
        self._records.count("generation_tokens", num)
        last = handle.last_token_at.get(index)
        handle.last_token_at[index] = now
        if last is not None:
            self._records.observe("inter_token_latency_seconds", now - last)
        elif len(handle.last_token_at) == 1:
            arrival = handle.request.arrival_seconds
            self._records.observe("time_to_first_token_seconds", now - arrival)

    def ended(self, handle: RequestHandle, now: float) -> None:
        """A request that generates has ended."""
        request, error, records = handle.request, handle.error, self._records
        self._ended(len(request.prompt_token_ids), now - request.arrival_seconds, error)
        records.observe("request_generation_tokens", handle.num_output_tokens)
        longest = max((len(output.token_ids) for output in handle.output.outputs), default=0)
        records.observe("request_max_num_generation_tokens", longest)
        records.observe("request_params_n", request.sampling.n)
        if request.sampling.max_tokens is not None:
            records.observe("request_params_max_tokens", request.sampling.max_tokens)
        if error is None:
            for output in handle.output.outputs:
                records.count("request_success", 1, output.finish_reason or "stop")
            self._observe_times(handle)

    def answered(self, num_tokens: int, seconds: float, error: ServeError | None) -> None:
        """A request that generates nothing has ended, `seconds` after its arrival."""
        self._ended(num_tokens, seconds, error)
        if error is None:
            self._records.count("request_success", 1, "stop")

    def _ended(self, num_tokens: int, seconds: float, error: ServeError | None) -> None:
        """Count what all requests have in common, and how one failed."""
        records = self._records
        records.count("prompt_tokens", num_tokens)
        records.observe("request_prompt_tokens", num_tokens)
        records.observe("e2e_request_latency_seconds", seconds)
        if error is not None:
            is_abort = error.kind.status in (499, 504, 409)
            records.count("request_success", 1, "abort" if is_abort else "error")
            records.count("requests_aborted", 1, error.code)
            records.count("nan_rows", int(error.cause == "non_finite"))

    def _observe_times(self, handle: RequestHandle) -> None:
        metrics, observe = handle.output.metrics, self._records.observe
        if metrics is None or metrics.queue_seconds is None or metrics.ttft_seconds is None:
            return
        later = metrics.num_output_tokens - 1
        decode = (metrics.tpot_seconds or 0.0) * later
        prefill = metrics.ttft_seconds - metrics.queue_seconds
        observe("request_queue_time_seconds", metrics.queue_seconds)
        observe("queue_seconds", metrics.queue_seconds, _priority_label(handle.request.priority))
        observe("request_prefill_time_seconds", prefill)
        observe("request_decode_time_seconds", decode)
        observe("request_inference_time_seconds", prefill + decode)
        if metrics.tpot_seconds is not None:
            observe("request_time_per_output_token_seconds", metrics.tpot_seconds)

    def stepped(self, turn: Turn) -> None:
        """The engine has finished a turn."""
        for step in turn.steps:
            self._records.observe("step_duration_seconds", step.seconds, step.mode)
            self._records.observe("iteration_tokens_total", step.num_tokens)

    # ------------------------------------------------------------------ what is shown

    def collect(self) -> Iterator[Family]:
        """Everything as of now; with vLLM's prefix some of it by its older name, too."""
        yield from self._start_families()
        if self._engine is None:
            return
        for metric in self._all(self._engine):
            family = self._family(metric)
            yield family
            if family.name in OLD_NAMES:
                yield _renamed(family, OLD_NAMES[family.name])
        yield from self._info_families()

    def _all(self, engine: Running) -> Iterator[Metric]:
        yield from self._records.metrics()
        yield gauge("last_step_age_seconds", "Since the last step.", engine.last_step_age)
        yield from engine_metrics(engine.stats)
        compiles = self._num_compiles()
        yield counter("recompiles_after_warmup", "Must be 0.", compiles)
        yield counter("compile", "Programs compiled.", self._num_programs + compiles)
        text = "1 for the attention that steps use, and why."
        used = dict.fromkeys(self._attention.items(), 1)
        yield gauge("attention_backend", text, used, "name", "reason")
        for collector in self.collectors:
            yield from collector()

    def _family(self, metric: Metric) -> Family:
        """Return the metrics as Prometheus families, with prefix and labels of the model."""
        labels = [*self._labels, *metric.labels]
        name = f"{self.prefix}:{metric.name}"
        family = FAMILIES[metric.kind](name, metric.text, labels=labels)
        for own, value in metric.values.items():
            values = [*self._labels.values(), *own]
            if isinstance(value, Histogram):
                family.add_metric(values, value.buckets(), sum_value=value.total)
            else:
                family.add_metric(values, value)
        return family

    def _start_families(self) -> Iterator[Family]:
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

    def _info_families(self) -> Iterator[Family]:
        """The deployment, as labels."""
        info = InfoMetricFamily(f"{self.prefix}:config", "The deployment.", labels=[*self._labels])
        info.add_metric([*self._labels.values()], dict(self._info))
        yield info
        cache = GaugeMetricFamily(
            f"{self.prefix}:cache_config_info", "The KV cache.", labels=["engine", *self._info]
        )
        cache.add_metric(["0", *self._info.values()], 1)
        yield cache


def engine_metrics(stats: EngineStats) -> Iterator[Metric]:
    """What every engine says of its queue, cache and steps."""
    yield gauge("num_requests_running", "Sequences that run.", stats.num_running)
    yield gauge("num_requests_waiting", "Sequences that wait.", stats.num_waiting)
    yield gauge("kv_cache_usage_perc", "Share of KV blocks held.", stats.kv_usage)
    preempted = sum(stats.num_preemptions.values())
    yield counter("num_preemptions", "Sequences preempted.", preempted)
    queries, hits = stats.num_prefix_query_tokens, stats.num_prefix_hit_tokens
    yield counter("prefix_cache_queries", "Prompt tokens looked up.", queries)
    yield counter("prefix_cache_hits", "Prompt tokens found.", hits)
    yield counter("failed_steps", "Steps that failed.", stats.num_failed_steps)
    steps = {(mode, str(width)): count for (mode, width), count in stats.steps.items()}
    yield counter("steps", "Steps by mode, and units of a group.", steps, "mode", "width")
    pairs = permutations(stats.steps_by_mode, 2)
    switches = {pair: stats.mode_switches.get(pair, 0) for pair in pairs}
    yield counter("mode_switches", "Changes of mode.", switches, "from", "to")


def _renamed(family: Family, name: str) -> Family:
    again = Family(name, family.documentation, family.type)
    for sample in family.samples:  # of a counter they are called ..._total
        again.samples.append(sample._replace(name=name + sample.name.removeprefix(family.name)))
    return again


def _priority_label(priority: int) -> str:
    """A bounded number of labels, whatever clients choose."""
    if priority in OWN_PRIORITIES:
        return str(priority)
    return f"below {OWN_PRIORITIES[0]}" if priority < 0 else f"above {OWN_PRIORITIES[-1]}"
