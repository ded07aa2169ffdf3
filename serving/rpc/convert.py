"""Protobuf requests as the bodies that HTTP clients would send. Pure functions."""

from collections.abc import Collection, Mapping, MutableSequence
from typing import Any

import numpy as np

from serving.proto import shiftjax_pb2 as pb
from serving.server.errors import ServeError, invalid
from serving.server.json_body import MAX_VALUES, parse_json
from serving.server.schema import MAX_MESSAGES
from serving.server.tools import MAX_CALLS, MAX_TOOLS
from shiftjax.core.sampling_params import PARAMS

OPTIONAL = ("cache_salt", "min_width", "truncate_prompt_tokens")
MESSAGE_OPTIONS = ("name", "tool_call_id", "reasoning_content")
EMBED_OPTIONS = ("dimensions", "truncate_prompt_tokens", "prompt_name")


def bounded[T](field: str, values: Collection[T], most: int = MAX_MESSAGES) -> list[T]:
    """A list of what a message repeats. Raises `ServeError` for what takes long to copy.

    64 MiB can hold sixty million entries. What a field may have of them, the schema says.
    """
    if len(values) > most:
        raise invalid(field, f"must have at most {most} entries, not {len(values)}")
    return list(values)


def generate_values(request: pb.GenerateRequest, *, stream: bool) -> dict[str, Any]:
    """The body that an HTTP client would send for the same request."""
    values = prompt_values(request) | sampling_values(request)
    values |= {"model": request.model or None, "request_id": request.request_id or None}
    values |= {"priority": request.priority, "stream": stream}
    values |= {name: getattr(request, name) for name in OPTIONAL if request.HasField(name)}
    if request.HasField("prediction"):
        values["prediction"] = {"type": "content", "content": request.prediction}
    if request.agent_hint_json:
        values["agent_hint"] = _object("agent_hint_json", request.agent_hint_json)
    return values | _choice_values(request) | ({"timeline": True} if request.timeline else {})


def _choice_values(request: pb.GenerateRequest) -> dict[str, Any]:
    """Which tools shall be called, as far as the request says it."""
    values: dict[str, Any] = {}
    match request.WhichOneof("tool_choice"):
        case "choice":
            values["tool_choice"] = request.choice
        case "function":
            named = {"type": "function", "function": {"name": request.function}}
            values["tool_choice"] = named
    if request.HasField("parallel_tool_calls"):
        values["parallel_tool_calls"] = request.parallel_tool_calls
    return values


def is_chat(request: pb.GenerateRequest | pb.TokenizeRequest) -> bool:
    """Whether the prompt is a conversation."""
    return request.WhichOneof("prompt") == "chat"


def prompt_values(
    request: pb.GenerateRequest | pb.ScoreRequest | pb.TokenizeRequest,
) -> dict[str, Any]:
    """The fields `prompt`, or `messages` and their variables; none if there is no prompt."""
    match request.WhichOneof("prompt"):
        case "text":
            return {"prompt": request.text}
        case "token_ids":
            assert not isinstance(request, pb.TokenizeRequest)
            return {"prompt": bounded("prompt", request.token_ids.ids, MAX_VALUES)}
        case "chat":
            assert not isinstance(request, pb.ScoreRequest)
            return _chat_values(request.chat)
        case _:
            return {}


def _chat_values(chat: pb.Chat) -> dict[str, Any]:
    messages = bounded("messages", chat.messages)
    values: dict[str, Any] = {"messages": [_message(i, each) for i, each in enumerate(messages)]}
    if chat.template_variables_json:
        text = chat.template_variables_json
        values["chat_template_kwargs"] = _object("chat.template_variables_json", text)
    if chat.tools:
        tools = bounded("tools", chat.tools, MAX_TOOLS)
        values["tools"] = [_tool(index, tool) for index, tool in enumerate(tools)]
    return values


def _message(index: int, message: pb.Message) -> dict[str, Any]:
    values: dict[str, Any] = {"role": message.role, "content": message.content}
    given = (name for name in MESSAGE_OPTIONS if message.HasField(name))
    values |= {name: getattr(message, name) for name in given}
    if message.tool_calls:
        calls = bounded(f"messages[{index}].tool_calls", message.tool_calls, MAX_CALLS)
        values["content"] = message.content or None
        values["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_json},
            }
            for call in calls
        ]
    return values


def _tool(index: int, tool: pb.Tool) -> dict[str, Any]:
    given = (name for name in ("description", "strict") if tool.HasField(name))
    function = {"name": tool.name} | {name: getattr(tool, name) for name in given}
    if tool.HasField("parameters_json"):
        place = f"tools[{index}].parameters_json"
        function["parameters"] = _object(place, tool.parameters_json)
    return {"type": "function", "function": function}


def _object(field: str, text: str) -> dict[str, Any]:
    """The JSON object that a text is. Raises `ServeError`."""
    try:
        value = parse_json(text.encode())
    except ServeError:
        value = None
    if not isinstance(value, dict):
        raise invalid(field, "must be a JSON object")
    return value


def _plain(name: str, value: Any) -> Any:
    """A value of a message as JSON has it. Raises `ServeError` for what takes long to copy."""
    if isinstance(value, Mapping):
        return {str(key): value[key] for key in bounded(name, value)}
    return bounded(name, value) if isinstance(value, MutableSequence) else value


def sampling_values(request: pb.GenerateRequest) -> dict[str, Any]:
    """The sampling fields that are set."""
    sampling = request.sampling
    given = {field.name: value for field, value in sampling.ListFields() if field.name in PARAMS}
    values = {name: _plain(name, value) for name, value in given.items() if name != "logprobs"}
    if sampling.HasField("logprobs"):
        chat = {"logprobs": True, "top_logprobs": sampling.logprobs}
        values |= chat if is_chat(request) else {"logprobs": sampling.logprobs}
    constraint = sampling.WhichOneof("constraint")
    if constraint == "choice":
        values["structured_outputs"] = {
            "choice": bounded("structured_outputs.choice", sampling.choice.options)
        }
    elif constraint is not None:
        name = "json" if constraint == "json_schema" else constraint
        values["structured_outputs"] = {name: getattr(sampling, constraint)}
    return values


def embed_values(request: pb.EmbedRequest) -> dict[str, Any]:
    """The body that an HTTP client would send for the same texts. Raises `ServeError`."""
    texts = bounded("texts", request.texts)
    lengths = bounded("lengths", request.lengths)
    if bool(texts) == bool(lengths):
        raise invalid("texts", "or token_ids and lengths must be given, and only one of them")
    if len(request.token_ids) != 4 * sum(lengths):
        words = f"must have 4 bytes for each of {sum(lengths)} tokens, as lengths has it"
        raise invalid("token_ids", f"{words}, not {len(request.token_ids)}")
    ids, start = np.frombuffer(request.token_ids, "<i4").tolist(), 0
    pieces = []
    for length in lengths:
        pieces.append(ids[start : start + length])
        start += length
    values: dict[str, Any] = {"input": texts or pieces, "priority": request.priority}
    values |= {"model": request.model or None, "request_id": request.request_id or None}
    given = (name for name in EMBED_OPTIONS if request.HasField(name))
    return values | {name: getattr(request, name) for name in given}
