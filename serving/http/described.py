"""Routes that say what they do, so that the OpenAPI document is made from the routes themselves."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.routing import Route

from serving.http.guard import warning_headers


def json_response(
    value: Any,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    ignored: Sequence[str] = (),
) -> Response:
    """A value as JSON; a warning names the fields of the request that were `ignored`."""
    response = Response(msgspec.json.encode(value), status, headers, "application/json")
    response.raw_headers += warning_headers(tuple(ignored))
    return response


class Described(Route):
    """A route of the OpenAPI document. With `body`, the type of what it reads, it is for POST."""

    def __init__(
        self,
        path: str,
        endpoint: Any,
        summary: str,
        body: type[msgspec.Struct] | None = None,
        *,
        methods: tuple[str, ...] | None = None,
        media_type: str = "application/json",
    ):
        # HEAD, which Starlette answers wherever it answers GET, is not described.
        self.verbs = methods or (("GET",) if body is None else ("POST",))
        super().__init__(path, endpoint, methods=self.verbs)
        self.summary, self.body, self.media_type = summary, body, media_type
