"""The HTTP application: which path does what."""

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version as installed
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.http.adapters import PATHS as ADAPTER_PATHS
from serving.http.adapters import adapter_routes
from serving.http.background import InBackground
from serving.http.batches import batch_routes, run_batches
from serving.http.cache import LOCAL, cache_routes
from serving.http.control import PATHS as CONTROLS
from serving.http.control import control_routes
from serving.http.described import Described, json_response
from serving.http.dialects import DIALECTS
from serving.http.embeddings import embedding_routes
from serving.http.files import file_routes
from serving.http.generate import Generate
from serving.http.guard import LOOPBACK, Guard, read_body, send_json, warning_headers
from serving.http.info import info_routes
from serving.http.models import model_routes
from serving.http.openapi import document
from serving.http.outside import reachable
from serving.http.page import page_routes, root_route
from serving.http.stored import stored_routes
from serving.server.dialects import messages, responses_api
from serving.server.dialects.asked import renamed
from serving.server.errors import ServeError
from serving.server.fields import DetokenizeFields, TokenizeFields
from serving.server.json_body import parse_json, unknown_names
from serving.server.schema import Wish
from serving.server.service import Service
from serving.stored.documents import owner_now
from serving.stored.setup import Kept, open_kept

Answer = tuple[dict[str, Any], tuple[str, ...]]
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def make_app(
    service: Service, keys: tuple[str, ...] = (), control_keys: tuple[str, ...] = ()
) -> ASGIApp:
    """The application, guarded. `keys` are the API keys; none: no key is needed.

    `control_keys` are those of the paths that hold and change the engine and its adapters; none:
    there are no such paths.
    """
    # A redirect to a path with a slash would repeat what the Host header says.
    controls = *control_routes(service, control_keys), *adapter_routes(service, control_keys)
    routes = [*controls, *all_routes(service, has_keys=bool(keys))]
    app = Router(routes, redirect_slashes=False)
    is_local = service.options.host in LOCAL
    own = dict.fromkeys((*CONTROLS, *ADAPTER_PATHS), control_keys) if control_keys else {}
    guard = Guard(app, keys, LOOPBACK if is_local else None, service.refuse, own)
    return reachable(guard, service.options)


def all_routes(service: Service, *, has_keys: bool = False) -> list[BaseRoute]:
    """Every path; those that are `Described` are in `/openapi.json`."""
    kept = open_kept(service)
    endpoints = Endpoints(service, kept)
    memories = {"/v1/responses": kept.memory}
    speak: dict[str, ASGIApp] = {
        path: Generate(service, each, memories.get(path)) for path, each in DIALECTS.items()
    }
    speak["/v1/responses"] = InBackground(service, kept, speak["/v1/responses"])
    routes = [
        *(Described(path, speak[path], d.summary, d.fields) for path, d in DIALECTS.items()),
        *endpoints.routes(),
        *embedding_routes(service),
        *model_routes(service),
        *info_routes(service, endpoints.ready),
        *cache_routes(service, has_keys=has_keys),
        *stored_routes(service, kept),
        *file_routes(service, kept),
        *batch_routes(service, kept),
        root_route(service.options.ui),
        *(page_routes(service) if service.options.ui else ()),
    ]
    asked = {each.path: each.endpoint for each in routes if isinstance(each, Described)}
    run_batches(service, kept, asked)
    return [*routes, Route("/openapi.json", _documented(routes))]


def _documented(routes: Iterable[BaseRoute]) -> Any:
    async def openapi(request: Request) -> Response:
        return json_response(document(routes))

    return openapi


class Raw:
    """An endpoint that reads a bounded JSON body; `answer` gives JSON, and what it ignored."""

    def __init__(self, answer: Any):
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        answer, unknown = await self._answer(scope, receive)
        await send_json(send, answer, headers=warning_headers(unknown))


class Endpoints:
    """Everything but generations."""

    def __init__(self, service: Service, kept: Kept):
        self._service, self._kept = service, kept

    def routes(self) -> list[BaseRoute]:
        """The routes; `/health` is `/health/ready` by its shorter name."""
        return [
            Described(
                "/v1/messages/count_tokens",
                Raw(self.count_message),
                "Count the tokens of a message",
                messages.MessagesCountFields,
            ),
            Described(
                "/v1/responses/input_tokens",
                Raw(self.count_response),
                "Count the tokens of an input",
                responses_api.ResponsesCountFields,
            ),
            Described(
                "/tokenize",
                Raw(self.tokenize),
                "Token ids of a text or a conversation",
                TokenizeFields,
            ),
            Described(
                "/detokenize", Raw(self.detokenize), "The text of token ids", DetokenizeFields
            ),
            Route("/health", self.ready),
            Described("/health/live", self.live, "The process runs"),
            Described("/health/ready", self.ready, "Requests are taken"),
            Described("/health/progress", self.progress, "Steps finish, if there is work"),
            Described("/version", self.version, "The version of the server"),
            Described("/metrics", self.metrics, "Prometheus metrics", media_type="text/plain"),
        ]

    async def _body(self, scope: Scope, receive: Receive) -> Any:
        return parse_json(await read_body(scope, receive, self._service.options.max_request_bytes))

    async def tokenize(self, scope: Scope, receive: Receive) -> Answer:
        """POST /tokenize."""
        values = await self._body(scope, receive)
        model, fields, ids = await self._service.tokenize(values)
        _, engine = self._service.running()
        answer = {
            "count": len(ids),
            "max_model_len": engine.request_limits.max_model_len,
            "tokens": ids,
            "token_strs": None,
        }
        if fields.return_token_strs and model.tokenizer is not None:
            answer["token_strs"] = [model.tokenizer.backend.id_to_token(i) for i in ids]
        return answer, unknown_names(TokenizeFields, values)

    async def detokenize(self, scope: Scope, receive: Receive) -> Answer:
        """POST /detokenize."""
        values = await self._body(scope, receive)
        answer = {"prompt": await self._service.detokenize(values)}
        return answer, unknown_names(DetokenizeFields, values)

    async def count_message(self, scope: Scope, receive: Receive) -> Answer:
        """POST /v1/messages/count_tokens."""
        values = await self._body(scope, receive)
        num_tokens, unknown = await self._count(values, messages.read_count, messages.NAMES)
        return {"input_tokens": num_tokens}, unknown

    async def count_response(self, scope: Scope, receive: Receive) -> Answer:
        """POST /v1/responses/input_tokens."""
        values = await self._body(scope, receive)
        values = await self._kept.memory.recalled(owner_now(), values)
        counted = self._count(values, responses_api.read_count, responses_api.NAMES)
        num_tokens, unknown = await counted
        return {"object": "response.input_tokens", "input_tokens": num_tokens}, unknown

    async def _count(
        self, values: Any, read: Callable[[Any], Wish], names: Mapping[str, str]
    ) -> tuple[int, tuple[str, ...]]:
        try:
            wish, num_tokens = await self._service.count(read, values)
        except ServeError as error:
            raise renamed(error, names) from None
        return num_tokens, wish.ignored

    async def live(self, request: Request) -> Response:
        """GET /health/live: the process and its event loop run."""
        return json_response({"status": "live"})

    async def ready(self, request: Request) -> Response:
        """GET /health/ready: requests are taken; by which attention, and why."""
        if (start := self._service.phases.state()) is not None:
            error = self._service.still_starting()
            body = {"status": "starting", "start": start} | error.body()
            return json_response(
                body, error.kind.status, {"retry-after": str(error.kind.retry_seconds)}
            )
        model, engine = self._service.running()
        engine.check_room(0)
        if engine.is_leaving:
            raise ServeError("draining", "The server will shut down: send requests elsewhere.")
        if not engine.is_ready:
            raise ServeError("starting", "The engine does not run.")
        attention = {"attention": model.attention} if model.attention else {}
        simulated = {"simulated": model.simulated} if model.simulated else {}
        return json_response({"status": "ready"} | attention | simulated)

    async def progress(self, request: Request) -> Response:
        """GET /health/progress: steps finish, if there is work."""
        if not self._service.makes_progress:
            raise ServeError("starting", "No step has finished for a while.", code="no_progress")
        return json_response({"status": "progress"})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        body = self._service.metrics.text()
        return Response(body, headers={"content-type": METRICS_TYPE})

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return json_response({"version": installed("shiftjax")})
