"""Tokens of answers that no model gave: made up of a seed and a position. No JAX."""

from collections.abc import Sequence

import numpy as np

from shiftjax.core.request import ScheduledSequence, StepPlan

MEAN_TOKENS = 256  # of an answer that nothing else ends


class MadeUpTokens:
    """The tokens of a plan's rows: the same for the same seed and position, whatever else runs.

    They are some of `ids`, or what a constraint or the request allows. An answer that heeds the end
    of text has it after `MEAN_TOKENS` on average, and never before `min_tokens`. What shapes a
    distribution, as temperatures do, has none to shape.
    """

    def __init__(self, ids: Sequence[int], eos_token_ids: Sequence[int]):
        self._eos = eos_token_ids[0] if eos_token_ids else None
        self._ids = [token for token in ids if token not in eos_token_ids]

    def __call__(self, plan: StepPlan) -> np.ndarray:
        """[rows] int32; a row of each sequence, or none."""
        return np.array([self._token(each) for each in plan.scheduled if each.num_rows], np.int32)

    def _token(self, item: ScheduledSequence) -> int:
        sequence = item.sequence
        number = _spread(sequence.seed, item.start + item.num_tokens)
        if sequence.constraint is not None:
            bits = np.unpackbits(sequence.constraint.mask.view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits)
            return int(allowed[number % len(allowed)])
        if given := sequence.request.sampling.allowed_token_ids:
            banned = sequence.stop_ids if item.bans_stop_ids(0) else ()
            left = [token for token in given if token not in banned]
            return left[number % len(left)]
        may_end = self._eos in sequence.stop_ids and not item.bans_stop_ids(0)
        if self._eos is not None and may_end and number % MEAN_TOKENS == 0:
            return self._eos
        return self._ids[number // MEAN_TOKENS % len(self._ids)]


def _spread(seed: int, position: int) -> int:
    """A number of 64 bits without a pattern (the finaliser of SplitMix64; Steele et al. 2014)."""
    number = (seed << 32 ^ position) * 0x9E3779B97F4A7C15 & _MASK
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31


_MASK = (1 << 64) - 1
