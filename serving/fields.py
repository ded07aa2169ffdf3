"""The fields of requests, typed, and the names of those that are not supported. No JAX."""

from collections.abc import Mapping
from typing import Any

import msgspec

Json = Any


class StreamOptions(msgspec.Struct):
    """When usage is sent with a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(msgspec.Struct):
    """The schema of a `response_format`; `strict` changes nothing: it is always kept."""

    schema: dict[str, Json] | bool
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """text, json_object, or json_schema with a schema."""

    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct):
    """At most one constraint on the output, under the names that vLLM has for them."""

    json: dict[str, Json] | str | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """What completions and chats have in common. None: not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    # OpenAI's clients send these; checked, and without effect here.
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None
    safety_identifier: str | None = None


class CompletionFields(GenerationFields, kw_only=True):
    """The body of /v1/completions."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None


class ChatFields(GenerationFields, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Json]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Json] | None = None
    add_generation_prompt: bool | None = None


class TokenizeFields(msgspec.Struct, kw_only=True):
    """The body of /tokenize: text or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Json]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Json] | None = None
    return_token_strs: bool = False


class DetokenizeFields(msgspec.Struct, kw_only=True):
    """The body of /detokenize."""

    tokens: list[int]
    model: str | None = None


# Fields that others have and this server has not, with the values that ask for nothing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "typical_p": (1, 1.0),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "logits_processors": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "lora": (),
    "adapter": (),
    "kv_transfer_params": (),
}
