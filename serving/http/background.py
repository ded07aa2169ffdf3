"""`background: true`: a response is queued, and answered when nobody waits for it."""

from collections.abc import Sequence

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.http.guard import read_body, send_json, warning_headers
from serving.http.inner import ask
from serving.server.dialects.asked import Json, renamed, wrong
from serving.server.dialects.responses_api import NAMES, read_response
from serving.server.dialects.responses_api_writer import response_of
from serving.server.errors import ServeError
from serving.server.json_body import parse_json
from serving.server.served import Generation
from serving.server.service import Service
from serving.stored.background import Ask
from serving.stored.documents import owner_now
from serving.stored.setup import Kept, when_ready

PATH = "/v1/responses"


class InBackground:
    """An ASGI endpoint around that of responses: it queues what shall run in the background."""

    def __init__(self, service: Service, kept: Kept, inner: ASGIApp):
        self._service, self._kept, self._inner = service, kept, inner
        if (talks := kept.maybe_talks) is not None:
            when_ready(service, lambda: talks.background.start(asking(inner)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            body = await read_body(scope, receive, self._service.options.max_request_bytes)
            values = parse_json(body) if b'"background"' in body else None
            if isinstance(values, dict) and values.get("background") is True:
                response, ignored = await self._queue(values, scope["request_id"])
                await send_json(send, response, headers=warning_headers(ignored))
                return
        except ServeError as error:
            self._service.refuse(error)
            raise
        await self._inner(scope, _again(body, receive), send)

    async def _queue(self, values: Json, request_id: str) -> tuple[Json, Sequence[str]]:
        """What is queued, and the names of fields that have no effect. Raises `ServeError`."""
        if self._kept.maybe_talks is None:
            words = "needs a server that keeps responses: --store-responses SIZE"
            raise wrong("background", words, "unsupported_parameter")
        if values.get("stream"):
            words = "cannot be combined with background: ask for the response by its id"
            raise wrong("stream", words, "unsupported_parameter")
        if values.get("store") is False:
            raise wrong("store", "must not be false with background: it is asked for by its id")
        owner, talks = owner_now(), self._kept.maybe_talks
        exchange = await talks.responses.begin(owner, request_id, values)
        try:
            wish, _ = await self._service.count(read_response, exchange.values)
        except ServeError as error:
            raise renamed(error, NAMES) from None
        called = wish.fields.model
        model = self._service.model_named(called).answers_as(called)
        name = wish.fields.request_id or request_id
        response = response_of(Generation(name, wish, model, []), "queued")
        await talks.background.begin(owner, response, values)
        return response, (*wish.ignored, *exchange.ignored)


def asking(inner: ASGIApp) -> Ask:
    """What asks the endpoint of responses."""

    async def response(values: Json, request_id: str) -> Json:
        _, body = await ask(inner, PATH, values, request_id)
        return msgspec.json.decode(body)

    return response


def _again(body: bytes, receive: Receive) -> Receive:
    """What gives a body that has been read once more, and then what comes."""
    left = [body]

    async def receive_again() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return receive_again
