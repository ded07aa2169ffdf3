"""Engine output as OpenAI's responses and their events. No JAX.

https://platform.openai.com/docs/api-reference/responses-streaming says which events there are.
"""

import itertools
from collections.abc import Iterable
from typing import Any

import msgspec

from serving.server.dialects.asked import Asked, Json
from serving.server.dialects.blocks import Block, Blocks, Turn
from serving.server.dialects.responses_api import (
    ConversationName,
    CustomTool,
    ResponsesFields,
    functions_of,
)
from serving.server.errors import ServeError
from serving.server.handle import Delta
from serving.server.logprobs import LogprobWriter
from serving.server.request_timeline import asked_timeline
from serving.server.served import Generation
from serving.server.vllm_answers import weight_version
from shiftjax.outputs import CompletionOutput
from shiftjax.text.tokenizer import Tokenizer

_IDS = {"text": "msg", "reasoning": "rs", "call": "fc"}
_DELTAS = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


class ResponsesWriter:
    """Writes one response."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer | None):
        assert isinstance(generation.wish, Asked)
        self._generation, self._tokenizer = generation, tokenizer
        self._fields: ResponsesFields = generation.wish.body
        (self._handle,) = generation.handles
        self._parser, self._blocks = generation.parser(), Blocks()
        self._numbers, self._has_begun = itertools.count(), False
        self._finish: str | None = None
        self._functions = functions_of(self._fields)
        self._logprobs = LogprobWriter(tokenizer)
        self._unsaid: list[Json] = []  # log-probabilities of tokens whose text is still to come
        self._said: dict[int, list[Json]] = {}  # those of texts, by their block

    # ------------------------------------------------------------------ a whole response

    def encoded(self) -> Json:
        """The response to a request that does not stream."""
        (output,) = self._handle.output.outputs
        pieces = [*self._parser.feed(output.text), *self._parser.finish()]
        self._note(output)
        for turn in (*self._blocks.add(pieces), *self._blocks.end()):
            self._say(turn)
        self._finish = output.finish_reason
        return self._ended()

    def _ended(self) -> Json:
        """Incomplete is what `max_output_tokens`, or the context, cut."""
        is_cut = self._finish == "length"
        response = self._response("incomplete" if is_cut else "completed")
        response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        response["output"] = [self._item(block) for block in self._blocks.all]
        timeline = asked_timeline(self._handle, self._generation.wish.fields.timeline)
        return response | {"usage": self._usage()} | timeline | self._version()

    def _version(self) -> Json:
        (output,) = self._handle.output.outputs
        return weight_version(output)

    def _item(self, block: Block) -> Json:
        """A block that is complete, or cut at the end of the output."""
        is_last = block.index == len(self._blocks.all) - 1
        is_cut = is_last and self._finish == "length"
        item = _shown(block, self._id(block), self._said.get(block.index, []))
        if block.kind == "call":
            item |= self._called(block)
            if "input" in item:
                del item["arguments"]
        return item | {"status": "incomplete" if is_cut else "completed"}

    def _called(self, block: Block) -> Json:
        """What a call says of its tool: the name, a namespace, or a text instead of arguments."""
        if block.name not in self._functions:
            return {}
        namespace, tool = self._functions[block.name]
        said = {"name": tool.name} | ({"namespace": namespace} if namespace else {})
        if self._is_custom(block):
            said |= {"type": "custom_tool_call", "input": _input(block.text)}
        return said

    def _is_custom(self, block: Block) -> bool:
        return isinstance(self._functions.get(block.name, (None, None))[1], CustomTool)

    def _id(self, block: Block) -> str:
        return f"{_IDS[block.kind]}_{self._generation.id}_{block.index}"

    def _response(self, status: str) -> Json:
        return response_of(self._generation, status)

    def _usage(self) -> Json:
        metrics = self._handle.output.metrics
        num_input = len(self._handle.request.prompt_token_ids)
        num_output = self._handle.num_output_tokens
        cached = 0 if metrics is None else metrics.num_cached_tokens
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens()},
            "total_tokens": num_input + num_output,
        }

    def _num_reasoning_tokens(self) -> int:
        """Tokens of what was thought, without the marks around it."""
        thoughts = [block.text for block in self._blocks.all if block.kind == "reasoning"]
        if self._tokenizer is None:
            return 0
        return sum(len(self._tokenizer.encode(text, False)) for text in thoughts)

    # ------------------------------------------------------------------ a stream

    def chunks(self, number: int, deltas: list[Delta]) -> list[Json]:
        """Events for what the response has gained."""
        events = []
        if not self._has_begun:
            self._has_begun = True
            response = self._response("in_progress")
            events.append(self._event("response.created", response=response))
            events.append(self._event("response.in_progress", response=response))
        for delta in deltas:
            self._note(delta)
            events += self._events(self._blocks.add(self._parser.feed(delta.text)))
            self._finish = delta.finish_reason
        return events

    def last_chunks(self) -> list[Json]:
        """Events of the end."""
        events = self._events(self._blocks.add(self._parser.finish()))
        events += self._events(self._blocks.end())
        response = self._ended()
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def failure(self, error: ServeError) -> list[Json]:
        """The event of a stream that fails."""
        response = self._response("failed")
        response["error"] = {"code": error.code, "message": error.message}
        return [self._event("response.failed", response=response)]

    def _events(self, turns: Iterable[Turn]) -> list[Json]:
        """Events of turns, with log-probabilities beside the text."""
        write = {"open": self._opened, "more": self._more, "close": self._closed}
        return [event for turn in turns for event in write[turn.what](turn)]

    def _opened(self, turn: Turn) -> list[Json]:
        block = Block(turn.block.kind, turn.block.index, turn.block.id, turn.block.name)
        item = self._item(block) | {"status": "in_progress"}
        part = item["content"][0] if "content" in item else None
        item |= {} if part is None else {"content": []}
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        place = self._place(block)
        if part is None:
            return [added]
        return [added, self._event("response.content_part.added", **place, part=part)]

    def _more(self, turn: Turn) -> list[Json]:
        if turn.block.kind == "call" and self._is_custom(turn.block):
            return []  # its text is known when all of the arguments are
        logprobs = {"logprobs": self._say(turn)} if turn.block.kind == "text" else {}
        name = f"{_DELTAS[turn.block.kind]}.delta"
        return [self._event(name, **self._place(turn.block), delta=turn.text, **logprobs)]

    def _closed(self, turn: Turn) -> list[Json]:
        self._say(turn)
        block, item, place = turn.block, self._item(turn.block), self._place(turn.block)
        done = f"{_DELTAS[block.kind]}.done"
        if "input" in item:
            name = "response.custom_tool_call_input"
            events = [
                self._event(f"{name}.delta", **place, delta=item["input"]),
                self._event(f"{name}.done", **place, input=item["input"]),
            ]
        elif block.kind == "call":
            events = [self._event(done, **place, name=item["name"], arguments=block.text)]
        else:
            (part,) = item["content"]
            logprobs = {"logprobs": part["logprobs"]} if block.kind == "text" else {}
            events = [
                self._event(done, **place, text=block.text, **logprobs),
                self._event("response.content_part.done", **place, part=part),
            ]
        last = self._event("response.output_item.done", output_index=block.index, item=item)
        return [*events, last]

    def _place(self, block: Block) -> Json:
        place: Json = {"item_id": self._id(block), "output_index": block.index}
        return place if block.kind == "call" else place | {"content_index": 0}

    # ------------------------------------------------------------------ log-probabilities

    def _note(self, news: Delta | CompletionOutput) -> None:
        self._unsaid += [self._logprobs.of_chat(each) for each in news.logprobs or ()]

    def _say(self, turn: Turn) -> list[Json]:
        """Those that come with more of a text, or with its end."""
        if turn.block.kind != "text" or turn.what == "open":
            return []
        said, self._unsaid = self._unsaid, []
        self._said.setdefault(turn.block.index, []).extend(said)
        return said

    def _event(self, kind: str, **values: Any) -> Json:
        return {"type": kind, "sequence_number": next(self._numbers), **values}


def _input(arguments: str) -> str:
    """The text within arguments; those that were cut are given as they are."""
    try:
        value = msgspec.json.decode(arguments or '{"input":""}')
    except (msgspec.MsgspecError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _shown(block: Block, item_id: str, logprobs: list[Json]) -> Json:
    """The item that a block is, as far as it has come."""
    if block.kind == "call":
        call = {"id": item_id, "type": "function_call", "call_id": block.id}
        return call | {"name": block.name, "arguments": block.text}
    if block.kind == "reasoning":
        content = [{"type": "reasoning_text", "text": block.text}]
        return {"id": item_id, "type": "reasoning", "summary": [], "content": content}
    text = {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}
    return {"id": item_id, "type": "message", "role": "assistant", "content": [text]}


def response_of(generation: Generation, status: str) -> Json:
    """A response to come: all but its output, in a state."""
    assert isinstance(generation.wish, Asked)
    fields: ResponsesFields = generation.wish.body
    sampling = generation.wish.sampling
    text, reasoning = fields.text, fields.reasoning
    return {
        "id": f"resp_{generation.id}",
        "object": "response",
        "created_at": generation.created,
        "status": status,
        "background": bool(fields.background),
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "model": generation.model,
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": bool(fields.store),
        "temperature": sampling.temperature,
        "text": {"format": _plain(text.format) if text and text.format else {"type": "text"}},
        "tool_choice": _plain(fields.tool_choice or "auto"),
        "tools": [_plain(tool) for tool in fields.tools or ()],
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": fields.user,
    } | _conversation(fields)


def _conversation(fields: ResponsesFields) -> Json:
    given = fields.conversation
    name = given.id if isinstance(given, ConversationName) else given
    return {} if name is None else {"conversation": {"id": name}}


def _plain(value: Any) -> Any:
    """A field of the request as it came, without what was not given."""
    if not isinstance(value, msgspec.Struct):
        return value
    return {name: each for name, each in msgspec.structs.asdict(value).items() if each is not None}
