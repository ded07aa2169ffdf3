"""How the server asks an endpoint of its own as a client would, without a connection."""

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

JSON = (b"content-type", b"application/json")


async def ask(
    app: ASGIApp,
    path: str,
    values: Any,
    request_id: str,
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> tuple[int, bytes]:
    """(status, body) of the answer to a JSON body. Raises `ServeError` as the endpoint does."""
    body = msgspec.json.encode(values)
    sent, status, has_come = bytearray(), 0, False

    async def receive() -> Message:
        nonlocal has_come
        if has_come:
            await asyncio.Event().wait()  # it never hangs up
        has_come = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        sent.extend(message.get("body", b""))

    scope = {"type": "http", "method": "POST", "path": path, "request_id": request_id}
    scope |= {"headers": [JSON, *headers], "client": None}
    await app(scope, receive, send)
    return status, bytes(sent)
