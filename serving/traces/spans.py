"""What a request went through, as spans: the request, and its phases below it. No JAX.

Names are those of OpenTelemetry's semantic conventions for generative AI
(`opentelemetry-semantic-conventions` 0.66b2); in addition those that vLLM 0.29 gives its spans
(`vllm/tracing/utils.py`), for dashboards that ask for them.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from serving.server.engine_thread import Turn
from serving.server.errors import ServeError
from serving.server.fields import ChatFields
from serving.server.handle import RequestHandle
from serving.server.request_timeline import timeline_of
from serving.server.schema import Wish
from serving.server.served import Generation
from serving.server.trace_context import TRACE, TraceContext

Value = str | bool | int | float | list[str]

PROVIDER = "shiftjax"
# The conventions' name of a sampling parameter, and ours.
PARAMETERS = {
    "gen_ai.request.max_tokens": "max_tokens",
    "gen_ai.request.temperature": "temperature",
    "gen_ai.request.top_p": "top_p",
    "gen_ai.request.top_k": "top_k",
    "gen_ai.request.frequency_penalty": "frequency_penalty",
    "gen_ai.request.presence_penalty": "presence_penalty",
    "gen_ai.request.seed": "seed",
    "gen_ai.request.choice.count": "n",
    "gen_ai.request.n": "n",  # vLLM
}
# vLLM's names of times in seconds, and the fields of the request timeline.
PHASES = {
    "gen_ai.latency.time_in_queue": "queue_seconds",
    "gen_ai.latency.time_in_model_prefill": "prefill_seconds",
    "gen_ai.latency.time_in_model_decode": "decode_seconds",
}


@dataclass(frozen=True)
class Span:
    """One span; times are nanoseconds since 1970. `error`: what went wrong, or ""."""

    name: str
    start: int
    end: int
    attributes: Mapping[str, Value] = field(default_factory=dict)
    children: tuple["Span", ...] = ()
    error: str = ""


class Asked(NamedTuple):
    """What is known of a request when it starts."""

    trace: TraceContext
    wish: Wish
    model: str


class SpanExporter(Protocol):
    """Where spans go."""

    def emit(self, span: Span, trace: TraceContext) -> None:
        """Hand over a span and those below it, as part of the caller's trace."""
        ...

    async def close(self) -> None:
        """Send what has not been sent."""
        ...


class Traces:
    """An `Observer` that makes a span of each request when it has ended."""

    def __init__(self, exporter: SpanExporter):
        self._exporter = exporter
        self._asked: dict[str, Asked] = {}  # by the engine's name of a request

    def started(self, generation: Generation) -> None:
        """Note in which trace the requests of a call are. Called in the call's own task."""
        asked = Asked(TRACE.get(), generation.wish, generation.model)
        for handle in generation.handles:
            self._asked[handle.request.request_id] = asked

    def ended(self, handle: RequestHandle, now: float) -> None:
        """Emit the span of a request."""
        asked = self._asked.pop(handle.request.request_id, None)
        if asked is not None:
            offset = time.time_ns() - round(now * 1e9)
            self._exporter.emit(span_of(handle, asked, now, offset), asked.trace)

    def rejected(self, error: ServeError) -> None:
        """A request that was refused has no phases, and no span."""

    def tokens(self, handle: RequestHandle, index: int, num: int, now: float) -> None:
        """Tokens are counted at the end."""

    def stepped(self, turn: Turn) -> None:
        """Steps belong to many requests."""


def span_of(handle: RequestHandle, asked: Asked, now: float, offset: int) -> Span:
    """The span of a request that ended at `now`, in seconds of the monotonic clock.

    `offset`: nanoseconds from that clock to the time since 1970.
    """
    operation = "chat" if isinstance(asked.wish.fields, ChatFields) else "text_completion"
    arrival = handle.request.arrival_seconds
    phases = timeline_of(handle) if handle.output.metrics is not None else {}
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        **_asked_for(handle, asked),
        **_answered(handle, asked),
        **_times(phases, now - arrival),
    }
    if handle.error is not None:
        attributes["error.type"] = handle.error.code
    return Span(
        f"{operation} {attributes['gen_ai.request.model']}",
        round(arrival * 1e9) + offset,
        round(now * 1e9) + offset,
        {name: value for name, value in attributes.items() if value is not None},
        _phase_spans(phases, round(arrival * 1e9) + offset),
        "" if handle.error is None else handle.error.message,
    )


def _asked_for(handle: RequestHandle, asked: Asked) -> dict[str, Value | None]:
    sampling, fields = handle.request.sampling, asked.wish.fields
    found = {name: getattr(sampling, ours) for name, ours in PARAMETERS.items()}
    if sampling.n == 1:
        del found["gen_ai.request.choice.count"]
    return found | {
        "gen_ai.request.model": fields.model or asked.model,
        "gen_ai.request.stream": bool(fields.stream),
        "gen_ai.request.stop_sequences": list(sampling.stop) or None,
        "gen_ai.request.id": handle.public_id,  # vLLM
    }


def _answered(handle: RequestHandle, asked: Asked) -> dict[str, Value | None]:
    metrics, num_prompt = handle.output.metrics, len(handle.request.prompt_token_ids)
    reasons = [one.finish_reason for one in handle.output.outputs if one.finish_reason]
    return {
        "gen_ai.response.id": handle.public_id,
        "gen_ai.response.model": asked.model,
        "gen_ai.response.finish_reasons": reasons or None,
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.output_tokens": handle.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": metrics.num_cached_tokens if metrics else None,
        "gen_ai.usage.prompt_tokens": num_prompt,  # vLLM, with the next
        "gen_ai.usage.completion_tokens": handle.num_output_tokens,
    }


def _times(phases: Mapping[str, object], total: float) -> dict[str, Value | None]:
    queue, prefill, decode = (phases.get(name) for name in PHASES.values())
    found: dict[str, Value | None] = {"gen_ai.latency.e2e": total}
    if isinstance(queue, float):
        found["gen_ai.latency.time_in_queue"] = queue
    if isinstance(queue, float) and isinstance(prefill, float) and isinstance(decode, float):
        found["gen_ai.latency.time_in_model_prefill"] = prefill
        found["gen_ai.latency.time_in_model_decode"] = decode
        found["gen_ai.latency.time_in_model_inference"] = prefill + decode
        found["gen_ai.latency.time_to_first_token"] = queue + prefill
        found["gen_ai.response.time_to_first_chunk"] = queue + prefill
    for name in ("preemptions", "accepted_draft_tokens"):
        if number := phases.get(name):
            found[f"shiftjax.{name}"] = int(str(number))
    steps = phases.get("steps")
    if isinstance(steps, dict):
        found |= {f"shiftjax.steps.{mode}": number for mode, number in steps.items()}
    return found


def _phase_spans(phases: Mapping[str, object], start: int) -> tuple[Span, ...]:
    """Queue, prefill and decode, one behind the other, as far as the request got."""
    spans = []
    for name in PHASES.values():
        seconds = phases.get(name)
        if not isinstance(seconds, float):
            break
        end = start + round(seconds * 1e9)
        spans.append(Span(name.removesuffix("_seconds"), start, end))
        start = end
    return tuple(spans)
