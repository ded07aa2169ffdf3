"""What a generation made as protobuf messages, whole and piece by piece."""

from collections.abc import Sequence

from serving.proto import shiftjax_pb2 as pb
from serving.server.formats.pieces import CallArguments, CallBegin, Parser, Piece, Reasoning, Text
from serving.server.handle import Delta, RequestHandle
from serving.server.request_timeline import timeline_of
from serving.server.responses import is_own_end, text_of, usage
from serving.server.served import Generation
from shiftjax.core.request import TokenLogprobs
from shiftjax.outputs import CompletionOutput

REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}
News = Delta | CompletionOutput  # which is all news at once


class OutputWriter:
    """Writes what one generation makes; it takes the text of each continuation apart."""

    def __init__(self, generation: Generation):
        self._generation = generation
        (self._handle,) = generation.handles
        self._parsers: dict[int, Parser] = {}
        self._callers: set[int] = set()  # continuations with tool calls

    # ------------------------------------------------------------------ a whole result

    def result(self) -> pb.GenerateResult:
        """Return the complete result of a finished generation."""
        return pb.GenerateResult(
            request_id=self._generation.id,
            model=self._generation.model,
            completions=[self._completion(one) for one in self._handle.output.outputs],
            usage=usage_message(self._handle),
            prompt_logprobs=prompt_logprobs(self._handle),
            timeline=self.timeline(),
        )

    def timeline(self) -> pb.Timeline | None:
        """Where the time went, if the request wants to know."""
        if not self._generation.wish.fields.timeline:
            return None
        values = timeline_of(self._handle)
        runs = [pb.ModeRun(mode=mode, num_tokens=number) for mode, number in values.pop("modes")]
        return pb.Timeline(**values, modes=runs)

    def _completion(self, output: CompletionOutput) -> pb.Completion:
        """One continuation that has ended."""
        pieces = self._pieces(output)
        arguments: dict[int, str] = {}
        for piece in pieces:
            if isinstance(piece, CallArguments):
                arguments[piece.number] = arguments.get(piece.number, "") + piece.text
        calls = [piece for piece in pieces if isinstance(piece, CallBegin)]
        return pb.Completion(
            index=output.index,
            text=text_of(pieces, Text),
            token_ids=output.token_ids,
            logprobs=logprob_messages(output.logprobs or []),
            finished=self._finished(output),
            reasoning=text_of(pieces, Reasoning),
            tool_calls=[
                pb.ToolCall(
                    id=each.id, name=each.name, arguments_json=arguments.get(each.number, "")
                )
                for each in calls
            ],
        )

    # ------------------------------------------------------------------ a stream

    def events(self, delta: Delta) -> list[pb.GenerateEvent]:
        """The messages of one continuation's news."""
        events, pieces = [], self._pieces(delta)
        if pieces or delta.token_ids:
            event = pb.GenerateEvent()
            message = event.delta  # filled in place: half the time of a message that is copied in
            message.index, message.text = delta.index, text_of(pieces, Text)
            message.token_ids.extend(delta.token_ids)
            message.reasoning = text_of(pieces, Reasoning)
            message.tool_calls.extend(_call_deltas(pieces))
            if delta.logprobs:
                message.logprobs.extend(logprob_messages(delta.logprobs))
            events.append(event)
        if delta.finish_reason is not None and delta.finish_reason != "error":
            events.append(pb.GenerateEvent(finished=self._finished(delta)))
        return events

    def last_events(self) -> list[pb.GenerateEvent]:
        """The usage and, if it is wanted, the timeline."""
        events, timeline = [pb.GenerateEvent(usage=usage_message(self._handle))], self.timeline()
        return events if timeline is None else [*events, pb.GenerateEvent(timeline=timeline)]

    # ------------------------------------------------------------------ of both

    def _pieces(self, news: News) -> list[Piece]:
        """What the text of a continuation says, as far as it is certain."""
        if news.index not in self._parsers:
            self._parsers[news.index] = self._generation.parser()
        parser = self._parsers[news.index]
        pieces = parser.feed(news.text) + (parser.finish() if news.finish_reason else [])
        if any(isinstance(piece, CallBegin) for piece in pieces):
            self._callers.add(news.index)
        return pieces

    def _finished(self, news: News) -> pb.Finished:
        """How a continuation ended."""
        is_call = news.index in self._callers and is_own_end(news)
        reason = pb.FINISH_REASON_TOOL_CALLS if is_call else REASONS[news.finish_reason or ""]
        version = news.weight_version
        message = pb.Finished(index=news.index, reason=reason, weight_version=version)
        if isinstance(news.stop_reason, str):
            message.stop = news.stop_reason
        elif news.stop_reason is not None:
            message.stop_token_id = news.stop_reason
        return message


def _call_deltas(pieces: Sequence[Piece]) -> list[pb.ToolCallDelta]:
    """What calls have gained, in its order."""
    deltas = []
    for piece in pieces:
        match piece:
            case CallBegin(number, id, name):
                deltas.append(pb.ToolCallDelta(number=number, id=id, name=name))
            case CallArguments(number, text):
                deltas.append(pb.ToolCallDelta(number=number, arguments_json=text))
    return deltas


def logprob_messages(entries: Sequence[TokenLogprobs | None]) -> list[pb.TokenLogprob]:
    """Log-probabilities of tokens; None is the first token of a prompt."""
    return [pb.TokenLogprob() if entry is None else _logprob(entry) for entry in entries]


def _logprob(entry: TokenLogprobs) -> pb.TokenLogprob:
    pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
    top = [pb.TopToken(token_id=token_id, logprob=logprob) for token_id, logprob in pairs]
    return pb.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, top=top)


def prompt_logprobs(handle: RequestHandle) -> list[pb.TokenLogprob]:
    """Those of the prompt, with the id of the first token, which nothing predicts."""
    entries = logprob_messages(handle.output.prompt_logprobs or [])
    if entries:
        entries[0].token_id = next(iter(handle.request.prompt_token_ids))
    return entries


def usage_message(handle: RequestHandle) -> pb.Usage:
    """Tokens in and out."""
    counts = usage([handle])
    return pb.Usage(
        prompt_tokens=counts["prompt_tokens"],
        completion_tokens=counts["completion_tokens"],
        cached_tokens=counts["prompt_tokens_details"]["cached_tokens"],
        **counts.get("completion_tokens_details", {}),
    )
