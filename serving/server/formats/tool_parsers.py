"""Tool calls in the text of a model, as it comes, between marks or without. No JAX.

A call begins when its name, one of the request's tools, and the first character of its arguments
have come; its arguments are passed on as the model writes them, or as JSON if they are written in
another way. What looks like a call and is
none (an unknown name, an object that is no call) is text, with its marks. What the parts are in
which the text comes changes nothing.
"""

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from serving.server.fields import Function
from serving.server.formats.call_heads import Head
from serving.server.formats.marked_text import JsonNesting, first_mark, num_held, parts_of
from serving.server.formats.pieces import CallArguments, CallBegin, Piece, Text
from serving.server.formats.tagged_arguments import ArgumentReader

# {"name": "f", "arguments": of a call whose arguments begin.
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*'
)
_BETWEEN = "[],; \t\r\n"  # what may stand between calls


def call_id() -> str:
    """A new id of a call, as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """A new id of nine letters and digits, which Mistral's templates insist on."""
    return secrets.token_hex(5)[:9]


@dataclass(frozen=True)
class CallMarks:
    """How a model marks its calls."""

    begin: tuple[str, ...]  # before calls; the first is the usual one
    end: str = ""  # behind them; "": nothing is
    behind: tuple[str, ...] = ()  # marks behind one call, which say nothing
    bare: str = ""  # the character with which a call may begin an output without a mark
    head: Head | None = None  # what is before the arguments of a call that is no JSON object
    has_objects: bool = True  # a call may be a JSON object
    reader: Callable[[Function], ArgumentReader] | None = None  # None: arguments are JSON
    seen: tuple[str, ...] = ()  # marks within calls
    make_id: Callable[[], str] = call_id

    @property
    def all(self) -> tuple[str, ...]:
        """Every mark that a parser looks for."""
        return tuple(each for each in (*self.begin, self.end, *self.behind, *self.seen) if each)


class CallParser:
    """A `Parser` of calls `{"name": ..., "arguments": {...}}`, or of those that a head begins.

    `functions` are the request's tools. Calls beyond `most` are left out.
    """

    def __init__(self, marks: CallMarks, functions: Sequence[Function], most: int | None = None):
        self._marks, self._most = marks, most
        self._functions = {each.name: each for each in functions}
        self._between = tuple(each for each in (*marks.begin, marks.end, *marks.behind) if each)
        begins = tuple(mark[0] for mark in marks.begin)
        self._skipped = "".join(each for each in _BETWEEN if each not in begins)  # in runs
        self._state = self._at_start if marks.bare else self._in_text
        self._buffer = ""  # what has come and is not yet dealt with
        self._opening: list[str] = []  # before a call, and text if it is none
        self._num_calls = 0
        self._ids: set[str] = set()
        self._reader: ArgumentReader | None = None  # of the call whose arguments come
        self._nesting = JsonNesting()
        self._num_seen = 0  # characters of the buffer that `_nesting` has taken in
        self._may_begin = False  # the arguments of a call may come
        self._pieces: list[Piece] = []

    def feed(self, text: str) -> list[Piece]:
        """Take in more text; the pieces that are certain now."""
        for part in parts_of(text):
            self._buffer += part
            while self._state():
                pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """The output has ended: what was held back is text, unless it is space behind a call."""
        rest = "" if self._state in (self._in_arguments, self._behind_arguments) else self._buffer
        rest = "".join(self._opening) + rest
        self._buffer, self._opening = "", []
        is_text = rest.strip(_BETWEEN) or not self._num_calls
        return [Text(rest)] if rest and is_text else []

    # ------------------------------------------------------------------ states
    # Each deals with some of the buffer; True: there may be more to do without further text.

    def _at_start(self) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(self._marks.bare):
            self._open(len(self._buffer) - len(text))
        elif text:
            self._state = self._in_text
        return bool(text)

    def _in_text(self) -> bool:
        found = first_mark(self._buffer, self._marks.begin)
        if found is None:
            kept = self._buffer[: len(self._buffer) - num_held(self._buffer, self._marks.begin)]
            self._say(len(kept.rstrip()))
            return False
        place, mark = found
        self._say(len(self._buffer[:place].rstrip()))
        self._open(self._buffer.index(mark) + len(mark))
        return True

    def _between_calls(self) -> bool:
        text = self._buffer.lstrip(self._skipped)
        self._skip(len(self._buffer) - len(text))
        if text.startswith("{") and self._marks.has_objects:
            self._nesting, self._num_seen, self._may_begin = JsonNesting(), 0, True
            self._state = self._in_call
            return True
        marks = self._between
        mark = next((each for each in marks if text.startswith(each)), None)
        if mark is not None and mark == self._marks.end:
            self._buffer, self._opening = text[len(mark) :], []
            self._state = self._in_text
            return True
        if mark is not None:
            self._skip(len(mark))
            if mark in self._marks.behind and self._num_calls:
                self._opening = []
            return True
        if not text or num_held(text, marks) == len(text):
            return False
        if text[0] in _BETWEEN:
            self._skip(1)
            return True
        return self._headed_call(self._marks.head, text) if self._marks.head else self._give_up(0)

    def _headed_call(self, head: Head, text: str) -> bool:
        found = head.match(text)
        if found is None:
            return False if head.may_come(text) else self._give_up(0)
        function = self._functions.get(found["name"])
        if function is None:
            return self._give_up(0)
        self._begin(function.name, found.end(), self._between_calls, found.groupdict().get("id"))
        self._reader = self._marks.reader(function) if self._marks.reader else None
        return True

    def _in_call(self) -> bool:
        for place in self._nesting.brackets(self._buffer, self._num_seen):
            self._num_seen = place
            if self._nesting.depth == 0:
                return self._whole_call(place)
            if self._may_begin:  # what is nested first
                self._may_begin = self._nesting.depth == 1
                is_object = self._buffer[place - 1] == "{"
                head = _HEAD.fullmatch(self._buffer, 0, place - 1) if is_object else None
                name = _decoded(head[1]) if head else None
                if isinstance(name, str) and name in self._functions:
                    self._begin(name, place - 1, self._behind_arguments)
                    return True
        self._num_seen = len(self._buffer)
        return False

    def _whole_call(self, end: int) -> bool:
        """An object that has come in whole: a call whose fields stand in another order, or text."""
        call = _decoded(self._buffer[:end])
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(name, str) or name not in self._functions:
            return self._give_up(end)
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):  # JSON within JSON
            arguments = _decoded(arguments)
        if not isinstance(arguments, dict):
            return self._give_up(end)
        self._begin(name, end, self._between_calls)
        self._argue(msgspec.json.encode(arguments).decode())
        self._state = self._between_calls
        return True

    def _in_arguments(self) -> bool:
        if self._reader is not None:
            made, end, is_over = self._reader.read(self._buffer)
            self._argue(made)
            self._buffer = self._buffer[end:]
            self._state = self._after if is_over else self._in_arguments
            return is_over
        for place in self._nesting.brackets(self._buffer):
            if self._nesting.depth == 0:
                self._argue(self._buffer[:place])
                self._buffer, self._state = self._buffer[place:], self._after
                self._nesting, self._num_seen = JsonNesting(1), 0
                return True
        self._argue(self._buffer)
        self._buffer = ""
        return False

    def _behind_arguments(self) -> bool:
        """In an object whose arguments have come: further fields do not matter."""
        text = self._buffer.lstrip()
        if not self._num_seen and text and text[0] not in ",}":
            self._buffer, self._state = text, self._between_calls  # it is not closed
            return True
        for place in self._nesting.brackets(self._buffer, self._num_seen):
            if self._nesting.depth == 0:
                self._buffer, self._state = self._buffer[place:], self._between_calls
                return True
        self._num_seen = len(self._buffer) if text else 0
        return False

    # ------------------------------------------------------------------ what states do

    def _open(self, end: int) -> None:
        """Enter the state between calls after the first `end` characters of the buffer."""
        self._opening, self._buffer = [self._buffer[:end]], self._buffer[end:]
        self._state = self._between_calls

    def _skip(self, end: int) -> None:
        self._opening.append(self._buffer[:end])
        self._buffer = self._buffer[end:]

    def _give_up(self, end: int) -> bool:
        """Emit the opening and the next `end` characters of the buffer as text."""
        text, self._opening = "".join(self._opening), []
        if not self._num_calls or text.strip(_BETWEEN) or end:
            self._pieces += [Text(text + self._buffer[:end])] if text + self._buffer[:end] else []
        self._buffer, self._state = self._buffer[end:], self._in_text
        return True

    def _say(self, end: int) -> None:
        if end:
            self._pieces.append(Text(self._buffer[:end]))
            self._buffer = self._buffer[end:]

    def _begin(
        self, name: str, end: int, after: Callable[[], bool], given: str | None = None
    ) -> None:
        """A call begins; its arguments follow the first `end` characters. `given`: its id."""
        self._buffer, self._opening = self._buffer[end:], []
        self._num_calls += 1
        if self._is_wanted():
            made = given if given and given not in self._ids else self._marks.make_id()
            self._ids.add(made)
            self._pieces.append(CallBegin(self._num_calls - 1, made, name))
        self._nesting, self._num_seen, self._reader = JsonNesting(), 0, None
        self._state, self._after = self._in_arguments, after

    def _argue(self, text: str) -> None:
        if text and self._is_wanted():
            self._pieces.append(CallArguments(self._num_calls - 1, text))

    def _is_wanted(self) -> bool:
        return self._most is None or self._num_calls <= self._most


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return None
