"""Who guesses tokens ahead in the steps of a group: the seam for speculation. No JAX."""

from collections.abc import Iterable
from typing import Any

from shiftjax.core.block_tables import BlockTables
from shiftjax.core.plan_builder import PlanBuilder
from shiftjax.core.proposal import ModelGuess, Proposal
from shiftjax.core.request import FinishReason, SequenceState, StepPlan
from shiftjax.parallel.grid import Mode


class Lookahead:
    """Is told of every sequence and step of a group, and may propose tokens. This one never does.

    `commits_first` says whether a step in flight has to be committed before the next of its
    micro-batch is planned.
    """

    commits_first: bool = False

    def start(self, siblings: list[SequenceState]) -> None:
        """Called when the continuations of a request have come."""

    def extend(
        self, sequence: SequenceState, tokens: tuple[int, ...], guess: ModelGuess | None = None
    ) -> None:
        """Called with the tokens that a step has committed for a sequence."""

    def end(self, sequence: SequenceState, reason: FinishReason) -> None:
        """Called when a sequence has ended."""

    def leave(self, siblings: list[SequenceState]) -> None:
        """Called when the sequences of a request go to another group."""

    def join(self, siblings: list[SequenceState]) -> None:
        """Called when the sequences of a request come from another group."""

    def extend_plan(
        self, builder: PlanBuilder, tables: BlockTables, num_waiting: int, last_mode: Mode | None
    ) -> None:
        """Let decodes of a plan that has everything else guess ahead with what the step has left.

        `num_waiting` and `last_mode` are what the policy will know of the plan.
        """

    def learn(self, sequence: SequenceState, proposal: Proposal, accepted: int) -> None:
        """Called with how many tokens of a proposal a step has accepted."""

    def learn_step(self, plan: StepPlan, mode: Mode, seconds: float, is_hidden: bool) -> None:
        """Called with the seconds of a step; `is_hidden`: it was planned during another."""

    def runs(self, plan: StepPlan, mode: Mode) -> None:
        """Called with the mode that a step runs in."""

    def states(self) -> Iterable[Any]:
        """Return counters that can be added to those of other groups."""
        return ()

    def close(self) -> None:
        """End what works in the background."""
