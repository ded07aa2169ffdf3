"""The serving loop: schedule, choose, run, commit. No JAX, no text, no threads."""

import heapq
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Literal

from shiftjax.core.errors import EngineLostError, is_out_of_memory
from shiftjax.core.lane import Failure, Flight, Lane, wait_for_one
from shiftjax.core.limits import RequestLimits, validate_request
from shiftjax.core.policy import Policy
from shiftjax.core.request import (
    DuplicateRequestError,
    Event,
    FinishReason,
    Request,
    Status,
    StepPlan,
    derive_seed,
)
from shiftjax.core.results import ended_in_queue
from shiftjax.core.scheduler import Scheduler
from shiftjax.core.stats import EndedStep, EngineStats, ended_step, stats_of
from shiftjax.core.step_sizes import due_seconds
from shiftjax.core.topology import Topology
from shiftjax.parallel.grid import Mode

# Told of a step that has ended, of its group, of its seconds, and when that was.
Watcher = Callable[[Lane, Flight, float, float], None]
Hold = Literal["none", "new", "all"]  # who has to wait: requests that no lane has, or everybody
MOST_PASSED = 64  # requests that wait for a wider group, and that others may overtake
logger = logging.getLogger(__name__)
_ORDER = itemgetter(0, 1, 2)  # of the queue: requests themselves cannot be compared


class Engine:
    """One waiting queue in front of `lanes`, and the loop over them.

    A request goes to the least loaded lane as late as possible. Lanes step on their own: each is
    committed when *its* step is ready, whatever the others compute. A lane has a step in flight for
    each micro-batch, mostly one; `overlap` keeps them in flight while the next is
    scheduled, and without it the loop is the plain control. Where there are several lanes, `wait`
    is called with those that can do nothing until a step of theirs is ready; it may come back
    early, say because a request has come for another lane.
    For each prompt token a request may be passed for `patience` seconds by ones that come later.
    What `holds` says waits until it says otherwise. `version` is that of the weights.
    `parts` are asked for states that the stats tell beside those of lanes and topology;
    `watchers` are told of every step that has ended.
    Tokens are stamped with `clock()`, read after the step's results are there, or with the `now`
    of the turn where there is no clock. Unseeded requests get seeds from `seed` and their number.
    """

    def __init__(
        self,
        lanes: list[Lane],
        policy: Policy,
        limits: RequestLimits,
        *,
        overlap: bool = True,
        seed: int = 0,
        clock: Callable[[], float] | None = None,
        wait: Callable[[Sequence[Lane]], None] = wait_for_one,
        topology: Topology | None = None,  # that opens and closes the lanes; None: all are open
        patience: float = 0.0,
        parts: Sequence[Callable[[], Any]] = (),
        watchers: Sequence[Watcher] = (),
    ):
        if not lanes:
            raise ValueError("An engine needs at least one group of devices.")
        self.lanes = lanes
        self.policy = policy
        self.limits = limits
        self.overlap = overlap
        self.wait = wait
        self.topology = topology or Topology(lanes)
        self.patience = patience
        self.parts, self.watchers = parts, watchers
        self.holds: Hold = "none"
        self.version = 0
        self._seed = seed
        self._clock = clock
        self._queue: list[tuple[int, float, int, Request]] = []  # a heap
        self._queued: dict[str, Request] = {}  # the same, by id
        self._num_requests = 0
        self._steps = {(mode.label, lane.group.width): 0 for lane in lanes for mode in lane.modes}
        self._mode_switches: Counter[tuple[str, str]] = Counter()
        self._num_failed_steps = 0
        self._told: list[Event] = []  # of requests that need no step
        self.ended_steps: list[EndedStep] = []  # of the last turn

    # ------------------------------------------------------------------- the loop

    def step(self, now: float) -> list[Event]:
        """One turn: schedule, choose and run a step in every lane, then commit what is due."""
        num_queued = len(self._queued) if self.holds == "none" else 0
        if self.holds != "all":
            self.topology.turn(self._first_queued, num_queued, self._num_requests, now)
        if self.holds == "none":
            self._dispatch()
        self.ended_steps = []
        due = [lane for lane in self.lanes if self._is_due(lane, self._launch(lane, now))]
        busy = sum(bool(lane.in_flight) for lane in self.lanes)
        if not busy and self.holds != "all":
            self.topology.idle(num_queued and len(self._queue))
            for lane in self.lanes:
                lane.scheduler.tables.tier.idle()
        if sum(lane.steps for lane in self.lanes) > 1 or busy > 1:  # a single one waits in `fetch`
            if len(due) == busy > 0:
                self.wait(due)
            due = [lane for lane in due if lane.is_ready]
        # A group whose step fails may take what others on its devices have in flight with it.
        events, self._told = self._told, []
        return events + [e for lane in due if lane.in_flight for e in self._turn(lane, now)]

    def _turn(self, lane: Lane, now: float) -> list[Event]:
        """Commit; where the next step had to wait for that, launch it before events are told."""
        events = self._commit(lane, now)
        if self.overlap and lane.commits_first:
            self._launch(lane, now)
        return events

    def _launch(self, lane: Lane, now: float) -> bool:
        """Schedule, choose, run, if there is room in flight; nothing is waited for."""
        overlap = self.overlap and not lane.commits_first
        if self.holds == "all" or not lane.steps or not lane.has_room(overlap):
            return False
        plan, plans = None, [each.plan for each in lane.in_flight if each.plan is not None]
        try:
            num_queued = len(self._queued)
            plan = lane.scheduler.schedule(now, num_queued, lane.last_mode, plans, overlap)
            if plan is None:
                return False
            last_mode, num_waiting = lane.last_mode, len(self._queued) + len(lane.scheduler.waiting)
            mode = last_mode or lane.modes[0]
            if plan.scheduled:
                mode = self._choose(lane, plan, num_waiting)
            if not plans:
                lane.progress_at = max(lane.progress_at, now)  # `now` may be before a commit
            handle = lane.runner.run(plan, mode, lane.last_handle(plan.micro_batch))
            lane.in_flight.append(Flight(plan, mode, handle, bool(plans), last_mode, num_waiting))
        except Exception as error:
            lane.in_flight.append(Failure(plan, error))
        return True

    def _is_due(self, lane: Lane, has_launched: bool) -> bool:
        """Whether a lane can do nothing but wait for its oldest step."""
        in_flight = lane.in_flight
        if not has_launched:
            return bool(in_flight)
        return not lane.has_room(self.overlap) or isinstance(in_flight[0], Failure)

    def _commit(self, lane: Lane, now: float) -> list[Event]:
        """Wait for the oldest step in flight and enter its results."""
        flight, events = lane.in_flight.popleft(), list[Event]()
        lane.awaited = flight
        try:
            if isinstance(flight, Failure):
                raise flight.error
            output = lane.runner.fetch(flight.handle)
            lane.awaited = None
            done_at = self._clock() if self._clock else now
            seconds = lane.end_step(flight, done_at)
            if flight.plan.scheduled:
                self.ended_steps.append(ended_step(flight, seconds))
                for watch in self.watchers:
                    watch(lane, flight, seconds, done_at)
            for event in lane.scheduler.commit(flight.plan, flight.mode, output, done_at):
                events.append(event)  # one by one: they count even if a later one fails
            self.topology.has_stepped(lane)
        except Exception as error:
            return events + self._fail(lane, flight.plan, error)
        if lane.in_flight and isinstance(lane.in_flight[0], Failure):
            events += self._commit(lane, now)
        return events

    def _fail(self, lane: Lane, plan: StepPlan | None, error: Exception) -> list[Event]:
        """End the requests of a failed step and rebuild the pool.

        Steps launched on top of it are forgotten; what they have alone starts from its tokens.
        Where not even a plan could be made, all requests of the group end. An exception from
        `Runner.reset` is final: the engine is then of no more use. So is EngineLostError.
        """
        if isinstance(error, EngineLostError):
            raise error
        self._num_failed_steps += 1
        lane.awaited = None
        if self.topology.absorbs(lane, error):
            return []
        logger.error("A step failed; its requests end with an error.", exc_info=error)
        lane.in_flight.clear()
        reason = f"The step that computed this request failed ({type(error).__name__})."
        code = "device_oom" if is_out_of_memory(error) else "step_failed"
        events = lane.scheduler.fail(plan, reason, code)
        if code == "device_oom" and plan is not None and plan.scheduled:
            lane.scheduler.lower_budget(plan.num_tokens)
        self.topology.lost(lane)
        lane.runner.reset()
        return events

    def _choose(self, lane: Lane, plan: StepPlan, num_waiting: int) -> Mode:
        policy = lane.policy or self.policy
        mode = policy.choose(plan, lane.modes, num_waiting, lane.last_mode)
        self._steps[mode.label, lane.group.width] += 1
        lane.scheduler.lookahead.runs(plan, mode)
        if lane.last_mode not in (None, mode):
            self._mode_switches[lane.last_mode.label, mode.label] += 1
        lane.last_mode = mode
        return mode

    # ------------------------------------------------------------------- requests

    def add_request(self, request: Request) -> None:
        """Accept a request, which then gets exactly one terminal event, or raise `RequestError`."""
        validate_request(request, self.limits)
        self.admit(request)

    def admit(self, request: Request) -> None:
        """Accept what `validate_request` has let pass. Raises `DuplicateRequestError`."""
        name = request.request_id
        if name in self._queued or self._lane_of(name) is not None:
            raise DuplicateRequestError(f"There is an unfinished request with the id {name!r}.")
        if request.hints.is_alone:
            for lane in self.lanes:
                lane.scheduler.tables.heed(request)
            self._told += ended_in_queue(request, "stop")
            return
        entry = (request.priority, self._due(request), self._num_requests, request)
        heapq.heappush(self._queue, entry)
        self._queued[name] = request
        self._num_requests += 1

    def abort(self, request_id: str) -> list[Event]:
        """End a request now; returns its last events, none if it is unknown or has ended."""
        request = self._queued.pop(request_id, None)
        if request is not None:
            self._queue = [entry for entry in self._queue if entry[-1] is not request]
            heapq.heapify(self._queue)
            return ended_in_queue(request)
        lane = self._lane_of(request_id)
        return lane.scheduler.abort(request_id) if lane else []

    def finish(self, request_id: str, index: int, reason: FinishReason) -> list[Event]:
        """End one continuation, say at a stop string; returns its last event, or none."""
        lane = self._lane_of(request_id)
        return lane.scheduler.finish(request_id, index, reason) if lane else []

    def has_work(self) -> bool:
        """Whether a request is unfinished, and need not wait, or a step in flight."""
        if self._told or (self.holds == "none" and self._queued):
            return True
        waits = self.holds == "all"
        return any(lane.in_flight or (lane.scheduler.requests and not waits) for lane in self.lanes)

    def waits_since(self, now: float) -> float:
        """When the lane that waits longest for a step last made progress; `now` if none waits."""
        return min((lane.progress_at for lane in self.lanes if lane.in_flight), default=now)

    def stats(self) -> EngineStats:
        """Counters and gauges as of now."""
        counters = self._steps, self._mode_switches, self._num_failed_steps
        states = [*self.topology.states(), *(part() for part in self.parts)]
        return stats_of(self.lanes, self._queued.values(), states, *counters)

    def mend(self, error: Exception) -> list[Event]:
        """After a command that raised: end the requests of every group that it left broken."""
        events = []
        for lane in self.lanes:
            try:
                lane.scheduler.check()
            except RuntimeError:
                events += self._fail(lane, None, error)
        return events

    @property
    def num_begun(self) -> int:
        """Requests that lanes have."""
        return sum(len(lane.scheduler.requests) for lane in self.lanes)

    def unfinished(self) -> Iterator[tuple[Request, bool]]:
        """Yield the request of every unfinished sequence, and whether it runs."""
        for request in self._queued.values():
            yield request, False
        for lane in self.lanes:
            for siblings in lane.scheduler.requests.values():
                for each in siblings:
                    if each.status is not Status.FINISHED:
                        yield each.request, each.status is Status.RUNNING

    @property
    def names(self) -> list[str]:
        """The ids of all unfinished requests."""
        begun = (name for lane in self.lanes for name in lane.scheduler.requests)
        return [*self._queued, *begun]

    def settle(self, now: float) -> list[Event]:
        """Wait for every step in flight, and launch none: nothing is on the devices then."""
        events = []
        for lane in self.lanes:
            while lane.in_flight:
                events += self._commit(lane, now)
        return events

    def renew(self, version: int, *, recompute: bool) -> None:
        """The weights are others, of this version; no step is in flight. See `Scheduler.renew`."""
        self.version = version
        for lane in self.lanes:
            lane.scheduler.renew(version, recompute=recompute)

    def forget_all(self) -> None:
        """All KV on the devices is lost, and no step is in flight: requests wait, and go on."""
        for lane in self.lanes:
            lane.scheduler.forget_all()

    def flush_prefix_cache(self) -> None:
        """Make every cached block worthless; running sequences keep theirs."""
        for lane in self.lanes:
            lane.scheduler.tables.clear_cache()

    def drain(self) -> None:
        """The end has begun: what there is goes on, and no groups are bound for it."""
        self.topology.drain()

    def close(self) -> None:
        """End what works in the background; requests that come later are served without it.

        What prefix caches have goes where it outlives the engine, if there is such a place.
        """
        for lane in self.lanes:
            lane.scheduler.lookahead.close()
            if lane.scheduler.tables.tier.fetches and lane.steps and not lane.in_flight:
                self._save_cache(lane)
        for lane in self.lanes:
            lane.scheduler.tables.tier.close()

    def _save_cache(self, lane: Lane) -> None:
        plan = lane.scheduler.plan_to_save()
        try:
            if plan.offloads:
                lane.runner.fetch(lane.runner.run(plan, lane.modes[0], None))
                lane.scheduler.tables.end_plan(plan)
        except Exception as error:
            logger.error("What the prefix cache has could not be saved.", exc_info=error)

    def check(self) -> None:
        """Conservation in every lane. Raises `RuntimeError` at the first breach."""
        for lane in self.lanes:
            lane.scheduler.check()
        self.topology.check()

    def _lane_of(self, request_id: str) -> Lane | None:
        for lane in self.lanes:
            if request_id in lane.scheduler.requests:
                return lane
        return None

    def waiting(self) -> list[tuple[str, int]]:
        """Requests that no step has had yet, in their order, with their numbers of sequences."""
        entries = [(entry[:3], entry[3]) for entry in self._queue]
        for lane in self.lanes:
            for first, *_ in lane.scheduler.requests.values():
                if first.first_scheduled_seconds is None and first.status is not Status.FINISHED:
                    entries.append((first.order[:3], first.request))
        entries.sort(key=itemgetter(0))
        return [(request.request_id, request.sampling.n) for _, request in entries]

    def _first_queued(self, most: int) -> list[Request]:
        """The requests that come first in the queue."""
        if self.holds != "none":
            return []
        return [request for *_, request in heapq.nsmallest(most, self._queue, key=_ORDER)]

    def _due(self, request: Request) -> float:
        """The request's place in the queue, now that it comes: what caches have needs no time."""
        lanes = [lane for lane in self.lanes if lane.steps] if self.patience else []
        hashes: list[bytes] = []
        known = [lane.scheduler.tables.num_known_tokens(request, hashes) for lane in lanes]
        return due_seconds(request, sum(known) / max(1, len(known)), self.patience)

    def _dispatch(self) -> None:
        """Hand requests from the queue to the least loaded group while one has room for more.

        A group takes no more than it can soon admit; the rest stays in front, where any group can
        still take it. A request that comes before all that waits in a group need not stay. Where
        one waits for a wider group, those after it go to groups that do not have to give way.
        """
        passed: list[tuple[int, float, int, Request]] = []
        while self._queue and len(passed) < MOST_PASSED:
            priority, due, number, request = self._queue[0]
            order = (priority, due, number, 0)
            lane = self.topology.lane_for(request)
            if lane is None:
                passed.append(heapq.heappop(self._queue))
                continue
            scheduler = lane.scheduler
            waiting = scheduler.waiting
            if scheduler.is_full and not (waiting and order < waiting[0].order):
                break
            heapq.heappop(self._queue)
            self._start(request, number, due, scheduler)
        for entry in passed:
            heapq.heappush(self._queue, entry)

    def _start(self, request: Request, number: int, due: float, scheduler: Scheduler) -> None:
        sampling = request.sampling
        seed = derive_seed(self._seed, number) if sampling.seed is None else sampling.seed
        num_prompt_tokens = len(request.prompt_token_ids)
        max_length = self.limits.max_length(num_prompt_tokens, sampling.max_tokens)
        scheduler.add(request, number, seed, max_length, due)
        del self._queued[request.request_id]
