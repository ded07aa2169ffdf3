"""A server of an encoder, in a thread of its own."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from in_thread import InThread, server_in_thread

from serving.server.async_embedder import AsyncEmbedder
from serving.server.served import ServedModel
from serving.server.service import Service
from shiftjax.embed.embed_engine import EmbedRunner
from shiftjax.text.embedding_inputs import InputReader


@dataclass
class EmbedServer(InThread[AsyncEmbedder]):
    """A server over a runner."""

    def assert_quiescent(self) -> None:
        """Nothing is held; what has gone in has come out."""

        async def settle() -> None:
            async with asyncio.timeout(10):
                while self.engine.handles or self.engine._places:
                    await asyncio.sleep(0.005)

        self.on_loop(settle())
        counts = self.engine.counts
        assert counts.accepted == counts.finished + counts.cancelled + counts.failed, counts
        assert not self.engine._places
        assert self.engine.stats.num_waiting_tokens == 0


@contextmanager
def embed_server(runner: EmbedRunner, reader: InputReader, **options) -> Iterator[EmbedServer]:
    """It must stop cleanly at the end."""

    def open_engine(service: Service) -> AsyncEmbedder:
        observers, vocab_size = service.embed_observers, reader.vocab_size
        engine = AsyncEmbedder(runner, vocab_size, observers, service.options)
        model = ServedModel(("encoder",), reader.tokenizer, None, reader=reader)
        service.open(model, engine)
        return engine

    with server_in_thread(open_engine, **options) as running:
        yield EmbedServer(**vars(running))
