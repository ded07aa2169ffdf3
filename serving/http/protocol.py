"""Uvicorn's HTTP/1.1 with bounds of its own: size and time of headers, connections, slow readers.

What is checked here cannot be checked by an application: it is called when all headers are there.
"""

import asyncio
import math
import resource
import socket
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from serving.server.errors import ServeError

HEADER_SECONDS = 10.0  # that a client has for sending the headers of its first request
MAX_HEAD_BYTES = 64 << 10  # of target and headers; the guard refuses less, with a JSON error
MAX_CONNECTIONS = 4096
SPARE_DESCRIPTORS = 32  # that connections leave to everything else
BYTES_PER_BODY_BYTE = 9  # of a body in chunks of one byte: b"0001\r\n", the byte, b"\r\n"
UNSENT_BYTES = 128 << 10  # that the system keeps for a connection; more shows that nobody reads
KEEPALIVE_IDLE_SECONDS, KEEPALIVE_INTERVAL_SECONDS, KEEPALIVE_PROBES = 20, 5, 3


class BoundedProtocol(HttpToolsProtocol):
    """A connection that can neither wait forever nor pile up headers."""

    _is_in_head = True
    _head_bytes = 0
    _num_messages = 0
    _spare_bytes = 0  # that may come without being body: framing and trailers
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Begin the time for headers; refuse one connection too many."""
        super().connection_made(transport)
        self._start_timer()
        if len(self.connections) > MAX_CONNECTIONS or _are_few_left(transport):
            self._refuse(ServeError("queue_full", "There are too many connections."))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse; what is no request yet has a limit in size and time."""
        if self.transport.is_closing():
            return
        number = self._num_messages
        super().data_received(data)
        if not self._is_in_head and number == self._num_messages:
            self._spare_bytes -= len(data)
            if self._spare_bytes < 0:
                self._refuse(ServeError("headers", "The body is mostly framing, or its trailers."))
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(ServeError("headers", "The headers of the request are too large."))
        if self.cycle is None or self.cycle.response_complete:
            self._start_timer()

    def on_message_begin(self) -> None:
        """Begin to count the bytes of a head."""
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0
        self._num_messages += 1
        self._spare_bytes = MAX_HEAD_BYTES

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; a trailer, which comes after the body, is none and is dropped."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Take a part of a body, and the framing that it may have had."""
        self._spare_bytes += BYTES_PER_BODY_BYTE * len(body)
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Start the application; `scope["abort"]` drops the connection and what is unsent."""
        self._is_in_head = False
        self._stop_timer()
        self.scope["abort"] = self.transport.abort  # pyright: ignore[reportGeneralTypeIssues]
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and self.cycle is not None:
            self.cycle.send = unframed(self.cycle)  # before the task of the request begins

    def on_response_complete(self) -> None:
        """Begin the time for the rest of a head that has come meanwhile."""
        super().on_response_complete()
        if self._is_in_head:
            self._start_timer()

    def send_400_response(self, msg: str) -> None:
        """Say in JSON that what came is no HTTP."""
        self._refuse(ServeError("invalid", msg, code="invalid_http"))

    def _time_out(self) -> None:
        self._refuse(ServeError("slow_sender", "The headers took too long to arrive."))

    def _start_timer(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEADER_SECONDS, self._time_out)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: ServeError) -> None:
        if self.transport.is_closing():
            return
        body = msgspec.json.encode(error.body())
        head = (
            b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            % len(body)
        )
        self.transport.write(STATUS_LINE[error.kind.status] + head + body)
        self.transport.close()


def unframed(cycle: RequestResponseCycle) -> Any:
    """The `send` of an answer to a client of HTTP/1.0, which knows no chunks (RFC 9112, 6.1).

    A body of unknown length ends with the connection, which uvicorn closes after any answer to
    such a client.
    """
    send, is_open_ended = cycle.send, False

    async def send_unframed(message: Any) -> None:
        nonlocal is_open_ended
        if message["type"] == "http.response.start":
            names = [name.lower() for name, _ in message.get("headers", ())]
            is_open_ended = b"content-length" not in names
            cycle.chunked_encoding = False if is_open_ended else None
        elif is_open_ended:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_unframed


def _are_few_left(transport: asyncio.Transport) -> bool:
    """Whether file descriptors are running out. A new one has the lowest number that is free."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = transport.get_extra_info("socket").fileno()
    return limit != resource.RLIM_INFINITY and number >= limit - SPARE_DESCRIPTORS


def tune(listener: socket.socket, unread_seconds: float) -> None:
    """Let small writes go at once; end connections whose peer has vanished or does not read.

    `unread_seconds` is how long a peer may take nothing; one to whom nothing is sent is asked after
    as long, or `KEEPALIVE_IDLE_SECONDS`, whether it is there. Connections inherit all of it from
    the listener (Linux). Without TCP_NODELAY an answer in two writes waits for 40 ms.
    """
    options: list[tuple[int, Any, int]] = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    seconds = max(1, math.ceil(unread_seconds))
    for name, value in (
        ("TCP_NODELAY", 1),
        ("TCP_KEEPIDLE", min(seconds, KEEPALIVE_IDLE_SECONDS)),
        ("TCP_KEEPINTVL", min(seconds, KEEPALIVE_INTERVAL_SECONDS)),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", max(1, int(1000 * unread_seconds))),
        ("TCP_NOTSENT_LOWAT", UNSENT_BYTES),
    ):
        if hasattr(socket, name):  # not on every system
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    for option in options:
        listener.setsockopt(*option)
