"""One request as its front end sees it: what has come, how it ended, and the one way to let go."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import numpy as np

from serving.server.errors import ServeError, internal_error
from shiftjax.core.request import Event, TokenLogprobs
from shiftjax.outputs import OutputAssembler, RequestOutput

# Codes of engine errors that are not "internal" outside.
ERROR_KINDS = {"constraint_failed": "constraint", "device_oom": "device_memory"}

MAX_BUFFERED_TOKENS = 1 << 14  # generated, and not read by a stream's client


@dataclass(slots=True)
class Delta:
    """What one continuation has gained since it was last read."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    weight_version: int = 0  # with the end: that of the last token
    routed_experts: np.ndarray | None = None  # with the end, or behind a stop string after it


class RequestHandle:
    """A request that the engine has accepted; use it as a context manager.

    Leaving the context releases everything, whatever happened before: an unfinished request is
    aborted. A handle ends exactly once, in `error` None or not; nothing that comes later counts.
    Iterating gives lists of deltas, one per continuation that has news: what comes while nobody
    reads is merged, up to `MAX_BUFFERED_TOKENS`, beyond which the reader is too slow. The first
    token, `stream_interval` tokens and an end are news; None: only the end is.
    """

    def __init__(
        self,
        assembler: OutputAssembler,
        public_id: str,
        on_end: Callable[["RequestHandle"], None],
        on_close: Callable[["RequestHandle"], None],
        stream_interval: int | None,
    ):
        self.request = assembler.request
        self.public_id = public_id  # the id that the client knows
        self.error: ServeError | None = None
        self.is_ended = False
        self.last_token_at: dict[int, float] = {}  # by continuation, for metrics
        # (mode, tokens) of the first continuation, in their order; None: nobody asks
        self.modes: list[tuple[str, int]] | None = None
        self._assembler = assembler
        self._interval = stream_interval  # tokens that are news; None: nobody reads on the way
        self._deltas: dict[int, Delta] = {}
        self._num_buffered_tokens = 0
        self._news = asyncio.Event()
        self._on_end, self._on_close = on_end, on_close
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def output(self) -> RequestOutput:
        """All that has come so far."""
        return self._assembler.output

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, over all continuations."""
        return sum(len(one.token_ids) for one in self.output.outputs)

    @property
    def num_logprobs(self) -> int:
        """About how many log-probabilities have come; to write many takes a while."""
        sampling, num_prompt = self.request.sampling, len(self.output.prompt_logprobs or ())
        num_output = 0 if sampling.logprobs is None else self.num_output_tokens
        of_prompt = num_prompt * (1 + (sampling.prompt_logprobs or 0))
        return num_output * (1 + (sampling.logprobs or 0)) + of_prompt

    def keep_modes(self) -> None:
        """Note from now on which modes make the tokens of the first continuation."""
        self.modes = []

    # ------------------------------------------------------------------ from the engine

    def apply(self, event: Event) -> int:
        """Take in one event of the engine; returns how many tokens it brought."""
        if self.is_ended:
            return 0
        output = self.output.outputs[event.index]
        num_before, was_open = len(output.token_ids), output.finish_reason is None
        text = self._assembler.apply(event)
        new_ids = output.token_ids[num_before:]  # a stop string may have cut the event's
        if self._interval is not None and was_open and (new_ids or text or output.finish_reason):
            self._buffer(event, text, new_ids)
            is_first = num_before == 0
            if is_first or output.finish_reason or self._num_buffered_tokens >= self._interval:
                self._news.set()
        elif self._interval is not None and event.notes is not None:
            delta = self._deltas.setdefault(event.index, Delta(event.index))
            delta.routed_experts = output.routed_experts
            self._news.set()
        if self.modes is not None and event.index == 0 and new_ids:
            self._note_mode(event.mode, len(new_ids))
        if event.finish_reason == "error":
            self.fail(_engine_error(event))
        elif event.is_last:
            self._end(None)
        return len(new_ids)

    def _note_mode(self, mode: str, num_tokens: int) -> None:
        assert self.modes is not None
        if self.modes and self.modes[-1][0] == mode:
            num_tokens += self.modes.pop()[1]
        self.modes.append((mode, num_tokens))

    def _buffer(self, event: Event, text: str, new_ids: list[int]) -> None:
        delta = self._deltas.setdefault(event.index, Delta(event.index))
        output = self.output.outputs[event.index]
        delta.text += text
        delta.token_ids += new_ids
        delta.logprobs += event.logprobs[: len(new_ids)]
        if output.finish_reason is not None:
            delta.finish_reason, delta.stop_reason = output.finish_reason, output.stop_reason
            delta.weight_version = output.weight_version
            delta.routed_experts = output.routed_experts
        self._num_buffered_tokens += len(new_ids)
        if self._num_buffered_tokens > MAX_BUFFERED_TOKENS:
            self.fail(ServeError("slow_reader", "The client reads too slowly; the stream ended."))

    # ------------------------------------------------------------------ ends

    def expire_at(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        """End with a deadline error at `when`, a time of the loop."""
        self._timer = loop.call_at(when, self._expire)

    def _expire(self) -> None:
        self.fail(ServeError("deadline", "The deadline passed before the request was complete."))

    def cancel(self) -> None:
        """End because the client has gone; does nothing after the end."""
        self.fail(ServeError("cancelled", "The client closed the request."))

    def fail(self, error: ServeError) -> None:
        """End with an error; does nothing after the end."""
        if not self.is_ended:
            self._end(error)

    def _end(self, error: ServeError | None) -> None:
        self.is_ended, self.error = True, error
        if self._timer is not None:
            self._timer.cancel()
        self._news.set()
        self._on_end(self)

    def close(self) -> None:
        """Release what the request holds; the same as leaving the context."""
        if self._is_closed:
            return
        self._is_closed = True
        self.cancel()
        self._on_close(self)

    @property
    def num_unbegun(self) -> int:
        """Continuations without a token yet."""
        return self.request.sampling.n - len(self.last_token_at)

    def __enter__(self) -> "RequestHandle":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------------ to the front end

    async def __aiter__(self) -> AsyncGenerator[list[Delta]]:
        """Yield news until the end. Raises the `ServeError` with which the request ended."""
        while True:
            await self._news.wait()
            self._news.clear()
            deltas, self._deltas = list(self._deltas.values()), {}
            self._num_buffered_tokens = 0
            if deltas:
                yield deltas
            if self.is_ended and not self._deltas:
                break
        if self.error is not None:
            raise self.error

    async def has_news(self) -> None:
        """Wait until iterating would not wait; nothing is taken."""
        await self._news.wait()

    async def result(self) -> RequestOutput:
        """Wait for the end and return all of it. Raises the `ServeError` of a failed request."""
        while not self.is_ended:
            await self._news.wait()
            self._news.clear()
        if self.error is not None:
            raise self.error
        return self.output


def _engine_error(event: Event) -> ServeError:
    kind = ERROR_KINDS.get(event.error_code or "")
    if kind is None:
        if event.error is None:
            return internal_error()
        return ServeError("internal", event.error, cause=event.error_code)
    return ServeError(kind, event.error or "", code=event.error_code)
