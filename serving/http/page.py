"""The page `/ui`: three static files and the data that they poll."""

from importlib.resources import files
from itertools import islice
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from serving.server.async_embedder import AsyncEmbedder
from serving.server.service import Service
from serving.server.timeline import row_of
from shiftjax.control.fleet_state import FleetState, plain_change, plain_group, shown_arrangement

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
FILES = {
    "/ui": ("index.html", "text/html; charset=utf-8"),
    "/ui/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/ui/style.css": ("style.css", "text/css; charset=utf-8"),
}


def page_routes(service: Service) -> list[BaseRoute]:
    """The routes of the page. Its files need no key, its data does."""
    directory = files("serving") / "ui"
    routes: list[BaseRoute] = [
        Route(path, _static((directory / name).read_bytes(), kind))
        for path, (name, kind) in FILES.items()
    ]

    async def data(request: Request) -> Response:
        values = service.timeline.snapshot() | _now(service)
        body = msgspec.json.encode(values)
        return Response(body, media_type="application/json")

    return [*routes, Route("/ui/data", data)]


def _now(service: Service) -> dict[str, Any]:
    """What the page says of the present; requests that have not ended among them."""
    engine, model = service.engine, service.model
    if engine is None or model is None:
        load = {"running": 0, "waiting": 0, "kv": 0.0, "switches": 0, "drafts": None}
        return {
            "state": "loading",
            "model": "",
            "task": "generate",
            "mesh": "",
            "load": load,
            "open": [],
            "fleet": None,
        }
    stats = engine.stats
    handles = () if isinstance(engine, AsyncEmbedder) else engine.handles.values()
    unfinished = (handle for handle in handles if not handle.is_ended)
    return {
        "state": "ready" if service.is_ready else "not ready",
        "model": model.name,
        "task": model.task,
        "mesh": model.info.get("mesh", ""),
        "load": {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "kv": stats.kv_usage,
            "switches": sum(stats.mode_switches.values()),
            "drafts": None if stats.drafts is None else stats.drafts.by_drafter,
        },
        "open": [row_of(handle, None) for handle in islice(unfinished, NUM_OPEN)],
        "fleet": None if stats.fleet is None else _fleet(stats.fleet),
    }


def _fleet(state: FleetState) -> dict[str, Any]:
    """The groups of now, and the latest changes with their reasons."""
    return {
        "arrangement": shown_arrangement(state.arrangement),
        "units": sum(group.width for group in state.arrangement),
        "widths": state.widths,
        "groups": [plain_group(each) for each in state.groups],
        "changes": [{"at": turn.seconds} | plain_change(turn) for turn in state.changes],
    }


def _static(body: bytes, kind: str) -> Any:
    async def serve(request: Request) -> Response:
        return Response(body, headers={**HEADERS, "content-type": kind})

    return serve
