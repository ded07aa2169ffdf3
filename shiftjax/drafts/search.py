"""From the last tokens of a sequence to a guess of the next ones. No JAX.

Suffix decoding (Oliaro et al., arXiv 2411.04975) without its trees: the places where the longest
suffix has occurred before vote for the next token, and those that agree for the one after it.
Prompt lookup (n-grams; Saxena 2023) is the same with other lengths.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shiftjax.draft_options import DraftOptions
from shiftjax.drafts.draft_history import Place

SUFFIX_SIZES = (4, 2, 1)  # tokens of the keys that places are found by
MOST_PLACES = 12  # the most recent ones of a key

type Lookup = Callable[[array[int], int], list[Place]]  # (key, most) -> places, the latest first


class Guess(NamedTuple):
    """Tokens that may follow, and what speaks for them."""

    tokens: list[int]
    claims: list[float]  # [tokens] share of the places that agree, among those that did so far
    match: int  # tokens


NO_GUESS = Guess([], [], 0)

type Path = tuple[list[int], list[float]]  # tokens, claims: see `Guess`


@dataclass(frozen=True)
class Search:
    """How places are found and how far they are followed; see `DraftOptions`."""

    sizes: tuple[int, ...]  # the longest first
    max_match: int
    factor: float
    offset: float
    min_prob: float

    def guess(self, tail: array[int], lookup: Lookup, most: int) -> Guess:
        """At most `most` tokens after `tail`, the last `max_match` tokens of a sequence."""
        for size in self.sizes:
            if size <= len(tail):
                match, best = longest_matches(tail, lookup(tail[-size:], MOST_PLACES), size)
                if best:
                    limit = min(most, int(self.factor * match + self.offset + 1e-6))
                    return Guess(*follow(best, limit, self.min_prob), match)
        return NO_GUESS


def make_search(options: DraftOptions) -> Search:
    """The search of a method. Lengths of n-gram drafts do not depend on the match, as published."""
    if options.speculation == "ngram":
        sizes = tuple(range(options.prompt_lookup_max, options.prompt_lookup_min - 1, -1))
        most = options.max_draft_tokens
        return Search(sizes, options.prompt_lookup_max, 0.0, most, options.suffix_min_prob)
    lengths = options.suffix_factor, options.suffix_offset
    return Search(SUFFIX_SIZES, options.suffix_max_match, *lengths, options.suffix_min_prob)


def longest_matches(
    tail: array[int], places: Sequence[Place], least: int
) -> tuple[int, list[Place]]:
    """(length, places) of those before which most of the last tokens of `tail` stand.

    Places with fewer than `least` of them are none: hashes of keys may collide.
    """
    longest, best = least, []
    for place in places:
        tokens, end = place
        match, limit = 0, min(end, len(tail))
        while match < limit and tokens[end - match - 1] == tail[-match - 1]:
            match += 1
        if match > longest:
            longest, best = match, [place]
        elif match == longest:
            best.append(place)
    return longest, best


def follow(places: list[Place], limit: int, min_prob: float = 0.0) -> Path:
    """(tokens, claims): the most frequent next token, again and again; of equals the most recent.

    It ends after `limit` tokens, where the claimed probability of the whole path falls below
    `min_prob`, or with the texts.
    """
    tokens, claims, path = [], [], 1.0
    while places and len(tokens) < limit:
        if len(places) == 1:
            text, at = places[0]
            rest = text[at : at + limit - len(tokens)].tolist()
            return tokens + rest, claims + [1.0] * len(rest)
        following = [text[at] for text, at in places]
        token = max(following, key=following.count)
        claim = following.count(token) / len(places)
        path *= claim
        if path < min_prob:
            break
        tokens.append(token)
        claims.append(claim)
        places = [(text, at + 1) for text, at in places if text[at] == token and at + 1 < len(text)]
    return tokens, claims
