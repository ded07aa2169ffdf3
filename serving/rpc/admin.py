"""The Admin service: load, abort, drain, profiles; for a listener of its own."""

import asyncio
import re
import time
from collections.abc import Callable
from importlib.metadata import version as installed

from grpc import aio

from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc
from serving.rpc.guard import method
from serving.rpc.profiler import Profiler
from serving.server.errors import invalid
from serving.server.service import Service
from shiftjax.core.limits import MAX_ID_CHARACTERS
from shiftjax.fleet.state import FleetState, plain_state

MAX_ABORTS = 1024
ABORTS = {
    "ABORTED": pb.ABORT_STATUS_ABORTED,
    "ALREADY_FINISHED": pb.ABORT_STATUS_ALREADY_FINISHED,
    "NOT_FOUND": pb.ABORT_STATUS_NOT_FOUND,
}
PROFILE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class AdminServicer(pb_grpc.AdminServicer):
    """Calls of `shiftjax.v1.Admin`. `on_drain` begins the end of the process."""

    def __init__(self, service: Service, on_drain: Callable[[], None]):
        self._service, self._on_drain = service, on_drain
        self._profiler = Profiler(service.options.profile_dir)

    @method
    async def GetServer(
        self, request: pb.GetServerRequest, context: aio.ServicerContext
    ) -> pb.Server:
        """What runs here."""
        service = self._service
        model, fleet = service.model, None
        state = None if service.engine is None else service.engine.stats.find(FleetState)
        if state is not None:
            fleet = pb.Fleet(**plain_state(state, time.monotonic()))
        return pb.Server(
            version=installed("shiftjax"),
            models=model.names if model else (),
            info=model.info if model else {},
            ready=service.is_ready,
            draining=service.engine is not None and service.engine.is_draining,
            fleet=fleet,
        )

    @method
    async def Explain(
        self, request: pb.ExplainRequest, context: aio.ServicerContext
    ) -> pb.Explanation:
        """Why steps, sizes and groups are as they are, beside what others would have cost."""
        _, engine = self._service.generating()
        return pb.Explanation(**await engine.explanations.whole())

    @method
    async def GetLoad(self, request: pb.GetLoadRequest, context: aio.ServicerContext) -> pb.Load:
        """Gauges and counters of now."""
        return self._load()

    @method
    async def WatchLoad(self, request: pb.WatchLoadRequest, context: aio.ServicerContext) -> None:
        """The load again and again, until the client has enough or the server drains."""
        seconds = request.interval_seconds if request.HasField("interval_seconds") else 1.0
        if not 0.1 <= seconds <= 60.0:  # false for NaN too
            raise invalid("interval_seconds", "must be between 0.1 and 60")
        _, engine = self._service.running()
        while not engine.is_draining:
            await context.write(self._load())
            await asyncio.sleep(seconds)

    def _load(self) -> pb.Load:
        _, engine = self._service.running()
        stats, counts = engine.stats, engine.counts
        return pb.Load(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_waiting_tokens=stats.num_waiting_tokens,
            kv_usage=stats.kv_usage,
            steps_by_mode=stats.steps_by_mode,
            accepted=counts.accepted,
            finished=counts.finished,
            cancelled=counts.cancelled,
            failed=counts.failed,
            rejected=counts.rejected,
        )

    @method
    async def Abort(
        self, request: pb.AbortRequest, context: aio.ServicerContext
    ) -> pb.AbortResponse:
        """End requests by their ids."""
        names = list(request.request_ids)
        if not 0 < len(names) <= MAX_ABORTS:
            raise invalid("request_ids", f"must have 1 to {MAX_ABORTS} entries")
        if len(set(names)) < len(names):
            raise invalid("request_ids", "must be different from each other")
        for name in names:
            if not (0 < len(name) <= MAX_ID_CHARACTERS and name.isprintable()):
                raise invalid("request_ids", "must be ids of requests")
        _, engine = self._service.running()
        statuses = {name: ABORTS[engine.abort(name)] for name in names}
        return pb.AbortResponse(statuses=statuses)

    @method
    async def Drain(
        self, request: pb.DrainRequest, context: aio.ServicerContext
    ) -> pb.DrainResponse:
        """Begin to shut down, as SIGTERM does."""
        _, engine = self._service.running()
        num_unfinished = len(engine.handles)
        self._on_drain()
        return pb.DrainResponse(num_unfinished=num_unfinished)

    @method
    async def FlushPrefixCache(
        self, request: pb.FlushPrefixCacheRequest, context: aio.ServicerContext
    ) -> pb.FlushPrefixCacheResponse:
        """Forget the cached prefixes; running requests keep theirs."""
        _, engine = self._service.generating()
        await engine.call(lambda core: core.flush_prefix_cache())
        return pb.FlushPrefixCacheResponse()

    @method
    async def StartProfile(
        self, request: pb.StartProfileRequest, context: aio.ServicerContext
    ) -> pb.StartProfileResponse:
        """Begin a trace of the engine's steps."""
        if not PROFILE_NAME.fullmatch(request.name):
            raise invalid("name", "must be 1 to 64 letters, digits, - or _: it is no path")
        await self._on_engine_thread(lambda: self._profiler.start(request.name))
        return pb.StartProfileResponse()

    @method
    async def StopProfile(
        self, request: pb.StopProfileRequest, context: aio.ServicerContext
    ) -> pb.StopProfileResponse:
        """End the trace."""
        await self._on_engine_thread(self._profiler.stop)
        return pb.StopProfileResponse()

    async def _on_engine_thread(self, function: Callable[[], None]) -> None:
        _, engine = self._service.generating()
        await engine.call(lambda core: function())
