"""The door for a trainer: pause, sleep, other weights. Off by default, with a key of its own.

Paths and parameters are vLLM's where it has such; `/update_weights` reads a checkpoint that the
server can see.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from serving.http.described import Described, json_response
from serving.http.guard import read_body
from serving.server.async_engine import AsyncEngine
from serving.server.errors import ServeError, invalid
from serving.server.json_body import parse_json, read
from serving.server.service import Service
from shiftjax.core.engine import Engine
from shiftjax.rollouts.control import MODES, TAGS, RolloutError

BOOLEANS: Mapping[str, bool] = {"true": True, "1": True, "false": False, "0": False}
LEVELS = {str(level): level for level in (0, 1, 2)}


class WeightFields(msgspec.Struct):
    """What `/update_weights` reads."""

    path: str  # of a checkpoint's directory, or of a safetensors file
    version: int | None = None  # of the new weights; None: one larger than the last
    recompute: bool = False  # requests lose the KV of the old weights


Verb = Callable[[AsyncEngine, Request], Awaitable[Any]]


async def pause(engine: AsyncEngine, request: Request) -> Any:
    """POST /pause."""
    asked = _asked(request.query_params, ("mode", "clear_cache"))
    mode = _one_of("mode", asked.get("mode", "abort"), dict(zip(MODES, MODES, strict=True)))
    clears = _one_of("clear_cache", asked.get("clear_cache", "true").lower(), BOOLEANS)
    await engine.pause(mode)
    if clears:
        await engine.call(Engine.flush_prefix_cache)
    return {"status": "paused"}


async def resume(engine: AsyncEngine, request: Request) -> Any:
    """POST /resume."""
    _asked(request.query_params, ())
    await engine.control(lambda rollouts, now: rollouts.resume())
    return {"status": "resumed"}


async def is_paused(engine: AsyncEngine, request: Request) -> Any:
    """GET /is_paused."""
    return {"is_paused": engine.rollouts.is_paused}


async def sleep(engine: AsyncEngine, request: Request) -> Any:
    """POST /sleep."""
    asked = _asked(request.query_params, ("level", "mode"))
    level = _one_of("level", asked.get("level", "1"), LEVELS)
    mode = _one_of("mode", asked.get("mode", "abort"), dict(zip(MODES, MODES, strict=True)))
    if mode == "wait":
        await engine.pause(mode)
    await engine.control(lambda rollouts, now: rollouts.sleep(level, mode, now))
    return {"is_sleeping": engine.rollouts.is_sleeping}


async def wake_up(engine: AsyncEngine, request: Request) -> Any:
    """POST /wake_up."""
    _asked(request.query_params, ("tags",))
    tags = request.query_params.getlist("tags") or None
    for tag in tags or ():
        _one_of("tags", tag, dict(zip(TAGS, TAGS, strict=True)))
    await engine.control(lambda rollouts, now: rollouts.wake_up(tags))
    return {"is_sleeping": engine.rollouts.is_sleeping}


async def is_sleeping(engine: AsyncEngine, request: Request) -> Any:
    """GET /is_sleeping."""
    return {"is_sleeping": engine.rollouts.is_sleeping}


async def update_weights(engine: AsyncEngine, request: Request) -> Any:
    """POST /update_weights."""
    limit = engine.max_request_bytes
    body = await read_body(request.scope, request.receive, limit)
    fields, unknown = read(WeightFields, parse_json(body))
    if unknown:
        raise invalid(unknown[0], "is no field of this path")
    how = {"version": fields.version, "recompute": fields.recompute}
    await engine.control(lambda rollouts, now: rollouts.update(fields.path, now, **how))
    return {"weight_version": engine.rollouts.version}


PATHS: Mapping[str, tuple[Verb, str, str]] = {
    "/pause": (pause, "POST", "Begin no step any more"),
    "/resume": (resume, "POST", "Go on after a pause"),
    "/is_paused": (is_paused, "GET", "Whether no step is begun"),
    "/sleep": (sleep, "POST", "Give up device memory"),
    "/wake_up": (wake_up, "POST", "Take device memory back"),
    "/is_sleeping": (is_sleeping, "GET", "Whether weights or KV are not on devices"),
    "/update_weights": (update_weights, "POST", "Change weights to those of a checkpoint"),
}


def control_routes(service: Service, keys: Collection[str]) -> list[Described]:
    """The routes; none where there is no key of theirs."""
    if not keys:
        return []
    return [
        Described(path, _endpoint(service, verb), summary, methods=(method,))
        for path, (verb, method, summary) in PATHS.items()
    ]


def _endpoint(service: Service, verb: Verb) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        _, engine = service.generating()
        try:
            return json_response(await verb(engine, request))
        except RolloutError as error:
            raise ServeError("not_now", str(error)) from None
        except ValueError as error:  # of weights that are not the model's
            raise ServeError("invalid", str(error).splitlines()[0]) from None

    return answer


def _asked(query: QueryParams, known: Collection[str]) -> Mapping[str, str]:
    """The parameters of a query. Raises `ServeError` for others than these."""
    for name in query:
        if name not in known:
            raise invalid(name, f"is no parameter of this path: it has {list(known)}")
    return query


def _one_of[T](name: str, text: str, known: Mapping[str, T]) -> T:
    if text not in known:
        raise invalid(name, f"must be one of {', '.join(known)}")
    return known[text]
