"""The endpoints of encoders: a body in, embeddings or an order of documents out."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from serving.http.described import Described
from serving.http.generate import timeout_of, watching
from serving.http.guard import read_body, send_body, warning_headers
from serving.server.embedding import (
    EmbeddingFields,
    Embeddings,
    embed,
    embedding_body,
    written,
)
from serving.server.errors import ServeError
from serving.server.json_body import parse_json
from serving.server.scoring import (
    ClassifyFields,
    RerankFields,
    ScoreFields,
    classify,
    classify_body,
    rerank,
    rerank_body,
    score,
    score_body,
)
from serving.server.service import Service

Ask = Callable[..., Awaitable[tuple[Any, Embeddings]]]
Write = Callable[[Any, Any], bytes]
# What answers, what writes the answer, what it is, the body, and vLLM's paths for it.
ROUTES: tuple[tuple[Ask, Write, str, type[msgspec.Struct], tuple[str, ...]], ...] = (
    (embed, embedding_body, "Embed texts", EmbeddingFields, ("/v1/embeddings",)),
    (
        *(rerank, rerank_body, "Order documents by their score for a query", RerankFields),
        ("/v1/rerank", "/v2/rerank", "/rerank"),
    ),
    (score, score_body, "Score pairs of texts", ScoreFields, ("/v1/score", "/score")),
    (classify, classify_body, "Label texts", ClassifyFields, ("/v1/classify", "/classify")),
)


def embedding_routes(service: Service) -> list[Described]:
    """The routes; on a server of a decoder they say that it is one."""
    return [
        Described(path, Embed(service, ask, write), summary, fields)
        for ask, write, summary, fields, paths in ROUTES
        for path in paths
    ]


class Embed:
    """An ASGI endpoint: `ask` embeds what a body asks for, `write` makes the answer."""

    def __init__(self, service: Service, ask: Ask, write: Write):
        self._service, self._ask, self._write = service, ask, write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; a client that hangs up takes its texts with it."""
        service = self._service
        try:
            body = await read_body(scope, receive, service.options.max_request_bytes)
            values, timeout = parse_json(body), timeout_of(scope)
        except ServeError as error:
            service.refuse(error)
            raise
        asked = asyncio.ensure_future(self._ask(service, values, scope["request_id"], timeout))
        async with watching(receive, asked.cancel):
            try:
                fields, found = await asked
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise  # the server ends, not the client
                raise ServeError("cancelled", "The client closed the request.") from None
        text = await written(service, self._write, fields, found)
        await send_body(send, text, headers=warning_headers(found.unknown))
