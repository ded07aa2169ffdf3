"""A server on free ports, in a thread of its own."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from serving.run.listeners import Server
from serving.server.options import ServerOptions
from serving.server.service import Service


@dataclass
class InThread[E]:
    """A server in a thread of its own, and ways to look inside."""

    service: Service
    server: Server
    engine: E
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        """Of the HTTP listener."""
        return self.server.http_address

    def on_loop(self, coroutine):
        """Run a coroutine on the server's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the HTTP listener."""
        url = httpx.URL(self.url)
        return url.host, url.port

    def client(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, trust_env=False, **options)

    def wait_until(self, condition) -> None:
        """Poll; the test fails if it does not come true."""
        for _ in range(2000):
            if condition():
                return
            time.sleep(0.005)
        raise AssertionError("the condition never came true")


@contextmanager
def server_in_thread[E](
    open_engine: Callable[[Service], E],
    keys: tuple[str, ...] = (),
    drain_seconds: float = 5.0,
    **options,
) -> Iterator[InThread[E]]:
    """A server on free ports over what is opened on its loop; at the end it must stop cleanly."""
    service = Service(ServerOptions(port=0, grpc_port=0, **options))
    server = Server(service, keys)
    running: list[InThread[E]] = []
    started = threading.Event()
    stop = asyncio.Event()
    failures: list[BaseException] = []

    async def main() -> None:
        engine = open_engine(service)
        await server.start()
        running.append(InThread(service, server, engine, asyncio.get_running_loop()))
        started.set()
        await stop.wait()
        await server.stop(drain_seconds)
        assert await service.close(), "a thread did not end"

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failures.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    try:
        if failures:
            raise failures[0]
        yield running[0]
    finally:
        if running:
            running[0].loop.call_soon_threadsafe(stop.set)
        thread.join(30)
    assert not thread.is_alive(), "the server did not stop"
    if failures:
        raise failures[0]
