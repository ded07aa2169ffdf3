"""How many tokens a step with prompts takes, and who may be passed: the seam for sizes. No JAX."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from shiftjax.core.plan_builder import PlanBuilder
from shiftjax.core.request import Request, ScheduledSequence, SequenceState, StepPlan
from shiftjax.parallel.grid import Mode

MANY = 32  # prompts of a kind, begun or waiting, that are looked at one by one


class Turn(NamedTuple):
    """What is known of a step when its plan is begun."""

    now: float
    num_queued: int = 0  # requests that wait before all groups
    last_mode: Mode | None = None
    is_hidden: bool = True  # it is planned while the one before runs


class Demand(NamedTuple):
    """What there is to compute beside the decodes of a step."""

    turn: Turn
    num_decodes: int
    context: int  # tokens that the decodes attend to, about
    prompts: Sequence[tuple[int, int]]  # tokens left and tokens before them, in order
    num_begun: int  # of these prompts; the others wait
    num_more: int  # prompts behind them that will find a place among the running ones
    num_waiting: int  # sequences that wait, in this group and before all groups
    most: int  # tokens of the step
    sequences: Sequence[SequenceState] = ()  # whose prompts these are
    decodes: Sequence[ScheduledSequence] = ()
    num_others: int = 0  # decodes that run in other micro-batches


class StepSizes:
    """Says how large steps with prompts are. This one: as large as they may be, in arrival order.

    `chooses` says whether it is to be asked. The front queue feeds `num_groups` groups.
    """

    chooses: bool = False
    num_groups: int = 1

    def choose(self, demand: Demand) -> int:
        """Return how many tokens the step may have at most, decodes included."""
        return demand.most

    def foresee(self, demand: Demand) -> int:
        """Return about how many it would have, for prompts that nobody has sent yet."""
        return demand.most

    def arrived(self, seconds: float, num_tokens: int) -> None:
        """Called with a prompt that has come, and its tokens that are not known already."""

    def ended(self, num_output_tokens: int) -> None:
        """Called with the length of an answer that has come to its end by itself."""

    def states(self) -> Iterator[Any]:
        """Return the counters; those of several groups can be added."""
        yield from ()

    def learn_step(self, plan: StepPlan, mode: Mode, seconds: float, is_hidden: bool) -> None:
        """Called with the seconds of a step; `is_hidden`: it was planned during another."""


def demand_of(
    builder: PlanBuilder,
    waiting: Sequence[SequenceState],
    room: int,
    used_tokens: int,
    turn: Turn,
    num_groups: int = 1,
) -> Demand:
    """Return what a plan that has its decodes could compute beside them.

    `room` more sequences may run; tables hold blocks for `used_tokens`.
    """
    begun, num_decodes = builder.unfinished_prompts[:MANY], len(builder.decodes)
    prompts = [(len(s.token_ids) - s.num_computed_tokens, s.num_computed_tokens) for s in begun]
    context = used_tokens - sum(len(s.token_ids) for s in builder.unfinished_prompts)
    near = waiting[: min(room, MANY)]
    for sequence in near:
        length = len(sequence.token_ids)
        known = max(sequence.num_computed_tokens, sequence.num_known_tokens)
        if sequence is not sequence.siblings[0]:  # which computes the prompt for all
            known = max(known, sequence.num_prompt_tokens - 1)
        left = max(1, length - known)
        prompts.append((left, length - left))
    coming = min(room - len(near), len(waiting) - len(near) + turn.num_queued // num_groups)
    num_more = len(builder.unfinished_prompts) - len(begun) + coming
    return Demand(
        turn,
        num_decodes,
        max(0, context) if num_decodes else 0,
        prompts,
        len(begun),
        num_more,
        len(waiting) + turn.num_queued,
        num_decodes + builder.tokens_left,
        [*begun, *near],
        builder.decodes,
    )


def due_seconds(request: Request, num_known: float, patience: float) -> float:
    """Return until when a request may be passed by ones that come later.

    That is `patience` seconds after its arrival for each prompt token that has to be computed, of
    which `num_known` are known already. A key that does not change: the shorter prompt comes
    first, unless the longer one has waited longer than it can make good.
    """
    if not patience:
        return request.arrival_seconds
    num_new = len(request.prompt_token_ids) - num_known
    return request.arrival_seconds + patience * num_new
