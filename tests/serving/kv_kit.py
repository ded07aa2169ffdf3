"""What the tests of KV events share: a subscriber, and what it should have come to know."""

import struct
import time
from dataclasses import dataclass, field

import msgspec
import pytest

from serving.server import kv_events
from shiftjax.core.engine import Engine

zmq = pytest.importorskip("zmq", reason="KV events need pyzmq: pip install 'shiftjax[events]'")
FREE = "tcp://127.0.0.1:*"
MILLISECONDS = 20_000  # until a test fails


@dataclass
class Subscriber:
    """A SUB socket, and the index that it makes of what comes: tokens and parent by hash."""

    address: str
    topic: bytes = b"kv@"
    index: dict[int, tuple[list[int], int | None]] = field(default_factory=dict)
    last: int = -1  # sequence number
    gaps: list[int] = field(default_factory=list)
    ranks: set = field(default_factory=set)

    def __post_init__(self):
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.subscribe(self.topic)
        self.socket.connect(self.address)

    def hear(self, milliseconds: int = MILLISECONDS) -> bool:
        """Apply the next message; whether there was one."""
        if not self.socket.poll(milliseconds):
            return False
        topic, number, body = self.socket.recv_multipart()
        assert topic.startswith(self.topic)
        (number,) = struct.unpack(">Q", number)
        if number != self.last + 1:
            self.gaps.append(number)
        self.apply(number, body)
        return True

    def apply(self, number: int, body: bytes) -> None:
        self.last = number
        seconds, events, rank = msgspec.msgpack.decode(body)
        assert abs(seconds - time.time()) < 3600
        self.ranks.add(rank)
        for name, *fields in events:
            if name == "AllBlocksCleared":
                self.index.clear()
            elif name == "BlockRemoved":
                hashes, medium = fields
                assert medium == "GPU"
                for block_hash in hashes:
                    del self.index[block_hash]
            else:
                hashes, parent, tokens, size, lora_id, medium, lora_name = fields
                assert (name, lora_id, medium, lora_name) == ("BlockStored", None, "GPU", None)
                assert len(tokens) == len(hashes) * size
                for begin, block_hash in zip(range(0, len(tokens), size), hashes, strict=True):
                    self.index[block_hash] = tokens[begin : begin + size], parent
                    parent = block_hash

    def hear_until(self, condition) -> None:
        while not condition():
            assert self.hear(), f"nothing came; it has {len(self.index)} blocks"

    def replay(self, address: str, start: int) -> list[int]:
        """Ask for what was sent from a number on, and apply it; returns the numbers."""
        with zmq.Context.instance().socket(zmq.DEALER) as dealer:
            dealer.connect(address)
            dealer.send_multipart([b"", struct.pack(">Q", start)])
            numbers = []
            while True:
                assert dealer.poll(MILLISECONDS)
                empty, topic, number, body = dealer.recv_multipart()
                assert empty == b""
                if number == b"\xff" * 8:
                    assert body == b""
                    return numbers
                assert topic.startswith(self.topic)
                numbers.append(struct.unpack(">Q", number)[0])
                self.apply(numbers[-1], body)

    def prefix(self, tokens: list[int], size: int = 4) -> int:
        """How many blocks of a prompt it believes to be cached, found as a router does."""
        by_tokens = {(parent, tuple(found)): key for key, (found, parent) in self.index.items()}
        parent, num = None, 0
        for begin in range(0, len(tokens) - size + 1, size):
            parent = by_tokens.get((parent, tuple(tokens[begin : begin + size])))
            if parent is None:
                break
            num += 1
        return num


def truth(engine: Engine) -> dict[int, tuple[list[int], int | None]]:
    """What the engine's one group finds by hash, as it is sent."""
    blocks = engine.lanes[0].scheduler.tables.device
    contents = [blocks.contents_of(block) for block in blocks._index.values()]
    number = kv_events._number
    return {
        number(each.block_hash): (each.tokens, each.parent and number(each.parent))
        for each in contents
        if each is not None and not each.is_private
    }
