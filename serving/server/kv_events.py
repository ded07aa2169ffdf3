"""Tells routers which prefixes are cached here: KV events over ZMQ, as vLLM sends them. No JAX.

A message of the PUB socket has three frames: the topic, a sequence number (8 bytes, big-endian) and
msgpack of `[seconds, [event, ...], group or nil]`, where an event is one of

    ["BlockStored", [hash, ...], parent or nil, [token, ...], block_size, nil, "GPU", nil]
    ["BlockRemoved", [hash, ...], "GPU"]
    ["AllBlocksCleared"]

A hash is the last 8 bytes of ours as a number: subscribers make their own keys out of the tokens.
The replay socket, a ROUTER, answers the frames `["", sequence number]` with all batches from it on,
each as `["", topic, sequence number, batch]`, and ends with `["", "", -1, ""]`. Sources: vLLM's
`vllm/distributed/kv_events.py`, llm-d-router's `pkg/kvevents` (2026), which reads all of this.
"""

import contextlib
import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import msgspec

from serving.server.options import ServerOptions, names_of
from shiftjax.config import EngineConfig
from shiftjax.core.cache_events import Batch, CacheEvent, CacheFeed, Everything, Removed, Stored
from shiftjax.metric import Metric, counter
from shiftjax.options import ConfigError

logger = logging.getLogger(__name__)

MOST_QUEUED = 10_000  # turns of the engine that wait to be sent; then they are dropped
MOST_UNREAD = 1000  # messages that a slow subscriber may leave; then it misses some
MOST_KEPT_BATCHES, MOST_KEPT_BYTES = 10_000, 64 << 20  # for replay
TELL_ALL_SECONDS = 10.0  # between two times that subscribers cause the whole index to be told
LEAVE_SECONDS = 1.0
DEFAULT_ENDPOINT = "tcp://127.0.0.1:5557"
END = (-1).to_bytes(8, "big", signed=True)
NO_ZMQ = "kv_events = zmq needs pyzmq: pip install 'shiftjax[events]', or use kv_events = none"


class _News(NamedTuple):
    """The KV events of one turn of the engine."""

    batches: Sequence[Batch | Everything]
    tells_all: bool


class KvEvents:
    """Sends what a `CacheFeed` collects, on a thread of its own that no step waits for.

    A subscriber that misses messages sees a gap in the numbers and asks for a replay. Where that
    goes too far back, where a subscriber is new, or where this thread could not keep up, the whole
    index is told again, to all: `ask` is called, from this thread, to have the engine do so.
    Raises ConfigError where an address cannot be used; `check_kv_events` comes before.
    """

    def __init__(self, endpoint: str, topic: str, replay: str | None = None):
        import zmq  # pyright: ignore[reportMissingImports]

        self.counts: Counter[str] = Counter()
        self.ask: Callable[[], None] = lambda: None
        self.topic, self._zmq = topic, zmq
        self._queue: deque[_News] = deque()
        self._is_behind = self._is_stopping = False
        self._context = zmq.Context()
        self._bell, self._ear = (self._socket(zmq.PAIR) for _ in range(2))
        self._ear.bind("inproc://bell")
        self._bell.connect("inproc://bell")
        self._out = self._socket(zmq.XPUB, SNDHWM=MOST_UNREAD, XPUB_VERBOSE=1)
        self._replay = (
            None if replay is None else self._socket(zmq.ROUTER, SNDHWM=MOST_KEPT_BATCHES + 1)
        )
        self.replay_address: str | None = None
        try:
            self.address = self._listen(self._out, "kv_events_endpoint", endpoint)
            if replay is not None:
                self.replay_address = self._listen(self._replay, "kv_events_replay", replay)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._next = 0  # sequence number
        self._kept: deque[tuple[int, bytes]] = deque()
        self._num_kept_bytes = 0
        self._keeps_all = False  # what is kept begins with the whole index
        self._asked_at = float("-inf")
        self._wants_all = False
        self._encode = msgspec.msgpack.Encoder().encode
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _socket(self, kind: int, **options: int) -> Any:
        made = self._context.socket(kind)
        for name, value in options.items():
            setattr(made, name.lower(), value)
        return made

    def _listen(self, on: Any, name: str, endpoint: str) -> str:
        on.ipv6 = "[" in endpoint
        try:
            on.bind(endpoint)
        except self._zmq.ZMQError as error:
            raise ConfigError([f"{name} = {endpoint} cannot be used: {error.strerror}"]) from None
        return on.last_endpoint.decode()

    def addresses(self) -> list[str]:
        """A line per socket, for people."""
        replay = [f"replay {self.replay_address}"] if self.replay_address else []
        return [f"events {self.address}", *replay]

    # ------------------------------------------------------------------ on the engine's thread

    def send_from(self, feed: CacheFeed) -> None:
        """Hand over what has happened since the last time; never waits.

        What finds no room is dropped and counted, and all is told when there is room again.
        """
        batches, tells_all = feed.take()
        if not batches:
            return
        if len(self._queue) >= MOST_QUEUED:
            self.counts["dropped"] += len(batches)
            self._is_behind = True
            feed.tell_all()
            return
        self._queue.append(_News(batches, tells_all))
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(self._zmq.Again):  # it has been rung often enough
            self._bell.send(b"", self._zmq.NOBLOCK)

    def close(self) -> None:
        """Send what waits, and leave. The engine's thread must have ended."""
        self._is_stopping = True
        self._ring()
        self._thread.join(LEAVE_SECONDS)

    # ------------------------------------------------------------------ on the own thread

    def _run(self) -> None:
        poller = self._zmq.Poller()
        hears = {self._ear: self._send_all, self._out: self._hear, self._replay: self._answer}
        for each in hears:
            if each is not None:
                poller.register(each, self._zmq.POLLIN)
        while not self._is_stopping:
            try:
                for ready, _ in poller.poll(self._ask_if_due()):
                    hears[ready]()
            except Exception:  # of one message: the next ones can be sent all the same
                logger.exception("KV events were lost.")
                self._wants_all = True
                time.sleep(0.1)
        self._send_all()
        self._context.destroy(linger=int(LEAVE_SECONDS * 500))

    def _ask_if_due(self) -> int | None:
        """Have all told where somebody needs it; milliseconds until that may be, None: ever."""
        if not self._wants_all:
            return None
        wait = self._asked_at + TELL_ALL_SECONDS - time.monotonic()
        if wait > 0:
            return int(wait * 1000) + 1
        self._wants_all, self._asked_at = False, time.monotonic()
        self.ask()
        return None

    def _hear(self) -> None:
        """A subscriber comes (1, and what topics must begin with) or goes (0)."""
        self._wants_all |= self._out.recv().startswith(b"\x01")

    def _send_all(self) -> None:
        with contextlib.suppress(self._zmq.Again):
            while True:
                self._ear.recv(self._zmq.NOBLOCK)
        while self._queue:
            news = self._queue.popleft()
            if news.tells_all:  # nobody needs what was before
                self._kept.clear()
                self._num_kept_bytes, self._keeps_all = 0, True
            for batch in news.batches:
                self._send(batch)
        self._wants_all |= self._is_behind
        self._is_behind = False

    def _send(self, batch: Batch | Everything) -> None:
        number, self._next = self._next, self._next + 1
        body = self._encode([time.time(), [_as_sent(event) for event in batch.events], batch.rank])
        self._out.send_multipart((self.topic.encode(), number.to_bytes(8, "big"), body))
        self.counts["sent"] += 1
        if self._replay is None:
            return
        self._kept.append((number, body))
        self._num_kept_bytes += len(body)
        while len(self._kept) > MOST_KEPT_BATCHES or self._num_kept_bytes > MOST_KEPT_BYTES:
            self._num_kept_bytes -= len(self._kept.popleft()[1])
            self._keeps_all = False

    def _answer(self) -> None:
        """A replay. What begins with the whole index is all that anybody needs."""
        assert self._replay is not None
        who, *frames = self._replay.recv_multipart()
        if len(frames) != 2 or frames[0] or len(frames[1]) != len(END):
            return  # not a question
        self.counts["replays"] += 1
        start = int.from_bytes(frames[1], "big")
        first = self._kept[0][0] if self._kept else self._next
        self._wants_all |= start < first and not self._keeps_all
        for number, body in self._kept:
            if number >= start:
                head = (who, b"", self.topic.encode(), number.to_bytes(8, "big"))
                self._replay.send_multipart((*head, body))
        self._replay.send_multipart((who, b"", b"", END, b""))


def _as_sent(event: CacheEvent) -> list[Any]:
    if isinstance(event, Stored):
        parent = None if event.parent is None else _number(event.parent)
        hashes = [_number(each) for each in event.hashes]
        tokens, size = event.token_ids, event.block_size
        return ["BlockStored", hashes, parent, tokens, size, None, "GPU", None]
    if isinstance(event, Removed):
        return ["BlockRemoved", [_number(each) for each in event.hashes], "GPU"]
    return ["AllBlocksCleared"]


def _number(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


def check_kv_events(options: ServerOptions, config: EngineConfig) -> None:
    """Raise ConfigError for what could not be told, or sent."""
    if options.kv_events == "none":
        return
    if not config.cache.prefix_caching:
        raise ConfigError(["kv_events = zmq has nothing to tell without prefix_caching: drop one"])
    if find_spec("zmq") is None:
        raise ConfigError([NO_ZMQ])


def open_kv_events(options: ServerOptions, config: EngineConfig) -> KvEvents | None:
    """The publisher that checked settings ask for, if they do. Raises ConfigError."""
    if options.kv_events == "none":
        return None
    model = names_of(options.served_model_name or config.model.model)[0]
    topic = options.kv_events_topic or f"kv@{socket.gethostname()}@{model}"
    return KvEvents(options.kv_events_endpoint or DEFAULT_ENDPOINT, topic, options.kv_events_replay)


def metrics(events: KvEvents | None) -> Iterator[Metric]:
    """What was sent, dropped and asked for again; nothing where no events are sent."""
    if events is None:
        return
    sent = {(outcome,): events.counts[outcome] for outcome in ("sent", "dropped")}
    yield counter("kv_event_batches", "Messages about changes of cached blocks.", sent, "outcome")
    text = "Replays of KV events that subscribers have asked for."
    yield counter("kv_event_replays", text, events.counts["replays"])
