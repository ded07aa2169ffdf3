"""How many draft tokens, and for whom: one choice per step. No JAX.

A draft's tokens survive with falling probability, so the n most probable ones of all sequences are
always beginnings of their drafts, and a step with them yields its other tokens and the sum of
their probabilities. It takes what its bucket takes, in the mode that a step of that size runs in.
(Goodput as what is maximised: SmartSpec, Liu et al., arXiv 2406.14066; there without modes.)
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import NamedTuple

from shiftjax.draft_options import DraftOptions

type Candidate = tuple[Hashable, Sequence[float]]  # name of a sequence, survivals of its draft


class Room(NamedTuple):
    """What a step has without drafts, and what it can take."""

    base_tokens: int  # in the plan without drafts
    tokens_left: int  # that the budgets of tokens and blocks leave to drafts
    rows_left: int  # logit rows; every draft token needs one
    buckets: Sequence[int]  # tokens, ascending
    num_running: int = 0  # sequences in the plan

    @property
    def most(self) -> int:
        """The most draft tokens that fit."""
        largest = max(self.buckets, default=0)
        return max(0, min(self.tokens_left, self.rows_left, largest - self.base_tokens))


def choose(
    options: DraftOptions,
    candidates: Sequence[Candidate],
    room: Room,
    *,
    most_tokens: int | None = None,
    seconds: Callable[[int], float] | None = None,
    proposing_seconds: float = 0.0,
) -> dict[Hashable, int]:
    """Lengths of at least 1 by name, by `options.draft_choice`; without `seconds` a step is filled.

    What the rules say of the other arguments: `fixed`, `fill`, `by_cost`.
    """
    if options.fixed_drafts:
        return fixed(candidates, room, options.draft_max_seqs, options.draft_off_seqs)
    if options.draft_choice != "fill" and seconds:
        return by_cost(candidates, room, seconds, proposing_seconds)
    return fill(candidates, room, most_tokens)


def fill(
    candidates: Sequence[Candidate], room: Room, most_tokens: int | None = None
) -> dict[Hashable, int]:
    """Lengths that only fill what the bucket of the plan pads.

    `most_tokens` is the size of a step that drafts must not carry it past, say the threshold of
    the modes; a plan that is larger by itself is past it already.
    """
    size = next((bucket for bucket in room.buckets if bucket >= room.base_tokens), 0)
    if most_tokens is not None and room.base_tokens <= most_tokens:
        size = min(size, most_tokens)
    return _lengths(_ranked(candidates), min(room.most, size - room.base_tokens))


def fixed(
    candidates: Sequence[Candidate], room: Room, max_seqs: int, off_seqs: int
) -> dict[Hashable, int]:
    """Whole drafts of the first `max_seqs` candidates (0: all), none if `off_seqs` run (0: never).

    The rule that engines had first, as a control.
    """
    if 0 < off_seqs <= room.num_running:
        return {}
    lengths, left = {}, room.most
    for name, survivals in candidates[: max_seqs or None]:
        taken = min(len(survivals), left)
        if taken:
            lengths[name] = taken
            left -= taken
    return lengths


def by_cost(
    candidates: Sequence[Candidate],
    room: Room,
    seconds: Callable[[int], float],
    proposing_seconds: float = 0.0,
) -> dict[Hashable, int]:
    """Lengths of the most expected tokens per second.

    `seconds` predicts a step of so many tokens, in the mode that it will run in; so the best
    length is that of the best pair of length and mode. `proposing_seconds` is the host's time that
    a step with drafts cannot hide. Only sizes that fill a bucket are tried: O(D log D + buckets)
    for D draft tokens. Of equal rates the fewest drafts are taken.
    """
    ranked = _ranked(candidates)
    gains = [0.0, *accumulate(survival for survival, _, _ in ranked)]
    most = min(room.most, len(ranked))
    sizes = {min(most, bucket - room.base_tokens) for bucket in room.buckets}
    best_rate, best = -1.0, 0
    for num in sorted({0, *(size for size in sizes if size > 0)}):
        cost = seconds(room.base_tokens + num) + (proposing_seconds if num else 0.0)
        rate = (room.base_tokens + gains[num]) / cost
        if rate > best_rate * (1 + 1e-9):
            best_rate, best = rate, num
    return _lengths(ranked, best)


def _ranked(candidates: Sequence[Candidate]) -> list[tuple[float, int, Hashable]]:
    """(survival, place in its draft, name), the most probable first; of equals the earlier."""
    flat = [
        (survival, place, name)
        for name, survivals in candidates
        for place, survival in enumerate(survivals)
    ]
    return sorted(flat, key=lambda token: (-token[0], token[1]))


def _lengths(ranked: Sequence[tuple[float, int, Hashable]], num: int) -> dict[Hashable, int]:
    """How many of the first `num` ranked tokens are whose."""
    return dict(Counter(name for _, _, name in ranked[: max(0, num)]))
