"""One of the other hosts: connects to the first, takes its calls, says how far it is."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from serving.hosts.terms import (
    AGREE_SECONDS,
    AUTHORIZATION,
    CHANNEL_OPTIONS,
    HEARTBEAT_SECONDS,
    JOIN_SECONDS,
    START_SILENT_SECONDS,
    Terms,
)
from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc
from shiftjax.hosts.calls import LostHostError
from shiftjax.options import ConfigError

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.1  # without a call, after which a follower says what it has done
FAIL_SECONDS = 5.0
REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED)


class FollowerHosts:
    """A connection to the leader, and a `hosts.calls.Follower`.

    `on_lost` hears once, on any thread, that the leader is gone: the thread that computes may wait
    for it in a step that never ends.
    """

    def __init__(self, terms: Terms, on_lost: Callable[[LostHostError], None] = lambda _: None):
        self.terms, self.num, self.on_lost = terms, terms.num, on_lost
        self._calls: queue.Queue[bytes | None] = queue.Queue()  # None: the end
        self._numbers: queue.Queue[list[int] | Exception] = queue.Queue()
        self._outgoing: queue.Queue[pb.FollowerMessage] = queue.Queue()
        self._stream: Any = None
        self._has_begun, self._done = False, 0
        self._heard_at = time.monotonic()
        self._lost: LostHostError | None = None
        self._has_ended = False
        self._is_over = threading.Event()

    def connect(self, credentials: grpc.ChannelCredentials | None = None) -> None:
        """Wait until the leader has all hosts.

        Raises ConfigError if this one may not be one of them, LostHostError if it does not come.
        """
        address = self.terms.address
        if credentials is None:
            channel = grpc.insecure_channel(address, CHANNEL_OPTIONS)
        else:
            channel = grpc.secure_channel(address, credentials, CHANNEL_OPTIONS)
        try:
            grpc.channel_ready_future(channel).result(JOIN_SECONDS)
        except grpc.FutureTimeoutError:
            raise LostHostError(f"nobody listens on coordinator = {address}") from None
        metadata = ((AUTHORIZATION, f"Bearer {self.terms.secret}"),)
        self._stream = pb_grpc.HostsStub(channel).Follow(self._tell(), metadata=metadata)
        threading.Thread(target=self._read, name="hosts", daemon=True).start()
        self._answer(JOIN_SECONDS, "to gather the hosts")
        threading.Thread(target=self._watch, name="watch hosts", daemon=True).start()

    def least(self, what: str, values: Sequence[int]) -> list[int]:
        """See `hosts.calls.Hosts`."""
        self._outgoing.put(pb.FollowerMessage(numbers=pb.Numbers(values=values)))
        return self._answer(AGREE_SECONDS, what)

    def calls(self) -> Iterator[bytes | None]:
        """See `hosts.calls.Follower`."""
        is_busy = False
        while True:
            try:
                call = self._calls.get(timeout=PAUSE_SECONDS if is_busy else None)
            except queue.Empty:
                is_busy = False
                yield None
                continue
            if call is None:
                if self._lost is not None:
                    raise self._lost
                return
            is_busy = True
            yield call

    def done(self, number: int) -> None:
        """See `hosts.calls.Follower`."""
        self._done = number
        self._outgoing.put(self._progress())

    def answer(self, data: bytes) -> None:
        """Answer a call of one of this host's own groups."""
        self._outgoing.put(pb.FollowerMessage(answer=data))

    def fail(self, error: Exception) -> None:
        """Tell the leader why this host does no more, and give it time to hear of it."""
        words = f"{type(error).__name__}: {error}"[:500]
        progress = pb.Progress(calls=self._done, error=words)
        self._outgoing.put(pb.FollowerMessage(progress=progress))
        self._is_over.wait(FAIL_SECONDS)

    def close(self) -> None:
        """End the connection, after which the leader waits no more for this host."""
        self._has_ended = True
        self._stream.cancel()

    def _answer(self, seconds: float, what: str) -> list[int]:
        try:
            answer = self._numbers.get(timeout=seconds)
        except queue.Empty:
            raise LostHostError(f"the leader took more than {seconds:.0f} s {what}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _progress(self) -> pb.FollowerMessage:
        return pb.FollowerMessage(progress=pb.Progress(calls=self._done))

    def _tell(self) -> Iterator[pb.FollowerMessage]:
        facts = dict(self.terms.facts)
        yield pb.FollowerMessage(hello=pb.Hello(rank=self.terms.rank, facts=facts))
        while True:
            try:
                yield self._outgoing.get(timeout=HEARTBEAT_SECONDS)
            except queue.Empty:
                yield self._progress()

    def _read(self) -> None:
        try:
            for message in self._stream:
                self._heard_at = time.monotonic()
                kind = message.WhichOneof("kind")
                if kind == "call":
                    self._has_begun = True
                    self._calls.put(message.call)
                elif kind in ("welcome", "numbers"):
                    self._numbers.put(list(message.numbers.values))
                elif kind == "end":
                    self._has_ended = True
                    self._calls.put(None)
            self._lose("the leader has gone")
        except grpc.RpcError as error:
            code, details = error.code(), error.details()  # pyright: ignore[reportAttributeAccessIssue]
            if code in REFUSALS:
                self._numbers.put(ConfigError([str(details)]))
            else:
                self._lose(f"the leader has gone: {details}")

    def _watch(self) -> None:
        while self._lost is None:
            time.sleep(HEARTBEAT_SECONDS)
            limit = self.terms.limit if self._has_begun else START_SILENT_SECONDS
            if time.monotonic() - self._heard_at > limit:
                self._lose(f"the leader has been silent for {limit:.0f} s")

    def _lose(self, words: str) -> None:
        if self._has_ended or self._lost is not None:
            return
        self._lost = LostHostError(words)
        self._is_over.set()
        logger.critical("%s", words)
        self._numbers.put(self._lost)
        self._calls.put(None)
        self.on_lost(self._lost)
