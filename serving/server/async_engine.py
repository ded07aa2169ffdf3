"""The engine as a service on an event loop: bounded queues, handles, deadlines, drain. No JAX."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Protocol

from serving.server.async_requests import AsyncRequests, Watches
from serving.server.bottleneck import StepInFlight
from serving.server.engine_thread import EngineThread, Turn
from serving.server.errors import ServeError, internal_error, unknown_model
from serving.server.explaining import Explanations
from serving.server.handle import RequestHandle
from serving.server.kv_events import KvEvents
from serving.server.mode_choice import capacity_of, choice_of, step_in_flight
from serving.server.options import ServerOptions
from serving.server.waiting import Place, Waits
from shiftjax.adapters.pool import AdapterState
from shiftjax.core.cache_events import CacheFeed
from shiftjax.core.engine import Engine
from shiftjax.core.limits import MAX_ID_CHARACTERS, validate_request
from shiftjax.core.request import Event, Request, RequestError
from shiftjax.core.stats import EngineStats
from shiftjax.outputs import OutputAssembler
from shiftjax.rollouts.control import PauseMode, Rollouts
from shiftjax.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NUM_RECENT = 1024  # ended requests whose ids are remembered
STOP_SECONDS, STOP_FAILED_SECONDS = 5.0, 0.5  # for the step that runs; for one that may hang
PAUSE_SECONDS = 0.02  # between looks whether all that run have ended
PLACE_SECONDS = 1.0  # that the engine has for saying who waits


class Observer(Watches, Protocol):
    """What metrics and the page want to hear of."""

    def tokens(self, handle: RequestHandle, index: int, num: int, now: float) -> None:
        """One step brought `num` tokens of a continuation."""
        ...

    def ended(self, handle: RequestHandle, now: float) -> None:
        """A request has ended; `handle.error` says how."""
        ...

    def stepped(self, turn: Turn) -> None:
        """The engine has finished a turn."""
        ...


class AsyncEngine(AsyncRequests[RequestHandle, Observer]):
    """Requests go in through `submit` on the event loop; each comes out of its handle.

    `submit` raises `ServeError` for what is refused; `options` say how much may wait. All methods
    are for the loop's thread.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        observers: Sequence[Observer] = (),
        options: ServerOptions | None = None,
        kv_events: KvEvents | None = None,
        rollouts: Rollouts | None = None,  # that hold the engine; None: without its weights
    ):
        super().__init__(observers, options)  # requests are by the engine's name
        self.request_limits = engine.limits
        self.stats: EngineStats = engine.stats()
        self.choice, self.capacity = choice_of(engine), capacity_of(engine)
        self._names: dict[str, RequestHandle] = {}  # the same, by the id that the client knows
        self._recent: dict[str, None] = {}  # ids that have ended, oldest first
        self._engine, self._tokenizer = engine, tokenizer
        self.rollouts = rollouts or Rollouts(engine)
        self._num_controlled = 0  # changes of the engine on their way
        self._threads = self._thread = EngineThread(engine, self._loop, self._deliver)
        self._num_obeyed = 0
        self._submitted: dict[int, tuple[int, int]] = {}  # command -> sequences, prompt tokens
        self._waits = Waits(lambda: self.call(Engine.waiting))
        self.explanations = Explanations(self._ask)
        self.kv_events = kv_events
        if kv_events is not None:
            self._tell_of_blocks(engine, kv_events)
        self._thread.start()

    def _tell_of_blocks(self, engine: Engine, kv_events: KvEvents) -> None:
        """Have what becomes of cached blocks sent after every turn."""
        feed = CacheFeed([lane.scheduler.tables.device for lane in engine.lanes])
        self._thread.after_turn = partial(kv_events.send_from, feed)

        def tell_all() -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._thread.post, lambda _: feed.tell_all())

        kv_events.ask = tell_all
        tell_all()

    # ------------------------------------------------------------------ admission

    def check_room(self, num_sequences: int, num_tokens: int = 0) -> None:
        """Refuse with `ServeError` what would not fit the queue, or comes at a bad time.

        Cheap: front ends ask before they tokenize, with the tokens left out.
        """
        self._check_open()
        on_the_way = self._submitted.values()
        num_queued = self.stats.num_waiting + sum(n for n, _ in on_the_way)
        queued_tokens = self.stats.num_waiting_tokens + sum(tokens for _, tokens in on_the_way)
        most = self._options.max_num_queued_reqs
        if num_sequences > most:
            raise ServeError(
                "invalid", f"{num_sequences} sequences in one request exceed the queue of {most}."
            )
        if num_queued + num_sequences > most:
            raise ServeError("queue_full", f"The queue is full: {num_queued} sequences wait.")
        if queued_tokens and queued_tokens + num_tokens > self._options.max_num_queued_tokens:
            raise ServeError("queue_full", f"The queue is full: {queued_tokens} tokens wait.")

    def stop_accepting(self) -> None:
        """Refuse new requests from now on, and bind no groups for those in flight."""
        if not self.is_draining:
            self._thread.post(Engine.drain)
        super().stop_accepting()

    def submit(
        self,
        requests: Sequence[Request],
        prompts: Sequence[str | None],
        *,
        streams: bool = False,
        timeout: float | None = None,
        visible: frozenset[int] = frozenset(),
    ) -> list[RequestHandle]:
        """Hand over requests that belong together: all or none. `prompts` are their texts.

        The caller closes every handle. `timeout` is in seconds from now; `visible` are special
        tokens that the texts of outputs show.
        Raises ServeError: invalid, duplicate id, queue full, draining.
        """
        for request in requests:
            _validate(request, self._engine)
            if request.request_id in self._names:
                raise ServeError(
                    "duplicate",
                    "There is an unfinished request with this id.",
                    param="request_id",
                )
        sizes = [(r.sampling.n, r.sampling.n * len(r.prompt_token_ids)) for r in requests]
        self.check_room(sum(n for n, _ in sizes), sum(tokens for _, tokens in sizes))
        handles = []
        for request, prompt, size in zip(requests, prompts, sizes, strict=True):
            handle = self._accept(request, prompt, streams, visible)
            self._submitted[self._thread.num_posted + 1] = size
            self._thread.post(partial(self._admit, handle=handle))
            if timeout is not None:
                handle.expire_at(self._loop, self._loop.time() + timeout)
            handles.append(handle)
        return handles

    def _admit(self, engine: Engine, handle: RequestHandle) -> None:
        """Admit a request on the engine's thread, whose adapter may have gone meanwhile."""
        request = handle.request
        if request.adapter is None or request.adapter in engine.limits.adapters:
            engine.admit(request)
        else:
            self._loop.call_soon_threadsafe(handle.fail, unknown_model())

    def _accept(
        self, request: Request, prompt: str | None, streams: bool, visible: frozenset[int]
    ) -> RequestHandle:
        # The engine's name is new every time: events of an ended request find nobody.
        public = request.request_id
        name = f"{self.counts.accepted}:{public}"[:MAX_ID_CHARACTERS]
        assembler = OutputAssembler(
            replace(request, request_id=name),
            prompt,
            self._tokenizer,
            lambda index: self._thread.post(lambda engine: engine.finish(name, index, "stop")),
            visible,
        )
        interval = self._options.stream_interval if streams else None
        handle = RequestHandle(assembler, public, self._ended, self._released, interval)
        self.handles[name] = handle
        self._names[public] = handle
        self._quiet.clear()
        self.counts.accepted += 1
        return handle

    # ------------------------------------------------------------------ ends

    def _ended(self, handle: RequestHandle) -> None:
        error = handle.error
        self._count_end(error)
        metrics = handle.output.metrics
        if metrics is not None and metrics.queue_seconds is not None:
            arrival = handle.request.arrival_seconds
            self._waits.served(time.monotonic() - arrival - metrics.queue_seconds)
        if error is not None:
            name = handle.request.request_id
            self._thread.post(lambda engine: engine.abort(name))
        now = time.monotonic()
        self._tell(lambda observer: observer.ended(handle, now))
        reason = "finished" if error is None else error.code
        num_prompt, num_output = len(handle.request.prompt_token_ids), handle.num_output_tokens
        logger.info(
            "request ended: id=%s reason=%s prompt_tokens=%d output_tokens=%d",
            *(handle.public_id, reason, num_prompt, num_output),
        )

    def _released(self, handle: RequestHandle) -> None:
        public = handle.public_id
        del self.handles[handle.request.request_id], self._names[public]
        self._recent[public] = None
        if len(self._recent) > NUM_RECENT:
            del self._recent[next(iter(self._recent))]
        if not self.handles:
            self._quiet.set()

    def abort(self, request_id: str) -> str:
        """End a request from outside; says ABORTED, ALREADY_FINISHED or NOT_FOUND."""
        handle = self._names.get(request_id)
        if handle is None:
            return "ALREADY_FINISHED" if request_id in self._recent else "NOT_FOUND"
        if handle.is_ended:
            return "ALREADY_FINISHED"
        handle.fail(ServeError("aborted", "The request was aborted by an administrator."))
        return "ABORTED"

    async def place_of(self, handle: RequestHandle) -> Place | None:
        """Where a request stands in the queue; None: it does not wait, or a step takes long."""
        try:
            async with asyncio.timeout(PLACE_SECONDS):
                return await self._waits.place_of(handle.request.request_id, self.stats.num_running)
        except TimeoutError:
            return None

    def step_in_flight(self) -> StepInFlight | None:
        """The step that the engine waits for; for a look while its thread hangs."""
        return step_in_flight(self._engine)

    # ------------------------------------------------------------------ from the engine

    def _deliver(self, turn: Turn) -> None:
        self.stats = turn.stats
        for number in range(self._num_obeyed + 1, turn.num_commands + 1):
            self._submitted.pop(number, None)
        self._num_obeyed = turn.num_commands
        for event in turn.events:
            handle = self.handles.get(event.request_id)
            if handle is not None:
                self._apply(handle, event, turn.at)
        self._fail_without_adapter(turn.stats)
        self._tell(lambda observer: observer.stepped(turn))
        if turn.failure is not None:
            self.lost(turn.failure)

    def _fail_without_adapter(self, stats: EngineStats) -> None:
        """End requests whose adapter has gone, as files that are to be read again may."""
        adapters = stats.find(AdapterState)
        if adapters is None or not adapters.lost:
            return
        for handle in list(self.handles.values()):
            if handle.request.adapter in adapters.lost:
                handle.fail(unknown_model())

    def _apply(self, handle: RequestHandle, event: Event, now: float) -> None:
        """Make text of an event; whatever goes wrong there ends this request alone."""
        try:
            num_tokens = self.make_text(handle, event)
        except Exception:
            logger.exception("Making the text of request %s failed.", event.request_id)
            handle.fail(internal_error())
            return
        if num_tokens:
            self._tell(lambda observer: observer.tokens(handle, event.index, num_tokens, now))

    def make_text(self, handle: RequestHandle, event: Event) -> int:
        """Enter an event into its request; returns how many tokens it brought."""
        return handle.apply(event)

    # ------------------------------------------------------------------ the thread

    async def _leave(self) -> bool:
        seconds = STOP_SECONDS if self.failure is None else STOP_FAILED_SECONDS
        has_ended = await self._loop.run_in_executor(None, self._thread.stop, seconds)
        if has_ended:  # nobody else touches the engine any more
            await self._loop.run_in_executor(None, self._engine.close)
            if self.kv_events is not None:
                await self._loop.run_in_executor(None, self.kv_events.close)
        return has_ended

    async def call[T](self, function: Callable[[Engine], T]) -> T:
        """Run a function on the engine's thread, between steps, and return what it returns."""
        return await asyncio.wrap_future(self._ask(function))

    def _ask[T](self, function: Callable[[Engine], T]) -> Future[T]:
        future: Future[T] = Future()

        def command(engine: Engine) -> None:
            if not future.set_running_or_notify_cancel():
                return  # who asked has gone, and does not want it any more
            try:
                future.set_result(function(engine))
            except Exception as error:
                future.set_exception(error)

        self._thread.post(command)
        return future

    # ------------------------------------------------------------------ control

    async def control(self, change: Callable[[Rollouts, float], None]) -> None:
        """Pause, put to sleep, or change the engine, between steps. Raises what `change` does."""

        def command(engine: Engine) -> list[Event]:
            try:
                change(self.rollouts, time.monotonic())
            except Exception as error:
                self._loop.call_soon_threadsafe(_fail, done, error)
            else:
                self._loop.call_soon_threadsafe(_succeed, done)
            return self.rollouts.take_events()

        done: asyncio.Future[None] = self._loop.create_future()
        self._num_controlled += 1
        try:
            self._thread.post(command)
            await done
        finally:
            self._num_controlled -= 1

    async def pause(self, mode: PauseMode) -> None:
        """Begin no step any more; with `wait`, when all that run have ended. See `Rollouts`."""
        await self.control(lambda rollouts, now: rollouts.pause(mode, now))
        while self.rollouts.is_ending:
            await asyncio.sleep(PAUSE_SECONDS)
            await self.control(lambda rollouts, now: rollouts.end_wait(now))

    @property
    def max_request_bytes(self) -> int:
        """The largest body of a request."""
        return self._options.max_request_bytes

    def stalled_seconds(self) -> float:
        """How long unfinished requests have waited for a step; 0 if none is to be expected."""
        is_held = self.rollouts.is_paused or self._num_controlled
        return 0.0 if is_held else super().stalled_seconds()


def _succeed(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _fail(done: asyncio.Future[None], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)


def _validate(request: Request, engine: Engine) -> None:
    """What only the engine's limits can refuse, as the front ends' kind of error."""
    try:
        validate_request(request, engine.limits)
    except RequestError as error:
        if error.field == "adapter":  # it was unloaded while the prompt became tokens
            raise unknown_model() from None
        raise ServeError("invalid", str(error), code=error.code, param=error.field) from None
