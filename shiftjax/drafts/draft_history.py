"""Texts that grow, and where their last few tokens have occurred before. No JAX.

Dictionaries find the latest place after every run of `sizes` tokens, and each place knows the one
before it with the same run: the hash chains of deflate (RFC 1951, section 4), in plain Python. A
token costs two dictionary operations per size, and a place has no object of its own::

    text                 a b c x a b c y a b
    latest[a b]          -> 10, the end: nothing follows yet
    before[10]           -> 6, where c y follow
    before[6]            -> 2, where c x follow
"""

from array import array
from collections.abc import Iterable, Sequence

NOWHERE = -1
TEXT_SHIFT = 32  # a place is `text number << 32 | end`: the tokens before `end` are the key
END_MASK = (1 << TEXT_SHIFT) - 1
WORD_BITS = 32  # of a token in a key; token + 1, so that keys of several sizes never meet
OUTSIDE = END_MASK  # stands for the tokens before a text
SHARDS = 32  # dictionaries, by the last token: one that grows is copied, 17 ms for 200,000 tokens

type Place = tuple[array[int], int]  # a text, and the index of the token that follows the key


def key_of(tokens: Iterable[int], code: int = 0) -> int:
    """The key of these tokens, appended to those of `code`: one word each."""
    for token in tokens:
        code = code << WORD_BITS | (token + 1) & OUTSIDE
    return code


class Text:
    """One text of a history, indexed from the place `first` up to the place `stop`, excluded."""

    __slots__ = ("before", "first", "number", "stop", "tokens")

    def __init__(self, number: int, tokens: array[int], first: int):
        self.number = number
        self.tokens = tokens
        self.first = self.stop = first
        self.before = array("q")  # [stop - first, sizes] the place before with the same key


class History:
    """Texts under one index. Numbers of texts rise, and they are removed in that order.

    `sizes` are the lengths of keys, in tokens, the longest first.
    """

    def __init__(self, sizes: Sequence[int]):
        self.texts: dict[int, Text] = {}
        self._next = 0
        self._slots = {size: slot for slot, size in enumerate(sizes)}
        self._masks = [(1 << size * WORD_BITS) - 1 for size in sizes]
        self._longest = max(sizes, default=0)
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]

    def __len__(self) -> int:
        """Keys that are found."""
        return sum(map(len, self._shards))

    def add(self, tokens: array[int], first: int = 1) -> Text:
        """A new text, not indexed yet; places before `first` never will be."""
        text = self.texts[self._next] = Text(self._next, tokens, first)
        self._next += 1
        return text

    def index(self, text: Text, stop: int) -> None:
        """Index the next places of a text, up to `stop`, excluded; its length + 1 at most."""
        shards, append, masks = self._shards, text.before.append, self._masks
        place = text.number << TEXT_SHIFT | text.stop
        for code in self._codes(text, text.stop, stop):
            latest = shards[code % SHARDS]
            for mask in masks:
                key = code & mask
                append(latest.get(key, NOWHERE))
                latest[key] = place
            place += 1
        text.stop = stop

    def forget(self, text: Text, start: int, stop: int) -> None:
        """Take the places `start .. stop - 1` of a removed text, the oldest, out of the index."""
        number = text.number
        for code in self._codes(text, start, stop):
            latest = self._shards[code % SHARDS]
            for mask in self._masks:
                key = code & mask
                if latest.get(key, NOWHERE) >> TEXT_SHIFT == number:
                    del latest[key]

    def places(self, key: Sequence[int], most: int) -> list[Place]:
        """The most recent places after `key` that a token follows, the latest first."""
        slot, width = self._slots[len(key)], len(self._masks)
        code, found = key_of(key), []
        place = self._shards[code % SHARDS].get(code, NOWHERE)
        while place != NOWHERE and len(found) < most:
            text = self.texts.get(place >> TEXT_SHIFT)
            if text is None:  # removed, as is everything older
                break
            end = place & END_MASK
            if end < len(text.tokens):
                found.append((text.tokens, end))
            place = text.before[(end - text.first) * width + slot]
        return found

    def _codes(self, text: Text, start: int, stop: int) -> Iterable[int]:
        """The key of the longest size at every place; what lies before the text is no token."""
        tokens, mask = text.tokens, (1 << self._longest * WORD_BITS) - 1
        code = key_of(tokens[max(0, start - self._longest) : max(0, start - 1)], mask)
        for token in tokens[max(0, start - 1) : stop - 1]:
            code = (code << WORD_BITS | (token + 1) & OUTSIDE) & mask
            yield code
