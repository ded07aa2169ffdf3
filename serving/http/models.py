"""The models that are served, as OpenAI lists them and, by its header, as Anthropic does.

https://docs.anthropic.com/en/api/models-list
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from serving.http.described import Described, json_response
from serving.server.errors import ServeError, invalid
from serving.server.service import Service

VERSION_HEADER = "anthropic-version"
LIMIT, MAX_LIMIT = 20, 1000  # models in one answer to Anthropic's clients

Json = dict[str, Any]


def model_routes(service: Service) -> list[Described]:
    """`/v1/models` and `/v1/models/{id}`."""

    async def models(request: Request) -> Response:
        model, _ = service.running()
        if VERSION_HEADER in request.headers:
            return _json(
                _page([_of_anthropic(service, n) for n in model.called()], request.query_params)
            )
        return _json({"object": "list", "data": [_of_openai(service, n) for n in model.called()]})

    async def model(request: Request) -> Response:
        name = request.path_params["id"]
        service.model_named(name)
        write = _of_anthropic if VERSION_HEADER in request.headers else _of_openai
        return _json(write(service, name))

    return [
        Described("/v1/models", models, "The models that are served"),
        Described("/v1/models/{id:path}", model, "One model"),
    ]


def _of_openai(service: Service, name: str) -> Json:
    model, engine = service.running()
    adapters = {} if model.adapters is None or name in model.names else model.adapters.names
    path = adapters.get(name)
    told = {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "shiftjax",
        "root": path or model.name,
        "parent": model.name if path else None,
        "max_model_len": engine.request_limits.max_model_len,
        "task": model.task,
        "default_sampling_params": dict(model.defaults),
    }
    return told | ({"simulated": model.simulated} if model.simulated else {})


def _of_anthropic(service: Service, name: str) -> Json:
    model, engine = service.running()
    created = datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    title = f"{name} (simulated {model.simulated})" if model.simulated else name
    shown = {"type": "model", "id": name, "display_name": title, "created_at": created}
    return shown | {"max_input_tokens": engine.request_limits.max_model_len}


def _page(models: Sequence[Json], query: QueryParams) -> Json:
    """A part of the list: at most `limit`, after or before the model of an id."""
    text, names = query.get("limit", str(LIMIT)), [each["id"] for each in models]
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_LIMIT):
        raise invalid("limit", f"must be between 1 and {MAX_LIMIT}")
    after, before = query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise invalid("before_id", "cannot be combined with after_id")
    for each in (after, before):
        if each is not None and each not in names:
            raise ServeError("not_found", "There is no such model.", code="model_not_found")
    limit = int(text)
    if before is not None:
        found = models[: names.index(before)]
        shown = found[-limit:]
    else:
        found = models[0 if after is None else names.index(after) + 1 :]
        shown = found[:limit]
    return {
        "data": shown,
        "has_more": len(found) > len(shown),
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
    }


def _json(value: Json) -> Response:
    return json_response(value, headers={"vary": VERSION_HEADER})
