"""The routes of what is kept of conversations: responses and conversations, by API key."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from serving.http.described import Described, json_response
from serving.http.guard import read_body
from serving.server.dialects.response_items import Item
from serving.server.dialects.responses_api import typed
from serving.server.errors import ServeError, invalid
from serving.server.json_body import parse_json, read
from serving.server.schema import check_metadata
from serving.server.service import Service
from serving.stored.documents import owner_now
from serving.stored.items import page
from serving.stored.setup import Kept

MOST_ADDED = 20  # items that a request may add to a conversation, as at OpenAI's

Json = dict[str, Any]
Answer = Callable[[Request, str], Awaitable[Json]]  # of a request and its owner
RESPONSE, CONVERSATION = "/v1/responses/{id}", "/v1/conversations/{id}"


class ConversationFields(msgspec.Struct, kw_only=True):
    """The body of a new conversation."""

    items: list[Item] | None = None
    metadata: dict[str, str] | None = None


class ChangeFields(msgspec.Struct, kw_only=True):
    """The body of a change of a conversation."""

    metadata: dict[str, str] | None = None


class ItemsFields(msgspec.Struct, kw_only=True):
    """The body that adds to a conversation."""

    items: list[Item]


def stored_routes(service: Service, kept: Kept) -> list[Described]:
    """The routes; on a server that keeps nothing they say how it would."""
    return [*_of_responses(kept), *_of_conversations(service, kept)]


def _of_responses(kept: Kept) -> list[Described]:
    async def response(request: Request, owner: str) -> Json:
        if request.query_params.get("stream", "false") != "false":
            raise invalid("stream", "is of responses in the background", "unsupported_parameter")
        name, talks = request.path_params["id"], kept.talks
        return talks.background.running(owner, name) or await talks.responses.get(owner, name)

    async def delete_response(request: Request, owner: str) -> Json:
        name = request.path_params["id"]
        await kept.talks.background.cancel(owner, name)
        await kept.talks.responses.delete(owner, name)
        return {"id": name, "object": "response", "deleted": True}

    async def input_items(request: Request, owner: str) -> Json:
        items = await kept.talks.responses.input_items(owner, request.path_params["id"])
        return page(items, request.query_params)

    async def cancel(request: Request, owner: str) -> Json:
        name, talks = request.path_params["id"], kept.talks
        await talks.background.cancel(owner, name)
        response = await talks.responses.get(owner, name)
        if not response["background"]:
            raise invalid("background", "was not asked for: only such a response can be cancelled")
        return response

    return [
        _route(RESPONSE, "GET", "A response that was kept", response),
        _route(RESPONSE, "DELETE", "Forget a response", delete_response),
        _route(f"{RESPONSE}/input_items", "GET", "What a response was told", input_items),
        _route(f"{RESPONSE}/cancel", "POST", "Cancel a response in the background", cancel),
    ]


def _of_conversations(service: Service, kept: Kept) -> list[Described]:
    most = service.options.max_request_bytes

    async def new(request: Request, owner: str) -> Json:
        asked, values = await _read(request, most, ConversationFields)
        items = _few(values.get("items") or [])
        return await kept.talks.conversations.create(owner, items, _metadata(asked.metadata))

    async def conversation(request: Request, owner: str) -> Json:
        return (await kept.talks.conversations.get(owner, request.path_params["id"]))[
            "conversation"
        ]

    async def change(request: Request, owner: str) -> Json:
        asked, _ = await _read(request, most, ChangeFields)
        name, metadata = request.path_params["id"], _metadata(asked.metadata)
        return await kept.talks.conversations.describe(owner, name, metadata)

    async def delete(request: Request, owner: str) -> Json:
        name = request.path_params["id"]
        await kept.talks.conversations.delete(owner, name)
        return {"id": name, "object": "conversation.deleted", "deleted": True}

    async def items(request: Request, owner: str) -> Json:
        document = await kept.talks.conversations.get(owner, request.path_params["id"])
        return page(document["items"], request.query_params)

    async def add(request: Request, owner: str) -> Json:
        _, values = await _read(request, most, ItemsFields)
        added = _few(values["items"])
        told = await kept.talks.conversations.add(owner, request.path_params["id"], added)
        return page(told, {"order": "asc", "limit": "100"})

    async def item(request: Request, owner: str) -> Json:
        document = await kept.talks.conversations.get(owner, request.path_params["id"])
        wanted = request.path_params["item"]
        for each in document["items"]:
            if each["id"] == wanted:
                return each
        raise ServeError("not_found", "There is no such item.", code="item_not_found")

    async def remove(request: Request, owner: str) -> Json:
        places = request.path_params
        return await kept.talks.conversations.remove(owner, places["id"], places["item"])

    return [
        _route("/v1/conversations", "POST", "Begin a conversation", new, ConversationFields),
        _route(CONVERSATION, "GET", "A conversation", conversation),
        _route(CONVERSATION, "POST", "Change its metadata", change, ChangeFields),
        _route(CONVERSATION, "DELETE", "Forget a conversation", delete),
        _route(f"{CONVERSATION}/items", "GET", "The items of a conversation", items),
        _route(f"{CONVERSATION}/items", "POST", "Add items", add, ItemsFields),
        _route(f"{CONVERSATION}/items/{{item}}", "GET", "One item", item),
        _route(f"{CONVERSATION}/items/{{item}}", "DELETE", "Remove an item", remove),
    ]


def _route(path: str, verb: str, summary: str, answer: Answer, body: Any = None) -> Described:
    async def endpoint(request: Request) -> Response:
        request.state.ignored = ()
        told = await answer(request, owner_now())
        return json_response(told, ignored=request.state.ignored)

    return Described(path, endpoint, summary, body, methods=(verb,))


async def _read[T: msgspec.Struct](request: Request, most: int, kind: type[T]) -> tuple[T, Json]:
    """The fields of a body, and the body with the types of its items."""
    values = parse_json(await read_body(request.scope, request.receive, most))
    values = typed(values, "items")
    checked, request.state.ignored = read(kind, values)
    return checked, values


def _few(items: Sequence[Json]) -> Sequence[Json]:
    if len(items) > MOST_ADDED:
        raise invalid("items", f"must have at most {MOST_ADDED} entries")
    return items


def _metadata(given: dict[str, str] | None) -> Json:
    check_metadata(given or {})
    return given or {}
