"""What a model says, taken apart: text, reasoning and tool calls, as they come. No JAX.

Every dialect (OpenAI's chats and responses, Anthropic's messages) writes the same pieces.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning that precedes the answer."""

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
    """Splits the text of one continuation into pieces; each continuation has its own."""

    def feed(self, text: str) -> list[Piece]:
        """Add text and return the pieces that no further text can change."""
        ...

    def finish(self) -> list[Piece]:
        """Return the pieces of the text held back, at the end of the output."""
        ...


class PlainParser:
    """A parser without tools and reasoning: the output is text."""

    def feed(self, text: str) -> list[Piece]:
        """Return the text as one piece; none for an empty text."""
        return [Text(text)] if text else []

    def finish(self) -> list[Piece]:
        """Return nothing: no text is held back."""
        return []


class WithoutReasoning:
    """Another parser whose reasoning is left out: `include_reasoning: false`."""

    def __init__(self, parser: Parser):
        self._parser = parser

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces of the other parser that are shown."""
        return [each for each in self._parser.feed(text) if not isinstance(each, Reasoning)]

    def finish(self) -> list[Piece]:
        """Return what the other parser held back and is shown."""
        return [each for each in self._parser.finish() if not isinstance(each, Reasoning)]
