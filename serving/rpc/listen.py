"""The gRPC listeners: services, health, reflection, TLS, limits. On the running event loop."""

from typing import Any

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc
from serving.rpc.guard import KeyInterceptor
from serving.rpc.inference import InferenceServicer
from serving.server.service import Service
from serving.server.tls import Certificates
from shiftjax.options import ConfigError

MAX_MESSAGE_BYTES = 64 << 20  # that are received at all
MAX_ADMIN_BYTES = 1 << 20
INFERENCE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
ADMIN = pb.DESCRIPTOR.services_by_name["Admin"].full_name
STOP_SECONDS = 1.0  # for calls that do not end by themselves, such as Watch
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.max_allowed_incoming_connections", 4096),
    ("grpc.so_reuseport", 0),  # a port in use is an error
    ("grpc.keepalive_time_ms", 20_000),  # a client that has vanished is noticed
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
)


class GrpcServer:
    """A listener for inference, or for the administrator."""

    def __init__(self, host: str, port: int, certificates: Certificates | None = None):
        self.host, self.port = host, port
        self._certificates = certificates
        self._server: aio.Server | None = None
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]

    async def start_inference(self, service: Service, keys: tuple[str, ...]) -> None:
        """Listen; readiness follows that of the service. Raises ConfigError."""
        most = service.options.max_request_bytes
        guard = KeyInterceptor(keys, most, (health.SERVICE_NAME,), service.refuse)
        server = self._server = aio.server(interceptors=(guard,), options=CHANNEL_OPTIONS)
        pb_grpc.add_InferenceServicer_to_server(InferenceServicer(service), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (INFERENCE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        await self._health.set(health.OVERALL_HEALTH, health_pb2.HealthCheckResponse.SERVING)
        await self.show_ready(service.is_ready)
        self._bind()
        await server.start()

    async def start_admin(self, servicer: Any, token: str) -> None:
        """Listen for the administrator, whose token every call must bring."""
        guard = KeyInterceptor((token,), MAX_ADMIN_BYTES)
        server = self._server = aio.server(interceptors=(guard,), options=CHANNEL_OPTIONS)
        pb_grpc.add_AdminServicer_to_server(servicer, server)
        reflection.enable_server_reflection((ADMIN, reflection.SERVICE_NAME), server)
        self._bind()
        await server.start()

    def _bind(self) -> None:
        assert self._server is not None
        host = f"[{self.host}]" if ":" in self.host else self.host
        address = f"{host}:{self.port}"
        try:
            if self._certificates is None:
                self.port = self._server.add_insecure_port(address)
            else:
                credentials = self._certificates.credentials
                self.port = self._server.add_secure_port(address, credentials)
        except (RuntimeError, ValueError):
            raise ConfigError([f"cannot listen on {self.host}, port {self.port}"]) from None

    @property
    def address(self) -> str:
        """Host and port, as clients want it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def show_ready(self, is_ready: bool) -> None:
        """Tell Check and every Watch."""
        states = health_pb2.HealthCheckResponse
        await self._health.set(INFERENCE, states.SERVING if is_ready else states.NOT_SERVING)

    async def stop(self) -> None:
        """Close the listener and every call that is left."""
        if self._server is not None:
            await self._health.enter_graceful_shutdown()
            await self._server.stop(STOP_SECONDS)
