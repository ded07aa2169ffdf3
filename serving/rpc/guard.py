"""What every call passes: the key; and how errors become statuses with details."""

import functools
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, cast

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from serving.server.errors import ServeError, internal_error
from serving.server.headers import (
    REQUEST_ID,
    check_request_id,
    digests,
    key_in,
    request_id_for,
    trace_id,
)
from serving.server.quotas import CALLER, Caller, holder_of_peer
from serving.server.trace_context import TRACE, trace_from

logger = logging.getLogger(__name__)

DOMAIN = "shiftjax"
GENERATIONS = ("Generate", "GenerateOnce", "Score", "Embed")
DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True)
class BadMessage:
    """Stands for a request that has not been read."""

    error: ServeError


class KeyInterceptor(aio.ServerInterceptor):
    """Refuses calls without a key, but those of the services in `public`.

    Messages over `max_bytes`, which may take seconds and gigabytes to parse, and bytes that are no
    message reach the method as a `BadMessage`, so that it can say so. `on_refusal` hears of every
    generation that is refused here.
    """

    def __init__(
        self,
        keys: Collection[str],
        max_bytes: int,
        public: Collection[str] = (),
        on_refusal: Callable[[ServeError], None] = lambda _: None,
    ):
        self._keys = digests(keys)
        self._max_bytes = max_bytes
        self._public = tuple(f"/{name}/" for name in public)
        self._on_refusal = on_refusal

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Pass the call on, or put a handler in its place that ends it."""
        details = handler_call_details
        is_generation = details.method.rpartition("/")[2] in GENERATIONS
        count = self._on_refusal if is_generation else lambda _: None
        key = self._key_of(details) if self._keys else None
        CALLER.set(Caller(key))  # in the task that goes on to serve the call
        if not self._keys or details.method.startswith(self._public) or key is not None:
            return _with_tolerance(await continuation(details), self._max_bytes, count)
        error = ServeError("unauthenticated", "A valid key is needed: authorization: Bearer.")
        count(error)

        async def refuse(request: Any, context: aio.ServicerContext) -> None:
            await abort(context, error)

        return grpc.unary_unary_rpc_method_handler(refuse)

    def _key_of(self, details: Any) -> bytes | None:
        metadata = dict(details.invocation_metadata or ())
        return key_in(str(metadata.get("authorization", "")).encode(), self._keys)


def _with_tolerance(handler: Any, max_bytes: int, count: Callable[[ServeError], None]) -> Any:
    """The handler with a deserializer that does not raise; what it refuses is counted."""
    if handler is None or handler.request_deserializer is None:
        return handler
    parse = handler.request_deserializer

    def refused(kind: str, words: str) -> BadMessage:
        error = ServeError(kind, words)
        count(error)
        return BadMessage(error)

    def deserialize(data: bytes) -> Any:
        if len(data) > max_bytes:
            words = f"The message has {len(data)} bytes; at most {max_bytes} are allowed."
            return refused("too_large", words)
        try:
            return parse(data)
        except DecodeError:
            return refused("invalid", "The bytes of the request are no such message.")

    return handler._replace(request_deserializer=deserialize)


def method[F: Callable[..., Awaitable[Any]]](function: F) -> F:
    """A servicer method whose `ServeError`s become statuses, and whose bugs become INTERNAL."""

    @functools.wraps(function)
    async def wrapped(self: Any, request: Any, context: aio.ServicerContext) -> Any:
        metadata = dict(context.invocation_metadata() or ())
        given, trace = str(metadata.get(REQUEST_ID, "")), str(metadata.get("traceparent", ""))
        TRACE.set(trace_from(trace, str(metadata.get("tracestate", ""))))
        name, trace = request_id_for(given), trace_id(trace)
        context.set_trailing_metadata(((REQUEST_ID, name),))
        CALLER.set(CALLER.get()._replace(address=holder_of_peer(context.peer())))
        try:
            check_request_id(given, name)
            if isinstance(request, BadMessage):
                raise request.error
            result = await function(self, request, context)
            logger.info("grpc: %s OK id=%s trace=%s", function.__name__, name, trace)
            return result
        except ServeError as error:
            words = "grpc: %s %s id=%s trace=%s"
            logger.info(words, function.__name__, error.kind.grpc, name, trace)
            await abort(context, error, name)
        except aio.AbortError:
            raise
        except Exception:
            if context.done():  # the client has gone, and with it what was to be written
                logger.info("grpc: %s CANCELLED id=%s trace=%s", function.__name__, name, trace)
                return None
            logger.exception("The call %s of request %s failed.", function.__name__, name)
            await abort(context, internal_error(), name)

    return cast(F, wrapped)


def request_id(context: aio.ServicerContext) -> str:
    """The id of a call that `method` serves: it stands in the trailing metadata."""
    return str(dict(context.trailing_metadata() or ())[REQUEST_ID])


async def abort(context: aio.ServicerContext, error: ServeError, name: str | None = None) -> None:
    """End the call with the error's status and its details."""
    code = grpc.StatusCode[error.kind.grpc]
    status = status_pb2.Status(code=code.value[0], message=error.message)
    info = error_details_pb2.ErrorInfo(reason=error.code.upper(), domain=DOMAIN)
    status.details.add().Pack(info)
    if error.violations or error.kind_name == "invalid":
        violations = error.violations or ((error.param or "", error.message),)
        bad = error_details_pb2.BadRequest()
        for field, description in violations:
            bad.field_violations.add(field=field, description=description)
        status.details.add().Pack(bad)
    if error.kind.retry_seconds is not None:
        delay = duration_pb2.Duration(seconds=error.kind.retry_seconds)
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    if name is not None:
        status.details.add().Pack(error_details_pb2.RequestInfo(request_id=name))
    metadata: tuple[tuple[str, str | bytes], ...] = ((DETAILS_KEY, status.SerializeToString()),)
    if name is not None:
        metadata = (*metadata, (REQUEST_ID, name))
    await context.abort(code, error.message, metadata)
