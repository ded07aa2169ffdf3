"""Spans on their way to a collector, over OTLP by the SDK of OpenTelemetry. No JAX.

The SDK is imported where it is used: a server without traces does without it.
"""

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING

from serving.server.trace_context import TraceContext
from serving.traces.spans import Span

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

CLOSE_SECONDS = 3.0  # that a collector has at the end
NAME = "shiftjax"


class OtlpSpans:
    """A `SpanExporter` that sends batches to an endpoint, from a thread of its own.

    The SDK's variables hold (`OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER` and others).
    """

    def __init__(self, endpoint: str, protocol: str):
        from opentelemetry.trace.propagation import tracecontext

        self._provider = _provider(_exporter(endpoint, protocol))
        self._tracer: Tracer = self._provider.get_tracer(NAME)
        self._propagator = tracecontext.TraceContextTextMapPropagator()

    def emit(self, span: Span, trace: TraceContext) -> None:
        """Hand over a span and those below it; the caller's span is above."""
        from opentelemetry.context import Context

        headers = {"traceparent": trace.parent, "tracestate": trace.state}
        carrier = {name: value for name, value in headers.items() if value}
        self._emit(span, self._propagator.extract(carrier, Context()), is_first=True)

    def _emit(self, span: Span, above: "Context", *, is_first: bool = False) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        kind, attributes = SpanKind.SERVER if is_first else SpanKind.INTERNAL, span.attributes
        made = self._tracer.start_span(span.name, above, kind, attributes, start_time=span.start)
        if span.error:
            made.set_status(Status(StatusCode.ERROR, span.error))
        for child in span.children:
            self._emit(child, set_span_in_context(made, above))
        made.end(span.end)

    async def close(self) -> None:
        """Send what has not been sent, in at most `CLOSE_SECONDS`.

        A collector that does not answer is left with its thread: no exit waits for that one.
        """
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def send() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # nobody waits any more
                loop.call_soon_threadsafe(sent.set)

        threading.Thread(target=send, name="spans", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(sent.wait(), CLOSE_SECONDS)


def _provider(exporter: "SpanExporter") -> "TracerProvider":
    """What makes spans and hands them over in batches."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = Resource.create({"service.name": NAME}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=named, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _exporter(endpoint: str, protocol: str) -> "SpanExporter":
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

        is_plain = not endpoint.startswith("https://")
        return over_grpc.OTLPSpanExporter(endpoint, insecure=is_plain)
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

    return over_http.OTLPSpanExporter(endpoint)
