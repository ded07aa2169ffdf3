"""A server of an encoder on free ports, in a thread of its own."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from serving.run.listeners import Server
from serving.server.async_embedder import AsyncEmbedder
from serving.server.options import ServerOptions
from serving.server.service import ServedModel, Service
from shiftjax.control.embed import EmbedRunner
from shiftjax.text.embedding_inputs import InputReader


@dataclass
class EmbedServer:
    """A server, and ways to look inside."""

    service: Service
    engine: AsyncEmbedder
    server: Server
    loop: asyncio.AbstractEventLoop

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.server.http_address, timeout=30, trust_env=False)

    def assert_quiescent(self) -> None:
        """Nothing is held; what has gone in has come out."""

        async def settle() -> None:
            async with asyncio.timeout(10):
                while self.engine.handles or self.engine._instances.has_work:
                    await asyncio.sleep(0.005)

        asyncio.run_coroutine_threadsafe(settle(), self.loop).result(20)
        counts = self.engine.counts
        assert counts.accepted == counts.finished + counts.cancelled + counts.failed, counts
        assert not self.engine._places
        assert self.engine.stats.num_waiting_tokens == 0


@contextmanager
def embed_server(runner: EmbedRunner, reader: InputReader, **options) -> Iterator[EmbedServer]:
    """It must stop cleanly at the end."""
    service = Service(ServerOptions(port=0, grpc_port=0, **options))
    server, started, stop = Server(service), threading.Event(), asyncio.Event()
    running: list[EmbedServer] = []
    failures: list[BaseException] = []

    async def main() -> None:
        observers, vocab_size = service.observers, reader.vocab_size
        engine = AsyncEmbedder(runner, vocab_size, observers, service.options)
        model = ServedModel(("encoder",), reader.tokenizer, None, reader=reader)
        service.open(model, engine)
        await server.start()
        running.append(EmbedServer(service, engine, server, asyncio.get_running_loop()))
        started.set()
        await stop.wait()
        await server.stop(5.0)
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
