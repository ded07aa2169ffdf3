"""The tools of a request: what may be called, what must be, and earlier calls in its messages.

Raises `ServeError` that names the field. No JAX.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from serving.server.errors import invalid
from serving.server.fields import AllowedTools, Function, Tool, ToolChoice, is_deeper

MAX_TOOLS = 512
MAX_TOOL_BYTES = 1 << 20  # of all tools as JSON
MAX_CALLS = 512  # in one message
MAX_DEPTH = 32  # of a schema and of arguments
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
CHOICES = ("auto", "none", "required")

Json = Any


@dataclass(frozen=True)
class ToolWish:
    """The functions that a request may call, and whether it has to."""

    functions: tuple[Function, ...]
    is_forced: bool = False  # the output must be calls
    most: int | None = None  # calls; None: any number
    all: tuple[Function, ...] = ()  # of the request, if it allows some of them only

    @property
    def names(self) -> frozenset[str]:
        """The names of the functions."""
        return frozenset(function.name for function in self.functions)

    @property
    def named(self) -> tuple[Function, ...]:
        """All that the prompt names, in the order of the request."""
        return self.all or self.functions

    @property
    def is_strict(self) -> bool:
        """Whether the arguments of some function must keep to its schema."""
        return any(function.strict for function in self.functions)


def read_tools(
    tools: Sequence[Tool] | None, choice: str | ToolChoice | None, parallel: bool | None
) -> ToolWish | None:
    """What may be called; None: nothing. A forced function is the only one that may be.

    Without tools, a choice that demands none has no effect; an empty list of tools is a choice of
    none, as OpenAI and vLLM have it.
    """
    functions = checked_functions(tools or ())
    if isinstance(choice, str) and choice not in CHOICES:
        raise invalid("tool_choice", f"must be one of {', '.join(CHOICES)}, or name a function")
    most = 1 if parallel is False else None
    if isinstance(choice, ToolChoice) and choice.type == "allowed_tools":
        return _allowed(functions, choice.allowed_tools, most)
    if isinstance(choice, ToolChoice):
        if choice.type != "function":
            raise invalid("tool_choice.type", "must be function or allowed_tools")
        if choice.function is None:
            raise invalid("tool_choice.function", "is missing", "missing_required_parameter")
        chosen = tuple(each for each in functions if each.name == choice.function.name)
        if not chosen:
            raise invalid("tool_choice.function.name", "is not the name of one of the tools")
        return ToolWish(chosen, is_forced=True, most=1)
    if choice == "required" and tools is None:
        raise invalid("tool_choice", "is required, but there are no tools")
    if choice == "none" or not functions:
        return None
    return ToolWish(functions, choice == "required", most)


def _allowed(
    functions: tuple[Function, ...], allowed: AllowedTools | None, most: int | None
) -> ToolWish:
    """Some of the functions; the prompt names them all, so that it stays in the prefix cache."""
    if allowed is None or not allowed.tools:
        raise invalid("tool_choice.allowed_tools", "must have a mode and at least one of the tools")
    names = {each.function.name for each in allowed.tools}
    chosen = tuple(each for each in functions if each.name in names)
    if len(chosen) < len(names):
        raise invalid("tool_choice.allowed_tools.tools", "has a name that no tool has")
    return ToolWish(chosen, allowed.mode == "required", most, functions)


def checked_functions(tools: Sequence[Tool]) -> tuple[Function, ...]:
    """The functions, whose names differ and are as OpenAI allows them."""
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"must have at most {MAX_TOOLS} entries, not {len(tools)}")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        place, name = f"tools[{index}]", tool.function.name
        if tool.type != "function":
            raise invalid(f"{place}.type", "must be function")
        if not _NAME.fullmatch(name):
            words = "must be 1 to 64 letters, digits, _ and -"
            raise invalid(f"{place}.function.name", words)
        if name in names:
            raise invalid(f"{place}.function.name", "is that of another tool, too")
        names.add(name)
        if (tool.function.parameters or {}).get("type", "object") != "object":
            raise invalid(f"{place}.function.parameters.type", "must be object")
        if is_deeper(tool.function.parameters, MAX_DEPTH):
            words = f"must be nested at most {MAX_DEPTH} deep"
            raise invalid(f"{place}.function.parameters", words)
    if tools and len(msgspec.json.encode(tools)) > MAX_TOOL_BYTES:
        raise invalid("tools", f"must have at most {MAX_TOOL_BYTES} bytes")
    return tuple(tool.function for tool in tools)


def written_tools(functions: Sequence[Function]) -> list[Json]:
    """The tools as chat templates expect them: the fields that models have seen, in their order."""
    written = []
    for each in functions:
        function: dict[str, Json] = {"name": each.name}
        if each.description is not None:
            function["description"] = each.description
        function["parameters"] = each.parameters or {"type": "object", "properties": {}}
        written.append({"type": "function", "function": function})
    return written


# ---------------------------------------------------------------- messages


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Json] | None = None


class _Call(msgspec.Struct):
    function: _CalledFunction
    id: str | None = None
    type: str | None = None


def read_calls(messages: Sequence[dict[str, Json]]) -> list[dict[str, Json]]:
    """The messages as templates expect them: the arguments of calls are objects, not JSON text.

    Arguments that are no object as JSON stay the text that they are.
    """
    return [_with_calls(message, index) for index, message in enumerate(messages)]


def _with_calls(message: dict[str, Json], index: int) -> dict[str, Json]:
    if "reasoning" in message and "reasoning_content" not in message:
        message = message | {"reasoning_content": message["reasoning"]}
    if "tool_calls" not in message:
        return message
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    given, place = message["tool_calls"], f"messages[{index}].tool_calls"
    if given is None or given == []:
        return plain
    if not isinstance(given, list) or len(given) > MAX_CALLS:
        raise invalid(place, f"must be a list of at most {MAX_CALLS} calls")
    return plain | {"tool_calls": [_call(call, f"{place}[{i}]") for i, call in enumerate(given)]}


def _call(value: Json, place: str) -> dict[str, Json]:
    try:
        call = msgspec.convert(value, _Call)
    except (msgspec.ValidationError, RecursionError):
        raise invalid(place, "must have a function with a name and arguments") from None
    if call.type not in (None, "function"):
        raise invalid(f"{place}.type", "must be function")
    arguments = _arguments(call.function.arguments, f"{place}.function.arguments")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(value: str | dict[str, Json] | None, place: str) -> str | dict[str, Json]:
    """The object that JSON text is; empty text is an empty one.

    What is none stays text: a model's own arguments that `max_tokens` has cut come back, too.
    """
    try:
        found = msgspec.json.decode(value or "{}") if not isinstance(value, dict) else value
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        found = None
    if not isinstance(found, dict):
        assert isinstance(value, str)  # as null is empty
        return value
    if is_deeper(found, MAX_DEPTH):
        raise invalid(place, f"must be nested at most {MAX_DEPTH} deep")
    return found


def other_forms(messages: Sequence[dict[str, Json]]) -> list[list[dict[str, Json]]]:
    """The messages in other forms, for templates that fail on arguments as `read_calls` has them.

    Some only read objects: arguments that are text are in one. Others only read JSON text
    (DeepSeek's own templates).
    """
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    arguments = [call["function"]["arguments"] for call in calls]
    forms = [_as_object] if any(isinstance(each, str) for each in arguments) else []
    forms += [_as_text] if any(isinstance(each, dict) for each in arguments) else []
    return [[_with_arguments(message, form) for message in messages] for form in forms]


def _as_object(arguments: str | dict[str, Json]) -> dict[str, Json]:
    return {"arguments": arguments} if isinstance(arguments, str) else arguments


def _as_text(arguments: str | dict[str, Json]) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_arguments(message: dict[str, Json], form: Callable[[Json], Json]) -> dict[str, Json]:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"] | {"arguments": form(call["function"]["arguments"])}
        calls.append(call | {"function": function})
    return message | {"tool_calls": calls}
