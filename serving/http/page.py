"""The page `/ui`: static files and the data that they poll; and `/`, which leads there."""

from importlib.resources import files
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from serving.server.async_embedder import AsyncEmbedder
from serving.server.async_engine import AsyncEngine
from serving.server.bottleneck import Bound, Look, bound_of, stuck_bound
from serving.server.errors import invalid
from serving.server.features import page_parts
from serving.server.handle import RequestHandle
from serving.server.service import Service
from serving.server.timeline import SLOT_SECONDS
from shiftjax.fleet.state import FleetState

NUM_OPEN = 16  # requests that have not ended, on the page

# The page may talk to this server only, and run no script but its own.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}
SCRIPTS = (
    *("adapters", "app", "chat", "charts", "draw", "explain", "fleet", "latency", "markdown"),
    *("modes", "requests", "server", "state"),
)
FILES = {
    "/ui": "index.html",
    "/ui/style.css": "style.css",
    **{f"/ui/{name}.js": f"{name}.js" for name in SCRIPTS},
}
# For whoever asks the root without a browser; addresses are relative, as a proxy may have moved it.
ROOT = {"server": "shiftjax", "api": "v1/", "openapi": "openapi.json", "health": "health"}


def page_routes(service: Service) -> list[BaseRoute]:
    """The routes of the page. Its files need no key, its data does."""
    directory = files("serving") / "ui"
    routes: list[BaseRoute] = [
        Route(path, _static((directory / name).read_bytes(), KINDS[name.split(".")[-1]]))
        for path, name in FILES.items()
    ]

    async def data(request: Request) -> Response:
        span = request.query_params.get("span", "60")
        if span not in map(str, SLOT_SECONDS):
            raise invalid("span", f"must be one of {', '.join(map(str, SLOT_SECONDS))}")
        engine, explained = service.engine, None
        if isinstance(engine, AsyncEngine):
            explained = await engine.explanations.page()
        values = service.timeline.snapshot(int(span)) | _now(service) | {"explained": explained}
        body = msgspec.json.encode(values)
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})

    return [*routes, Route("/ui/data", data)]


def root_route(has_page: bool) -> BaseRoute:
    """`/`: a browser is led to the page, if there is one; others get JSON with what there is."""

    async def root(request: Request) -> Response:
        headers = {"vary": "accept"}
        if has_page and "text/html" in request.headers.get("accept", ""):
            # Relative, so right below any path of a proxy, be it asked for with its slash or not.
            last = request.scope.get("raw_path", b"/").decode("latin-1").rpartition("/")[2]
            location = f"{last}/ui" if last else "ui"
            return Response(status_code=307, headers=headers | {"location": location})
        body = msgspec.json.encode(ROOT | ({"page": "ui"} if has_page else {}))
        return Response(body, media_type="application/json", headers=headers)

    return Route("/", root)


def _now(service: Service) -> dict[str, Any]:
    """What the page says of the present; requests that have not ended among them."""
    engine, model = service.engine, service.model
    if engine is None or model is None:
        phases = service.phases
        ended = list(phases.seconds.items())
        start = {"words": phases.words(), "now": phases.state(), "ended": ended}
        start |= {"coming": phases.coming(), "end_seconds": phases.end_seconds()}
        return {"state": "starting", "phases": start, "model": None, "load": None}
    stats = engine.stats
    unfinished = [handle for handle in engine.handles.values() if not handle.is_ended]
    rows = [each for each in unfinished[:NUM_OPEN] if isinstance(each, RequestHandle)]
    model_values = {
        "name": model.name,
        "task": model.task,
        "mesh": model.info.get("mesh", ""),
        "choice": engine.choice if isinstance(engine, AsyncEngine) else None,
    }
    load = {
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "kv": stats.kv_usage,
        "switches": sum(stats.mode_switches.values()),
        "most_waiting": service.options.max_num_queued_reqs,
    }
    if isinstance(engine, AsyncEngine):
        load |= {f"most_{name}": value for name, value in engine.capacity.items()}
    state = _state(engine)
    bound = _bound(service, engine, load, state) if isinstance(engine, AsyncEngine) else None
    return {
        "state": state,
        "bound": None if bound is None else bound._asdict(),
        "stalled_seconds": engine.stalled_seconds(),
        "model": model_values,
        "load": load,
        "open": [service.timeline.row_of(each, None) for each in rows],
        "num_open": len(unfinished),
        **page_parts(stats),
    }


def _bound(service: Service, engine: AsyncEngine, load: dict[str, Any], state: str) -> Bound | None:
    """What binds latency, or which step hangs; None: the engine is out of order."""
    if state == "failed":
        return None
    if state == "stalled":
        watchdog = service.options.watchdog_timeout
        return stuck_bound(engine.step_in_flight(), engine.stalled_seconds(), watchdog)
    stats, most, groups = engine.stats, load["most_running"], engine.choice["groups"]
    if (fleet := stats.find(FleetState)) is not None:
        groups = len(fleet.arrangement)
        most = groups * load["most_group_running"]
    look = Look(
        running=stats.num_running,
        waiting=stats.num_waiting,
        waiting_tokens=stats.num_waiting_tokens,
        kv=stats.kv_usage,
        most_running=most,
        num_groups=groups,
        most_waiting=load["most_waiting"],
        most_step_tokens=load["most_step_tokens"],
        **service.timeline.recent(),
    )
    return bound_of(look)


def _state(engine: AsyncEngine | AsyncEmbedder) -> str:
    """In a word: ready, stalled, draining, or failed."""
    if engine.failure is not None:
        return "failed"
    if not engine.makes_progress:
        return "stalled"
    return "ready" if engine.is_ready else "draining"


def _static(body: bytes, kind: str) -> Any:
    async def serve(request: Request) -> Response:
        return Response(body, headers={**HEADERS, "content-type": kind})

    return serve
