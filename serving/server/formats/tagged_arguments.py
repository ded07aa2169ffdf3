"""Arguments that stand between tags, one by one: read as they come, written as JSON. No JAX.

The text of a string is passed on at once. Any other value is passed on when it has ended: what it
is depends on all of it, and on the type that the tool's schema gives it.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from serving.server.fields import Function
from serving.server.formats.call_heads import Head
from serving.server.formats.json_types import as_json, escaped, quoted, types_of
from serving.server.formats.marked_text import first_mark, num_held


class ArgumentReader(Protocol):
    """Reads the arguments of one call that are not JSON."""

    def read(self, text: str) -> tuple[str, int, bool]:
        """(JSON text made, characters used up, whether the arguments have ended)."""
        ...


@dataclass(frozen=True)
class Tags:
    """How an argument is marked.

    A value ends with `value_end`, or before one of `value_stops`. The arguments end with `end`, if
    that is not empty, or before `stop`. `is_padded`: a line break on each side is not of the value.
    """

    key: Head
    value_end: str
    end: str
    stop: str
    value_stops: tuple[str, ...] = ()
    is_padded: bool = False


class TaggedArguments:
    """An `ArgumentReader` of tags. `function` has the schema of the arguments."""

    def __init__(self, tags: Tags, function: Function):
        self._tags = tags
        self._schema: dict[str, Any] = function.parameters or {}
        pads = (f"\n{tags.value_end}",) if tags.is_padded else ()
        self._value_ends = (*pads, tags.value_end)
        self._ends = (tags.end, tags.stop) if tags.end else (tags.stop,)
        self._made: list[str] = []
        self._text = ""
        self._num_read = -1  # arguments; -1: not even the bracket before them is written
        self._is_over = False
        self._state = self._between
        self._types: frozenset[str] = frozenset()
        self._held: list[str] | None = None  # of a value that is not passed on yet

    def read(self, text: str) -> tuple[str, int, bool]:
        """As `ArgumentReader.read`."""
        self._made, self._text = ["{"] if self._num_read < 0 else [], text
        self._num_read = max(0, self._num_read)
        while not self._is_over and self._state():
            pass
        return "".join(self._made), len(text) - len(self._text), self._is_over

    def _between(self) -> bool:
        """Between arguments: what is no tag is left out."""
        text, tags = self._text.lstrip(), self._tags
        self._text = text
        if text.startswith(self._ends):
            self._text = text.removeprefix(tags.end)
            self._made.append("}")
            self._is_over = True
            return False
        head = tags.key.match(text)
        if head:
            self._made.append(f"{', ' if self._num_read else ''}{quoted(head['name'])}: ")
            self._text = text[head.end() :]
            self._begin(head["name"])
            return True
        may_end = num_held(text, self._ends) == len(text)
        if may_end or tags.key.may_come(text):
            return False
        place = text.find("<", 1)
        self._text = text[place:] if place >= 0 else ""
        return True

    def _begin(self, name: str) -> None:
        properties = self._schema.get("properties")
        schema = properties.get(name) if isinstance(properties, dict) else None
        self._types = types_of(schema, self._schema)
        self._num_read += 1
        self._held = []
        self._state = self._padding if self._tags.is_padded else self._value
        if self._types == {"string"}:
            self._pass_on()

    def _padding(self) -> bool:
        if self._text:
            self._text, self._state = self._text.removeprefix("\n"), self._value
        return bool(self._text)

    def _value(self) -> bool:
        marks = (*self._value_ends, *self._tags.value_stops)
        found = first_mark(self._text, marks)
        end = found[0] if found else len(self._text) - num_held(self._text, marks)
        part, self._text = self._text[:end], self._text[end:]
        if self._held is None:
            self._made.append(escaped(part))
        elif part:
            self._held.append(part)
            if self._types == {"string", "null"} and not "null".startswith("".join(self._held)):
                self._pass_on()
        if found is None:
            return False
        self._made.append('"' if self._held is None else self._whole("".join(self._held)))
        if found[1] in self._value_ends:
            self._text = self._text[len(found[1]) :]
        self._state = self._between
        return True

    def _whole(self, value: str) -> str:
        """A value that was held back, as JSON."""
        if self._types == {"string", "null"}:
            return value if value == "null" else quoted(value)
        return as_json(value, self._types)

    def _pass_on(self) -> None:
        """The value is a string: what comes of it is passed on from now on."""
        self._made.append('"' + escaped("".join(self._held or ())))
        self._held = None
