"""Spans of requests at a collector that speaks OTLP, over HTTP and over gRPC."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest
from engines import checkpoint
from kit import CHAT, COMPLETION, USER, VOCAB_SIZE, running_server
from served import serve

from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc
from serving.server.options import ServerOptions
from serving.traces import plug
from serving.traces.plug import check_traces, protocol_of
from shiftjax.options import ConfigError

pytest.importorskip("opentelemetry.sdk", reason="spans need pip install 'shiftjax[traces]'")
from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2,
    trace_service_pb2_grpc,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
Export = trace_service_pb2.ExportTraceServiceRequest


class Collector:
    """What has come, and the resource of it."""

    def __init__(self):
        self.spans, self.resource, self.scope = [], {}, ""
        self.endpoint = ""
        self._lock = threading.Lock()

    def take(self, sent: Export) -> None:
        with self._lock:
            for group in sent.resource_spans:
                self.resource = attributes_of(group.resource)
                for scoped in group.scope_spans:
                    self.scope = scoped.scope.name
                    self.spans += scoped.spans

    def requests(self) -> list:
        """The spans of requests, in the order of their ends."""
        found = [span for span in self.spans if span.kind == span.SPAN_KIND_SERVER]
        return sorted(found, key=lambda span: span.end_time_unix_nano)

    def below(self, span) -> list:
        found = [each for each in self.spans if each.parent_span_id == span.span_id]
        return sorted(found, key=lambda each: each.start_time_unix_nano)


def attributes_of(span) -> dict:
    found = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        is_list = kind == "array_value"
        found[each.key] = [one.string_value for one in value.values] if is_list else value
    return found


@contextmanager
def collector_over_http():
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            assert self.headers["content-type"] == "application/x-protobuf"
            collector.take(Export.FromString(body))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(trace_service_pb2.ExportTraceServiceResponse().SerializeToString())

        def log_message(self, format, *args):
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def collector_over_grpc():
    collector = Collector()

    class Servicer(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request, context):
            collector.take(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Servicer(), server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()


def grpc_address(server) -> str:
    assert server.server.grpc is not None
    return server.server.grpc.address


COLLECTORS = {"http": collector_over_http, "grpc": collector_over_grpc}


@pytest.mark.parametrize("kind", COLLECTORS)
def test_a_request_is_a_span_below_its_callers(kind):
    body = {
        **{"messages": USER, "max_tokens": 6, "temperature": 0.5, "seed": 3, "stop": ["zz"]},
        **{"top_p": 0.9, "ignore_eos": True},
    }
    before = time.time_ns()
    with COLLECTORS[kind]() as collector:
        with (
            running_server(otlp_traces_endpoint=collector.endpoint) as server,
            server.client() as client,
        ):
            headers = {"traceparent": PARENT, "tracestate": "a=b", "x-request-id": "mine"}
            usage = client.post(CHAT, json=body, headers=headers).json()["usage"]
            server.assert_quiescent()
        (span,) = collector.requests()  # the end of the server has sent them
        phases = collector.below(span)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, SPAN)
    assert (span.name, span.trace_state) == ("chat echo", "a=b")
    assert collector.resource["service.name"] == collector.scope == "shiftjax"
    found = attributes_of(span)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.provider.name"] == "shiftjax"
    assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == "echo"
    assert found["gen_ai.request.max_tokens"] == found["gen_ai.usage.output_tokens"] == 6
    assert (found["gen_ai.request.temperature"], found["gen_ai.request.top_p"]) == (0.5, 0.9)
    assert (found["gen_ai.request.seed"], found["gen_ai.request.stop_sequences"]) == (3, ["zz"])
    assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.cache_read.input_tokens"] == 0
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert found["gen_ai.response.id"] == found["gen_ai.request.id"] == "mine"
    assert found["gen_ai.request.stream"] is False and "error.type" not in found
    assert span.status.code == span.status.STATUS_CODE_UNSET
    # Phases follow each other from the start to the last token.
    assert [each.name for each in phases] == ["queue", "prefill", "decode"]
    assert {each.kind for each in phases} == {span.SPAN_KIND_INTERNAL}
    times = [span.start_time_unix_nano, *(each.end_time_unix_nano for each in phases)]
    assert [each.start_time_unix_nano for each in phases] == times[:-1]
    assert before < times[0] <= times[-1] <= span.end_time_unix_nano + 1_000_000
    assert span.end_time_unix_nano <= time.time_ns()
    seconds = [found[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token")]
    assert seconds == pytest.approx([(end - times[0]) / 1e9 for end in times[1:3]], abs=1e-6)
    whole = (span.end_time_unix_nano - times[0]) / 1e9
    assert found["gen_ai.latency.e2e"] == pytest.approx(whole, abs=1e-6)


def test_what_fails_what_has_no_caller_and_what_is_not_sampled():
    with collector_over_http() as collector:
        with (
            running_server(otlp_traces_endpoint=collector.endpoint) as server,
            server.client() as client,
            grpc.insecure_channel(grpc_address(server)) as channel,
        ):
            body = {"prompt": ["ab", "cd"], "max_tokens": 2, "n": 2, "ignore_eos": True}
            client.post(COMPLETION, json=body)
            off = {"traceparent": PARENT[:-1] + "0"}
            client.post(COMPLETION, json=body, headers=off)
            client.post(COMPLETION, json=body, headers={"traceparent": "evil\tline"})
            server.runner.gate.clear()
            late = {"x-request-timeout": "0.05"}
            assert client.post(COMPLETION, json=body, headers=late).status_code == 504
            server.runner.gate.set()
            request = pb.GenerateRequest(text="ab")
            request.sampling.max_tokens = 2
            stub = pb_grpc.InferenceStub(channel)
            stub.GenerateOnce(request, metadata=(("traceparent", PARENT),), timeout=30)
            server.assert_quiescent()
        spans = collector.requests()
    plain, evil, failed, (last,) = spans[:2], spans[2:4], spans[4:6], spans[6:]
    for span in (*plain, *evil):
        assert span.name == "text_completion echo" and not span.parent_span_id
        found = attributes_of(span)
        assert found["gen_ai.request.choice.count"] == 2
        assert found["gen_ai.usage.output_tokens"] == 4
        assert found["gen_ai.response.finish_reasons"] == ["length"] * 2
    assert len({span.trace_id for span in (*plain, *evil)}) == 4
    for span in failed:
        assert span.status.code == span.status.STATUS_CODE_ERROR
        assert attributes_of(span)["error.type"] == "deadline_exceeded"
    assert (last.trace_id.hex(), last.parent_span_id.hex()) == (TRACE, SPAN)


def test_a_collector_that_is_not_there_stops_nobody():
    with collector_over_http() as collector:
        endpoint = collector.endpoint
    began = time.monotonic()
    with running_server(otlp_traces_endpoint=endpoint) as server, server.client() as client:
        for _ in range(3):
            answer = client.post(COMPLETION, json={"prompt": "ab", "max_tokens": 2})
            assert answer.status_code == 200
        server.assert_quiescent()
    assert time.monotonic() - began < 10


def test_a_server_process_sends_what_it_has_before_it_ends(tmp_path):
    environ = {"OTEL_SERVICE_NAME": "mine", "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "a=b"}
    with collector_over_http() as collector:
        flags = "--simulate=h200x8", f"--otlp-traces-endpoint={collector.endpoint}"
        with serve(
            checkpoint(vocab_size=VOCAB_SIZE)[0], tmp_path, *flags, environ=environ
        ) as served:
            served.wait_for("/health/ready", 200)
            served.complete(max_tokens=3)
            served.end_well()
    (span,) = collector.requests()
    assert attributes_of(span)["gen_ai.usage.output_tokens"] == 3
    assert collector.resource["service.name"] == "mine"


def test_how_spans_travel():
    assert protocol_of("http://c:4317", {}) == protocol_of("c:4317", {}) == "grpc"
    assert protocol_of("http://c:4318/v1/traces", {}) == "http/protobuf"
    variable = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    assert protocol_of("http://c:4318", variable) == "http/protobuf"
    own = variable | {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}
    assert protocol_of("http://c:4318/v1/traces", own) == "grpc"


def test_traces_that_cannot_be_sent_are_refused(monkeypatch):
    def refused(endpoint: str, environ: dict[str, str] = {}) -> str:  # noqa: B006
        with pytest.raises(ConfigError) as error:
            check_traces(ServerOptions(otlp_traces_endpoint=endpoint), environ)
        return "; ".join(error.value.problems)

    check_traces(ServerOptions(), {})
    check_traces(ServerOptions(otlp_traces_endpoint="http://[::1]:4317"), {})
    assert "must be as" in refused("ftp://c:1")
    assert "not http/json" in refused("c:4317", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})
    monkeypatch.setattr(plug, "find_spec", lambda name: None)
    assert "pip install 'shiftjax[traces]'" in refused("http://c:4317")
