"""What a draft is, and the settings of drafting. No JAX."""

from dataclasses import dataclass
from typing import Literal, NamedTuple


class Claims(NamedTuple):
    """What a source says of its draft before anything is learned of it."""

    source: str  # where the tokens come from: a cell of the acceptance table
    match: int  # how many last tokens agree with the place that is copied from
    values: list[float]  # [tokens] probability of each, given that those before it are kept


class Draft(NamedTuple):
    """Guessed tokens after the last known one of a sequence."""

    tokens: list[int]
    survivals: list[float]  # [tokens] learned probability that it and all before it are kept; falls
    drafter: str  # suffix, ngram, prediction, grammar or model
    keys: Claims  # what the outcome is learned under


@dataclass(frozen=True)
class DraftOptions:
    """The settings of speculation, resolved; one value for an engine."""

    method: Literal["none", "ngram", "suffix", "model", "hybrid"] = "none"
    max_draft_tokens: int = 16  # of a sequence in a step
    choice: Literal["fill", "cost", "fixed"] = "fill"
    corpus_tokens: int = 200_000  # of finished outputs, all corpora together; 0: none is kept
    min_prob: float = 0.1  # a draft ends where the claimed probability of its path falls below
    factor: float = 1.0  # a draft has at most factor * match + offset tokens
    offset: float = 0.0
    max_match: int = 32  # tokens; longer matches count as this long
    lookup_min: int = 2  # tokens of the shortest and the longest key of ngram
    lookup_max: int = 5
    draft_max_seqs: int = 64  # fixed: only so many sequences draft; 0: all
    draft_off_seqs: int = 0  # fixed: none does when so many run; 0: always

    @property
    def copies(self) -> bool:
        """Whether drafts are copied from what a sequence has said before."""
        return self.method in ("ngram", "suffix", "hybrid")

    @property
    def keeps_corpus(self) -> bool:
        """Whether they are copied from finished outputs of others, too."""
        return self.method in ("suffix", "hybrid") and self.corpus_tokens > 0
