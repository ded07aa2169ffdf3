"""Which tokens of which sequences go into a step, and what its results mean for them. No JAX.

    waiting --admit--> running --commit--> finished        all lists are kept in `order`
       ^------preempt-----'|                                (priority, due, number, index)
                           '--park--> parked               by an admission for another group

A step is planned in three parts: decodes, oldest first, the youngest preempted where blocks run
out; then chunks of admitted prompts; then admissions, in order. Nothing starves: nobody is
admitted past a sequence that waits for room, and the oldest running one is never preempted.
`due` never changes, and is a bounded time after the arrival (`step_sizes.due_seconds`).

`schedule` may be called while steps are in flight. A sequence whose next token one of them samples
is then scheduled with the row of the token instead of the token. Ends that can be foreseen by
counting are; after any other end the device has computed one token too many, which `commit` drops.

A group that is a pipeline has several micro-batches (`core/micro_batches.py`), which take turns;
chunks of a prompt follow each other without waiting for a commit.

Five seams say what else happens, each with a default that does nothing: `Lookahead` (who guesses
tokens ahead), `Tier` (a second place for KV), `Admission` (who may start and who leaves),
`StepSizes` (how large a step with prompts is), `Notes` (what is kept of tokens beside their KV).
"""

import bisect
import logging
import math
from collections.abc import Collection, Iterable, Iterator
from operator import attrgetter
from typing import Any

from shiftjax.core.admission import Admission
from shiftjax.core.blocks import BlockAllocator
from shiftjax.core.lookahead import Lookahead
from shiftjax.core.micro_batches import is_in_flight, num_sampling
from shiftjax.core.notes import Notes
from shiftjax.core.plan_builder import PlanBuilder
from shiftjax.core.request import (
    Event,
    FinishReason,
    Request,
    ScheduledSequence,
    SequenceState,
    Status,
    StepOutput,
    StepPlan,
    derive_seed,
)
from shiftjax.core.results import (
    append_tokens,
    check_output,
    collect_prompt_logprobs,
    num_accepted,
)
from shiftjax.core.scheduler_config import SchedulerConfig
from shiftjax.core.step_sizes import StepSizes, Turn, demand_of
from shiftjax.core.tier import Tier
from shiftjax.core.windowed_tables import tables_of
from shiftjax.parallel.grid import Mode

NON_FINITE = "The model produced numbers that are not finite for this request."
STEPS_TO_RECOVER = 1000
logger = logging.getLogger(__name__)
_order = attrgetter("order")


class Scheduler:
    """Sequences and blocks of one group; the only writer of both."""

    def __init__(
        self,
        config: SchedulerConfig,
        lookahead: Lookahead | None = None,  # None: nobody guesses
        blocks: BlockAllocator | None = None,  # of the pool; None: one of its own
        tier: Tier | None = None,  # None: there is no second place for KV
        admission: Admission | None = None,  # None: whoever has blocks may start
        sizes: StepSizes | None = None,  # None: steps are as large as they may be
        notes: Notes | None = None,  # of all groups; None: nothing is kept of tokens but KV
    ):
        self.config = config
        self.sizes = sizes or StepSizes()
        self.admission = admission or Admission()
        self.lookahead = lookahead or Lookahead()
        self.waiting: list[SequenceState] = []
        self.running: list[SequenceState] = []
        self.parked: list[SequenceState] = []
        self._queues = {
            Status.WAITING: self.waiting,
            Status.RUNNING: self.running,
            Status.PARKED: self.parked,
        }
        self.notes = notes or Notes()
        self.tables = tables_of(config, blocks, tier, self.notes)
        self.requests: dict[str, list[SequenceState]] = {}  # unfinished, whole
        self.num_waiting_tokens = 0  # prompt tokens of the waiting sequences
        self.num_preemptions = {"recompute": 0, "swap": 0}
        self._eos_ids = frozenset(config.eos_token_ids)
        self._num_steps = 0
        self._micro_batch = 0  # whose turn it is
        self._budget = config.max_num_batched_tokens  # less for a while after `lower_budget`
        self._recovers_at = 0  # number of a step

    @property
    def num_used_blocks(self) -> int:
        """Blocks held by block tables."""
        return self.tables.device.num_used_blocks

    @property
    def num_held_tokens(self) -> int:
        """Tokens that tables hold blocks for."""
        return self.tables.num_held_tokens(self.running)

    @property
    def is_full(self) -> bool:
        """Whether it has as many sequences, or waiting prompts, as one step takes."""
        apart, tokens_apart = self.admission.apart
        return (
            len(self.running) + len(self.waiting) - apart >= self.config.max_num_seqs
            or self.num_waiting_tokens - tokens_apart >= self.config.max_num_batched_tokens
        )

    def add(
        self, request: Request, number: int, seed: int, max_length: int, due: float | None = None
    ) -> None:
        """Queue every continuation of a validated request.

        `number` is unique and breaks ties of `due`, which is the arrival if it is None; `seed` is
        the request's, given or made up.
        """
        sampling, due = request.sampling, request.arrival_seconds if due is None else due
        num_known = self.tables.num_known_tokens(request, []) if self.sizes.chooses else 0
        self.sizes.arrived(request.arrival_seconds, len(request.prompt_token_ids) - num_known)
        stop_ids = frozenset(sampling.stop_token_ids)
        siblings: list[SequenceState] = []
        for index in range(sampling.n):
            sequence = SequenceState(
                request,
                index,
                derive_seed(seed, index),
                order=(request.priority, due, number, index),
                token_ids=list(request.prompt_token_ids),
                num_prompt_tokens=len(request.prompt_token_ids),
                max_length=max_length,
                stop_ids=stop_ids if sampling.ignore_eos else stop_ids | self._eos_ids,
                constraint=request.constraints[index] if request.constraints else None,
                num_known_tokens=num_known,
                siblings=siblings,
                version=self.tables.version,
            )
            siblings.append(sequence)
            self._wait(sequence)
        if sampling.prompt_logprobs is not None:
            siblings[0].prompt_logprobs = [None]  # nothing predicts the first token
        self.requests[request.request_id] = siblings
        self.lookahead.start(siblings)

    # ------------------------------------------------------------------ schedule

    def schedule(
        self,
        now: float,
        num_queued: int = 0,
        last_mode: Mode | None = None,
        in_flight: Collection[StepPlan] = (),
        overlap: bool = True,
    ) -> StepPlan | None:
        """Plan the next step, or None if nothing can be computed now.

        Every plan that is not committed must have been given to the devices and be `in_flight`,
        the oldest first; with one micro-batch that may be left out. A micro-batch that samples in
        one of them, or with `overlap` in two, has to wait: all but its last token must be known.
        What a policy will know, guesses know too: `num_queued` requests wait before all groups.
        """
        self.tables.device.expire(now)
        num_micro_batches, first = self.config.num_micro_batches, self._micro_batch
        begun = Turn(now, num_queued, last_mode, overlap)
        leaving = self.admission.leaving(self.running)
        self._park_computed(leaving)
        swapped: list[SequenceState] = []
        num_preempted = 0
        for turn in range(num_micro_batches):
            micro_batch = (first + turn) % num_micro_batches
            if num_sampling(in_flight, micro_batch) > overlap:
                continue
            tokens, rows = self._tokens_per_step(), self._rows_per_step
            builder = PlanBuilder(
                tokens,
                rows,
                self.config.block_size,
                micro_batch=micro_batch,
                num_in_flight=len(in_flight),
                num_preempted=num_preempted,  # whom no other micro-batch brings back at once
            )
            self._fill(builder, begun, in_flight)
            self._guess(builder, num_queued, last_mode)
            plan = builder.finish(self._num_steps)
            if plan is not None:
                self._micro_batch = (micro_batch + 1) % num_micro_batches
                return self._planned(plan)
            swapped, num_preempted = swapped + builder.swapped, builder.num_preempted
        if leaving and self.tables.tier.is_offloading:
            return self._planned(StepPlan([], 0, 0, 0, [], [], self._num_steps))
        self._forget_swapped(swapped)
        self.tables.finish_plan(is_planned=False)
        return None

    def plan_to_save(self) -> StepPlan:
        """A plan without a step, while none is in flight: the second tier gets what is cached."""
        self.tables.save_cached()
        return self._planned(StepPlan([], 0, 0, 0, [], [], self._num_steps))

    def _planned(self, plan: StepPlan) -> StepPlan:
        """With the moves between the tiers that have been collected."""
        moves = self.tables.finish_plan(is_planned=True, waiting=self.waiting)
        plan.dropped, plan.offloads, plan.restores, plan.prefetches, plan.unit_restores = moves
        self._num_steps += 1
        return plan

    def _fill(self, builder: PlanBuilder, turn: Turn, in_flight: Collection[StepPlan]) -> None:
        """Decodes, then chunks, then admissions."""
        if self.admission.prompts_first and self._fill_prompts(builder, turn, in_flight):
            return
        if self.admission.decodes:
            self._schedule_decodes(builder)
        else:
            mine = (s for s in self.running if s.micro_batch == builder.micro_batch)
            builder.unfinished_prompts += (s for s in mine if not s.num_pending_tokens)
        if self.sizes.chooses and (builder.unfinished_prompts or self.waiting):
            self._limit(builder, turn)
        for sequence in builder.unfinished_prompts:
            has_room = min(builder.tokens_left, builder.rows_left) > 0
            if has_room and self._cover(sequence, builder):  # a handover may bring several
                builder.add(sequence)
        if not builder.num_preempted:
            self._admit_waiting(builder, turn.now, in_flight)

    def _fill_prompts(
        self, builder: PlanBuilder, turn: Turn, in_flight: Collection[StepPlan]
    ) -> bool:
        """Chunks and admissions alone; False if there are none."""
        for sequence in self.running:
            left = len(sequence.token_ids) - sequence.num_computed_tokens
            is_mine = sequence.micro_batch == builder.micro_batch
            has_begun = is_mine and left > 1 and not sequence.num_pending_tokens
            if has_begun and min(builder.tokens_left, builder.rows_left) > 0:
                builder.add(sequence)
        self._admit_waiting(builder, turn.now, in_flight)
        return builder.tokens_left < self._tokens_per_step()

    def _limit(self, builder: PlanBuilder, turn: Turn) -> None:
        """Leave so many tokens for prompts as is best for all that wait."""
        room = max(0, self._max_num_seqs - len(self.running))
        rest = self.num_held_tokens, turn, self.sizes.num_groups
        demand = demand_of(builder, self.waiting, room, *rest)
        if self.config.num_micro_batches > 1:
            others = sum(s.micro_batch != builder.micro_batch for s in self.running)
            demand = demand._replace(num_others=others)
        if demand.prompts and builder.tokens_left:
            num_tokens = self.sizes.choose(demand) - demand.num_decodes
            builder.tokens_left = min(builder.tokens_left, max(1, num_tokens))

    def _forget_swapped(self, sequences: Iterable[SequenceState]) -> None:
        """No step will copy what these have computed to the tier: they start from their tokens."""
        for sequence in sequences:
            self.tables.forget(sequence)
            self.num_preemptions["swap"] -= 1
            self.num_preemptions["recompute"] += 1

    def lower_budget(self, num_tokens: int) -> None:
        """Plan at most half of `num_tokens`, which a device had no memory for, in a step.

        Every `STEPS_TO_RECOVER` steps the budget doubles, up to the configured one. For when
        nothing runs: running sequences may be more than a smaller budget holds.
        """
        self._budget = max(1, num_tokens // 2)
        self._recovers_at = self._num_steps + STEPS_TO_RECOVER
        logger.warning("A step had no memory: at most %d tokens in one for a while.", self._budget)

    def _tokens_per_step(self) -> int:
        most = self.config.max_num_batched_tokens
        if self._budget < most and self._num_steps >= self._recovers_at:
            self._budget = min(most, 2 * self._budget)
            self._recovers_at = self._num_steps + STEPS_TO_RECOVER
        return self._budget

    @property
    def _max_num_seqs(self) -> int:
        return min(self.config.max_num_seqs, self._budget)

    @property
    def _rows_per_step(self) -> int:
        return min(self.config.max_step_seqs, self._budget)

    def _schedule_decodes(self, builder: PlanBuilder) -> None:
        """One token of each that runs, is of this micro-batch and lacks just one.

        The loop that must be fast.
        """
        block_size, decodes = self.config.block_size, builder.decodes
        micro_batch = builder.micro_batch
        for sequence in self.running:  # preemption shortens it from the far end
            if sequence.micro_batch != micro_batch:
                continue
            start = sequence.num_computed_tokens
            pending = sequence.num_pending_tokens
            length = len(sequence.token_ids) + pending
            if length - start != 1:
                builder.unfinished_prompts.append(sequence)
                continue
            if pending and (length >= sequence.max_length or sequence.constraint is not None):
                continue  # the step in flight samples its last token, or decides what may follow
            if start == len(sequence.block_table) * block_size and not self._grow(
                sequence, builder
            ):
                break  # it was the youngest and has preempted itself
            previous_row = sequence.pending_row if pending else -1
            sequence.num_computed_tokens = length
            sequence.num_pending_tokens = pending + 1
            sequence.pending_row = len(decodes)
            decodes.append(ScheduledSequence(sequence, start, 1, 1, previous_row))
        builder.tokens_left -= len(decodes)
        builder.rows_left -= len(decodes)

    def _guess(self, builder: PlanBuilder, num_queued: int, last_mode: Mode | None) -> None:
        """Let decodes guess ahead with what the step has left; nobody is kept waiting for a guess.

        A guess takes no block that an admission would have to leave free.
        """
        builder.blocks_left = self.tables.num_growths(self._watermark)
        self.lookahead.extend_plan(builder, self.tables, num_queued + len(self.waiting), last_mode)

    @property
    def _watermark(self) -> int:
        return math.ceil(self.config.watermark * self.config.num_blocks)

    def _grow(self, sequence: SequenceState, builder: PlanBuilder) -> bool:
        """One more block, at the expense of the youngest; False if that is the sequence itself."""
        while not self.tables.grow(sequence):
            victim = self.running.pop()
            self._preempt(victim, builder)
            if victim is sequence:
                return False
        return True

    def _cover(self, sequence: SequenceState, builder: PlanBuilder) -> bool:
        """Room for a part of a prompt, at the expense of younger ones that the plan has nothing of.

        False if it has been preempted itself, or has to wait for those that the plan has.
        """
        if sequence.status is not Status.RUNNING:
            return False
        while not self.tables.cover(sequence):
            victim = self.running[-1]
            if victim is sequence or builder.has(victim):
                return False
            self.running.pop()
            self._preempt(victim, builder)
        return True

    def _preempt(self, sequence: SequenceState, builder: PlanBuilder) -> None:
        """Back to waiting, by swap where the second tier has room and else by recompute.

        What a guess in flight computes beyond its first token is not known to be right.
        """
        if sequence.num_pending_tokens:
            known = len(sequence.token_ids) + sequence.num_pending_tokens - 1
            sequence.num_computed_tokens = min(sequence.num_computed_tokens, known)
        swaps = self.config.preemption == "swap" and self.tables.swap_out(sequence)
        if swaps:
            builder.swapped.append(sequence)
        else:
            self.tables.forget(sequence)
        self.num_preemptions["swap" if swaps else "recompute"] += 1
        builder.num_preempted += 1
        sequence.num_preemptions += 1
        self._wait(sequence)

    def _park_computed(self, sequences: Iterable[SequenceState]) -> None:
        """Swap out running sequences. What the tier has no room for is computed again."""
        for sequence in sequences:
            if not self.tables.swap_out(sequence):
                self.tables.forget(sequence)
            self.park(sequence)

    def park(self, sequence: SequenceState) -> None:
        """It waits for another group; with it go the continuations that wait for its prompt."""
        for each in sequence.siblings:
            if each is sequence or each.status is Status.WAITING:
                self._leave_queue(each)
                each.status = Status.PARKED
                bisect.insort(self.parked, each, key=_order)

    def _wait(self, sequence: SequenceState) -> None:
        sequence.status = Status.WAITING
        bisect.insort(self.waiting, sequence, key=_order)
        self.num_waiting_tokens += sequence.num_prompt_tokens

    def _admit_waiting(
        self, builder: PlanBuilder, now: float, in_flight: Collection[StepPlan]
    ) -> None:
        """Admit in order until a budget or the blocks run out."""
        position, num_left = 0, self._num_admitted(builder.micro_batch)
        while (
            num_left > 0
            and position < len(self.waiting)
            and min(builder.tokens_left, builder.rows_left) > 0
        ):
            sequence = self.waiting[position]
            verdict = self.admission.verdict(sequence, self.tables)
            is_skipped = _waits_for_prompt(sequence) or verdict == "skip"
            if is_skipped or (verdict == "admit" and self.tables.awaits(sequence)):
                position += 1
                continue
            if verdict == "park":
                self.park(sequence)
                continue
            if sequence.num_preemptions and is_in_flight(sequence, in_flight):
                break  # what it had computed, and sampled, is not known yet
            is_first = sequence.first_scheduled_seconds is None
            if not self.admission.admit(sequence, self._num_spared(sequence), self.tables):
                break
            self.notes.begin(sequence)
            if is_first:
                sequence.first_scheduled_seconds = now
                sequence.num_cached_tokens = sequence.num_computed_tokens
            del self.waiting[position]
            self.num_waiting_tokens -= sequence.num_prompt_tokens
            bisect.insort(self.running, sequence, key=_order)
            sequence.status = Status.RUNNING
            sequence.micro_batch = builder.micro_batch
            num_left -= 1
            builder.add(sequence)

    def _num_admitted(self, micro_batch: int) -> int:
        """How many sequences may at most be admitted to a micro-batch now."""
        room = self._max_num_seqs - len(self.running)
        if self.config.num_micro_batches == 1 or not self.waiting or room <= 0:
            return room
        sizes = [0] * self.config.num_micro_batches
        for sequence in self.running:
            sizes[sequence.micro_batch] += 1
        return self.admission.quota(micro_batch, sizes, self.waiting, room, self.tables)

    def _num_spared(self, sequence: SequenceState) -> int:
        """Blocks that the admission of this sequence must leave free.

        With a sequence among them that has been preempted often enough: all that the running ones
        and this one may still grow by, so that nobody is preempted while it runs.
        """
        if not self.running:
            return 0
        most = self.config.max_preemptions
        after = [*self.running, sequence]
        if all(other.num_preemptions < most for other in after):
            return self._watermark
        missing = self.tables.num_missing
        return sum(missing(other, _most_computed(other)) for other in after)

    # -------------------------------------------------------------------- commit

    def commit(self, plan: StepPlan, mode: Mode, output: StepOutput, now: float) -> Iterator[Event]:
        """Enter the results of a step: new tokens, full blocks, ends. In the order of the steps.

        A sequence that has ended since the step was scheduled is passed over. Rows of a guess
        after the first token that the step does not sample itself count for nothing. Events are
        yielded as they happen, so that what has ended before an exception is told: `fail` knows no
        more of it.
        """
        check_output(plan, output)
        self.notes.enter(plan, output)
        self.tables.end_plan(plan)
        label, caches = mode.label, self.config.prefix_caching
        block_size = self.config.block_size
        tokens, finite = output.token_ids.tolist(), output.is_finite.tolist()
        next_row = 0
        guesses = output.guesses or [None] * len(plan.scheduled)
        for item, guess in zip(plan.scheduled, guesses, strict=True):
            sequence, first_row = item.sequence, next_row
            next_row += item.num_rows
            if sequence.status is Status.FINISHED:
                continue
            sequence.steps_by_mode[label] = sequence.steps_by_mode.get(label, 0) + 1
            if not item.num_rows:
                continue  # part of a prompt: whether it is finite shows in a later row
            end, last = item.start + item.num_tokens, next_row  # of what counts
            if item.proposal is not None:
                num_rejected = self._verify(item, tokens[first_row:next_row])
                end, last = end - num_rejected, last - num_rejected
                if sequence.block_table:  # else it has been preempted since
                    sequence.num_computed_tokens = end
            if not (finite[first_row] and (last == first_row + 1 or all(finite[first_row:last]))):
                yield from self._end_request(sequence.siblings, "error", NON_FINITE, "non_finite")
                continue
            if sequence.wants_prompt_logprobs:
                collect_prompt_logprobs(item, output, last - 1)
            event = reason = None
            if item.proposal is not None or end == len(sequence.token_ids):
                sampling_row = last - 1 if item.proposal is None else first_row
                sampled = tokens[sampling_row:last]
                event, reason = append_tokens(sequence, sampled, output, sampling_row, now)
                event.mode, event.version = label, self.tables.version
                self.lookahead.extend(sequence, event.token_ids, guess)
            if sequence.block_table:
                sequence.num_verified_tokens = min(end, len(sequence.token_ids))
                if caches and end // block_size > sequence.num_registered_blocks:
                    self.tables.register(sequence)
            if event is not None:
                yield self._end(sequence, reason, event) if reason else event

    def _verify(self, item: ScheduledSequence, sampled: list[int]) -> int:
        """How many tokens of a proposal were wrong, and all after the first that was."""
        accepted = num_accepted(item, sampled)
        sequence, num_proposed = item.sequence, len(item.proposed_ids)
        sequence.num_proposed_tokens += num_proposed
        sequence.num_accepted_tokens += accepted
        if item.proposal is not None:
            self.lookahead.learn(sequence, item.proposal, accepted)
        return num_proposed - accepted

    # ----------------------------------------------------------------------- ends

    def abort(self, request_id: str) -> list[Event]:
        """End every continuation of a request; nothing if it is not here (any more)."""
        return list(self._end_request(self.requests.get(request_id, ()), "abort"))

    def finish(self, request_id: str, index: int, reason: FinishReason) -> list[Event]:
        """End one continuation, for a reason found in its text; nothing if it has ended."""
        siblings = self.requests.get(request_id, ())
        return list(self._end_request(siblings[index : index + 1], reason))

    def fail(self, plan: StepPlan | None, error: str, code: str = "step_failed") -> list[Event]:
        """End the requests of a failed plan (None: all of them), and forget all KV on the device.

        The others start again from their tokens, with an empty prefix cache; those that have been
        swapped out by a step that has ended, from there.
        """
        everybody = list(self.requests.values())
        self.forget_all(plan)
        failed = everybody if plan is None else [item.sequence.siblings for item in plan.scheduled]
        return [e for siblings in failed for e in self._end_request(siblings, "error", error, code)]

    def forget_all(self, plan: StepPlan | None = None) -> None:
        """Forget all KV on the device, which is lost: everybody starts again from the tokens.

        Those that have been swapped out by a step that has ended start from there. `plan` has
        failed, if there is one.
        """
        alive = self._alive()
        self.tables.reset(alive, plan)
        self._clear_queues()
        for sequence in alive:
            sequence.num_pending_tokens = 0
            self._wait(sequence)
        for sequence in self.admission.leaving(alive):
            self.park(sequence)  # swapped out already

    def renew(self, version: int, *, recompute: bool) -> None:
        """The weights are others, of this version. No step is in flight.

        Nothing that was cached is found any more. Sequences that have begun keep their KV, or lose
        it in both tiers to `recompute` it; where they keep it they keep the root of their hashes.
        """
        self.tables.version = version
        self.tables.clear_cache()
        if recompute:
            for sequence in self._alive():
                self.tables.forget(sequence)
            self.forget_all()
        for sequence in self._alive():
            if not sequence.block_table and not sequence.places:
                sequence.block_hashes.clear()
                sequence.version, sequence.notes = version, None

    def _alive(self) -> list[SequenceState]:
        """Every unfinished sequence."""
        everybody = self.requests.values()
        return [s for group in everybody for s in group if s.status is not Status.FINISHED]

    # ----------------------------------------------------------- from group to group

    def detach(self, request_id: str) -> list[SequenceState]:
        """Give up all continuations of a request, at a moment when no step is in flight.

        Their blocks stay what they are; whoever moves the request sees to that.
        """
        siblings = self.requests.pop(request_id)
        for sequence in siblings:
            if sequence.status is not Status.FINISHED:
                self._leave_queue(sequence)
        self.lookahead.leave(siblings)
        return siblings

    def attach(self, siblings: list[SequenceState]) -> None:
        """Take over what another group has given up; running sequences have blocks of this one."""
        self.requests[siblings[0].request.request_id] = siblings
        for sequence in siblings:
            if sequence.status is Status.RUNNING:
                bisect.insort(self.running, sequence, key=_order)
            elif sequence.status is not Status.FINISHED:
                self._wait(sequence)
        self.lookahead.join(siblings)

    def disown(self) -> None:
        """Give up all requests and forget all KV, whatever state either is in.

        For when a hand-over has gone wrong in the middle.
        """
        self.tables.reset([])
        self.requests.clear()
        self._clear_queues()

    def _clear_queues(self) -> None:
        for queue in self._queues.values():
            queue.clear()
        self.num_waiting_tokens = 0

    def forget(self, sequence: SequenceState) -> None:
        """A detached sequence loses its blocks, in both tiers: it will be recomputed."""
        self.tables.forget(sequence)
        self.num_preemptions["recompute"] += sequence.status is Status.RUNNING
        sequence.num_preemptions += sequence.status is Status.RUNNING
        sequence.status = Status.WAITING

    def _end_request(
        self,
        siblings: Iterable[SequenceState],
        reason: FinishReason,
        error: str | None = None,
        code: str | None = None,
    ) -> Iterator[Event]:
        for sequence in siblings:
            if sequence.status is not Status.FINISHED:
                name, index = sequence.request.request_id, sequence.index
                event = Event(name, index, error=error, error_code=code)
                yield self._end(sequence, reason, event)

    def _end(self, sequence: SequenceState, reason: FinishReason, event: Event) -> Event:
        """Take a sequence out, free its blocks, and make the event its last.

        The blocks come first: if that fails, the sequence has not ended and `fail` will end it.
        """
        self.tables.end(sequence, is_whole=reason in ("stop", "length"))
        self._leave_queue(sequence)
        sequence.status = Status.FINISHED
        self.lookahead.end(sequence, reason)
        if reason in ("stop", "length"):
            self.sizes.ended(sequence.num_output_tokens)
        event.finish_reason = reason
        event.metrics = sequence.metrics()
        if sequence.request.wants_notes:
            event.notes = self.notes.of(sequence)
        event.is_last = all(other.status is Status.FINISHED for other in sequence.siblings)
        if event.is_last:
            del self.requests[sequence.request.request_id]
            sequence.siblings.clear()  # which hold each other, and all their tokens, otherwise
        return event

    def _leave_queue(self, sequence: SequenceState) -> None:
        queue = self._queues[sequence.status]
        if queue is self.waiting:
            self.num_waiting_tokens -= sequence.num_prompt_tokens
        del queue[bisect.bisect_left(queue, sequence.order, key=_order)]

    def states(self) -> Iterator[Any]:
        """Return the counters of what is plugged in; those of several groups can be added."""
        yield from self.lookahead.states()
        yield from self.tables.tier.states()
        yield from self.tables.device.states()
        yield from self.sizes.states()

    def check(self) -> None:
        """Conservation of blocks and queues. Raises `RuntimeError` at the first breach."""
        for status, queue in self._queues.items():
            orders = [sequence.order for sequence in queue]
            if orders != sorted(set(orders)) or any(s.status is not status for s in queue):
                raise RuntimeError(f"The {status.value} queue is out of order.")
        unfinished = {
            id(sequence)
            for siblings in self.requests.values()
            for sequence in siblings
            if sequence.status is not Status.FINISHED
        }
        everybody = [sequence for queue in self._queues.values() for sequence in queue]
        if unfinished != {id(sequence) for sequence in everybody}:
            raise RuntimeError("The queues do not hold exactly the unfinished sequences.")
        if self.num_waiting_tokens != sum(s.num_prompt_tokens for s in self.waiting):
            raise RuntimeError("The count of waiting tokens is wrong.")
        self.tables.check(everybody)


def _waits_for_prompt(sequence: SequenceState) -> bool:
    """Whether the first continuation is still computing the prompt that this one will share."""
    first = sequence.siblings[0]
    return (
        sequence is not first
        and first.status is not Status.FINISHED
        and len(first.token_ids) == first.num_prompt_tokens
    )


def _most_computed(sequence: SequenceState) -> int:
    """The most tokens whose KV it can come to hold: the last sampled one needs none."""
    return max(sequence.num_prompt_tokens, sequence.max_length - 1)
