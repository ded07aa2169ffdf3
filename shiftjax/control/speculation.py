"""Drafts in the loop of one group: who guesses ahead, how far, and what came of it. No JAX.

A drafted item computes the last committed token and the draft's in one step; as many of the draft
count as the step samples itself (`results.num_accepted`), so the tokens are those of plain
decoding. A draft needs the committed token, hence a group that drafts commits a step before it
plans the next; one whose drafts are not worth that goes back to planning ahead, and tries again
after ever more turns.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

from shiftjax.control.plan_builder import PlanBuilder
from shiftjax.control.policy import CostPolicy, Policy, ThresholdPolicy, work_of_items
from shiftjax.control.request import FinishReason, ScheduledSequence, Sequence
from shiftjax.costs.buckets import Bucket
from shiftjax.costs.step import CostModel
from shiftjax.drafts.choice import Room, choose
from shiftjax.drafts.draft import Draft
from shiftjax.drafts.drafting import Drafting
from shiftjax.parallel.grid import Mode

TURNS_WITHOUT_DRAFT = 8  # until a group plans ahead again
MOST_TURNS_BETWEEN_TRIALS = 128
SECONDS_MEMORY = 16  # turns that the mean of the host's time goes over
SLOW_DRAFT_SECONDS = 0.05  # a drafter that takes longer is asked no more for this sequence
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prices:
    """What a choice of draft lengths has to know of steps."""

    buckets: tuple[int, ...]  # the tokens that steps are padded to, ascending
    threshold: int | None = None  # of a policy with one: drafts do not carry a step past it
    costs: CostModel | None = None  # of a policy that predicts
    modes: tuple[Mode, ...] = ()

    def seconds(
        self, items: list[ScheduledSequence], num_decodes: int
    ) -> dict[Mode, Callable[[int], float]] | None:
        """By mode: seconds of a step that drafts bring from these items to so many tokens."""
        costs = self.costs
        if costs is None:
            return None
        work = work_of_items(items, num_decodes)

        def predict(mode: Mode, num_tokens: int) -> float:
            rows = work.num_rows + num_tokens - work.num_tokens
            drafted = work._replace(num_tokens=num_tokens, num_rows=rows)
            return costs.device_seconds(mode, drafted) + costs.host_seconds(drafted)

        return {mode: partial(predict, mode) for mode in self.modes}


def prices_of(policy: Policy, buckets: Iterable[Bucket], modes: tuple[Mode, ...]) -> Prices:
    """What a group's steps cost, as far as its policy knows."""
    return Prices(
        tuple(bucket.tokens for bucket in buckets),
        policy.threshold if isinstance(policy, ThresholdPolicy) else None,
        policy.costs if isinstance(policy, CostPolicy) else None,
        modes,
    )


@dataclass(slots=True)
class DraftStats:
    """Counters since the start, and how much is kept to copy from."""

    num_drafts: int = 0
    accepted_at: Counter[int] = field(default_factory=Counter)  # by place in the draft
    tokens: Counter[tuple[str, str]] = field(default_factory=Counter)  # by drafter, outcome
    steps: Counter[str] = field(default_factory=Counter)  # with drafts, by mode
    seconds: float = 0.0  # of the host, to guess and to choose
    num_corpus_tokens: int = 0

    @property
    def num_accepted(self) -> int:
        """Tokens of drafts that the steps sampled themselves."""
        return self.accepted_at.total()


def total_stats(groups: Iterable["Speculation | None"]) -> DraftStats | None:
    """A copy of what all groups have counted; None where none drafts."""
    stats = [group.stats_now() for group in groups if group is not None]
    if not stats:
        return None
    return DraftStats(
        sum(each.num_drafts for each in stats),
        sum((each.accepted_at for each in stats), Counter()),
        sum((each.tokens for each in stats), Counter()),
        sum((each.steps for each in stats), Counter()),
        sum(each.seconds for each in stats),
        sum(each.num_corpus_tokens for each in stats),
    )


class Speculation:
    """The drafts of one group: `drafting` guesses, `prices` say how far it pays.

    `max_rows` bounds the logit rows of a step. `overlap` is the engine's: without it a step is
    always committed before the next is planned, and drafts are tried in every turn.
    """

    def __init__(self, drafting: Drafting, prices: Prices, *, max_rows: int, overlap: bool = True):
        self.stats = DraftStats()
        self.commits_first = True
        self._drafting, self._prices, self._max_rows = drafting, prices, max_rows
        self._overlap = overlap
        self._without: set[Sequence] = set()  # those whose drafter failed
        self._idle_turns = 0  # in a row in which nobody drafted
        self._pause = self._turns_to_trial = TURNS_WITHOUT_DRAFT
        self._host_seconds = 0.0  # of a turn with drafts, about

    # ------------------------------------------------------------------ the life of a sequence

    def start(self, siblings: list[Sequence]) -> None:
        """The continuations of a request have come."""
        for sequence in siblings:
            request = sequence.request
            self._ask(
                sequence,
                self._drafting.start,
                sequence,
                sequence.token_ids,
                corpus=(request.adapter, request.cache_salt),
                prediction=request.prediction,
                parent=request if len(siblings) > 1 else None,
            )
        self._pause = TURNS_WITHOUT_DRAFT
        self._turns_to_trial = min(self._turns_to_trial, self._pause)

    def extend(self, sequence: Sequence, tokens: tuple[int, ...]) -> None:
        """Tokens have been committed."""
        self._ask(sequence, self._drafting.extend, sequence, tokens)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """A sequence has ended; what came to its end by itself may be learned from."""
        self._ask(sequence, self._drafting.end, sequence, reason in ("stop", "length"))
        self._without.discard(sequence)

    def close(self) -> None:
        """End what drafts in the background."""
        self._drafting.close()

    def stats_now(self) -> DraftStats:
        """The counters, which go on counting, beside what is kept now."""
        self.stats.num_corpus_tokens = self._drafting.num_corpus_tokens
        return self.stats

    # ------------------------------------------------------------------ a step

    def propose(self, builder: PlanBuilder) -> list[tuple[ScheduledSequence, Draft]]:
        """Drafts for decodes of a plan that has everything else, as long as they shall be."""
        if not self._tries():
            return []
        begin = perf_counter()
        offers = {item: draft for item in builder.decodes if (draft := self._offer(item))}
        lengths = self._choose(builder, offers) if offers else {}
        chosen = [(i, draft.first(lengths[i])) for i, draft in offers.items() if i in lengths]
        self._take_turn(bool(chosen), bool(builder.decodes))
        seconds = perf_counter() - begin
        self.stats.seconds += seconds
        if chosen:
            self._host_seconds += (seconds - self._host_seconds) / SECONDS_MEMORY
        return chosen

    def _choose(
        self, builder: PlanBuilder, offers: dict[ScheduledSequence, Draft]
    ) -> dict[Hashable, int]:
        """The lengths that pay; those of length 0 are left out."""
        items, prices = builder.decodes + builder.chunks, self._prices
        num_rows = sum(item.num_rows for item in items)
        room = Room(
            sum(item.num_tokens for item in items),
            builder.tokens_left,
            self._max_rows - num_rows,
            prices.buckets,
        )
        choice = choose(
            self._drafting.options,
            [(item, draft.survivals) for item, draft in offers.items()],
            room,
            num_running=len(items),
            most_tokens=prices.threshold,
            seconds=prices.seconds(items, len(builder.decodes)),
            drafting_seconds=self._host_seconds,
        )
        return choice.lengths

    def cut(self, item: ScheduledSequence, draft: Draft, room: int) -> Draft | None:
        """The draft as far as there is room and a constraint allows it; None: nothing of it."""
        draft, constraint = draft.first(room), item.sequence.constraint
        if constraint is not None and draft.tokens:
            masks = self._ask(item.sequence, constraint.draft_masks, draft.tokens) or []
            draft = draft.first(len(masks) - 1)
            item.masks = masks if draft.tokens else None
        return draft if draft.tokens else None

    def learn(self, sequence: Sequence, draft: Draft, accepted: int) -> None:
        """A step has verified a draft."""
        stats, offered = self.stats, len(draft.tokens)
        stats.num_drafts += 1
        stats.tokens[draft.drafter, "accepted"] += accepted
        stats.tokens[draft.drafter, "rejected"] += offered - accepted
        stats.accepted_at.update(range(accepted))
        self._ask(sequence, self._drafting.learn, sequence, draft, offered, accepted)

    def _offer(self, item: ScheduledSequence) -> Draft | None:
        sequence = item.sequence
        most = sequence.max_length - 1 - len(sequence.token_ids)
        if item.previous_row >= 0 or most < 1 or sequence in self._without:
            return None
        if sequence.constraint is not None:
            most = min(most, self._drafting.options.max_draft_tokens)
            forced = self._ask(sequence, sequence.constraint.forced_tokens, most)
            if forced:
                sure = [1.0] * len(forced)
                return self._ask(sequence, self._drafting.rated, sequence, forced, sure, "grammar")
        return self._ask(sequence, self._drafting.draft, sequence, most)

    def _ask[T](
        self, of: Sequence, function: Callable[..., T], *args: Any, **named: Any
    ) -> T | None:
        """Call a drafter; one that fails, or is slow, is not asked to draft for a sequence again.

        Nothing else happens to the sequence: without drafts it decodes as ever.
        """
        begin = perf_counter()
        try:
            result = function(*args, **named)
        except Exception:
            if of not in self._without:
                logger.exception("A drafter failed; %s goes on without.", of.request.request_id)
            result = None
            self._without.add(of)
        if perf_counter() - begin > SLOW_DRAFT_SECONDS:
            self._without.add(of)
        return result

    # ------------------------------------------------------------------ whether to commit first

    def _tries(self) -> bool:
        if not self.commits_first:
            self._turns_to_trial -= 1
            self.commits_first = self._turns_to_trial <= 0
            return False
        return True

    def _take_turn(self, drafts: bool, could_draft: bool) -> None:
        """Note whether anybody drafted; too long nobody, and the group plans ahead again."""
        if drafts:
            self._idle_turns, self._pause = 0, TURNS_WITHOUT_DRAFT
        elif could_draft:
            self._idle_turns += 1
        if self._overlap and self._idle_turns >= TURNS_WITHOUT_DRAFT:
            self.commits_first = False
            self._idle_turns = TURNS_WITHOUT_DRAFT - 1  # a trial is one turn
            self._turns_to_trial = self._pause
            self._pause = min(2 * self._pause, MOST_TURNS_BETWEEN_TRIALS)
