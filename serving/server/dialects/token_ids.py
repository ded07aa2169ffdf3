"""vLLM's `/inference/v1/generate` as completions: token ids in, token ids out. No JAX."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import msgspec

from serving.server.dialects.asked import Json, read_body, wrong
from serving.server.fields import (
    CompletionFields,
    StreamOptions,
    StructuredOutputs,
    sampling_fields,
)
from serving.server.hints import Harmless
from serving.server.json_body import unknown_names
from serving.server.refused_fields import REFUSED
from serving.server.schema import Wish, read_completion
from shiftjax.core.sampling_params import HTTP

PLACE = "sampling_params"


class TokenSampling(sampling_fields(HTTP), kw_only=True):
    """What vLLM's `SamplingParams` has; without `max_tokens` as many as the context holds."""

    max_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    routed_experts_prompt_start: int | None = None


class GenerateFields(msgspec.Struct, kw_only=True):
    """The body of /inference/v1/generate."""

    token_ids: list[int]
    sampling_params: TokenSampling
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    min_width: int | None = None
    request_id: str | None = None
    timeline: bool | None = None
    return_routed_experts: bool | None = None


# How vLLM makes its answers, which are as good without it.
HINTS: Harmless = MappingProxyType(
    {
        f"{PLACE}.detokenize": (False, True),
        f"{PLACE}.extra_args": ({},),
        f"{PLACE}.flat_logprobs": (False,),
        f"{PLACE}.output_kind": (0, 1, 2),
        f"{PLACE}.skip_clone": (False, True),
        f"{PLACE}.skip_reading_prefix_cache": (False,),
    }
)
_IMAGES: Harmless = {"features": ()}
_ALIKE = set(GenerateFields.__struct_fields__) - {"token_ids", PLACE}  # as in a completion

# What a completion calls these fields.
NAMES: Mapping[str, str] = MappingProxyType(
    {name: f"{PLACE}.{name}" for name in (*TokenSampling.__struct_fields__, *REFUSED)}
    | {"prompt": "token_ids", "response_format": f"{PLACE}.structured_outputs"}
)


def read_token_ids(values: Any) -> Wish:
    """Check the body. Raises `ServeError`."""
    fields, told = read_body(GenerateFields, values, _IMAGES, HINTS)
    if fields.stream and fields.sampling_params.prompt_logprobs is not None:
        raise wrong(f"{PLACE}.prompt_logprobs", "cannot be streamed")
    sampling = values[PLACE]
    _refuse(sampling)
    given = _given(values, _ALIKE) | _given(sampling, TokenSampling.__struct_fields__)
    wish = read_completion({"prompt": values["token_ids"]} | given, max_tokens=None)
    harmless = {f"{PLACE}.{name}" for name in REFUSED}
    unknown = tuple(name for name in told.unknown if name not in harmless)
    return replace(wish, unknown=unknown, hints=told.hints, tells_experts=True)


def _given(values: Json, names: Iterable[str]) -> Json:
    return {name: values[name] for name in names if values.get(name) is not None}


def _refuse(sampling: Json) -> None:
    """Raise the `ServeError` of a completion for what it does not support."""
    names = {*REFUSED, "structured_outputs"} - {name.removeprefix(f"{PLACE}.") for name in HINTS}
    unknown_names(CompletionFields, _given(sampling, names))
