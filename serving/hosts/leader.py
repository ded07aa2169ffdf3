"""The first host: listens for the others, tells them what to call, hears how far they are."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import grpc

from serving.hosts.terms import (
    AGREE_SECONDS,
    AUTHORIZATION,
    CHANNEL_OPTIONS,
    HEARTBEAT_SECONDS,
    JOIN_SECONDS,
    START_SILENT_SECONDS,
    Terms,
    differences,
)
from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc
from serving.server.headers import digests, has_key
from shiftjax.hosts.calls import LostHostError
from shiftjax.metric import Metric, gauge
from shiftjax.options import ConfigError

logger = logging.getLogger(__name__)

MOST_WAITING = 256  # messages that a follower has not taken; steps in flight are a few
HELLO_SECONDS = 10.0  # in which a peer says who it is
EXPLAIN_SECONDS = 3.0  # in which a host whose absence fails a step is known to be gone
WATCH_SECONDS = 0.25
CLOSE_SECONDS = 5.0


class Peer:
    """A follower as the leader sees it."""

    def __init__(self, rank: int):
        self.rank = rank
        self.messages: queue.Queue[pb.LeaderMessage] = queue.Queue(MOST_WAITING)
        self.numbers: queue.Queue[list[int]] = queue.Queue()
        self.heard_at = self.moved_at = time.monotonic()
        self.sent = self.done = 0  # calls
        self.gone = threading.Event()

    def hear(self, calls: int) -> None:
        """It has done so many."""
        if calls > self.done:
            self.done, self.moved_at = calls, time.monotonic()

    def stuck_seconds(self, now: float) -> float:
        """How long it has had calls before it, and done none; 0: it has none."""
        return now - self.moved_at if self.sent > self.done else 0.0


class LeaderHosts(pb_grpc.HostsServicer):
    """Listens, and is a `hosts.calls.Leader`. `on_lost` hears once, on any thread, of the end."""

    def __init__(self, terms: Terms, on_lost: Callable[[LostHostError], None] = lambda _: None):
        self.terms, self.num, self.on_lost = terms, terms.num, on_lost
        self._keys = digests((terms.secret,))
        self._peers: dict[int, Peer] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._lost: LostHostError | None = None
        self._has_lost = threading.Event()
        self._refusal: str | None = None  # why the last of those refused cannot be one of these
        self._has_all = self._has_begun = self._is_closing = False
        self._server = grpc.server(
            ThreadPoolExecutor(2 * terms.num + 2, thread_name_prefix="hosts"),
            options=CHANNEL_OPTIONS,
        )
        pb_grpc.add_HostsServicer_to_server(self, self._server)

    # ------------------------------------------------------------------ the start

    def start(self, credentials: grpc.ServerCredentials | None = None) -> None:
        """Listen. Raises ConfigError for an address that cannot be used."""
        address = self.terms.address
        try:
            if credentials is None:
                self._server.add_insecure_port(address)
            else:
                self._server.add_secure_port(address, credentials)
        except RuntimeError:
            raise ConfigError([f"cannot listen on coordinator = {address}"]) from None
        self._server.start()

    def gather(self, seconds: float = JOIN_SECONDS) -> None:
        """Wait until all hosts have come. One that differs is refused, and may come again.

        Raises LostHostError for one that does not come.
        """
        with self._changed:
            is_over = lambda: self._lost or len(self._peers) == self.num - 1  # noqa: E731
            self._changed.wait_for(is_over, seconds)
            missing = [rank for rank in range(1, self.num) if rank not in self._peers]
            self._has_all = not missing
        if missing:
            why = f"; the last one was refused: {self._refusal}" if self._refusal else ""
            raise self._lose(f"hosts {missing} have not come in {seconds:.0f} s{why}")
        threading.Thread(target=self._watch, name="watch hosts", daemon=True).start()
        self._tell(pb.LeaderMessage(welcome=pb.Welcome()))

    def begin(self) -> None:
        """Requests may come: the engine has started on all hosts."""

    def least(self, what: str, values: Sequence[int]) -> list[int]:
        """See `hosts.calls.Hosts`."""
        told, end = [list(values)], time.monotonic() + AGREE_SECONDS
        for peer in list(self._peers.values()):
            told.append(self._numbers_of(peer, what, end))
        if len({len(each) for each in told}) != 1:
            raise self._lose("hosts are at different points of the start")
        least = list(map(min, *told)) if values else []
        self._tell(pb.LeaderMessage(numbers=pb.Numbers(values=least)))
        return least

    def _numbers_of(self, peer: Peer, what: str, end: float) -> list[int]:
        while time.monotonic() < end:
            self._check()
            try:
                return peer.numbers.get(timeout=WATCH_SECONDS)
            except queue.Empty:
                continue
        raise self._lose(f"host {peer.rank} took more than {AGREE_SECONDS:.0f} s {what}")

    # ------------------------------------------------------------------ calls

    def send(self, number: int, call: bytes) -> None:
        """See `hosts.calls.Leader`."""
        self._has_begun, now = True, time.monotonic()
        for peer in self._peers.values():
            if peer.sent <= peer.done:
                peer.moved_at = now
            peer.sent = number
        self._tell(pb.LeaderMessage(call=call))

    def explain(self, error: Exception) -> LostHostError:
        """See `hosts.calls.Leader`."""
        if isinstance(error, LostHostError):
            return error
        self._has_lost.wait(EXPLAIN_SECONDS)
        return self._lose(f"a step of all hosts failed on host 0: {error}")

    def metrics(self) -> Iterator[Metric]:
        """How long ago each of the other hosts was last heard to have done a step."""
        now = time.monotonic()
        ages = {(str(rank),): now - peer.moved_at for rank, peer in self._peers.items()}
        if ages:
            yield gauge("follower_last_step_age_seconds", "Since a host did a step.", ages, "host")

    def close(self) -> None:
        """Have the followers end well, and wait for that."""
        self._is_closing = True
        if self._lost is None:
            self._tell(pb.LeaderMessage(end=pb.End()))
            for peer in self._peers.values():
                peer.gone.wait(CLOSE_SECONDS)
        self._server.stop(0.2).wait()

    def _tell(self, message: pb.LeaderMessage) -> None:
        self._check()
        for peer in list(self._peers.values()):
            self._put(peer, message)

    def _put(self, peer: Peer, message: pb.LeaderMessage) -> None:
        try:
            peer.messages.put_nowait(message)
        except queue.Full:
            words = f"host {peer.rank} has not taken {MOST_WAITING} messages"
            raise self._lose_peer(peer, words) from None

    def _lose_peer(self, peer: Peer, words: str) -> Exception:
        """A host is lost, and with it the engine."""
        del peer
        return self._lose(words)

    def _limit(self, peer: Peer) -> float:
        """Seconds that a host may be silent."""
        del peer
        return self.terms.limit if self._has_begun else START_SILENT_SECONDS

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _lose(self, words: str) -> LostHostError:
        """The end of the engine, for the first reason that is heard."""
        with self._lock:
            if self._lost is not None or self._is_closing:
                return self._lost or LostHostError(words)
            self._lost = LostHostError(words)
            self._changed.notify_all()
        logger.critical("the engine ends: %s", words)
        self._has_lost.set()
        self.on_lost(self._lost)
        return self._lost

    def _watch(self) -> None:
        while not self._is_closing and self._lost is None:
            time.sleep(WATCH_SECONDS)
            now = time.monotonic()
            for peer in list(self._peers.values()):
                limit, seconds = self._limit(peer), self.terms.stuck_limit
                if now - peer.heard_at > limit:
                    self._lose_peer(peer, f"host {peer.rank} has been silent for {limit:.0f} s")
                elif peer.stuck_seconds(now) > seconds:
                    self._lose_peer(peer, f"host {peer.rank} has done no step for {seconds:.0f} s")

    # ------------------------------------------------------------------ the connection

    def Follow(self, request_iterator: Iterator[Any], context: Any) -> Iterator[pb.LeaderMessage]:
        """The call of one follower, as long as the engine lives."""
        metadata = dict(context.invocation_metadata())
        if not has_key(str(metadata.get(AUTHORIZATION, "")).encode(), self._keys):
            _refuse(context, "the hosts' secret is another one", grpc.StatusCode.UNAUTHENTICATED)
        peer = self._admitted(_hello(request_iterator, context), context)
        context.add_callback(lambda: self._on_end(peer))
        threading.Thread(target=self._read, args=(peer, request_iterator), daemon=True).start()
        while self._lost is None and not peer.gone.is_set():
            try:
                message = peer.messages.get(timeout=HEARTBEAT_SECONDS)
            except queue.Empty:
                message = pb.LeaderMessage(heartbeat=pb.Heartbeat())
            yield message
            if message.WhichOneof("kind") == "end":
                peer.gone.wait(CLOSE_SECONDS)  # ended here first, JAX would abort it
                return
        words = str(self._lost or f"host {peer.rank} is taken for lost")
        context.abort(grpc.StatusCode.ABORTED, words)

    def _admitted(self, hello: Any, context: Any) -> Peer:
        """A host that may be one of these; the call ends for any other."""
        rank = hello.rank
        problem = differences(rank, hello.facts, self.terms.facts)
        with self._changed:
            if problem is None and not 0 < rank < self.num:
                problem = f"host_rank = {rank} is none of hosts = {self.num}"
            if problem is None and rank in self._peers:
                problem = f"host_rank = {rank} is there already: give each host its own"
            if problem is None:
                peer = self._peers[rank] = Peer(rank)
                self._changed.notify_all()
                return peer
            self._refusal = problem
        _refuse(context, problem)

    def _read(self, peer: Peer, messages: Iterator[Any]) -> None:
        try:
            for message in messages:
                peer.heard_at = time.monotonic()
                if message.HasField("numbers"):
                    self._count(peer, list(message.numbers.values))
                elif message.HasField("answer"):
                    self._answered(peer, message.answer)
                elif message.progress.HasField("error"):
                    self._lose_peer(peer, f"host {peer.rank} failed: {message.progress.error}")
                else:
                    peer.hear(message.progress.calls)
        except Exception as error:  # the call has ended, which its callback tells
            logger.debug("host %d: %s", peer.rank, error)

    def _count(self, peer: Peer, numbers: list[int]) -> None:
        """A host has told its numbers, which `least` waits for."""
        peer.numbers.put(numbers)

    def _answered(self, peer: Peer, data: bytes) -> None:
        """A host has answered a call. Here none does: they say how far they are."""

    def _on_end(self, peer: Peer) -> None:
        peer.gone.set()
        with self._lock:
            may_come_again = not self._has_all
            if may_come_again:
                del self._peers[peer.rank]
        if may_come_again:
            logger.warning("host %d has gone before all had come: waiting on", peer.rank)
        elif not self._is_closing:
            self._lose_peer(peer, f"host {peer.rank} has gone")


def _hello(messages: Iterator[Any], context: Any) -> Any:
    """What a peer says of itself; the call of one that does not is ended."""
    timer = threading.Timer(HELLO_SECONDS, context.cancel)
    timer.daemon = True
    timer.start()
    try:
        message = next(messages, None)
    except Exception:  # the call was cancelled, by the peer or by the timer
        message = None
    timer.cancel()
    if message is None or not message.HasField("hello"):
        _refuse(context, "it does not say which host it is")
    return message.hello


def _refuse(
    context: Any, words: str, code: grpc.StatusCode = grpc.StatusCode.FAILED_PRECONDITION
) -> NoReturn:
    """End the call of a peer that cannot be one of the hosts; both sides say why."""
    logger.warning("refused %s, waiting on: %s", context.peer(), words)
    context.abort(code, words)
    raise AssertionError("abort raises")
