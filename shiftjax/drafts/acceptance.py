"""How often guessed tokens are kept: learned while serving, not believed. No JAX."""

from collections.abc import Iterable
from dataclasses import dataclass

from shiftjax.core.proposal import Claims

BINS = 8  # of claimed probabilities
MOST_OCTAVES = 6  # matches of 32 tokens and more are alike
PRIOR_OFFERS = 8.0  # what a claim weighs against what was seen
# A text that repeats m tokens goes on as before in about m / (m + 2) of what it claims to: of the
# questions and answers of chats 0.3, 0.5, 0.7, 0.8 and 0.95 with 1, 2, 4, 8 and 16 tokens.
SHORT_MATCH = 2.0
DECAY = 0.999  # of what was seen, per offer
FADE = 0.7  # of what was seen, each time that a group gives drafts up
RECORD_PRIOR_OFFERS = 4.0
RECORD_DECAY = 15 / 16  # per draft: a sequence's record is that of about 16 drafts


@dataclass(slots=True)
class Record:
    """How one sequence's drafts did, against what the table said of them."""

    accepted: float = 0.0
    expected: float = 0.0

    @property
    def factor(self) -> float:
        """What to multiply the table's probabilities by; 1 without drafts."""
        prior = RECORD_PRIOR_OFFERS
        return (self.accepted + prior) / (self.expected + prior)


class Acceptance:
    """Kept and offered tokens by source, claimed probability and length of the match.

    A token's outcome is known if all before it were kept, so the table holds probabilities given
    that, and a draft survives up to a token with their product. Old outcomes fade, so that
    traffic which changes is followed.
    """

    def __init__(self):
        self._cells: dict[tuple[str, int, int], tuple[float, float]] = {}  # kept, offered

    def survivals(self, claims: Claims, record: Record) -> list[float]:
        """[tokens] the probability that each token and all before it are kept."""
        factor, path, found = record.factor, 1.0, []
        for claim in claims.values:
            path *= min(1.0, self._rate(claims, claim) * factor)
            found.append(path)
        return found

    def learn(self, claims: Claims, record: Record, offered: int, accepted: int) -> None:
        """Of the first `offered` tokens of a draft the first `accepted` were kept."""
        record.accepted *= RECORD_DECAY
        record.expected *= RECORD_DECAY
        for place, claim in enumerate(claims.values[: min(offered, accepted + 1)]):
            cell, is_kept = self._cell(claims, claim), float(place < accepted)
            record.accepted += is_kept
            record.expected += self._rate(claims, claim)
            kept, tried = self._cells.get(cell, (0.0, 0.0))
            self._cells[cell] = kept * DECAY + is_kept, tried * DECAY + 1.0

    def fade(self, records: Iterable[Record]) -> None:
        """Believe the claims more again: nothing is drafted, so nothing else would correct this."""
        for cell, (kept, tried) in self._cells.items():
            self._cells[cell] = kept * FADE, tried * FADE
        for record in records:
            record.accepted *= FADE
            record.expected *= FADE

    def _cell(self, claims: Claims, claim: float) -> tuple[str, int, int]:
        octave = min(claims.match.bit_length(), MOST_OCTAVES)
        return claims.source, min(int(claim * BINS), BINS - 1), octave

    def _rate(self, claims: Claims, claim: float) -> float:
        kept, tried = self._cells.get(self._cell(claims, claim), (0.0, 0.0))
        if claims.match:  # else guessed, not copied
            claim *= claims.match / (claims.match + SHORT_MATCH)
        return (kept + claim * PRIOR_OFFERS) / (tried + PRIOR_OFFERS)
