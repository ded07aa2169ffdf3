"""The first host of an engine that has groups inside each host: hosts may go, and come back."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from serving.hosts.leader import LeaderHosts, Peer
from serving.hosts.terms import START_SILENT_SECONDS, Terms, differences
from serving.proto import shiftjax_pb2 as pb
from shiftjax.hosts.calls import LostHostError
from shiftjax.hosts.replicas import HostGoneError

logger = logging.getLogger(__name__)

Listener = tuple[Callable[[bytes], None], Callable[[], None]]  # of answers, and of the end


class ReplicaHosts(LeaderHosts):
    """Listens, and is `hosts.replicas.Replicas`.

    Until `begin` all hosts start together, and one that is lost ends the start. Then each is on its
    own. One that comes later is told what the others have agreed on at the start.
    """

    def __init__(self, terms: Terms, on_lost: Callable[[LostHostError], None] = lambda _: None):
        super().__init__(terms, on_lost)
        self._agreed: list[list[int]] = []
        self._has_started = False
        self._num_told: Counter[int] = Counter()  # by rank, of what was agreed
        self._comings: Counter[int] = Counter()
        self._ready: dict[int, int] = {}  # by rank: how often it has come
        self._listeners: dict[int, Listener] = {}

    def begin(self) -> None:
        """Requests may come: the engine has started on all hosts."""
        self._has_started = True
        for rank in list(self._peers):
            self._open(rank)

    def least(self, what: str, values: Sequence[int]) -> list[int]:
        """See `hosts.calls.Hosts`."""
        self._agreed.append(super().least(what, values))
        return self._agreed[-1]

    def call(self, rank: int, data: bytes) -> None:
        """See `hosts.replicas.Replicas`."""
        self._has_begun, peer = True, self._peers.get(rank)
        if peer is None or rank not in self._ready:
            raise HostGoneError(f"host {rank} is gone")
        if peer.sent <= peer.done:
            peer.moved_at = time.monotonic()
        peer.sent += 1
        self._put(peer, pb.LeaderMessage(call=data))

    def generation(self, rank: int) -> int:
        """See `hosts.replicas.Replicas`."""
        return self._ready.get(rank, 0)

    def listen(self, rank: int, hear: Callable[[bytes], None], gone: Callable[[], None]) -> None:
        """See `hosts.replicas.Replicas`."""
        self._listeners[rank] = hear, gone

    def _open(self, rank: int) -> None:
        self._comings[rank] += 1
        self._ready[rank] = self._comings[rank]

    def _admitted(self, hello: Any, context: Any) -> Peer:
        """A host that has come back takes the place of what is left of it."""
        old, facts = self._peers.get(hello.rank), self.terms.facts
        is_alike = differences(hello.rank, hello.facts, facts) is None
        if old is not None and self._has_started and is_alike:
            self._lose_peer(old, f"host {hello.rank} has come again")
        peer = super()._admitted(hello, context)
        if self._has_started:
            self._num_told[peer.rank] = 0
            self._put(peer, pb.LeaderMessage(welcome=pb.Welcome()))
        return peer

    def _count(self, peer: Peer, numbers: list[int]) -> None:
        if not self._has_started:
            super()._count(peer, numbers)
            return
        agreed = self._agreed[self._num_told[peer.rank]]
        # Bytes of memory may be fewer now, and suffice. A digest is told as (value, -value).
        is_digest = len(agreed) == 2 and sum(agreed) == 0
        if len(numbers) != len(agreed) or (is_digest and numbers != agreed):
            words = "its steps or KV blocks are not those that all have agreed on"
            self._lose_peer(peer, f"host {peer.rank} cannot join: {words}")
            return
        self._num_told[peer.rank] += 1
        self._put(peer, pb.LeaderMessage(numbers=pb.Numbers(values=agreed)))
        if self._num_told[peer.rank] == len(self._agreed):
            self._open(peer.rank)

    def _answered(self, peer: Peer, data: bytes) -> None:
        peer.hear(peer.done + 1)
        if self._peers.get(peer.rank) is peer and peer.rank in self._ready:
            hear, _ = self._listeners[peer.rank]
            hear(data)

    def _lose_peer(self, peer: Peer, words: str) -> Exception:
        """A host is lost, and its groups alone; before the start is over, the engine."""
        if not self._has_started:
            return super()._lose_peer(peer, words)
        with self._lock:
            is_new = self._peers.get(peer.rank) is peer
            if is_new:
                del self._peers[peer.rank]
            was_ready = is_new and self._ready.pop(peer.rank, None) is not None
        peer.gone.set()
        if is_new:
            logger.error("%s", words)
        if was_ready:
            _, gone = self._listeners[peer.rank]
            gone()
        return HostGoneError(words)

    def _limit(self, peer: Peer) -> float:
        """Seconds that a host may be silent: one that starts has little time for others."""
        is_ready = peer.rank in self._ready
        return super()._limit(peer) if is_ready else START_SILENT_SECONDS
