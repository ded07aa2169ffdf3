"""A step plan while it is being filled. No JAX."""

from dataclasses import dataclass, field
from itertools import chain

from shiftjax.core.proposal import Proposal
from shiftjax.core.request import ScheduledSequence, SequenceState, StepPlan


@dataclass(slots=True)
class PlanBuilder:
    """What has been scheduled so far, and what the budgets of the step still allow.

    Decodes come first in the plan and have one row each, so the row of a decode is its place in
    the list; the rows of chunks are known at the end.
    """

    tokens_left: int
    rows_left: int
    block_size: int = 1
    blocks_left: int = 0  # that proposals may take
    num_guesses: int = 0  # that a model shall make after the step
    proposing_seconds: float = 0.0
    micro_batch: int = 0
    num_in_flight: int = 0  # steps that have been given to the devices and not ended
    decodes: list[ScheduledSequence] = field(default_factory=list)
    proposed: list[ScheduledSequence] = field(default_factory=list)
    chunks: list[ScheduledSequence] = field(default_factory=list)
    unfinished_prompts: list[SequenceState] = field(default_factory=list)
    swapped: list[SequenceState] = field(default_factory=list)  # by this plan's offloads
    num_preempted: int = 0

    def add(self, sequence: SequenceState) -> None:
        """As much of what the sequence has not computed as the budgets allow.

        At least one token and one row must be left.
        """
        start = sequence.num_computed_tokens
        num_new = len(sequence.token_ids) - start
        num_tokens = min(num_new, self.tokens_left)
        if sequence.wants_prompt_logprobs:
            num_tokens = num_rows = min(num_tokens, self.rows_left)
        else:
            num_rows = int(num_tokens == num_new)
        items = self.decodes if num_new == 1 else self.chunks
        items.append(ScheduledSequence(sequence, start, num_tokens, num_rows, -1))
        self.tokens_left -= num_tokens
        self.rows_left -= num_rows
        sequence.num_computed_tokens += num_tokens
        if num_tokens == num_new:
            sequence.num_pending_tokens = 1
            sequence.pending_row = len(self.decodes) - 1  # `finish` knows the row of a chunk

    def has(self, sequence: SequenceState) -> bool:
        """Whether something of a sequence is in the plan."""
        return any(item.sequence is sequence for item in chain(self.decodes, self.chunks))

    def extend(self, item: ScheduledSequence, proposal: Proposal) -> None:
        """Let a decode, whose token is known, guess ahead."""
        num_proposed = len(proposal.tokens)
        item.proposal = proposal
        item.num_tokens += num_proposed
        item.num_rows += num_proposed
        item.sequence.num_computed_tokens += num_proposed
        self.proposed.append(item)
        self.tokens_left -= num_proposed

    def finish(self, step_id: int) -> StepPlan | None:
        """The plan, or None if there is nothing to compute."""
        if self.proposed:
            self.decodes = [item for item in self.decodes if item.proposal is None]
            for row, item in enumerate(self.decodes):
                item.sequence.pending_row = row
        num_decodes = num_rows = num_tokens = len(self.decodes)
        for item in self.proposed + self.chunks:
            num_rows += item.num_rows
            num_tokens += item.num_tokens
            item.sequence.pending_row = num_rows - 1
        if not num_tokens:
            return None
        scheduled = self.decodes + self.proposed + self.chunks
        return StepPlan(
            scheduled,
            num_tokens,
            num_rows,
            num_decodes,
            [],  # the scheduler knows the copies when the plan is made
            [],
            step_id,
            num_proposals=len(self.proposed),
            num_guesses=self.num_guesses,
            proposing_seconds=self.proposing_seconds,
            micro_batch=self.micro_batch,
        )
