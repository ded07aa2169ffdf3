"""Admission where prompts alone are computed: sequences leave with their first token. No JAX.

A sequence whose first token is committed is swapped out by the next plan, and waits as parked for
a lane that decodes; so do the continuations that share its prompt, which have computed nothing.
A prompt is admitted if the tier keeps room for it. One that not even an empty tier could hold is
parked uncomputed.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from shiftjax.core.admission import Admission
from shiftjax.core.block_tables import BlockTables
from shiftjax.core.request import SequenceState, Status


class Parking(Admission):
    """Admits prompts that the tier has room for, and parks them with their first token."""

    decodes = False

    def leaving(self, sequences: Iterable[SequenceState]) -> list[SequenceState]:
        """Return the sequences whose first token is committed."""
        return [sequence for sequence in sequences if has_begun(sequence)]

    def verdict(
        self, sequence: SequenceState, tables: BlockTables
    ) -> Literal["admit", "skip", "park"]:
        """Pass over a continuation while one before it is alive: they are parked together."""
        earlier = sequence.siblings[: sequence.index]
        if any(other.status is not Status.FINISHED for other in earlier):
            return "skip"
        return "admit" if tables.tier.could_reserve(_num_kept(sequence, tables)) else "park"

    def admit(self, sequence: SequenceState, num_spared: int, tables: BlockTables) -> bool:
        """Give it blocks, and keep room for them in the tier."""
        if not tables.tier.reserve(sequence, _num_kept(sequence, tables)):
            return False
        is_admitted = tables.admit(sequence, num_spared)
        if not is_admitted:
            tables.tier.cancel(sequence)
        return is_admitted

    def quota(
        self,
        micro_batch: int,
        sizes: Sequence[int],
        waiting: Sequence[SequenceState],
        room: int,
        tables: BlockTables,
    ) -> int:
        """Return `room`: micro-batches of prompts need no balance, for full steps are all alike."""
        return room


def _num_kept(sequence: SequenceState, tables: BlockTables) -> int:
    """Blocks that it will have computed when it is parked; none if it ends with its token."""
    num_tokens = len(sequence.token_ids)
    ends = num_tokens + 1 >= sequence.max_length
    return 0 if ends else tables.device.blocks_for(num_tokens)


def has_begun(sequence: SequenceState) -> bool:
    """Whether it has output, and only its last token has not been computed."""
    num_left = len(sequence.token_ids) - sequence.num_computed_tokens
    return num_left == 1 and not sequence.num_pending_tokens and sequence.num_output_tokens > 0
