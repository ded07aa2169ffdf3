"""The trace that a request is part of, as its caller says in the headers of W3C. No JAX."""

from contextvars import ContextVar
from typing import NamedTuple

MAX_STATE = 512  # characters of `tracestate` that are passed on; W3C asks for as many


class TraceContext(NamedTuple):
    """The headers `traceparent` and `tracestate`; "" for one that did not come."""

    parent: str = ""
    state: str = ""


NO_TRACE = TraceContext()
TRACE: ContextVar[TraceContext] = ContextVar("trace", default=NO_TRACE)
"""The trace of the request that the current task serves; front ends set it."""


def trace_from(parent: str, state: str) -> TraceContext:
    """The headers as they are passed on: a state that is too long is left out."""
    return TraceContext(parent, state if len(state) <= MAX_STATE else "")
