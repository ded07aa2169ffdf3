"""What the steps of a group cost: predicted, and corrected by what steps took. No JAX."""

from collections.abc import Callable
from dataclasses import dataclass, field

from shiftjax.core.plan_builder import PlanBuilder
from shiftjax.core.policy import Policy, work_of, work_of_items
from shiftjax.core.request import StepPlan
from shiftjax.costs.group_costs import GroupCosts
from shiftjax.costs.step_times import StepTimes, kind_of, predicted, switch_seconds
from shiftjax.parallel.grid import Mode


@dataclass(frozen=True)
class Prices:
    """What a choice of draft lengths has to know of steps."""

    buckets: tuple[int, ...]  # the tokens that steps are padded to, ascending
    policy: Policy | None = None  # that chooses the mode when the plan is made
    modes: tuple[Mode, ...] = ()
    costs: GroupCosts | None = None  # None: nobody knows what a step of this machine takes
    times: StepTimes = field(default_factory=StepTimes)  # of this group alone

    @property
    def threshold(self) -> int | None:
        """Of a policy with one: drafts do not carry a step past it."""
        return None if self.policy is None else self.policy.most_shifted

    def seconds(
        self, builder: PlanBuilder, num_waiting: int, last_mode: Mode | None, overlap: bool
    ) -> Callable[[int], float] | None:
        """Seconds of a step that drafts bring to so many tokens; None: nobody can say.

        They are those of the mode that the policy will choose for the plan, whose hysteresis knows
        the same `last_mode` and `num_waiting`. Without drafts a group that may `overlap` goes on
        to hide its host, and soon asks no speculator. A draft token attends to as much as the
        decodes do on average. In a pipeline other micro-batches go on meanwhile.
        """
        policy, costs, num_decodes = self.policy, self.costs, len(builder.decodes)
        if policy is None or costs is None:
            return None
        work = work_of_items(builder.decodes + builder.chunks, num_decodes)
        num_batches = 1 + builder.num_in_flight

        def predict(num_tokens: int) -> float:
            num = num_tokens - work.num_tokens
            step = work._replace(
                num_tokens=num_tokens,
                num_rows=work.num_rows + num,
                context_tokens=work.context_tokens + num * work.context_tokens // num_decodes,
            )
            mode = policy.mode_of(step, self.modes, num_waiting, last_mode)
            is_hidden = overlap and not num
            seconds = costs.paced_seconds(
                mode, step, num_batches, num_decodes if num else 0, is_hidden=is_hidden
            )
            seconds += switch_seconds(costs, mode, last_mode)
            return seconds * self.times.factor(kind_of(costs, mode, step, is_hidden))

        return predict

    def learn(
        self, plan: StepPlan, mode: Mode, last_mode: Mode | None, seconds: float, is_hidden: bool
    ) -> None:
        """A step took so long, from the end of the one before it or from its plan to its results.

        `is_hidden`: it was planned while the one before ran. What its drafts took to make is not
        of the step: a choice knows it by itself. Ends of unlike steps in a pipeline tell of
        neither.
        """
        costs = self.costs
        if costs is None or len(costs.stages) > 1:
            return
        work = work_of(plan)
        num_guessing = work.num_sequences if plan.num_guesses else 0
        expected = predicted(costs, mode, last_mode, work, is_hidden, num_guessing)
        kind = kind_of(costs, mode, work, is_hidden)
        self.times.learn(kind, seconds - plan.proposing_seconds, expected)
