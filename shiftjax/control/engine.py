"""The serving loop: schedule, choose, run, commit. No JAX, no text, no threads, no clock."""

import heapq
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shiftjax.control.admission import RequestLimits, validate_request
from shiftjax.control.policy import Policy
from shiftjax.control.request import (
    DuplicateRequestError,
    Event,
    FinishReason,
    Request,
    RequestMetrics,
    Runner,
    StepPlan,
    derive_seed,
)
from shiftjax.control.scheduler import Scheduler
from shiftjax.parallel.mode import Mode

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Flight:
    """A step that has been given to the device; or one that could not be, and why.

    `plan` is None if not even a plan could be made.
    """

    plan: StepPlan | None
    handle: Any = None
    error: Exception | None = None


@dataclass(slots=True)
class Group:
    """Devices that step together: their sequences, their runner, their step in flight."""

    scheduler: Scheduler
    runner: Runner
    in_flight: Flight | None = None
    last_mode: Mode | None = None


@dataclass(frozen=True)
class EngineStats:
    """Counters since the start and gauges of now, summed over groups.

    `num_waiting` counts sequences without blocks, those of requests in the front queue included.
    `kv_usage` is the share of blocks that block tables hold.
    """

    num_running: int
    num_waiting: int
    num_waiting_tokens: int  # of their prompts
    kv_usage: float
    steps_by_mode: dict[str, int]
    mode_switches: dict[tuple[str, str], int]  # (from, to)
    num_failed_steps: int
    num_preemptions: dict[str, int]  # recompute, swap
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int


class Engine:
    """One waiting queue in front of `groups`, and the loop over them.

    A request goes to the least loaded group as late as possible. `overlap` keeps one step of each
    group in flight while the next is scheduled; without it the loop is the plain control. Tokens
    are stamped with `clock()`, read after the step's results are there, or with the `now` of the
    turn where there is no clock. Unseeded requests get seeds from `seed` and their number.
    """

    def __init__(
        self,
        groups: list[Group],
        policy: Policy,
        limits: RequestLimits,
        *,
        overlap: bool = True,
        seed: int = 0,
        clock: Callable[[], float] | None = None,
    ):
        if not groups:
            raise ValueError("An engine needs at least one group.")
        self.groups = groups
        self.policy = policy
        self.limits = limits
        self.overlap = overlap
        self._seed = seed
        self._clock = clock
        self._queue: list[tuple[int, float, int, Request]] = []  # a heap
        self._queued: dict[str, Request] = {}  # the same, by id
        self._num_requests = 0
        self._steps_by_mode = {mode.value: 0 for mode in Mode}
        self._mode_switches: Counter[tuple[str, str]] = Counter()
        self._num_failed_steps = 0

    # ------------------------------------------------------------------- the loop

    def step(self, now: float) -> list[Event]:
        """One turn: schedule, choose and run a step in every group, then commit what is due."""
        self._dispatch()
        flights = [self._launch(group, now) for group in self.groups]
        commit = self._commit_previous if self.overlap else self._commit
        turns = zip(self.groups, flights, strict=True)
        return [event for group, flight in turns for event in commit(group, flight, now)]

    def _launch(self, group: Group, now: float) -> Flight | None:
        """Schedule, choose, run; the handle comes back before the step is done."""
        plan, previous = None, group.in_flight
        try:
            plan = group.scheduler.schedule(now)
            if plan is None:
                return None
            plan.mode = self._choose(group, plan)
            handle = group.runner.run(plan, plan.mode, previous.handle if previous else None)
            return Flight(plan, handle)
        except Exception as error:
            return Flight(plan, error=error)

    def _commit(self, group: Group, flight: Flight | None, now: float) -> list[Event]:
        """Wait for a step and enter its results."""
        if flight is None:
            return []
        try:
            if flight.plan is None or flight.error is not None:
                raise flight.error or AssertionError("a flight has a plan or an error")
            output = group.runner.fetch(flight.handle)
            done_at = self._clock() if self._clock else now
            return group.scheduler.commit(flight.plan, output, done_at)
        except Exception as error:
            return self._fail(group, flight, error)

    def _commit_previous(self, group: Group, flight: Flight | None, now: float) -> list[Event]:
        """With overlap: commit the step before, while the one just launched computes."""
        previous, group.in_flight = group.in_flight, flight
        events = self._commit(group, previous, now)
        if group.in_flight is not None and group.in_flight.error is not None:
            failed, group.in_flight = group.in_flight, None
            events += self._commit(group, failed, now)
        return events

    def _fail(self, group: Group, flight: Flight, error: Exception) -> list[Event]:
        """End the requests of a failed step and rebuild the pool.

        A step launched on top of it is forgotten; what it has alone starts again from its tokens.
        Where not even a plan could be made, all requests of the group end. An exception from
        `Runner.reset` is final: the engine is then of no more use.
        """
        logger.error("A step failed; its requests end with an error.", exc_info=error)
        self._num_failed_steps += 1
        group.in_flight = None
        reason = f"The step that computed this request failed ({type(error).__name__})."
        code = "device_oom" if is_out_of_memory(error) else "step_failed"
        events = group.scheduler.fail(flight.plan, reason, code)
        if code == "device_oom" and flight.plan is not None:
            group.scheduler.lower_budget(flight.plan.num_tokens)
        group.runner.reset()
        return events

    def _choose(self, group: Group, plan: StepPlan) -> Mode:
        num_waiting = len(self._queued) + len(group.scheduler.waiting)
        mode = self.policy.choose(plan, num_waiting, group.last_mode)
        self._steps_by_mode[mode.value] += 1
        if group.last_mode is not None and group.last_mode is not mode:
            self._mode_switches[group.last_mode.value, mode.value] += 1
        group.last_mode = mode
        return mode

    # ------------------------------------------------------------------- requests

    def add_request(self, request: Request) -> None:
        """Accept a request, which then gets exactly one terminal event, or raise `RequestError`."""
        validate_request(request, self.limits)
        name = request.request_id
        if name in self._queued or self._group_of(name) is not None:
            raise DuplicateRequestError(f"There is an unfinished request with the id {name!r}.")
        entry = (request.priority, request.arrival_seconds, self._num_requests, request)
        heapq.heappush(self._queue, entry)
        self._queued[name] = request
        self._num_requests += 1

    def abort(self, request_id: str) -> list[Event]:
        """End a request now; returns its last events, none if it is unknown or has ended."""
        request = self._queued.pop(request_id, None)
        if request is not None:
            self._queue = [entry for entry in self._queue if entry[-1] is not request]
            heapq.heapify(self._queue)
            return _aborted_in_queue(request)
        group = self._group_of(request_id)
        return group.scheduler.abort(request_id) if group else []

    def finish(self, request_id: str, index: int, reason: FinishReason) -> list[Event]:
        """End one continuation, say at a stop string; returns its last event, or none."""
        group = self._group_of(request_id)
        return group.scheduler.finish(request_id, index, reason) if group else []

    def has_work(self) -> bool:
        """Whether a request is unfinished or a step in flight."""
        return bool(self._queued) or any(
            group.scheduler.requests or group.in_flight for group in self.groups
        )

    def stats(self) -> EngineStats:
        """Counters and gauges as of now."""
        schedulers = [group.scheduler for group in self.groups]
        used = sum(scheduler.num_used_blocks for scheduler in schedulers)
        usable = sum(scheduler.tables.device.num_usable_blocks for scheduler in schedulers)
        preemptions = sum((Counter(s.num_preemptions) for s in schedulers), Counter())
        queued = [(r.sampling.n, len(r.prompt_token_ids)) for r in self._queued.values()]
        return EngineStats(
            num_running=sum(len(scheduler.running) for scheduler in schedulers),
            num_waiting=sum(n for n, _ in queued) + sum(len(s.waiting) for s in schedulers),
            num_waiting_tokens=sum(n * num_tokens for n, num_tokens in queued)
            + sum(scheduler.num_waiting_tokens for scheduler in schedulers),
            kv_usage=used / usable,
            steps_by_mode=dict(self._steps_by_mode),
            mode_switches=dict(self._mode_switches),
            num_failed_steps=self._num_failed_steps,
            num_preemptions={kind: preemptions[kind] for kind in ("recompute", "swap")},
            num_prefix_query_tokens=sum(s.tables.num_prefix_query_tokens for s in schedulers),
            num_prefix_hit_tokens=sum(s.tables.num_prefix_hit_tokens for s in schedulers),
        )

    def mend(self, error: Exception) -> list[Event]:
        """After a command that raised: end the requests of every group that it left broken."""
        events = []
        for group in self.groups:
            try:
                group.scheduler.check()
            except RuntimeError:
                events += self._fail(group, Flight(None), error)
        return events

    def flush_prefix_cache(self) -> None:
        """Make every cached block worthless; running sequences keep theirs."""
        for group in self.groups:
            group.scheduler.tables.device.clear_cache()

    def check(self) -> None:
        """Conservation in every group. Raises `RuntimeError` at the first breach."""
        for group in self.groups:
            group.scheduler.check()

    def _group_of(self, request_id: str) -> Group | None:
        for group in self.groups:
            if request_id in group.scheduler.requests:
                return group
        return None

    def _dispatch(self) -> None:
        """Hand requests from the queue to the least loaded group while one has room for more.

        A group takes no more than it can soon admit; the rest stays in front, where any group can
        still take it. A request that comes before all that waits in a group need not stay.
        """
        while self._queue:
            priority, arrival, number, request = self._queue[0]
            order = (priority, arrival, number, 0)
            scheduler = min((group.scheduler for group in self.groups), key=_load)
            waiting = scheduler.waiting
            if scheduler.is_full and not (waiting and order < waiting[0].order):
                return
            heapq.heappop(self._queue)
            self._start(request, number, scheduler)

    def _start(self, request: Request, number: int, scheduler: Scheduler) -> None:
        sampling = request.sampling
        seed = derive_seed(self._seed, number) if sampling.seed is None else sampling.seed
        num_prompt_tokens = len(request.prompt_token_ids)
        max_length = self.limits.max_length(num_prompt_tokens, sampling.max_tokens)
        scheduler.add(request, number, seed, max_length)
        del self._queued[request.request_id]


def _load(scheduler: Scheduler) -> tuple[bool, int]:
    """Sorts groups: those with room first, then by the tokens that they hold and will hold."""
    held = scheduler.num_used_blocks * scheduler.config.block_size
    return scheduler.is_full, held + scheduler.num_waiting_tokens


def _aborted_in_queue(request: Request) -> list[Event]:
    """The last events of a request that no group has seen."""
    nothing = RequestMetrics(
        queue_seconds=None,
        ttft_seconds=None,
        tpot_seconds=None,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=0,
        num_cached_tokens=0,
        num_preemptions=0,
        steps_by_mode={mode.value: 0 for mode in Mode},
    )
    last = request.sampling.n - 1
    return [
        Event(
            request.request_id,
            index,
            finish_reason="abort",
            metrics=nothing,
            is_last=index == last,
        )
        for index in range(request.sampling.n)
    ]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the devices or the host had no room; XLA says so in two ways."""
    signs = ("RESOURCE_EXHAUSTED", "Out of memory")
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in signs)
