"""Drafts in the loop of one group: who guesses ahead, how far, and what came of it. No JAX.

A drafted item computes the last committed token and the draft's in one step; as many of the draft
count as the step samples itself (`results.num_accepted`), so the tokens are those of plain
decoding. A draft needs the committed token, hence a group that drafts commits a step before it
plans the next, in a pipeline the next of the same micro-batch. One whose drafts are not worth that
goes back to planning ahead, and tries again after ever more turns.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from shiftjax.core.block_tables import BlockTables
from shiftjax.core.lookahead import Lookahead
from shiftjax.core.plan_builder import PlanBuilder
from shiftjax.core.proposal import ModelGuess, Proposal
from shiftjax.core.request import (
    FinishReason,
    ScheduledSequence,
    SequenceState,
    Status,
    StepPlan,
)
from shiftjax.drafts.choice import Room, choose
from shiftjax.drafts.drafting import Drafting
from shiftjax.drafts.prices import Prices
from shiftjax.metric import STEP_BUCKETS, Histogram, Metric, counter, gauge, histogram
from shiftjax.parallel.grid import Mode

TURNS_WITHOUT_DRAFT = 8  # until a group plans ahead again
MOST_TURNS_BETWEEN_TRIALS = 128
SECONDS_MEMORY = 16  # turns that the mean of the host's time goes over
DRAFTING_SHARE = 0.1  # of a predicted step
SLOW_DRAFT_SECONDS = 0.05  # a drafter that takes longer is asked no more for this sequence
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class DraftStats:
    """Counters since the start, and how much is kept to copy from."""

    num_drafts: int = 0
    accepted_at: Counter[int] = field(default_factory=Counter)  # by place in the draft
    tokens: Counter[tuple[str, str]] = field(default_factory=Counter)  # by drafter, outcome
    steps: Counter[str] = field(default_factory=Counter)  # with drafts, by mode
    # of the host, to guess and to choose in a turn
    seconds: Histogram = field(default_factory=lambda: Histogram(STEP_BUCKETS))
    num_corpus_tokens: int = 0

    def __add__(self, other: "DraftStats") -> "DraftStats":
        """Return what two groups have counted together."""
        return DraftStats(
            self.num_drafts + other.num_drafts,
            self.accepted_at + other.accepted_at,
            self.tokens + other.tokens,
            self.steps + other.steps,
            self.seconds + other.seconds,
            self.num_corpus_tokens + other.num_corpus_tokens,
        )

    @property
    def by_drafter(self) -> dict[str, dict[str, int]]:
        """Tokens that each drafter has guessed: accepted, rejected."""
        found: dict[str, dict[str, int]] = {}
        for (drafter, outcome), count in sorted(self.tokens.items()):
            found.setdefault(drafter, {"accepted": 0, "rejected": 0})[outcome] += count
        return found

    @property
    def num_accepted(self) -> int:
        """Tokens of drafts that the steps sampled themselves."""
        return self.accepted_at.total()


def metrics(drafts: DraftStats | None) -> Iterator[Metric]:
    """vLLM's counters of speculation, then ours; where nobody drafts an empty histogram."""
    text = "Host time to guess ahead in a turn."
    yield histogram("draft_seconds", text, (drafts or DraftStats()).seconds)
    if drafts is None:
        return
    yield counter("spec_decode_num_drafts", "Drafts.", drafts.num_drafts)
    yield counter("spec_decode_num_draft_tokens", "Guessed tokens.", drafts.tokens.total())
    name = "spec_decode_num_accepted_tokens"
    yield counter(name, "Guessed tokens that were right.", drafts.num_accepted)
    places = {(str(place),): count for place, count in sorted(drafts.accepted_at.items())}
    yield counter(f"{name}_per_pos", "Right ones by place.", places, "position")
    labels = "drafter", "outcome"
    yield counter("draft_tokens", "Guessed tokens by source.", drafts.tokens, *labels)
    steps = {(mode,): count for mode, count in drafts.steps.items()}
    yield counter("draft_steps", "Steps with drafts.", steps, "mode")
    size = drafts.num_corpus_tokens
    yield gauge("draft_corpus_tokens", "Tokens of finished outputs kept.", size)


class Speculation(Lookahead):
    """The drafts of one group: `drafting` guesses, `prices` say how far it pays.

    In a step of up to `max_rows` tokens any may be a logit row. `overlap` is the engine's: without
    it a step is always committed before the next is planned, and drafts are tried in every turn.
    In a pipeline `num_micro_batches` take turns.
    A drafting model makes `num_guesses` tokens for each sequence; 0: there is none.
    `clock` reads the host's seconds.
    """

    def __init__(
        self,
        drafting: Drafting,
        prices: Prices,
        *,
        max_rows: int,
        overlap: bool = True,
        num_guesses: int = 0,
        num_micro_batches: int = 1,
        clock: Callable[[], float] = perf_counter,
    ):
        self.stats = DraftStats()
        self.commits_first = True
        self._drafting, self._prices, self._max_rows = drafting, prices, max_rows
        self._overlap, self._num_guesses, self._clock = overlap, num_guesses, clock
        self._without: set[SequenceState] = set()  # those whose drafter failed
        self._idle_turns = 0  # in a row in which nobody drafted
        self._round = num_micro_batches  # turns in which every sequence has one
        self._pause = self._turns_to_trial = TURNS_WITHOUT_DRAFT * self._round
        self._host_seconds = 0.0  # of a turn with drafts, about
        self._num_live = self._num_declined = 0  # sequences now; when drafts did not pay
        self._last_mode: Mode | None = None  # of the step that ended last

    # ------------------------------------------------------------------ the life of a sequence

    def start(self, siblings: list[SequenceState]) -> None:
        """The continuations of a request have come."""
        for sequence in siblings:
            request = sequence.request
            self._ask(
                sequence,
                self._drafting.start,
                sequence,
                sequence.token_ids[: sequence.num_prompt_tokens],
                corpus=(request.adapter, request.cache_salt, sequence.version),
                prediction=request.prediction,
                parent=request if len(siblings) > 1 else None,
            )
        self._num_live += len(siblings)
        if 2 * self._num_live <= self._num_declined or not self._num_declined:
            self._try_soon()

    def extend(
        self, sequence: SequenceState, tokens: tuple[int, ...], guess: ModelGuess | None = None
    ) -> None:
        """Tokens have been committed, and a model may have guessed what follows them."""
        self._ask(sequence, self._drafting.extend, sequence, tokens, guess)

    def end(self, sequence: SequenceState, reason: FinishReason) -> None:
        """A sequence has ended; what came to its end by itself may be learned from."""
        self._ask(sequence, self._drafting.end, sequence, reason in ("stop", "length"))
        self._without.discard(sequence)
        self._num_live -= 1
        if 2 * self._num_live <= self._num_declined:
            self._try_soon()

    def leave(self, siblings: list[SequenceState]) -> None:
        """These sequences go to another group."""
        for sequence in siblings:
            if sequence.status is not Status.FINISHED:
                self.end(sequence, "abort")

    def join(self, siblings: list[SequenceState]) -> None:
        """These sequences come from another group; what they have so far is known."""
        unfinished = [each for each in siblings if each.status is not Status.FINISHED]
        self.start(unfinished)
        for sequence in unfinished:
            if sequence.num_output_tokens:
                self.extend(sequence, tuple(sequence.token_ids[sequence.num_prompt_tokens :]))

    def close(self) -> None:
        """End what drafts in the background."""
        self._drafting.close()

    def states(self) -> Iterable[DraftStats]:
        """Return a copy of the counters, beside what is kept now."""
        self.stats.num_corpus_tokens = self._drafting.num_corpus_tokens
        yield self.stats + DraftStats()

    def runs(self, plan: StepPlan, mode: Mode) -> None:
        """Count a step by its mode, if it has drafts."""
        if plan.num_proposals:
            self.stats.steps[mode.label] += 1

    # ------------------------------------------------------------------ a step

    @property
    def num_guesses(self) -> int:
        """Tokens that a drafting model shall guess after the step that is planned now.

        None in a group that plans ahead: it would not see them in time.
        """
        return self._num_guesses if self.commits_first else 0

    def extend_plan(
        self, builder: PlanBuilder, tables: BlockTables, num_waiting: int, last_mode: Mode | None
    ) -> None:
        """Place the drafts of `propose` in a plan."""
        drafts = self.propose(builder, num_waiting, last_mode)
        builder.num_guesses = self.num_guesses
        for item, draft in drafts:
            if (allowed := self.cut(item, draft)) is None:
                continue
            num_blocks = tables.device.blocks_for(item.start + 1 + len(allowed.tokens))
            while len(item.sequence.block_table) < num_blocks:
                tables.grow(item.sequence)
            builder.extend(item, allowed)

    def propose(
        self, builder: PlanBuilder, num_waiting: int = 0, last_mode: Mode | None = None
    ) -> list[tuple[ScheduledSequence, Proposal]]:
        """Drafts for decodes of a plan that has everything else, as long as they shall be.

        `num_waiting` and `last_mode` are what the policy will know of the plan.
        """
        if not self._tries():
            return []
        begin = self._clock()
        seconds = self._prices.seconds(builder, num_waiting, last_mode, self._overlap)
        offers = self._offers(builder, seconds)
        rows = self._choose(builder, offers, seconds) if offers else {}
        chosen = [(i, draft.first(rows[i])) for i, draft in offers.items() if i in rows]
        self._num_declined = self._num_live if offers and not chosen else 0
        self._take_turn(bool(chosen), bool(builder.decodes))
        builder.proposing_seconds = spent = self._clock() - begin
        self.stats.seconds.observe(spent)
        if chosen:
            self._host_seconds += (spent - self._host_seconds) / SECONDS_MEMORY
        return chosen

    def _offers(
        self, builder: PlanBuilder, seconds: Callable[[int], float] | None
    ) -> dict[ScheduledSequence, Proposal]:
        """The drafts that there are, no longer than all of them together find blocks.

        With a prediction they are made as long as a share of the step lasts, and the sequences
        whose drafts did best are asked first.
        """
        items, limit = builder.decodes, math.inf
        size, blocks_left = builder.block_size, builder.blocks_left
        if seconds is not None and items:
            limit = self._clock() + DRAFTING_SHARE * seconds(_num_tokens(builder))
            items = sorted(items, key=self._record, reverse=True)
        offers = {}
        for item in items:
            if self._clock() >= limit:
                break
            held = len(item.sequence.block_table) * size - item.start - 1
            if draft := self._offer(item, held + blocks_left * size):
                offers[item] = draft
                blocks_left -= max(0, -((held - len(draft.tokens)) // size))
        return offers

    def _record(self, item: ScheduledSequence) -> float:
        return self._ask(item.sequence, self._drafting.record, item.sequence) or 0.0

    def _choose(
        self,
        builder: PlanBuilder,
        offers: dict[ScheduledSequence, Proposal],
        seconds: Callable[[int], float] | None,
    ) -> dict[Hashable, int]:
        """Tokens that pay; drafts of which none do are left out."""
        num_tokens = _num_tokens(builder)
        # Up to `max_rows` tokens a bucket has a row for each, beyond that as many as sequences.
        rows_left = max(self._max_rows - num_tokens, builder.rows_left)
        buckets, num_running = self._prices.buckets, len(builder.decodes + builder.chunks)
        return choose(
            self._drafting.options,
            [(item, draft.survivals) for item, draft in offers.items()],
            Room(num_tokens, builder.tokens_left, rows_left, buckets, num_running),
            most_tokens=self._prices.threshold,
            seconds=seconds,
            proposing_seconds=self._host_seconds,
        )

    def cut(self, item: ScheduledSequence, draft: Proposal) -> Proposal | None:
        """The draft as far as a constraint allows it; None: nothing of it."""
        constraint = item.sequence.constraint
        if constraint is not None and draft.tokens:
            masks = self._ask(item.sequence, constraint.masks_along, draft.tokens) or []
            draft = draft.first(len(masks) - 1)
            item.masks = masks if draft.tokens else None
        return draft if draft.tokens else None

    def learn(self, sequence: SequenceState, proposal: Proposal, accepted: int) -> None:
        """A step has verified a draft."""
        stats, offered = self.stats, len(proposal.tokens)
        stats.num_drafts += 1
        stats.tokens[proposal.proposer, "accepted"] += accepted
        stats.tokens[proposal.proposer, "rejected"] += offered - accepted
        stats.accepted_at.update(range(accepted))
        if proposal.proposer == "prediction":
            sequence.num_prediction_tokens += offered
            sequence.num_accepted_prediction_tokens += accepted
        self._ask(sequence, self._drafting.learn, sequence, proposal, offered, accepted)

    def learn_step(self, plan: StepPlan, mode: Mode, seconds: float, is_hidden: bool) -> None:
        """A step has ended; what its like are said to take follows, see `Prices.learn`."""
        self._prices.learn(plan, mode, self._last_mode, seconds, is_hidden)
        self._last_mode = mode

    def _offer(self, item: ScheduledSequence, room: int) -> Proposal | None:
        sequence = item.sequence
        most = min(room, sequence.max_length - 1 - len(sequence.token_ids))
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
        self, of: SequenceState, function: Callable[..., T], *args: Any, **named: Any
    ) -> T | None:
        """Call a drafter; one that fails, or is slow, is not asked to draft for a sequence again.

        Nothing else happens to the sequence: without drafts it decodes as ever.
        """
        begin = self._clock()
        try:
            result = function(*args, **named)
        except Exception:
            if of not in self._without:
                logger.exception("A drafter failed; %s goes on without.", of.request.request_id)
            result = None
            self._without.add(of)
        if self._clock() - begin > SLOW_DRAFT_SECONDS:
            self._without.add(of)
        return result

    # ------------------------------------------------------------------ whether to commit first

    def _tries(self) -> bool:
        if not self.commits_first:
            self._turns_to_trial -= 1
            self.commits_first = self._turns_to_trial <= 0
            return False
        return True

    def _try_soon(self) -> None:
        """Other sequences draft otherwise; but where drafts did not pay, it takes half as many."""
        self._num_declined, self._pause = 0, TURNS_WITHOUT_DRAFT * self._round
        self._turns_to_trial = min(self._turns_to_trial, self._pause)

    def _take_turn(self, drafts: bool, could_draft: bool) -> None:
        """Note whether anybody drafted; too long nobody, and the group plans ahead again."""
        few = TURNS_WITHOUT_DRAFT * self._round
        if drafts:
            self._idle_turns, self._pause = 0, few
        elif could_draft:
            self._idle_turns += 1
        if self._overlap and self._idle_turns >= few:
            self.commits_first = False
            self._drafting.fade()
            self._idle_turns = few - self._round  # a trial is one turn of each micro-batch
            self._turns_to_trial = self._pause
            self._pause = min(2 * self._pause, MOST_TURNS_BETWEEN_TRIALS * self._round)


def _num_tokens(builder: PlanBuilder) -> int:
    return sum(item.num_tokens for item in builder.decodes + builder.chunks)
