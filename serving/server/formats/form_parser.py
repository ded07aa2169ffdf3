"""Outputs that are calls or an answer in a form, where marks of calls may be data. No JAX."""

from collections.abc import Sequence

from serving.server.formats.pieces import Parser, Piece, Text


class FormParser:
    """A `Parser` that looks for calls only where an output begins with one of the marks.

    All else is an answer that keeps to its form: a mark within its strings is text.
    """

    def __init__(self, calls: Parser, marks: Sequence[str]):
        self._calls, self._marks = calls, marks
        self._held = ""  # may be the beginning of a mark
        self._is_call: bool | None = None  # None: not known yet

    def feed(self, text: str) -> list[Piece]:
        """Add text and return the pieces that no further text can change."""
        if self._is_call is None:
            text, self._held = self._held + text, ""
            begun = text.lstrip()
            if any(begun.startswith(mark) for mark in self._marks):
                self._is_call = True
            elif any(mark.startswith(begun) for mark in self._marks):
                self._held = text
                return []
            else:
                self._is_call = False
        if self._is_call:
            return self._calls.feed(text)
        return [Text(text)] if text else []

    def finish(self) -> list[Piece]:
        """Return the pieces of the text held back, at the end of the output."""
        held = [Text(self._held)] if self._held else []
        return held + self._calls.finish()
