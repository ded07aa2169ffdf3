"""Which waiting sequences may start, and which stay to decode: the seam for admission. No JAX."""

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from shiftjax.core.block_tables import BlockTables
from shiftjax.core.micro_batches import num_dealt
from shiftjax.core.request import SequenceState


class Admission:
    """Lets waiting sequences start in their order, as blocks allow, and run to their end.

    `decodes` says whether sequences are decoded here at all, and `prompts_first` whether they wait
    for every prompt that can be computed: no step then has both. `apart` are waiting sequences, and
    their prompt tokens, that wait for something else than room: a lane is not full of them.
    """

    decodes: bool = True
    prompts_first: bool = False
    apart: tuple[int, int] = (0, 0)

    def leaving(self, sequences: Iterable[SequenceState]) -> Collection[SequenceState]:
        """Return those that have done here what they came for: they are swapped out and parked."""
        return ()

    def verdict(
        self, sequence: SequenceState, tables: BlockTables
    ) -> Literal["admit", "skip", "park"]:
        """Return whether the next waiting sequence may start, be passed over or be parked."""
        return "admit"

    def admit(self, sequence: SequenceState, num_spared: int, tables: BlockTables) -> bool:
        """Give a sequence its blocks and leave `num_spared` free; False if that cannot be."""
        return tables.admit(sequence, num_spared)

    def quota(
        self,
        micro_batch: int,
        sizes: Sequence[int],
        waiting: Sequence[SequenceState],
        room: int,
        tables: BlockTables,
    ) -> int:
        """Return how many sequences one of several micro-batches may admit, of `room` in all.

        `sizes` are the running sequences of each micro-batch.
        """
        device = tables.device
        needs = (device.blocks_for(len(sequence.token_ids)) for sequence in waiting)
        return num_dealt(micro_batch, sizes, needs, room, device.num_free_blocks)
