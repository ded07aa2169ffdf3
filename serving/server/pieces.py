"""What a model says, taken apart: text, reasoning and tool calls, as they come. No JAX.

Every dialect (OpenAI's chats and responses, Anthropic's messages) writes the same pieces.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins: its place among the calls of this output, its id, the tool's name."""

    number: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of a call, which are one JSON object when all has come."""

    number: int
    text: str


Piece = Text | Reasoning | CallBegin | CallArguments


class Parser(Protocol):
    """Takes one continuation apart; made anew for each."""

    def feed(self, text: str) -> list[Piece]:
        """Take in more text; the pieces that are certain now."""
        ...

    def finish(self) -> list[Piece]:
        """The output has ended: what was held back."""
        ...


class PlainParser:
    """All is text."""

    def feed(self, text: str) -> list[Piece]:
        """The text as it is."""
        return [Text(text)] if text else []

    def finish(self) -> list[Piece]:
        """Nothing is held back."""
        return []
