"""The listeners around a service, HTTP and gRPC: start, drain and end. No JAX."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator

import uvicorn

from serving.http.app import make_app
from serving.http.protocol import BoundedProtocol, tune
from serving.rpc.admin import AdminServicer
from serving.rpc.listen import GrpcServer
from serving.run.access import bind, read_admin_token, read_control_keys
from serving.server import write_limit
from serving.server.service import Service
from serving.server.tls import Certificates

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5  # for connections whose requests have ended
KEEP_ALIVE_SECONDS = 75
LOOPBACK = "127.0.0.1"


class HttpServer(uvicorn.Server):
    """Uvicorn without its own signal handlers: the process decides what a signal means."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


class Server:
    """One service behind HTTP and gRPC, on the running event loop.

    `on_drain` is called when the administrator asks for the end.
    """

    def __init__(
        self,
        service: Service,
        keys: tuple[str, ...] = (),
        on_drain: Callable[[], None] = lambda: None,
    ):
        self.service = service
        self.grpc: GrpcServer | None = None
        self.admin: GrpcServer | None = None
        self.certificates: Certificates | None = None
        self._keys, self._on_drain = keys, on_drain
        self._tasks: set[asyncio.Task[None]] = set()
        self._http: HttpServer | None = None
        self._task: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = None

    async def start(self) -> None:
        """Listen. Raises ConfigError for an address or a certificate that cannot be used."""
        options = self.service.options
        self.certificates = Certificates(options) if options.ssl_certfile else None
        await self._start_http()
        if options.grpc:
            self.grpc = GrpcServer(options.host, options.grpc_port, self.certificates)
            await self.grpc.start_inference(self.service, self._keys)
            self.service.listeners.append(self._show_ready)
        token = read_admin_token(options)
        if token is not None and options.admin_port is not None:
            self.admin = GrpcServer(LOOPBACK, options.admin_port, self.certificates)
            await self.admin.start_admin(AdminServicer(self.service, self._on_drain), token)

    def _show_ready(self, is_ready: bool) -> None:
        assert self.grpc is not None
        task = asyncio.get_running_loop().create_task(self.grpc.show_ready(is_ready))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_http(self) -> None:
        options, certificates = self.service.options, self.certificates
        self._socket = bind(options.host, options.port)
        tune(self._socket, write_limit.WRITE_SECONDS)
        app = make_app(self.service, self._keys, read_control_keys(options))
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            proxy_headers=False,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
        config.load()
        config.ssl = certificates and certificates.context
        self._http = HttpServer(config)
        self._task = asyncio.create_task(self._http.serve([self._socket]))
        while not self._http.started and not self._task.done():
            await asyncio.sleep(0.005)
        if self._task.done():
            await self._task

    @property
    def http_address(self) -> str:
        """The URL of the HTTP listener."""
        assert self._socket is not None
        scheme = "https" if self.service.options.ssl_certfile else "http"
        host, port = self._socket.getsockname()[:2]
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def num_connections(self) -> int:
        """HTTP connections that are open."""
        return 0 if self._http is None else len(self._http.server_state.connections)

    def addresses(self) -> list[str]:
        """A line per listener, for people."""
        lines = [f"HTTP   {self.http_address}  (OpenAI: {self.http_address}/v1)"]
        if self.grpc is not None:
            lines.append(f"gRPC   {self.grpc.address}")
        if self.admin is not None:
            lines.append(f"admin  {self.admin.address}")
        if self.service.options.ui:
            lines.append(f"page   {self.http_address}/")
        return lines

    async def stop(self, drain_seconds: float) -> bool:
        """Let requests finish, then end them and every listener. False if any was cut short."""
        is_clean = True
        self.service.begin_drain()
        if self.service.engine is not None:
            is_clean = await self.service.engine.drain(drain_seconds)
        if self._http is not None and self._task is not None:
            self._http.should_exit = True
            await self._task
        for listener in (self.grpc, self.admin):
            if listener is not None:
                await listener.stop()
        return is_clean
