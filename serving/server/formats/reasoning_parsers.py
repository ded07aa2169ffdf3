"""What a model thinks, split off its answer: between marks, or in harmony's channels. No JAX."""

import re
from collections.abc import Collection

from serving.server.formats.marked_text import first_mark, num_held, parts_of
from serving.server.formats.pieces import (
    CallArguments,
    CallBegin,
    Parser,
    Piece,
    PlainParser,
    Reasoning,
    Text,
)
from serving.server.formats.tool_parsers import call_id
from shiftjax.text.thinking import ThinkingMarks

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START, _CHANNEL)
HARMONY_MARKS = (*_ENDS, _MESSAGE, "<|constrain|>")
_HEADERS = (_START, _CHANNEL, _MESSAGE, " to=", "assistant")  # with which a header begins
_TO = re.compile(r"to=functions\.([\w.-]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")


class ThinkParser:
    """A `Parser` of thoughts where an output begins; what follows is `answer`'s.

    `is_inside`: the prompt ended with the mark before thoughts, so a further one is left out. A
    mark of `calls` ends thoughts, too. White space around the two parts is left out.
    """

    def __init__(
        self,
        marks: ThinkingMarks,
        answer: Parser | None = None,
        *,
        is_inside: bool = False,
        calls: tuple[str, ...] = (),
    ):
        self._marks, self._calls = marks, calls
        self._answer = answer or PlainParser()
        self._heads = [each for each in (marks.begin, marks.label) if each]  # still to come
        self._state = self._opening if is_inside else self._at_start
        self._buffer = ""
        self._is_first = True  # nothing has been thought
        self._pieces: list[Piece] = []

    def feed(self, text: str) -> list[Piece]:
        """Take in more text; the pieces that are certain now."""
        self._buffer += text
        while self._state():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """The output has ended: what was held back goes where it would have gone."""
        rest, self._buffer = self._buffer, ""
        if self._state in (self._thinking, self._opening):
            return [Reasoning(rest)] if rest.strip() else []
        if self._state == self._behind:
            rest = ""
        return [*self._answer.feed(rest), *self._answer.finish()]

    def _at_start(self) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(self._marks.begin):
            self._state = self._opening
            return True
        if self._marks.begin.startswith(text):
            return False
        self._state = self._answering
        return True

    def _opening(self) -> bool:
        """In thoughts of which nothing has come: the mark, and its label, are left out."""
        if not self._heads:
            self._state = self._thinking
            return True
        text = self._buffer.lstrip()
        if text.startswith(self._heads[0]):
            self._buffer = text.removeprefix(self._heads.pop(0))
            return True
        if self._heads[0].startswith(text):
            return False
        self._heads.pop(0)
        return True

    def _thinking(self) -> bool:
        if self._is_first:
            self._buffer = self._buffer.lstrip()
        marks = (self._marks.end, *self._calls)
        found = first_mark(self._buffer, marks)
        end = found[0] if found else len(self._buffer) - num_held(self._buffer, marks)
        thought = self._buffer[:end].rstrip()
        if thought:
            self._pieces.append(Reasoning(thought))
            self._is_first = False
        self._buffer = self._buffer[len(thought) :]
        if found:
            self._buffer = self._buffer.lstrip().removeprefix(self._marks.end)
            self._state = self._behind
        return bool(found)

    def _behind(self) -> bool:
        self._buffer = self._buffer.lstrip()
        self._state = self._answering if self._buffer else self._behind
        return bool(self._buffer)

    def _answering(self) -> bool:
        text, self._buffer = self._buffer, ""
        self._pieces += self._answer.feed(text)
        return False


class HarmonyParser:
    """A `Parser` of GPT-OSS's channels: analysis is reasoning, what goes to functions is calls.

    All else is text, also what goes to a function that is not one of `names`. Calls beyond `most`
    are left out. Source: "OpenAI harmony response format", github.com/openai/harmony.
    """

    def __init__(self, names: Collection[str] = (), most: int | None = None):
        self._names, self._most = names, most
        self._buffer = ""
        self._is_header = True
        self._kind: type[Text | Reasoning] | None = Text  # of a body; None: arguments
        self._num_calls = 0
        self._lacks_arguments = False  # of the call whose body is being read nothing has come

    def feed(self, text: str) -> list[Piece]:
        """Take in more text; the pieces that are certain now."""
        pieces: list[Piece] = []
        for part in parts_of(text):
            self._buffer += part
            while self._read_header(pieces) if self._is_header else self._read_body(pieces):
                pass
        return pieces

    def finish(self) -> list[Piece]:
        """The output has ended; a header without a message says nothing."""
        rest, self._buffer = self._buffer, ""
        return self._body(rest) if rest and not self._is_header else []

    def _read_header(self, pieces: list[Piece]) -> bool:
        text = self._buffer
        if not any(each.startswith(text) or text.startswith(each) for each in _HEADERS):
            self._is_header, self._kind = False, Text  # no header: an answer
            return True
        header, mark, rest = self._buffer.partition(_MESSAGE)
        if not mark:
            return False
        self._buffer, self._is_header = rest, False
        to = _TO.search(header)
        self._kind = Reasoning if _ANALYSIS.search(header) else Text
        if to and to[1] in self._names:
            self._kind = None
            self._num_calls += 1
            self._lacks_arguments = True
            if self._is_wanted():
                pieces.append(CallBegin(self._num_calls - 1, call_id(), to[1]))
        return True

    def _read_body(self, pieces: list[Piece]) -> bool:
        found = first_mark(self._buffer, _ENDS)
        end = found[0] if found else len(self._buffer) - num_held(self._buffer, _ENDS)
        pieces += self._body(self._buffer[:end])
        self._buffer = self._buffer[end:]
        if found is None:
            return False
        if self._kind is None and self._lacks_arguments:
            pieces += self._body("{}")  # an empty message; clients read JSON
        is_next = found[1] in (_START, _CHANNEL)
        self._buffer = self._buffer if is_next else self._buffer[len(found[1]) :]
        self._is_header = True
        return True

    def _body(self, text: str) -> list[Piece]:
        if not text:
            return []
        if self._kind is not None:
            return [self._kind(text)]
        self._lacks_arguments &= not text.strip()
        return [CallArguments(self._num_calls - 1, text)] if self._is_wanted() else []

    def _is_wanted(self) -> bool:
        return self._most is None or self._num_calls <= self._most
