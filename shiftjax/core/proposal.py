"""What a guess of the next tokens of a sequence is. No JAX."""

from typing import NamedTuple


class Claims(NamedTuple):
    """What a source says of its proposal before anything is learned of it."""

    source: str  # where the tokens come from: a cell of the acceptance table
    match: int  # how many last tokens agree with the place that is copied from
    values: list[float]  # [tokens] probability of each, given that those before it are kept


class Proposal(NamedTuple):
    """Guessed tokens after the last known one of a sequence."""

    tokens: list[int]
    survivals: list[float]  # [tokens] learned probability that it and all before it are kept; falls
    proposer: str  # suffix, ngram, prediction, grammar or model
    keys: Claims  # what the outcome is learned under

    def first(self, most: int) -> "Proposal":
        """The beginning of it, `most` tokens at most."""
        if most >= len(self.tokens):
            return self
        most = max(0, most)
        return self._replace(tokens=self.tokens[:most], survivals=self.survivals[:most])


class ModelGuess(NamedTuple):
    """Tokens that a model expects next, and how sure it is of each."""

    tokens: list[int]
    probabilities: list[float]
