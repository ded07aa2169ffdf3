"""What stands before every route: sizes, host, request id, API key, and errors as JSON."""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.http.dialects import DIALECTS, error_body
from serving.http.page import FILES
from serving.http.turns import Turns
from serving.server.errors import ServeError, internal_error
from serving.server.headers import check_request_id, digests, key_in, request_id_for, trace_id
from serving.server.quotas import CALLER, Caller, holder_of
from serving.server.trace_context import TRACE, trace_from

logger = logging.getLogger(__name__)

MAX_HEADERS = 100
MAX_HEADER_BYTES = 16 << 10
BODY_SECONDS = 30.0  # that a client has for sending a body
HEALTH = frozenset(("/health", "/health/live", "/health/ready", "/health/progress", "/ping"))
PUBLIC = HEALTH | {"/", *FILES}  # static: they hold no secret
QUIET = HEALTH | {"/metrics", "/ui/data"}  # asked again and again: not worth a line each
_POOLED = ("rerank", "score", "classify")
GENERATIONS = frozenset(
    (*DIALECTS, "/v1/embeddings", "/v2/rerank", *(f"{v}/{p}" for v in ("", "/v1") for p in _POOLED))
)
LOOPBACK = frozenset(("localhost", "127.0.0.1", "[::1]"))
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::\d{1,5})?")


class Guard:
    """An ASGI application around another. Everything but health needs a key, if there are any.

    `hosts` are the names by which a server on loopback may be called (None: any), so that a page
    elsewhere cannot reach it through a name of its own. `on_refusal` hears of generations that do
    not come through. Paths of `own_keys` need one of theirs.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Collection[str],
        hosts: Collection[str] | None,
        on_refusal: Callable[[ServeError], None],
        own_keys: Mapping[str, Collection[str]] = MappingProxyType({}),
    ):
        self.app, self._on_refusal = app, on_refusal
        self._keys = digests(keys)
        self._own_keys = {path: digests(each) for path, each in own_keys.items()}
        self._turns = Turns()
        self._hosts = None if hosts is None else frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        started = time.monotonic()
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = scope["request_id"] = request_id_for(given)
        status = 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode()),
                    (b"x-content-type-options", b"nosniff"),
                ]
            await send(message)

        scope["app"] = self.app  # the router then raises its errors
        if scope["path"] not in HEALTH:
            await self._turns.pass_by()
        try:
            self._admit(scope, headers, given)
            await self.app(scope, receive, send_and_note)
        except (ServeError, HTTPException) as error:
            status = status or await _send_error(send_and_note, error, scope["path"])
        except ConnectionError:
            status = 499  # the client has gone
        except Exception:
            logger.exception("Serving request %s failed.", request_id)
            status = status or await _send_error(send_and_note, internal_error(), scope["path"])
        _log(scope, headers, status, time.monotonic() - started)

    def _admit(self, scope: Scope, headers: dict[bytes, bytes], given_id: str) -> None:
        """Check the head of a request; count it if it is refused. Raises `ServeError`."""
        try:
            check_request_id(given_id, scope["request_id"])
            self._check(scope, headers)
        except ServeError as error:
            if scope["path"] in GENERATIONS and scope["method"] == "POST":
                self._on_refusal(error)
            raise

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Raise `ServeError` for what must not come through; note who sends the rest."""
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if len(scope["headers"]) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            raise ServeError("headers", "The headers of the request are too large.")
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        hosts = hosts or [b"localhost"] * (scope["http_version"] == "1.0")  # had no such header
        host = _HOST.fullmatch(hosts[0].decode("latin-1")) if len(hosts) == 1 else None
        if host is None or (self._hosts is not None and host[1].lower() not in self._hosts):
            raise ServeError("invalid", "The Host header does not name this server.", param="host")
        # Anthropic's clients have a header of their own.
        bearer = headers.get(b"authorization", b""), b"Bearer " + headers.get(b"x-api-key", b"")
        keys = self._own_keys.get(scope["path"], self._keys)
        found = [key_in(each, keys) for each in bearer] if keys else []
        client = scope.get("client") or (None, 0)
        TRACE.set(trace_from(*(_text(headers, each) for each in (b"traceparent", b"tracestate"))))
        CALLER.set(Caller(next(filter(None, found), None), holder_of(client[0])))
        if keys and scope["path"] not in PUBLIC and not any(found):
            raise ServeError("unauthenticated", "A valid API key is needed: Authorization: Bearer.")


def _text(headers: dict[bytes, bytes], name: bytes) -> str:
    return headers.get(name, b"").decode("latin-1")


def _log(scope: Scope, headers: dict[bytes, bytes], status: int, seconds: float) -> None:
    """One line per request; probes and polls only where they are looked for."""
    is_quiet = scope["path"] in QUIET and status in (200, 503)
    logger.log(
        logging.DEBUG if is_quiet else logging.INFO,
        "http: %s %s %d %.1f ms id=%s trace=%s",
        *(scope["method"], _shown(scope["path"]), status, 1000 * seconds, scope["request_id"]),
        trace_id(_text(headers, b"traceparent")),
    )


def _shown(path: str) -> str:
    return path[:80].encode("ascii", "backslashreplace").decode() if path.isprintable() else "?"


async def _send_error(send: Send, error: ServeError | HTTPException, path: str) -> int:
    """Answer with an error object, as the path has it, and what HTTP wants beside it."""
    headers = []
    if isinstance(error, HTTPException):
        given = error.headers or {}
        headers += [(name.lower().encode(), value.encode()) for name, value in given.items()]
        is_method = error.status_code == 405
        kind = "no_method" if is_method else "not_found"
        words = "This path has another method." if is_method else "There is no such path."
        error = ServeError(kind, words)
    if error.kind.retry_seconds is not None:
        headers.append((b"retry-after", str(error.kind.retry_seconds).encode()))
    if error.kind.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.kind.status in (408, 413, 431):
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    await send_json(send, error_body(path, error), error.kind.status, headers)
    return error.kind.status


async def send_json(
    send: Send, value: object, status: int = 200, headers: Collection[tuple[bytes, bytes]] = ()
) -> None:
    """Answer with JSON."""
    await send_body(send, msgspec.json.encode(value), status, headers)


async def send_body(
    send: Send, body: bytes, status: int = 200, headers: Collection[tuple[bytes, bytes]] = ()
) -> None:
    """Answer with the text of JSON."""
    length = str(len(body)).encode()
    fixed = [(b"content-type", b"application/json"), (b"content-length", length)]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body})


def warning_headers(unknown: Collection[str]) -> list[tuple[bytes, bytes]]:
    """A header that names the fields that were ignored, if there were any."""
    if not unknown:
        return []
    plain = [name for name in unknown if name.isascii() and name.replace(".", "_").isidentifier()]
    text = ", ".join(plain[:10])[:200] or "some"
    return [(b"warning", f'199 shiftjax "ignored fields: {text}"'.encode())]


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The body of a JSON request, bounded in size and time. Raises `ServeError`."""
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"application/json").split(b";")[0].strip().lower()
    if kind != b"application/json" and not kind.endswith(b"+json"):
        raise ServeError("media_type", "The body must be JSON (Content-Type: application/json).")
    if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"identity", b""):
        raise ServeError("media_type", "The body must not be compressed.")
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > limit:
        raise _too_large(limit)
    chunks, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ServeError("cancelled", "The client closed the request.")
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > limit:
                    raise _too_large(limit)
                chunks.append(chunk)
                if not message.get("more_body"):
                    return b"".join(chunks)
    except TimeoutError:
        raise ServeError("slow_sender", "The body took too long to arrive.") from None


def _too_large(limit: int) -> ServeError:
    return ServeError("too_large", f"The body is larger than {limit} bytes.")
