"""What is kept of tokens beside their KV, as long as that is of use: the seam for it. No JAX.

Steps may tell something of every token that they compute (`StepOutput.notes`), and a request may
want to be told of all of its own (`Request.wants_notes`). What a prefix cache has of such a request
is of use only as far as the notes of it are known, too.
"""

from collections.abc import Sequence
from typing import Any

from shiftjax.core.request import SequenceState, StepOutput, StepPlan


class Notes:
    """Keeps what steps tell, for all groups of an engine; here nothing is told, nor kept."""

    def enter(self, plan: StepPlan, output: StepOutput) -> None:
        """Take what a step told. Comes before its commit: no sequence has new tokens yet."""

    def begin(self, sequence: SequenceState) -> None:
        """A sequence begins with tokens that are computed already, `num_computed_tokens`."""

    def register(self, sequence: SequenceState, first: int, end: int) -> None:
        """Hashes `[first, end)` of a sequence are those of KV that will be found from now on."""

    def num_known(self, hashes: Sequence[bytes]) -> int:
        """Return of how many of these hashes, the first ones, the notes are known."""
        return len(hashes)

    def of(self, sequence: SequenceState) -> Any:
        """Return the notes of the tokens of a sequence but the last, which no step has computed."""
        return None
