"""Engine output as the JSON of OpenAI's completions and chats. Pure functions of what came."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from serving.server.errors import ServeError
from serving.server.fields import ChatFields, CompletionFields
from serving.server.formats.pieces import (
    CallArguments,
    CallBegin,
    Parser,
    Piece,
    PlainParser,
    Reasoning,
    Text,
)
from serving.server.handle import Delta, RequestHandle
from serving.server.logprobs import LogprobWriter, finite
from serving.server.request_timeline import asked_timeline
from serving.server.routed_experts import told_experts
from serving.server.served import Generation
from serving.server.vllm_answers import (
    ANSWER,
    CHOICE,
    MESSAGE,
    echoed,
    given_ids,
    prompt_ids,
    weight_version,
)
from shiftjax.core.request import TokenLogprobs
from shiftjax.outputs import CompletionOutput
from shiftjax.text.tokenizer import Tokenizer

Json = dict[str, Any]
News = Delta | CompletionOutput  # which is all news at once


class Writer:
    """Writes the responses of one generation; it keeps where the text of each choice stands."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer | None):
        self._generation, self._tokenizer = generation, tokenizer
        self._fields = generation.wish.fields
        self._logprobs = LogprobWriter(tokenizer, self._fields.return_tokens_as_token_ids)
        self._is_chat = isinstance(self._fields, ChatFields)
        self._echo = echoed(self._fields) if isinstance(self._fields, ChatFields) else ""
        self._offsets: dict[int, int] = {}
        self._begun: set[int] = set()
        self._told_usage: Json | None = None  # in the object before, if it is told in each
        self._is_plain = generation.parser is PlainParser
        self._parsers: dict[int, Parser] = {}
        self._callers: set[int] = set()  # choices with tool calls
        self._returns_ids = bool(self._fields.return_token_ids)
        has_logprobs = generation.wish.sampling.logprobs is not None
        self._tells_tokens = self._returns_ids or has_logprobs  # of what is no text, too

    # ------------------------------------------------------------------ whole responses

    def response(self) -> Json:
        """The response to a request that does not stream."""
        return self._whole(list(self._choices()))

    def encoded(self) -> Json:
        """The same, with choices that are JSON already: one at a time, as they may be big."""
        return self._whole([msgspec.Raw(msgspec.json.encode(each)) for each in self._choices()])

    def _choices(self) -> Iterator[Json]:
        for number, handle in enumerate(self._generation.handles):
            for index in range(handle.request.sampling.n):
                yield self._choice(number, handle, index)

    def _whole(self, choices: Sequence[Json | msgspec.Raw]) -> Json:
        ends = {"usage": usage(self._generation.handles)} | self._timeline()
        first = self._generation.handles[0]
        of_prompt = self._of_prompt(first) if self._is_chat else {}
        return self._envelope(choices, "") | ANSWER | of_prompt | ends

    def _of_prompt(self, handle: RequestHandle) -> Json:
        """What is told of a prompt: in the answer of a chat, in a choice of a completion."""
        entries = None
        if self._fields.prompt_logprobs is not None:
            prompt = handle.output.prompt_logprobs or []
            entries = [entry and self._logprobs.by_id(entry) for entry in prompt]
        return {"prompt_logprobs": entries, **prompt_ids(self._fields, handle)}

    def _timeline(self) -> Json:
        return asked_timeline(self._generation.handles[0], self._fields.timeline)

    def _envelope(self, choices: Sequence[Json | msgspec.Raw], suffix: str) -> Json:
        kind = f"chat.completion{suffix}" if self._is_chat else "text_completion"
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        return {
            "id": f"{prefix}-{self._generation.id}",
            "object": kind,
            "created": self._generation.created,
            "model": self._generation.model,
            "choices": choices,
        }

    def _choice(self, number: int, handle: RequestHandle, index: int) -> Json:
        output = handle.output.outputs[index]
        if self._is_chat:
            said = self._message(self._pieces(number, output))
            message = {"role": "assistant"} | MESSAGE | said
            choice = self._chat_choice(number, handle, output, {"message": message})
        else:
            choice = self._completion(number, handle, output) | self._of_prompt(handle)
        return CHOICE | choice | told_experts(self._fields, output)

    # ------------------------------------------------------------------ streams

    def chunks(self, number: int, deltas: list[Delta]) -> list[Json]:
        """Objects of a stream for what one prompt's continuations have gained."""
        handle, options = self._generation.handles[number], self._fields.stream_options
        tells_usage = False
        if options is not None and options.include_usage:
            tells_usage = bool(options.continuous_usage_stats)  # which means nothing alone
        objects: list[Json] = []
        for delta in deltas:
            is_first = self._place(number, delta.index) not in self._begun
            ids = prompt_ids(self._fields, handle) if is_first and self._returns_ids else {}
            if self._is_chat:
                choices = self._chat_deltas(number, handle, delta)
            else:
                choices, ids = [self._completion(number, handle, delta) | ids], {}
            new = [self._envelope([choice], ".chunk") for choice in choices]
            new = [each | (ids if each is new[0] else {}) for each in new]
            objects += self._with_usage(new) if tells_usage else new
        if tells_usage:
            return objects
        if options is not None and options.include_usage:
            return [each | {"usage": None} for each in objects]
        return objects

    def _with_usage(self, objects: list[Json]) -> Iterator[Json]:
        """Each object of one delta with the usage so far; its tokens come with the last one."""
        handles = self._generation.handles
        for each in objects[:-1]:
            yield each | {"usage": self._told_usage or usage(handles, is_begun=False)}
        self._told_usage = usage(handles)
        yield from (each | {"usage": self._told_usage} for each in objects[-1:])

    def last_chunks(self) -> list[Json]:
        """The object with the usage and the timeline, if the request wants one of them."""
        options, ends = self._fields.stream_options, self._timeline()
        if options is not None and options.include_usage:
            ends = {"usage": usage(self._generation.handles)} | ends
        return [self._envelope([], ".chunk") | ends] if ends else []

    def failure(self, error: ServeError) -> list[Json]:
        """The object of a stream that fails."""
        return [error.body()]

    def _chat_deltas(self, number: int, handle: RequestHandle, delta: Delta) -> list[Json]:
        """Log-probabilities and the end come with the last of the choices."""
        place = self._place(number, delta.index)
        parts = [_delta(piece) for piece in self._pieces(number, delta)]
        if not parts and self._is_plain and not delta.finish_reason:
            parts = [{"content": ""}]
        if place not in self._begun:
            self._begun.add(place)
            first = {"role": "assistant", "content": "" if self._is_plain else None}
            parts = [{"content": self._echo}] * bool(self._echo) + parts
            parts = [first, *(parts or [{}])]
        elif not parts and (delta.finish_reason or self._tells_tokens):
            parts = [{}]
        empty = {"logprobs": None, "finish_reason": None}
        choices = [{"index": place, "delta": part, **empty} for part in parts[:-1]]
        ends = [self._chat_choice(number, handle, delta, {"delta": part}) for part in parts[-1:]]
        return choices + ends

    # ------------------------------------------------------------------ pieces

    def _pieces(self, number: int, news: News) -> list[Piece]:
        """What the text of a choice says, as far as it is certain."""
        place = self._place(number, news.index)
        if place not in self._parsers:
            self._parsers[place] = self._generation.parser()
        parser = self._parsers[place]
        pieces = parser.feed(news.text) + (parser.finish() if news.finish_reason else [])
        if any(isinstance(piece, CallBegin) for piece in pieces):
            self._callers.add(place)
        return pieces

    def _message(self, pieces: Sequence[Piece]) -> Json:
        """The fields of a message, whose content is null where it only reasons or calls."""
        message: Json = {"content": self._echo + text_of(pieces, Text), "refusal": None}
        reasoning = text_of(pieces, Reasoning)
        calls = [
            _call(piece.id, piece.name, "") for piece in pieces if isinstance(piece, CallBegin)
        ]
        for piece in pieces:
            if isinstance(piece, CallArguments):
                calls[piece.number]["function"]["arguments"] += piece.text
        if not message["content"] and (reasoning or calls):
            message["content"] = None
        message |= _reasoned(reasoning) if reasoning else {}
        return message | ({"tool_calls": calls} if calls else {})

    # ------------------------------------------------------------------ choices

    def _place(self, number: int, index: int) -> int:
        return number * self._generation.wish.sampling.n + index

    def _chat_choice(self, number: int, handle: RequestHandle, delta: News, content: Json) -> Json:
        logprobs = None
        if handle.request.sampling.logprobs is not None:
            logprobs = {"content": [self._logprobs.of_chat(each) for each in delta.logprobs or ()]}
        return {
            "index": self._place(number, delta.index),
            **content,
            "logprobs": logprobs,
            **self._end(delta),
            **given_ids(self._fields, delta.token_ids),
            **self._called(self._place(number, delta.index), delta),
        }

    def _called(self, place: int, delta: News) -> Json:
        """The end of a choice that stopped in order to call tools."""
        is_call = place in self._callers and is_own_end(delta)
        return {"finish_reason": "tool_calls"} if is_call else {}

    def _completion(self, number: int, handle: RequestHandle, delta: News) -> Json:
        place = self._place(number, delta.index)
        entries: list[TokenLogprobs | None] = list(delta.logprobs or ())
        text = delta.text
        is_first = place not in self._begun
        self._begun.add(place)
        assert isinstance(self._fields, CompletionFields)
        if self._fields.echo and is_first:
            text = self._prompt_text(handle) + text
            entries = [*(handle.output.prompt_logprobs or []), *entries]
        logprobs = None
        if self._fields.logprobs is not None:
            first = next(iter(handle.request.prompt_token_ids))
            logprobs = self._completion_logprobs(place, entries, first)
        choice = {"index": place, "text": text, "logprobs": logprobs, **self._end(delta)}
        return choice | given_ids(self._fields, delta.token_ids)

    def _end(self, delta: News) -> Json:
        why = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        return why | weight_version(delta)

    def _prompt_text(self, handle: RequestHandle) -> str:
        if handle.output.prompt is not None or self._tokenizer is None:
            return handle.output.prompt or ""
        return self._tokenizer.decode(list(handle.request.prompt_token_ids), False)

    # ------------------------------------------------------------------ log-probabilities

    def _completion_logprobs(
        self, place: int, entries: Sequence[TokenLogprobs | None], first_id: int
    ) -> Json:
        """Four parallel lists; the first token of an echoed prompt has no log-probability."""
        ids = (first_id if entry is None else entry.token_id for entry in entries)
        tokens = [self._logprobs.text(token_id) for token_id in ids]
        offset, offsets = self._offsets.get(place, 0), []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[place] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [entry and finite(entry.logprob) for entry in entries],
            "top_logprobs": [entry and self._logprobs.top_by_text(entry) for entry in entries],
            "text_offset": offsets,
        }


def is_own_end(news: News) -> bool:
    """Whether the model ended its output; a stop string may cut a call."""
    return news.finish_reason == "stop" and not isinstance(news.stop_reason, str)


def text_of(pieces: Sequence[Piece], kind: type[Text] | type[Reasoning]) -> str:
    """What the pieces of a kind say together."""
    return "".join(piece.text for piece in pieces if isinstance(piece, kind))


def _call(id: str, name: str, arguments: str) -> Json:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _reasoned(text: str) -> Json:
    """Reasoning under both names that clients read: vLLM's older one and its newer one."""
    return {"reasoning_content": text, "reasoning": text}


def _delta(piece: Piece) -> Json:
    """What a piece adds to the message of a stream."""
    match piece:
        case Text(text):
            return {"content": text}
        case Reasoning(text):
            return _reasoned(text)
        case CallBegin(number, id, name):
            return {"tool_calls": [{"index": number} | _call(id, name, "")]}
        case CallArguments(number, text):
            return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}


def usage(handles: Sequence[RequestHandle], *, is_begun: bool = True) -> Json:
    """Tokens in and out, as far as they have come; details once the requests have ended.

    Of an answer that is not begun there is no output.
    """
    num_prompt = sum(len(handle.request.prompt_token_ids) for handle in handles)
    num_output = sum(handle.num_output_tokens for handle in handles) if is_begun else 0
    metrics = [handle.output.metrics for handle in handles]
    cached = sum(each.num_cached_tokens for each in metrics if each is not None)
    counts: Json = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if any(handle.request.prediction is not None for handle in handles):
        counts["completion_tokens_details"] = _prediction_details(handles)
    return counts


def _prediction_details(handles: Sequence[RequestHandle]) -> Json:
    """What the model agreed with of what was guessed from predictions, and the rest of it."""
    outputs = (output for handle in handles for output in handle.output.outputs)
    metrics = [m for output in outputs if (m := output.metrics) is not None]
    accepted = sum(each.num_accepted_prediction_tokens for each in metrics)
    rejected = sum(each.num_prediction_tokens for each in metrics) - accepted
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
