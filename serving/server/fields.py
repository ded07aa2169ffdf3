"""The fields of requests, typed, and the names of those that are not supported. No JAX."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from shiftjax.core.sampling_params import HTTP, PARAMS, Api, SamplingParams
from shiftjax.options import Setting, settings_of

Json = Any


def sampling_fields(api: Api) -> type[msgspec.Struct]:
    """The sampling parameters that an API takes by their own names, each of them optional."""
    settings = settings_of(SamplingParams)
    rows = [
        (name, Annotated[_json_type(settings[name]) | None, msgspec.Meta(description=param.help)])
        for name, param in PARAMS.items()
        if api in param.apis
    ]
    names = "".join(word.capitalize() for word in (api, "sampling"))
    return msgspec.defstruct(names, [(*row, None) for row in rows], kw_only=True)


def _json_type(setting: Setting) -> Any:
    """What stands in a body; names in objects are texts, and one text may stand for a list."""
    if setting.kind is Mapping:
        return dict[str, float]
    if setting.kind is tuple:
        items = list[setting.item]
        return str | items if setting.item is str else items
    return setting.kind


class StreamOptions(msgspec.Struct):
    """When usage is sent with a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


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
    # of JSON, also of that which `response_format` asks for
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None


class TextPart(msgspec.Struct):
    """A part of a text."""

    type: str
    text: str


class Prediction(msgspec.Struct):
    """What the client expects as output (OpenAI's Predicted Outputs): text, or its parts."""

    type: str
    content: str | list[TextPart]


class Function(msgspec.Struct):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Json] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """A tool; functions are all that there are."""

    type: str
    function: Function


class FunctionName(msgspec.Struct):
    """Which function is meant."""

    name: str


class NamedTool(msgspec.Struct):
    """A function by its name."""

    type: str
    function: FunctionName


class AllowedTools(msgspec.Struct):
    """Those of the tools that may be called (auto), or must be (required)."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ToolChoice(msgspec.Struct):
    """The tool that must be called, or the tools that are allowed."""

    type: str
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class CacheControl(msgspec.Struct):
    """Keep the KV of a request for so many seconds after its end."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: float = 300.0
    block_offset: int | None = None


class ContextEdit(msgspec.Struct):
    """What becomes of the KV of a context."""

    type: Literal["prefetch", "evict"]
    block_start: int | None = None
    block_end: int | None = None


class ContextManagement(msgspec.Struct):
    """Edits after a request, or with `manage_request` in its place."""

    manage_request: bool = False
    edits: list[ContextEdit] = []


class AgentHint(msgspec.Struct):
    """What an agent knows of the reuse of its context, as in vLLM's RFC 52113."""

    session_id: str | None = None
    parent_session_id: str | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None


class GenerationFields(sampling_fields(HTTP), kw_only=True):
    """What completions and chats have in common. None: not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prediction: Prediction | None = None
    priority: int | None = None
    min_width: int | None = None
    cache_salt: str | None = None
    agent_hint: AgentHint | None = None
    user: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_prompt_start: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    timeline: bool | None = None
    # OpenAI's clients send these; checked, and without effect here.
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    def ask_for_usage(self) -> None:
        """Let every object of a stream have the usage so far, and its end all of it."""
        given = self.stream_options or StreamOptions()
        told = {"include_usage": True, "continuous_usage_stats": True}
        self.stream_options = msgspec.structs.replace(given, **told)


class CompletionFields(GenerationFields, kw_only=True):
    """The body of /v1/completions."""

    prompt: str | list[Any]
    add_special_tokens: bool | None = None
    echo: bool | None = None
    logprobs: int | None = None


class ChatFields(GenerationFields, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Json]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Json] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    documents: list[dict[str, Json]] | None = None
    echo: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None


class TokenizeFields(msgspec.Struct, kw_only=True):
    """The body of /tokenize: text or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Json]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Json] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(msgspec.Struct, kw_only=True):
    """The body of /detokenize."""

    tokens: list[int]
    model: str | None = None


# Fields that only the other one of the two endpoints has.
FOREIGN: Mapping[type, Mapping[str, tuple[Any, ...]]] = {
    CompletionFields: {
        "messages": (),
        "top_logprobs": (0,),
        "chat_template_kwargs": ({},),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "documents": ([],),
        "reasoning_effort": (),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
    },
    ChatFields: {"prompt": ()},
}


def is_deeper(value: Json, most: int) -> bool:
    """Whether lists and objects are nested more than `most` levels deep."""
    level = [value]
    for _ in range(most + 1):
        nested = (each for each in level if isinstance(each, dict | list))
        inner = (each.values() if isinstance(each, dict) else each for each in nested)
        level = [each for values in inner for each in values]
    return bool(level)
