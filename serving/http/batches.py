"""The routes of batches, as OpenAI has them, and how a line of a batch asks an endpoint."""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from serving.http.described import Described, json_response
from serving.http.guard import read_body
from serving.http.inner import ask
from serving.server.async_engine import AsyncEngine
from serving.server.errors import invalid
from serving.server.json_body import parse_json, read
from serving.server.schema import check_metadata
from serving.server.service import Service
from serving.stored.batch_lines import Line
from serving.stored.batch_run import Call, Gate
from serving.stored.batches import WINDOW_SECONDS
from serving.stored.documents import owner_now
from serving.stored.items import page
from serving.stored.setup import Kept, when_ready
from shiftjax.core.request import derive_seed

BEHIND = 1 << 20  # added to the priority of lines: clients come first
EMBEDDER_LINES = 8  # at once, of a server of an encoder

Json = dict[str, Any]
_WORK = {"priority": BEHIND}
_TEXT = _WORK | {"seed": None}  # made of the number of the line
# The endpoints that lines may ask, and what is added to a body that does not have it.
ENDPOINTS: Mapping[str, Json] = {
    "/v1/chat/completions": _TEXT,
    "/v1/completions": _TEXT,
    "/v1/responses": _TEXT | {"store": False},
    "/v1/embeddings": _WORK,
}


class BatchFields(msgspec.Struct, kw_only=True):
    """The body of a new batch."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: Any = None


def batch_routes(service: Service, kept: Kept) -> list[Described]:
    """The routes; on a server that keeps nothing they say how it would."""

    async def create(request: Request) -> Response:
        batches, limit = kept.store.batches, service.options.max_request_bytes
        values = parse_json(await read_body(request.scope, request.receive, limit))
        fields, unknown = read(BatchFields, values)
        _check(fields)
        made = await batches.create(
            owner_now(), fields.input_file_id, fields.endpoint, fields.metadata or {}
        )
        return json_response(made, ignored=unknown)

    async def batch(request: Request) -> Response:
        return json_response(await kept.store.batches.get(owner_now(), request.path_params["id"]))

    async def batches(request: Request) -> Response:
        return json_response(page(await kept.store.batches.all(owner_now()), request.query_params))

    async def cancel(request: Request) -> Response:
        return json_response(
            await kept.store.batches.cancel(owner_now(), request.path_params["id"])
        )

    path = "/v1/batches/{id}"
    return [
        Described("/v1/batches", create, "Run the lines of a file", BatchFields),
        Described("/v1/batches", batches, "The batches that are kept"),
        Described(path, batch, "A batch"),
        Described(f"{path}/cancel", cancel, "Cancel a batch", methods=("POST",)),
    ]


def run_batches(service: Service, kept: Kept, routes: Mapping[str, ASGIApp]) -> None:
    """Run batches as soon as the service is ready. `routes` are the endpoints by their path."""
    if kept.maybe_store is None:
        return
    batches = kept.maybe_store.batches
    when_ready(service, lambda: batches.start(line_caller(routes), _gate(service)))


def _gate(service: Service) -> Gate:
    """As many lines at once as the settings say, or half of what the engine runs."""
    _, engine = service.running()
    if not isinstance(engine, AsyncEngine):
        return Gate(service.options.batch_requests or EMBEDDER_LINES, lambda: False)
    half = max(1, (engine.capacity["running"] or 2 * EMBEDDER_LINES) // 2)
    return Gate(service.options.batch_requests or half, lambda: engine.stats.num_waiting > 0)


def line_caller(routes: Mapping[str, ASGIApp]) -> Call:
    """What asks an endpoint as a client would, without a connection."""

    async def call(url: str, values: Json, line: Line, request_id: str) -> tuple[int, Any]:
        status, body = await ask(routes[url], url, _completed(url, values, line), request_id)
        return status, msgspec.Raw(body)

    return call


def _completed(url: str, values: Json, line: Line) -> Json:
    """A body that waits behind clients, and draws the same whenever it is asked."""
    added = dict(ENDPOINTS[url])
    if "seed" in added:
        added["seed"] = derive_seed(0, line.number)
    given = values.get("priority")
    if isinstance(given, int):
        added["priority"] = max(-BEHIND, min(given, BEHIND)) + BEHIND
    return added | values | {"priority": added["priority"]}


def _check(fields: BatchFields) -> None:
    if fields.endpoint not in ENDPOINTS:
        raise invalid("endpoint", f"must be one of {', '.join(ENDPOINTS)}")
    if fields.completion_window not in WINDOW_SECONDS:
        raise invalid("completion_window", "must be 24h")
    if fields.output_expires_after is not None:
        words = "is not supported: files are kept until they are deleted"
        raise invalid("output_expires_after", words, "unsupported_parameter")
    check_metadata(fields.metadata or {})
