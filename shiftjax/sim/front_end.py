"""The front end of a server, before its engine: one process reads all requests. No JAX.

Its event loop turns to every request that it has, a little at a time, so requests that come
together are ready together: a thousand at once, of 12 ms each, reach the engine after 12 s. vLLM
pull request 20065 has measured such a start.
"""

from collections import deque
from collections.abc import Mapping
from math import inf
from typing import NamedTuple

from shiftjax.arch.config import ModelConfig
from shiftjax.core.request import Request
from shiftjax.costs.machine import EngineOverhead, Machine
from shiftjax.sim.arrivals import Arrivals

# Templates that take another part of `chat_seconds` to look through than most, by architecture or
# name: none (gpt-oss has a format of its own), short ones (Qwen3-235B-A22B-Instruct-2507).
TEMPLATES: Mapping[str, float] = {"gpt_oss": 0.0, "qwen3-235b-a22b": 0.5}


def reading_seconds(engine: EngineOverhead, model: ModelConfig) -> float:
    """Seconds of the process that a request of a model takes."""
    share = TEMPLATES.get(model.name, TEMPLATES.get(model.architecture, 1.0))
    return engine.request_seconds + share * engine.chat_seconds


def opening_seconds(engine: EngineOverhead, machine: Machine) -> float:
    """Seconds for which the first prompts wait until an engine has compiled its attention.

    FlashAttention-3, where machines pack decodes (Hopper), comes compiled.
    """
    return engine.compiling_seconds if machine.attention_decode_rows else 0.0


class _Reading(NamedTuple):
    """A request, and the share of the process that each has had when it is ready, in seconds."""

    ready: float
    request: Request


class FrontEnd(Arrivals):
    """Requests as an engine sees them: each takes `seconds` of the process, which all share.

    `latency` more passes for each, but delays no other. None is ready before `opening` seconds have
    passed since the first came. Requests still count from when they were sent. What is streamed
    costs the engine's host time (`EngineOverhead.stream_seconds`).
    """

    def __init__(self, sent: Arrivals, seconds: float, latency: float = 0.0, opening: float = 0.0):
        self._sent, self._seconds, self._latency = sent, seconds, latency
        self._opens = sent.next_seconds + opening
        self._reading: deque[_Reading] = deque()  # the first is ready first
        self._now = self._share = 0.0  # until when it has worked; what it gave each by then

    @property
    def next_seconds(self) -> float:
        """When the next request has been read, if no more come until then."""
        self._begin()
        return max(self._opens, self._ready_at() + self._latency)

    def take(self) -> Request:
        """The next one; the others then have more of the process."""
        self._begin()
        self._now = self._ready_at()
        self._share, request = self._reading.popleft()
        return request

    def ended(self, seconds: float) -> None:
        """A request was answered then, or refused."""
        self._sent.ended(seconds)

    def _ready_at(self) -> float:
        if not self._reading:
            return inf
        return self._now + (self._reading[0].ready - self._share) * len(self._reading)

    def _begin(self) -> None:
        """Begin with all that come before one of the others is ready."""
        while (comes := self._sent.next_seconds) < inf and comes <= self._ready_at():
            comes = max(comes, self._now)
            if self._reading:
                self._share += (comes - self._now) / len(self._reading)
            self._now = comes
            self._reading.append(_Reading(self._share + self._seconds, self._sent.take()))
