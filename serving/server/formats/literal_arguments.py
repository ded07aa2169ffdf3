"""Arguments in literals that are nearly JSON: read as they come, written as JSON. No JAX.

Keys stand without quotes, and strings between quotes of the model's own (`<escape>`) or in Python's
syntax. Commas say nothing that brackets, keys and values do not say, so a missing or an additional
one does no harm.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from serving.server.fields import Function
from serving.server.formats.json_types import as_json, escaped, quoted, types_of
from serving.server.formats.marked_text import first_mark, num_held

_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([^xuU]))", re.S)
_BEGUN_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?")
_CHARACTERS = {
    **{"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0"},
    **{"\\": "\\", "'": "'", '"': '"', "/": "/", "\n": ""},
}
_OPEN = {"{": "}", "[": "]", "(": ")"}


@dataclass(frozen=True)
class Literals:
    """A dialect: what is behind the arguments, and what is around strings.

    `has_escapes`: a backslash in a string begins an escape.
    """

    close: str
    quotes: tuple[str, ...]
    has_escapes: bool = False


@dataclass
class _Frame:
    """A bracket that is open: an object, or a list."""

    close: str
    is_object: bool
    num_items: int = 0
    key: str | None = None  # whose value is to come


class LiteralArguments:
    """An `ArgumentReader` of literals. `function` has the schema of the arguments."""

    def __init__(self, literals: Literals, function: Function):
        self._literals = literals
        self._schema: dict[str, Any] = function.parameters or {}
        firsts = "".join(sorted({quote[0] for quote in literals.quotes}))
        self._word_end = re.compile(rf"[\s,\[\](){{}}:={re.escape(firsts)}]")
        self._value_end = re.compile(rf"[,\[\](){{}}{re.escape(firsts)}]")
        self._frames = [_Frame(literals.close, is_object=True)]
        self._made: list[str] = []
        self._text = ""
        self._quote: str | None = None  # of the string that is being read
        self._held: list[str] | None = None  # of a string that shall be another value
        self._num_seen = 0  # characters of a word that has not ended
        self._has_begun = False

    def read(self, text: str) -> tuple[str, int, bool]:
        """As `ArgumentReader.read`."""
        self._made, self._text = [] if self._has_begun else ["{"], text
        self._has_begun = True
        while self._frames and (self._string() if self._quote else self._token()):
            pass
        return "".join(self._made), len(text) - len(self._text), not self._frames

    def _token(self) -> bool:
        if not self._num_seen:
            self._text = self._text.lstrip()
        text, quotes = self._text, self._literals.quotes
        if not text:
            return False
        quote = next((each for each in quotes if text.startswith(each)), None)
        if quote is None and num_held(text, quotes) == len(text):
            return False
        frame, first = self._frames[-1], text[0]
        if quote is not None:
            self._begin_string(quote)
        elif first in _OPEN:
            self._begin_item()
            if frame.is_object and frame.key is None:
                self._end_key("")  # a value without one
            self._made.append("{" if first == "{" else "[")
            self._frames.append(_Frame(_OPEN[first], is_object=first == "{"))
        elif first in "}])":
            self._close()
        elif first not in ",:=":
            return self._word(frame)
        self._text = text[len(quote or first) :]
        return True

    def _close(self) -> None:
        """A bracket closes; one that is not open closes the innermost that is."""
        frame = self._frames.pop()
        lacks_value = frame.key is not None
        self._made.append(('""' if lacks_value else "") + ("}" if frame.is_object else "]"))
        if self._frames:
            self._end_item()

    def _word(self, frame: _Frame) -> bool:
        """A key, a number, or a word: it ends where something else begins."""
        is_key = frame.is_object and frame.key is None
        pattern = self._word_end if is_key or self._literals.has_escapes else self._value_end
        found = pattern.search(self._text, max(1, self._num_seen))
        if found is None:
            self._num_seen = len(self._text)
            return False
        self._num_seen = 0
        word, self._text = self._text[: found.start()].rstrip(), self._text[found.start() :]
        self._begin_item()
        if is_key:
            self._end_key(word)
        else:
            self._made.append(as_json(word, self._value_types()))
            self._end_item()
        return True

    def _begin_string(self, quote: str) -> None:
        frame = self._frames[-1]
        self._begin_item()
        self._quote = quote
        is_key = frame.is_object and frame.key is None
        types = frozenset() if is_key else self._value_types()
        self._held = [] if is_key or (types and "string" not in types) else None
        if self._held is None:
            self._made.append('"')

    def _value_types(self) -> frozenset[str]:
        """The types of the argument whose value comes; empty: any, and for what is nested."""
        properties = self._schema.get("properties")
        if len(self._frames) > 1 or not isinstance(properties, dict):
            return frozenset()
        return types_of(properties.get(self._frames[0].key), self._schema)

    def _string(self) -> bool:
        quote = self._quote
        assert quote is not None
        marks = (quote, "\\") if self._literals.has_escapes else (quote,)
        found = first_mark(self._text, marks)
        end = found[0] if found else len(self._text) - num_held(self._text, marks)
        self._say(escaped(self._text[:end]))
        self._text = self._text[end:]
        if found is None:
            return False
        if found[1] == quote:
            self._text = self._text[len(quote) :]
            self._end_string()
            return True
        return self._escape()

    def _escape(self) -> bool:
        found = _ESCAPE.match(self._text)
        if found is None:
            if _BEGUN_ESCAPE.fullmatch(self._text):
                return False
            self._say("\\\\")
            self._text = self._text[1:]
            return True
        byte, short, long, one = found.groups()
        if short:
            self._say(f"\\u{short}")  # it may be half of a pair
        elif one:
            self._say(escaped(_CHARACTERS.get(one, f"\\{one}")))
        else:
            number = int(byte or long, 16)
            self._say(escaped(chr(number)) if number < 0x110000 else escaped(found[0]))
        self._text = self._text[found.end() :]
        return True

    def _end_string(self) -> None:
        frame = self._frames[-1]
        self._quote = None
        if self._held is None:
            self._made.append('"')
            self._end_item()
            return
        text, self._held = json.loads(f'"{"".join(self._held)}"'), None
        if frame.is_object and frame.key is None:
            self._end_key(text)
        else:
            self._made.append(as_json(text, self._value_types()))
            self._end_item()

    def _end_key(self, key: str) -> None:
        self._frames[-1].key = key
        self._made.append(f"{quoted(key)}: ")

    def _begin_item(self) -> None:
        """A key or an element begins, or the value of a key."""
        frame = self._frames[-1]
        if frame.num_items and frame.key is None:
            self._made.append(", ")

    def _end_item(self) -> None:
        frame = self._frames[-1]
        frame.num_items, frame.key = frame.num_items + 1, None

    def _say(self, text: str) -> None:
        (self._made if self._held is None else self._held).append(text)
