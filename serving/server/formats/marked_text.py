"""Text in parts, in which marks are looked for: nothing that may begin a mark is let go. No JAX."""

import re
from collections.abc import Iterator, Sequence

PART = 1024  # characters that are looked at together: what is held is cut and joined that often
_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


def parts_of(text: str) -> Iterator[str]:
    """The text in parts, so that the time that a parser takes grows with its length alone."""
    return (text[start : start + PART] for start in range(0, len(text), PART))


class JsonNesting:
    """How deep JSON text that comes in parts is nested, without regard to what else is in it."""

    def __init__(self, depth: int = 0):
        self.depth = depth
        self._in_string = self._is_escaped = False

    def brackets(self, text: str, start: int = 0) -> Iterator[int]:
        """Take in `text[start:]`; yield the place behind each bracket that is not in a string.

        `depth` is then the one behind that bracket; what follows is taken in as one goes on.
        """
        place = start
        while place < len(text):
            if self._is_escaped:
                self._is_escaped = False
                place += 1
                continue
            found = (_IN_STRING if self._in_string else _STRUCTURE).search(text, place)
            if found is None:
                return
            place = found.end()
            if found[0] == "\\":
                self._is_escaped = True
            elif found[0] == '"':
                self._in_string = not self._in_string
            else:
                self.depth += 1 if found[0] in "{[" else -1
                yield place


def first_mark(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """(place, mark) of the mark that comes first; of several there, the longest."""
    found = [(text.find(mark), -len(mark), mark) for mark in marks]
    places = [each for each in found if each[0] >= 0]
    return (min(places)[0], min(places)[2]) if places else None


def num_held(text: str, marks: Sequence[str]) -> int:
    """The length of the longest end of `text` with which a mark begins."""
    longest = max(map(len, marks), default=1)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
