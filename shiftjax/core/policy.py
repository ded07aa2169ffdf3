"""Which parallel mode a step uses. A policy sees the plan and the queue, never JAX.

The settings read `POLICIES`, so what they need not know is imported for its types alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from shiftjax.costs.work import Work
from shiftjax.parallel.grid import Mode

if TYPE_CHECKING:
    from shiftjax.core.request import ScheduledSequence, StepPlan
    from shiftjax.costs.buckets import Bucket
    from shiftjax.costs.group_costs import GroupCosts


def work_of(plan: "StepPlan") -> Work:
    """What a plan computes, as the cost model counts it."""
    return work_of_items(plan.scheduled, plan.num_rowwise)


def work_of_items(items: Sequence["ScheduledSequence"], num_rowwise: int) -> Work:
    """The same of a plan's items; tokens of the first `num_rowwise` attend one by one."""
    sizes = [(item.start, item.num_tokens) for item in items]
    pairs = [count * start + count * (count + 1) // 2 for start, count in sizes]
    return Work(
        num_tokens=sum([count for _, count in sizes]),
        num_rows=sum([item.num_rows for item in items]),
        num_sequences=len(items),
        context_tokens=sum(pairs[:num_rowwise]),
        chunk_context_tokens=sum([start + count for start, count in sizes[num_rowwise:]]),
        attention_pairs=sum(pairs[num_rowwise:]),
        num_decodes=sum([count for _, count in sizes[:num_rowwise]]),
    )


class Policy(ABC):
    """Chooses the mode of every step among those of its group, `modes`: base first, shift last.

    A class says of itself what is asked before there is a cost model to make an instance with.
    """

    name: ClassVar[str] = "its own"  # of the setting `policy`, where it is in `POLICIES`
    has_threshold: ClassVar[bool] = False  # the setting `shift_threshold` has a meaning
    is_simulated: ClassVar[bool] = False  # it needs what a simulator alone knows: true costs

    @classmethod
    def made(cls, threshold: int | None, costs: "GroupCosts | None") -> Self:
        """The policy of these settings; `costs` are there if it `needs_costs`."""
        return cls()

    @classmethod
    def needs_costs(cls, threshold: int | None) -> bool:
        """Whether it takes a cost model of the machine."""
        return False

    @classmethod
    def modes_used(cls, modes: Sequence[Mode]) -> Sequence[Mode]:
        """Those of a group's modes that it may choose, in their order; all, unless it says so."""
        return modes

    @classmethod
    def in_words(cls, threshold: int | None) -> str:
        """How it chooses, for tables of deployments."""
        return f"mode by {cls.name}"

    @property
    def most_shifted(self) -> int | None:
        """Tokens of the largest step in SHIFT, a limit of proposals; None: no number says."""
        return None

    @abstractmethod
    def mode_of(
        self, work: Work, modes: Sequence[Mode], num_waiting: int, last_mode: Mode | None
    ) -> Mode:
        """The mode of a step of this work; `num_waiting` sequences are not in it, lacking room.

        `last_mode` is that of the group's step before; None: there was none. It is asked for plans,
        and for plans with more proposed tokens: the same work must get the same mode.
        """

    def choose(
        self, plan: "StepPlan", modes: Sequence[Mode], num_waiting: int, last_mode: Mode | None
    ) -> Mode:
        """The mode of this step: that of its work."""
        return self.mode_of(work_of(plan), modes, num_waiting, last_mode)

    def reason(self, mode: Mode, work: Work, modes: Sequence[Mode], last_mode: Mode | None) -> str:
        """Why a step of this work has run in `mode`, for people; asked later, if at all."""
        return f"policy {self.name}"

    def wanted(self, modes: Sequence[Mode], least: int, bucket: "Bucket") -> list[Mode]:
        """The modes it may choose for steps of `least` tokens or more in a bucket.

        These are compiled ahead of traffic.
        """
        return list(self.modes_used(modes))


def wanted_modes(
    policy: Policy, buckets: Sequence["Bucket"], modes: Sequence[Mode]
) -> "dict[Bucket, list[Mode]]":
    """The modes that a policy may choose in each bucket; the smallest bucket comes first."""
    wanted: dict[Bucket, list[Mode]] = {}
    for bucket in buckets:
        smaller = (one.tokens for one in wanted if one.tokens < bucket.tokens)
        wanted[bucket] = policy.wanted(modes, 1 + max(smaller, default=0), bucket)
    return wanted
