"""Engine output as vLLM's `/inference/v1/generate` writes it: token ids, and no text. No JAX."""

from serving.server.dialects.asked import Json
from serving.server.errors import ServeError
from serving.server.handle import Delta
from serving.server.logprobs import LogprobWriter, finite
from serving.server.request_timeline import asked_timeline
from serving.server.responses import usage
from serving.server.routed_experts import told_experts
from serving.server.served import Generation
from serving.server.vllm_answers import weight_version
from shiftjax.core.request import TokenLogprobs
from shiftjax.outputs import CompletionOutput
from shiftjax.text.tokenizer import Tokenizer


class TokenIdsWriter:
    """Writes the continuations of one prompt."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer | None):
        self._generation = generation
        self._logprobs = LogprobWriter(tokenizer)
        (self._handle,) = generation.handles

    def encoded(self) -> Json:
        """The response to a request that does not stream."""
        output, entries = self._handle.output, None
        if self._handle.request.sampling.prompt_logprobs is not None:
            entries = [each and self._logprobs.by_id(each) for each in output.prompt_logprobs or ()]
        answer = {
            "model": self._generation.model,
            "prompt_logprobs": entries,
            "kv_transfer_params": None,
            "usage": usage([self._handle]),
        }
        choices = [self._choice(each) for each in output.outputs]
        return self._told(choices) | answer | self._timeline()

    def chunks(self, number: int, deltas: list[Delta]) -> list[Json]:
        """An object for what each continuation has gained."""
        options = self._generation.wish.fields.stream_options
        counts = None
        if options is not None and options.include_usage and options.continuous_usage_stats:
            counts = usage([self._handle])
        return [self._told([self._choice(each)]) | {"usage": counts} for each in deltas]

    def last_chunks(self) -> list[Json]:
        """The object with the usage and the timeline, if the request wants one of them."""
        options, ends = self._generation.wish.fields.stream_options, self._timeline()
        if options is not None and options.include_usage:
            ends = {"usage": usage([self._handle])} | ends
        return [self._told([]) | ends] if ends else []

    def failure(self, error: ServeError) -> list[Json]:
        """The object of a stream that fails."""
        return [error.body()]

    def _told(self, choices: list[Json]) -> Json:
        return {"request_id": self._generation.id, "choices": choices}

    def _timeline(self) -> Json:
        return asked_timeline(self._handle, self._generation.wish.fields.timeline)

    def _choice(self, news: Delta | CompletionOutput) -> Json:
        logprobs = None
        if self._handle.request.sampling.logprobs is not None:
            logprobs = {"content": [_logprob(each) for each in news.logprobs or ()]}
        return (
            {
                "index": news.index,
                "token_ids": news.token_ids,
                "logprobs": logprobs,
                "finish_reason": news.finish_reason,
            }
            | weight_version(news)
            | told_experts(self._generation.wish.fields, news)
        )


def _logprob(entry: TokenLogprobs) -> Json:
    pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
    top = [_token(*each) for each in pairs]
    return _token(entry.token_id, entry.logprob) | {"top_logprobs": top}


def _token(token_id: int, logprob: float) -> Json:
    """As in vLLM's chats with `return_tokens_as_token_ids`; an id has no bytes."""
    return {"token": f"token_id:{token_id}", "logprob": finite(logprob), "bytes": None}
