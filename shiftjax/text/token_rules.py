"""What a request says of texts in its output, as constraints on its tokens. No JAX.

A grammar says what must come; a rule only what may not come next. Rules and a grammar are joined.
"""

from collections.abc import Callable, Sequence

import numpy as np

from shiftjax.core.request import TokenConstraint
from shiftjax.text.tokenizer import Tokenizer

ALL = 0xFFFFFFFF

Mask = np.ndarray  # [ceil(vocab / 32)] uint32, see `TokenConstraint`


def all_allowed(vocab_size: int) -> Mask:
    """A mask that allows every token of the vocabulary."""
    words = np.full(-(-vocab_size // 32), ALL, np.uint32)
    if vocab_size % 32:
        words[-1] = (1 << vocab_size % 32) - 1
    return words


def allows(mask: Mask, token: int) -> bool:
    """Whether a mask has the bit of a token."""
    return token < 32 * len(mask) and bool(int(mask[token // 32]) >> (token % 32) & 1)


def only(token: int, vocab_size: int) -> Mask:
    """A mask that allows one token."""
    mask = np.zeros(-(-vocab_size // 32), np.uint32)
    mask[token // 32] = 1 << token % 32
    return mask


def without(mask: Mask, tokens: Sequence[int]) -> Mask:
    """A copy of the mask that forbids these tokens, too."""
    mask = mask.copy()
    for token in tokens:
        if token < 32 * len(mask):  # a tokenizer may know more than its model
            mask[token // 32] &= np.uint32(ALL ^ (1 << token % 32))
    return mask


class TokenRule[S]:
    """A `TokenConstraint` whose state is a value: drafts follow it without changing it."""

    decides_end = False  # an output may end wherever the rest of its request allows it

    def __init__(self, start: S):
        self._state = start
        self.mask = self._mask_of(start)

    def _mask_of(self, state: S) -> Mask:
        """What may come in a state."""
        raise NotImplementedError

    def _after(self, state: S, token: int) -> S:
        """The state behind one more token."""
        raise NotImplementedError

    def accept(self, token_id: int) -> bool:
        """Move on by a token; there is always one that can follow."""
        self._state = self._after(self._state, token_id)
        self.mask = self._mask_of(self._state)
        return True

    def masks_along(self, tokens: list[int]) -> list[Mask]:
        """`mask` after none, one, two ... of these tokens, as far as they are allowed."""
        masks, state = [self.mask], self._state
        for token in tokens:
            if not allows(masks[-1], token):
                break
            state = self._after(state, token)
            masks.append(self._mask_of(state))
        return masks

    def forced_tokens(self, most: int) -> list[int]:
        """Tokens that must come next; none."""
        return []


class BannedWords(TokenRule[tuple[int, ...]]):
    """Sequences of tokens that an output may not hold; the last token of each is forbidden.

    As vLLM's `bad_words`, it looks at the output alone. The state is the tail of the output.
    """

    def __init__(self, words: Sequence[Sequence[int]], vocab_size: int):
        single = [word[0] for word in words if len(word) == 1]
        self._plain = without(all_allowed(vocab_size), single)
        self._longer = [(tuple(word[:-1]), word[-1]) for word in words if len(word) > 1]
        self._length = max((len(before) for before, _ in self._longer), default=0)
        super().__init__(())

    def _mask_of(self, state: tuple[int, ...]) -> Mask:
        banned = [last for before, last in self._longer if state[-len(before) :] == before]
        return without(self._plain, banned) if banned else self._plain

    def _after(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)[-self._length :] if self._length else ()


class Joined:
    """Two constraints at once."""

    def __init__(self, first: TokenConstraint, second: TokenConstraint):
        self._parts = first, second
        self.decides_end = first.decides_end or second.decides_end
        self.mask = first.mask & second.mask

    def accept(self, token_id: int) -> bool:
        """Move both on by a token; False if nothing can follow."""
        goes_on = [part.accept(token_id) for part in self._parts]
        self.mask = self._parts[0].mask & self._parts[1].mask
        return all(goes_on) and bool(self.mask.any())

    def masks_along(self, tokens: list[int]) -> list[Mask]:
        """`mask` after none, one, two ... of these tokens, as far as both allow them."""
        first, second = (part.masks_along(tokens) for part in self._parts)
        masks = [one & other for one, other in zip(first, second, strict=False)]
        end = next((i for i, mask in enumerate(masks[1:], start=1) if not mask.any()), len(masks))
        return masks[:end]

    def forced_tokens(self, most: int) -> list[int]:
        """Tokens that one of them forces; what the other forbids of them, `masks_along` drops."""
        return self._parts[0].forced_tokens(most) or self._parts[1].forced_tokens(most)


def word_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The token ids of words, at the beginning of a text and behind a space."""
    texts = [prefix + word.lstrip() for word in words for prefix in ("", " ")]
    found = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    return [list(ids) for ids in dict.fromkeys(found) if ids]


def ruled(
    grammars: Sequence[TokenConstraint], num: int, rules: Callable[[int], list[TokenConstraint]]
) -> Sequence[TokenConstraint]:
    """A constraint for each of `num` continuations, or none: a grammar's state, and rules."""
    made = [rules(index) for index in range(num)]
    if not any(made):
        return grammars
    return [_joined([*grammars[index : index + 1], *each]) for index, each in enumerate(made)]


def _joined(parts: list[TokenConstraint]) -> TokenConstraint:
    first, *others = parts
    for other in others:
        first = Joined(first, other)
    return first
