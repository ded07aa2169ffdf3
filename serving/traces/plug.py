"""Traces of a server, if its settings say so. OpenTelemetry is imported only then. No JAX."""

import re
from collections.abc import Mapping
from importlib.util import find_spec
from urllib.parse import urlsplit

from serving.server.options import ServerOptions
from serving.server.service import Service
from shiftjax.options import ConfigError

_ENDPOINT = re.compile(r"(https?://)?([A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\])(:\d{1,5})?(/[!-~]*)?")
PROTOCOLS = ("grpc", "http/protobuf")
NO_SDK = "otlp_traces_endpoint needs OpenTelemetry: pip install 'shiftjax[traces]'"


def protocol_of(endpoint: str, environ: Mapping[str, str]) -> str:
    """How spans travel: as the SDK's variables say; else by the path of the endpoint."""
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    given = next((environ[name] for name in names if environ.get(name)), None)
    by_path = "http/protobuf" if urlsplit(endpoint).path.endswith("/v1/traces") else "grpc"
    return given or by_path


def check_traces(options: ServerOptions, environ: Mapping[str, str]) -> None:
    """Raise ConfigError for traces that cannot be sent."""
    if options.otlp_traces_endpoint is None:
        return
    protocol = protocol_of(options.otlp_traces_endpoint, environ)
    problems = []
    if _ENDPOINT.fullmatch(options.otlp_traces_endpoint) is None:
        problems.append("otlp_traces_endpoint must be as http://collector:4317")
    if not _has_sdk():
        problems.append(NO_SDK)
    if protocol not in PROTOCOLS:
        problems.append(f"OTLP goes over {' or '.join(PROTOCOLS)}, not {protocol}")
    if problems:
        raise ConfigError(problems)


def _has_sdk() -> bool:
    try:
        return find_spec("opentelemetry.sdk.trace") is not None
    except ModuleNotFoundError:  # not even the namespace
        return False


def plug_traces(service: Service, environ: Mapping[str, str]) -> None:
    """Have the service tell a collector of its requests, where there is one."""
    endpoint = service.options.otlp_traces_endpoint
    if endpoint is None:
        return
    from serving.traces.otlp import OtlpSpans
    from serving.traces.spans import Traces

    spans = OtlpSpans(endpoint, protocol_of(endpoint, environ))
    traces = Traces(spans)
    service.on_start.append(traces.started)
    service.watchers.append(traces)
    service.on_close.append(spans.close)
