"""What is refused at the engine's door, before it can do harm. No JAX."""

import math
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from shiftjax.core.request import Request, RequestError
from shiftjax.core.sampling_params import INT32_MAX, SamplingParams

MAX_ID_CHARACTERS = 256
NO_LOGPROBS = -1
MAX_WIDTH = 1024  # units, as many as there can be devices


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a model and its deployment can take.

    `num_kv_tokens` is the number of tokens that the KV pool of one group holds, of groups of
    several widths that of the widest, which has `widest` units.
    """

    vocab_size: int
    max_model_len: int
    num_kv_tokens: int
    max_logprobs: int = 20  # NO_LOGPROBS: tokens come from no model
    eos_token_ids: tuple[int, ...] = ()
    computes_prompts: bool = True  # False: the last layers compute output tokens only (SwiftKV)
    adapters: Container[str] = frozenset()  # those that requests may ask for
    widest: int = 1
    keeps_notes: bool = False  # of tokens (`core/notes.py`)

    def max_length(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """The longest that prompt and output may become, in tokens.

        The KV of the last sampled token is never computed, hence one more than the pool holds.
        """
        most = min(self.max_model_len, self.num_kv_tokens + 1)
        return most if max_tokens is None else num_prompt_tokens + max_tokens


def validate_request(request: Request, limits: RequestLimits) -> None:
    """Refuse with `RequestError`, one sentence, what the engine could not serve correctly.

    Complete before admission, because a device clamps or drops bad indices in silence.
    """
    _check_identity(request, limits)
    _check_width(request.min_width, limits.widest)
    _check_prompt(request.prompt_token_ids, limits)
    check_length(len(request.prompt_token_ids), request.sampling.max_tokens, limits)
    _check_sampling(request.sampling, limits)
    _check_constraints(request)
    _check_notes(request.wants_notes, limits)


def _check_notes(is_wanted: Any, limits: RequestLimits) -> None:
    if type(is_wanted) is not bool:
        raise RequestError("wants_notes must be true or false.", "wants_notes")
    if is_wanted and not limits.keeps_notes:
        raise RequestError("This engine keeps no notes of tokens.", "wants_notes", "no_notes")


def _check_identity(request: Request, limits: RequestLimits) -> None:
    if not isinstance(request.sampling, SamplingParams):
        raise RequestError("sampling must be a SamplingParams.", "sampling")
    for name in ("request_id", "cache_salt"):
        text = getattr(request, name)
        if text is None and name == "cache_salt":
            continue
        if not (isinstance(text, str) and 0 < len(text) <= MAX_ID_CHARACTERS):
            words = f"must be a string of 1 to {MAX_ID_CHARACTERS} characters"
            raise RequestError(f"{name} {words}.", name)
        if not text.isprintable():
            raise RequestError(f"{name} must not contain control characters.", name)
    if type(request.priority) is not int or abs(request.priority) > INT32_MAX:
        words = f"must be an integer between -{INT32_MAX} and {INT32_MAX}"
        raise RequestError(f"priority {words}.", "priority")
    if type(request.arrival_seconds) not in (int, float) or not math.isfinite(
        request.arrival_seconds
    ):
        raise RequestError("arrival_seconds must be a finite number.", "arrival_seconds")
    if request.adapter is not None and request.adapter not in limits.adapters:
        raise RequestError("The adapter of this request is not loaded.", "adapter")


def _check_width(wanted: Any, widest: int) -> None:
    if type(wanted) is not int or not 1 <= wanted <= MAX_WIDTH:
        words = f"must be an integer between 1 and {MAX_WIDTH}"
        raise RequestError(f"min_width {words}.", "min_width")
    if wanted > widest == 1:
        words = f"min_width is {wanted}, but all groups of this server have one width"
        raise RequestError(f"{words}: leave it out.", "min_width", "one_width")
    if wanted > widest:
        words = f"min_width is {wanted}, but the widest group has {widest} units"
        raise RequestError(f"{words}.", "min_width", "too_wide")


def _check_prompt(token_ids: Any, limits: RequestLimits) -> None:
    if not isinstance(token_ids, (list, tuple)):
        raise RequestError("The prompt must be a list of token ids.", "prompt")
    if not token_ids:
        raise RequestError("The prompt is empty: it needs at least one token.", "prompt")
    if set(map(type, token_ids)) != {int}:
        raise RequestError("The prompt's token ids must all be integers.", "prompt")
    for token in (min(token_ids), max(token_ids)):
        _check_in_vocabulary("The prompt's", token, "prompt", limits)


def check_length(num_prompt: int, max_tokens: int | None, limits: RequestLimits) -> None:
    """Refuse with `RequestError` what is too long for the context or the KV pool; tokens."""
    context, pool = limits.max_model_len, limits.num_kv_tokens
    num_output = 1 if max_tokens is None else max_tokens
    asked = f"{num_prompt} prompt tokens and {num_output} output tokens"
    if num_prompt + num_output > context:
        raise RequestError(
            # Clients look for the first words, which are OpenAI's.
            f"This model's maximum context length is {context} tokens, but {asked} were asked for: "
            "shorten the prompt or max_tokens.",
            "prompt",
            "context_length_exceeded",
        )
    if max(num_prompt, num_prompt + num_output - 1) > pool:  # the last token needs no KV
        message = f"{asked} can never fit the KV pool, which holds {pool} tokens."
        raise RequestError(message, "prompt", "kv_capacity")


def _check_sampling(sampling: SamplingParams, limits: RequestLimits) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        given = getattr(sampling, name)
        if given is None:
            continue
        if limits.max_logprobs == NO_LOGPROBS:
            raise RequestError(f"{name}: there are none, because no model gives the tokens.", name)
        if given > limits.max_logprobs:
            raise RequestError(
                f"{name} must be at most {limits.max_logprobs} on this server.", name
            )
    if sampling.prompt_logprobs is not None and not limits.computes_prompts:
        message = (
            "This model computes its last layers for output tokens only, so prompt "
            "log-probabilities do not exist."
        )
        raise RequestError(message, "prompt_logprobs")
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        for token in getattr(sampling, name) or ():
            _check_in_vocabulary(f"{name}:", token, name, limits)
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else limits.eos_token_ids)}
    allowed = sampling.allowed_token_ids
    if sampling.min_tokens and allowed and stops.issuperset(allowed):
        message = "min_tokens forbids every one of allowed_token_ids: they are all stop ids."
        raise RequestError(message, "min_tokens")


def _check_constraints(request: Request) -> None:
    """One per continuation, and nothing beside them that could leave no token to choose."""
    sampling, num = request.sampling, len(request.constraints)
    if sampling.bad_words and not num:
        raise RequestError("bad_words needs a tokenizer, which is not here.", "bad_words")
    if not num:
        return
    if num != sampling.n:
        message = f"There are {num} constraints for {sampling.n} continuations."
        raise RequestError(message, "constraints")
    if not all(each.mask.any() for each in request.constraints):
        raise RequestError("The constraints leave no token to begin with.", "constraints")
    if any(each.decides_end for each in request.constraints):
        for name in ("min_tokens", "ignore_eos", "allowed_token_ids"):
            if getattr(sampling, name):
                raise RequestError(f"{name} cannot be combined with structured output.", name)
    if sampling.allowed_token_ids:
        words = "allowed_token_ids cannot be combined with bad_words"
        raise RequestError(f"{words}: leave them out of it.", "allowed_token_ids")


def _check_in_vocabulary(whose: str, token: int, field: str, limits: RequestLimits) -> None:
    if not 0 <= token < limits.vocab_size:
        words = f"token id {token} is out of vocabulary, which has {limits.vocab_size} tokens"
        raise RequestError(f"{whose} {words}.", field)
