"""vLLM's `/reset_prefix_cache`: every group forgets its prefixes, and the host tier its blocks."""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from serving.http.described import Described, json_response
from serving.server.errors import ServeError, invalid
from serving.server.service import Service
from shiftjax.core.engine import Engine

PATH = "/reset_prefix_cache"
LOCAL = ("127.0.0.1", "::1", "localhost")
# Parameters of the query, as vLLM has them. The tiers are one cache: external is always reset.
PARAMETERS = ("reset_running_requests", "reset_external")
_BOOLEANS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


def cache_routes(service: Service, *, has_keys: bool) -> list[Described]:
    """The route; `has_keys`: who asks has shown an API key."""
    reset = CacheReset(service, has_keys)
    return [Described(PATH, reset.answer, "Forget all cached prefixes", methods=("POST",))]


class CacheReset:
    """Resets the prefix caches for somebody who may: it slows down everybody else."""

    def __init__(self, service: Service, has_keys: bool):
        self._service, self._has_keys = service, has_keys

    async def answer(self, request: Request) -> Response:
        """POST /reset_prefix_cache."""
        if not self._has_keys and self._service.options.host not in LOCAL:
            words = "Resetting the cache needs a server with API keys, or on loopback."
            raise ServeError("forbidden", words)
        asked = _read(request.query_params)
        _, engine = self._service.generating()
        if asked.get("reset_running_requests") and engine.handles:
            words = "Requests are running, and keep their KV: wait until they end, or abort them."
            raise ServeError("not_now", words, param="reset_running_requests")
        await engine.call(Engine.flush_prefix_cache)
        return json_response({})  # vLLM's has no body at all


def _read(query: Mapping[str, str]) -> dict[str, bool]:
    """The parameters. Raises `ServeError` for others, and for values that are no booleans."""
    asked = {}
    for name, text in query.items():
        if name not in PARAMETERS:
            raise invalid(name, f"is no parameter of this path: it has {' and '.join(PARAMETERS)}")
        if text.lower() not in _BOOLEANS:
            raise invalid(name, "must be true or false")
        asked[name] = _BOOLEANS[text.lower()]
    return asked
