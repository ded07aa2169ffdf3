"""What users get back, and how engine events become it: text is made here, never in the engine."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from shiftjax.core.request import Event, Request, RequestMetrics, SamplingParams, TokenLogprobs
from shiftjax.text.detokenizer import IncrementalDetokenizer, StopChecker
from shiftjax.text.tokenizer import Tokenizer


@dataclass
class CompletionOutput:
    """One continuation. `stop_reason` is the stop string or stop token id that ended it."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None  # stop, length, error or abort
    stop_reason: str | int | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None
    # (place of a token, version of the weights that it and those after it were computed with)
    versions: list[tuple[int, int]] = field(default_factory=list)
    # [tokens, layers with experts, k]: of prompt and output, less the last, which no step computed.
    routed_experts: np.ndarray | None = None  # None: not asked for

    @property
    def weight_version(self) -> int:
        """The version of the weights that the last token was computed with."""
        return self.versions[-1][1] if self.versions else 0


@dataclass
class RequestOutput:
    """One request with all its continuations; `metrics` are those of the first."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def metrics(self) -> RequestMetrics | None:
        """Queue time, TTFT and TPOT in seconds, cached tokens and steps by mode."""
        return self.outputs[0].metrics

    @property
    def is_finished(self) -> bool:
        """Whether every continuation has ended."""
        return all(output.finish_reason is not None for output in self.outputs)


class _TextStream:
    """The text of one continuation as it grows."""

    def __init__(
        self, tokenizer: Tokenizer | None, sampling: SamplingParams, visible: frozenset[int]
    ):
        skips, includes = sampling.skip_special_tokens, sampling.include_stop_str_in_output
        self._detokenizer = tokenizer and IncrementalDetokenizer(
            tokenizer, skips, continues_prompt=True, visible=visible
        )
        self._stops = StopChecker(sampling.stop, includes)

    def push(self, token: int) -> tuple[str, str | None]:
        """Return the new final text, and the stop string that has been met, if any."""
        if self._detokenizer is None:  # a model without a tokenizer makes tokens, no text
            return "", None
        return self._check(self._detokenizer.push(token))

    def finish(self) -> tuple[str, str | None]:
        """Return what was held back: it is final now."""
        text, matched = self._check(self._detokenizer.finish() if self._detokenizer else "")
        return (text, matched) if matched else (text + self._stops.flush(), None)

    def _check(self, text: str) -> tuple[str, str | None]:
        return self._stops.push(text) if text else ("", None)


class OutputAssembler:
    """Collects the events of one request into its `RequestOutput`.

    `stop_sequence(index)` is called when the text meets a stop string: the engine then ends that
    continuation, and what its steps in flight still bring is dropped here. `visible` are special
    tokens that are text: the marks of tool calls.
    """

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        stop_sequence: Callable[[int], None],
        visible: frozenset[int] = frozenset(),
    ):
        self.request = request
        sampling = request.sampling
        wants_logprobs = sampling.logprobs is not None
        self.output = RequestOutput(
            request.request_id,
            prompt,
            list(request.prompt_token_ids),
            [
                CompletionOutput(i, logprobs=[] if wants_logprobs else None)
                for i in range(sampling.n)
            ],
        )
        self._streams = [_TextStream(tokenizer, sampling, visible) for _ in range(sampling.n)]
        self._has_stop = sampling.include_stop_str_in_output
        self._stop_sequence = stop_sequence

    def apply(self, event: Event) -> str:
        """Take in one event; return the text that it made final."""
        output, stream = self.output.outputs[event.index], self._streams[event.index]
        if output.finish_reason is not None:
            output.metrics = output.metrics or event.metrics
            self._take_notes(event)
            return ""
        if event.prompt_logprobs is not None:
            self.output.prompt_logprobs = event.prompt_logprobs
        text, matched = "", None
        if event.token_ids and event.version != (output.versions or [(0, -1)])[-1][1]:
            output.versions.append((len(output.token_ids), event.version))
        for place, token in enumerate(event.token_ids, start=1):
            output.token_ids.append(token)
            if output.logprobs is not None:
                output.logprobs.append(event.logprobs[place - 1])
            is_stop = place == len(event.token_ids) and event.stop_token_id is not None
            if is_stop and not self._has_stop:
                break  # the token that stops is reported, but is no text
            more, matched = stream.push(token)
            text += more
            if matched is not None:
                break  # what a draft had right beyond the stop string is dropped
        if matched is None and event.finish_reason is not None:
            rest, matched = stream.finish()
            text += rest
        output.text += text
        if matched is not None:
            output.finish_reason, output.stop_reason = "stop", matched
            if event.finish_reason is None:
                self._stop_sequence(event.index)
        elif event.finish_reason is not None:
            output.finish_reason, output.stop_reason = event.finish_reason, event.stop_token_id
        output.error = event.error
        output.metrics = event.metrics
        self._take_notes(event)
        return text

    def _take_notes(self, event: Event) -> None:
        """Of tokens that are part of the output: what comes behind a stop string is not."""
        if event.notes is not None:
            output = self.output.outputs[event.index]
            most = len(self.output.prompt_token_ids) + len(output.token_ids) - 1
            output.routed_experts = event.notes[: max(0, most)]
