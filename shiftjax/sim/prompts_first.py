"""Admission of engines that compute prompts before they decode, as SGLang's scheduler. No JAX.

A step has prompts, as many as fit, or decodes. A prompt starts if there is room for its answer, and
for a share of what the running ones may still have: of SGLang's `init_new_token_ratio` at first,
which every step lowers a little (`schedule_policy.py` and `scheduler.py` of SGLang 0.5).
"""

from collections.abc import Iterable

from shiftjax.core.admission import Admission
from shiftjax.core.block_tables import BlockTables
from shiftjax.core.request import SequenceState

FIRST, LEAST, STEPS = 0.7, 0.098, 600  # shares, and steps from the one to the other
LONGEST = 4096  # tokens of an answer that room is kept for


class PromptsFirst(Admission):
    """Decodes wait for every prompt that has room, an estimate of the answers' included."""

    prompts_first = True

    def __init__(self):
        self._running: list[SequenceState] = []
        self._share = FIRST

    def leaving(self, sequences: Iterable[SequenceState]) -> tuple[()]:
        """Look at who runs in the next step; nobody leaves."""
        self._running = list(sequences)
        lower = self._share - (FIRST - LEAST) / STEPS
        self._share = max(LEAST, lower) if self._running else FIRST
        return ()

    def admit(self, sequence: SequenceState, num_spared: int, tables: BlockTables) -> bool:
        """Give it its blocks, if the estimate of all answers leaves them."""
        coming = _num_left(sequence) + self._share * sum(map(_num_left, self._running))
        kept = max(num_spared, tables.device.blocks_for(int(coming)))
        if not tables.admit(sequence, kept if self._running else num_spared):
            return False
        self._running.append(sequence)
        return True


def _num_left(sequence: SequenceState) -> int:
    return min(LONGEST, sequence.max_length - len(sequence.token_ids))
