"""What stands before the guard: a prefix of paths, and leave for pages of other origins."""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.server.options import ServerOptions, names_of

METHODS = ("GET", "POST", "DELETE")
SHOWN = ("x-request-id", "warning", "retry-after")  # headers that a page may read


def reachable(app: ASGIApp, options: ServerOptions) -> ASGIApp:
    """The application as the settings let it be reached.

    Pages may send keys but no cookies: there are none, so no credentials are allowed.
    """
    origins = names_of(options.allowed_origins)
    if origins:
        app = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=METHODS,
            allow_headers=("*",),
            expose_headers=SHOWN,
        )
    return UnderRoot(app, options.root_path) if options.root_path is not None else app


class UnderRoot:
    """Serves every path below a prefix, too: a proxy may take the prefix off, or leave it."""

    def __init__(self, app: ASGIApp, root: str):
        self._app, self._root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and f"{scope['path']}/".startswith(f"{self._root}/"):
            scope = dict(scope) | {"path": scope["path"][len(self._root) :] or "/"}
        await self._app(scope, receive, send)
