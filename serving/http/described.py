"""Routes that say what they do, so that the OpenAPI document is made from the routes themselves."""

from typing import Any

import msgspec
from starlette.routing import Route


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
