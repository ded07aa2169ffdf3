"""What stands before the arguments of a call, or of one argument, recognised as it comes. No JAX.

A head is a sequence of parts. Each part knows what all of it looks like and what any beginning of
it looks like, so that a parser can tell "not yet" from "never".
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """Regular expressions of a whole part and of its beginnings."""

    whole: str
    begun: str


NAME = Part(r"(?P<name>[\w-]{1,64})", r"[\w-]{0,64}")
KEY = Part(r"(?P<name>[^<>\"'\n]{1,256})", r"[^<>\"'\n]{0,256}")
SPACE = Part(r"\s{0,8}", r"\s{0,8}")
_GROUP = re.compile(r"\?P<\w+>")


def literal(text: str) -> Part:
    """The text."""
    return Part(re.escape(text), _beginnings(text))


def maybe(text: str) -> Part:
    """The text, or nothing."""
    return Part(f"(?:{re.escape(text)})?", _beginnings(text))


def before(characters: str) -> Part:
    """Nothing, in front of one of these characters."""
    return Part(f"(?=[{re.escape(characters)}])", "")


def _beginnings(text: str) -> str:
    return "|".join(re.escape(text[:end]) for end in range(len(text)))


class Head:
    """A sequence of parts; a string is a literal one. One part has the group `name`."""

    def __init__(self, *parts: Part | str):
        read = [literal(part) if isinstance(part, str) else part for part in parts]
        plain = [_GROUP.sub("?:", part.whole) for part in read]
        begun = ("".join(plain[:i]) + f"(?:{part.begun})" for i, part in enumerate(read))
        self._whole = re.compile("".join(part.whole for part in read))
        self._begun = re.compile("|".join(begun))

    def match(self, text: str) -> re.Match[str] | None:
        """The head with which the text begins."""
        return self._whole.match(text)

    def may_come(self, text: str) -> bool:
        """Whether more text may make a head of this one."""
        return self._begun.fullmatch(text) is not None
