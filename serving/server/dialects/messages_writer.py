"""Engine output as Anthropic's messages and their events. No JAX.

https://docs.anthropic.com/en/api/messages-streaming says which events there are, in which order.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from serving.server.dialects.asked import Json
from serving.server.dialects.blocks import Block, Blocks, Turn
from serving.server.dialects.messages import NO_THREADS
from serving.server.errors import ServeError
from serving.server.handle import Delta
from serving.server.request_timeline import asked_timeline
from serving.server.served import Generation
from serving.server.vllm_answers import weight_version
from shiftjax.text.tokenizer import Tokenizer

# By the status of HTTP; all others are wrong requests, or failures of the server.
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def error_body(error: ServeError) -> Json:
    """The error object of Anthropic's interface."""
    kind = ERROR_TYPES.get(error.kind.status, "invalid_request_error")
    told: Json = {"type": kind, "message": error.message}
    if error.code == NO_THREADS:
        told["details"] = {"error_code": error.code, "unsupported": ["thread"]}
    return {"type": "error", "error": told}


class MessagesWriter:
    """Writes one message."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer | None):
        self._generation = generation
        (self._handle,) = generation.handles
        self._parser, self._blocks = generation.parser(), Blocks()
        self._has_begun = False
        self._end: tuple[str | None, str | int | None] = None, None  # finish and stop reason

    # ------------------------------------------------------------------ a whole message

    def encoded(self) -> Json:
        """The message of a request that does not stream."""
        (output,) = self._handle.output.outputs
        pieces = [*self._parser.feed(output.text), *self._parser.finish()]
        for _ in self._blocks.add(pieces):
            pass
        self._end = output.finish_reason, output.stop_reason
        return self._message([_content(block) for block in self._blocks.all]) | self._ends()

    def _message(self, content: list[Json]) -> Json:
        return {
            "id": f"msg_{self._generation.id}",
            "type": "message",
            "role": "assistant",
            "model": self._generation.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    # ------------------------------------------------------------------ a stream

    def chunks(self, number: int, deltas: list[Delta]) -> list[Json]:
        """Events for what the message has gained."""
        events = [] if self._has_begun else [self._start(), {"type": "ping"}]
        self._has_begun = True
        for delta in deltas:
            events += _events(self._blocks.add(self._parser.feed(delta.text)))
            self._end = delta.finish_reason, delta.stop_reason
        return events

    def last_chunks(self) -> list[Json]:
        """Events of the end."""
        events = _events(self._blocks.add(self._parser.finish()))
        events += _events(self._blocks.end())
        delta = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        delta |= self._told()
        return [*events, delta, {"type": "message_stop"}]

    def failure(self, error: ServeError) -> list[Json]:
        """The event of a stream that fails."""
        return [error_body(error)]

    def _start(self) -> Json:
        return {"type": "message_start", "message": self._message([])}

    def _stop(self) -> Json:
        """Why it ended. Tokens that stop have no text, so they are an end of the turn."""
        finish, stop = self._end
        is_sequence = finish == "stop" and isinstance(stop, str)
        reason = "stop_sequence" if is_sequence else "end_turn"
        if finish == "length":
            asked = self._generation.wish.sampling.max_tokens
            is_full = asked != self._handle.request.sampling.max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif self._blocks.has_calls and not is_sequence:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": stop if is_sequence else None}

    def _ends(self) -> Json:
        return self._stop() | self._told()

    def _told(self) -> Json:
        """What Anthropic's messages have not."""
        (output,) = self._handle.output.outputs
        timeline = asked_timeline(self._handle, self._generation.wish.fields.timeline)
        return timeline | weight_version(output)

    def _usage(self) -> Json:
        """Anthropic does not count cached tokens as input."""
        metrics = self._handle.output.metrics
        num_cached = 0 if metrics is None else metrics.num_cached_tokens
        return {
            "input_tokens": len(self._handle.request.prompt_token_ids) - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": self._handle.num_output_tokens,
        }


def _events(turns: Iterable[Turn]) -> list[Json]:
    return [_event(turn) for turn in turns]


def _event(turn: Turn) -> Json:
    block = turn.block
    if turn.what == "open":
        return {"type": "content_block_start", "index": block.index, "content_block": _empty(block)}
    if turn.what == "close":
        return {"type": "content_block_stop", "index": block.index}
    kind, name = _DELTAS[block.kind]
    delta = {"type": kind, name: turn.text}
    return {"type": "content_block_delta", "index": block.index, "delta": delta}


def _empty(block: Block) -> Json:
    return _shown(block, "", {})


def _content(block: Block) -> Json:
    """A block that is complete."""
    return _shown(block, block.text, _arguments(block) if block.kind == "call" else {})


def _shown(block: Block, text: str, arguments: Any) -> Json:
    if block.kind == "call":
        call = {"type": "tool_use", "id": block.id, "name": block.name}
        return call | {"input": arguments}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _arguments(block: Block) -> Any:
    """The object that the arguments are; those that `max_tokens` cut are none, and are dropped."""
    try:
        value = msgspec.json.decode(block.text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
