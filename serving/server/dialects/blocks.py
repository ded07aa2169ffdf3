"""The pieces of an output as blocks: one for a text, one for each call. No JAX."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from serving.server.formats.pieces import CallArguments, CallBegin, Piece, Reasoning

Kind = Literal["text", "reasoning", "call"]


@dataclass
class Block:
    """Consecutive pieces of one kind: text, reasoning or a tool call."""

    kind: Kind
    index: int  # among the blocks of the output
    id: str = ""  # of a call
    name: str = ""  # of a call's tool
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All that has come of it; of a call, its arguments as JSON."""
        return "".join(self.parts)


class Turn(NamedTuple):
    """One event of a block: it opens, gains text or closes."""

    what: Literal["open", "more", "close"]
    block: Block
    text: str = ""  # that it gains


class Blocks:
    """Puts pieces into blocks; at most one block is open."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._is_open = False

    @property
    def has_calls(self) -> bool:
        """Whether the output contains a tool call."""
        return any(block.kind == "call" for block in self.all)

    def add(self, pieces: Iterable[Piece]) -> Iterator[Turn]:
        """Add pieces to blocks and yield the resulting events in order."""
        for piece in pieces:
            if isinstance(piece, CallBegin):
                yield from self._open(Block("call", len(self.all), piece.id, piece.name))
                continue
            kind = _kind(piece)
            if kind != "call" and not (self._is_open and self.all[-1].kind == kind):
                yield from self._open(Block(kind, len(self.all)))
            self.all[-1].parts.append(piece.text)
            yield Turn("more", self.all[-1], piece.text)

    def end(self) -> Iterator[Turn]:
        """Close the open block, if there is one, and yield that event."""
        if self._is_open:
            self._is_open = False
            yield Turn("close", self.all[-1])

    def _open(self, block: Block) -> Iterator[Turn]:
        yield from self.end()
        self.all.append(block)
        self._is_open = True
        yield Turn("open", block)


def _kind(piece: Piece) -> Kind:
    if isinstance(piece, CallArguments):
        return "call"
    return "reasoning" if isinstance(piece, Reasoning) else "text"
