"""OpenAI's Responses as chats: https://platform.openai.com/docs/api-reference/responses. No JAX.

A conversation comes with every request, and goes by its items. What is kept of earlier ones has
been put before them (`serving/stored`).
"""

import re
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from serving.server.dialects.asked import Asked, Extras, Json, Told, read_body, wish_of, wrong
from serving.server.dialects.foreign import take_kinds, take_tools
from serving.server.dialects.namespaces import joined
from serving.server.dialects.response_items import Item, turns_of
from serving.server.hints import HINTS as CHAT_HINTS
from serving.server.hints import Harmless

TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
LOGPROBS = "message.output_text.logprobs"


class FunctionTool(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """A function of the client, as there are no tools that this server runs.

    All are told to the model at once, so deferred loading has no effect.
    """

    name: str
    parameters: Json | None = None
    strict: bool | None = None
    description: str | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    output_schema: Json | None = None


class CustomTool(msgspec.Struct, kw_only=True, tag_field="type", tag="custom"):
    """A tool of the client that takes a text. The model is told its format, which is not forced."""

    name: str
    description: str | None = None
    format: Json | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None

    @property
    def function(self) -> FunctionTool:
        """A function with the text as its only argument."""
        given = self.format or {}
        told = given.get("definition") and f"The input has this format:\n{given['definition']}"
        text = "\n\n".join(each for each in (self.description, told) if each)
        return FunctionTool(name=self.name, description=text or None, parameters=TEXT)


class NamespaceTool(msgspec.Struct, kw_only=True, tag_field="type", tag="namespace"):
    """Functions of one origin, as an MCP server is."""

    name: str
    tools: list[FunctionTool]
    description: str | None = None


class FunctionChoice(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """The function to call."""

    name: str


class AllowedChoice(msgspec.Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """Those of the functions that may be called (auto), or must be (required)."""

    mode: Literal["auto", "required"]
    tools: list[FunctionChoice]


class Format(msgspec.Struct, kw_only=True):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: Json | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    """What the text is like."""

    format: Format | None = None


class Reasoning(msgspec.Struct, kw_only=True):
    """How much to think. Thoughts come as they are, with no summary of them."""

    effort: str | None = None


class ResponsesCountFields(Extras, kw_only=True):
    """The body of /v1/responses/input_tokens."""

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    tools: list[FunctionTool | CustomTool | NamespaceTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None


class ConversationName(msgspec.Struct, kw_only=True):
    """The conversation that a response goes on with."""

    id: str


class ResponsesFields(ResponsesCountFields, kw_only=True):
    """The body of /v1/responses."""

    background: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


# Fields that OpenAI has and this server has not, with the values that ask for nothing.
REFUSED: Harmless = MappingProxyType(
    {
        "access_programs": (),
        "background_options": (),
        "image": (),
        "personality": (),
        "prompt": (),
    }
)

# The same, where an answer is as good without. Only tools of a server count as `max_tool_calls`.
HINTS: Harmless = MappingProxyType(
    {
        **{name: value for name, value in CHAT_HINTS.items() if name != "store"},
        "client_metadata": ({},),
        "context_management": ([],),
        "max_tool_calls": (),
        "reasoning.context": ("auto",),
        "reasoning.generate_summary": ("auto",),
        "reasoning.mode": ("standard",),
        "reasoning.summary": ("auto",),
        "stream_options": ({},),
        "text.verbosity": ("medium",),
        "truncation": ("disabled",),
    }
)

# Both, where nothing is kept and nothing recalled.
OF_COUNTS = (
    {**REFUSED, "background": (False,), "conversation": (), "previous_response_id": ()},
    {**HINTS, "store": (False,)},
)

# What OpenAI runs, or only its models know; and what a conversation keeps of it.
_TOOLS = re.compile(
    r"apply_patch|code_interpreter|computer\w*|file_search|image_generation|local_shell|mcp"
    r"|programmatic_tool_calling|shell|tool_search|web_search\w*"
)
_ITEMS = re.compile(
    rf"({_TOOLS.pattern})_(call|call_output|output)"
    r"|mcp_(list_tools|approval_\w+)|compaction\w*|program(_output)?"
)
# What `include` may ask for and gets; the first is in plain items of reasoning.
_INCLUDED = ("reasoning.encrypted_content", LOGPROBS)

# What a chat calls these fields.
NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def read_response(values: Any) -> Asked:
    """Check the body of a response. Raises `ServeError`."""
    fields, told = _read(ResponsesFields, values, REFUSED, HINTS)
    names = ("stream", "temperature", "top_p", "top_k", "metadata", "user")
    same = {name: getattr(fields, name) for name in (*names, *_CHECKED)}
    chat = _chat(fields) | same | {"max_completion_tokens": fields.max_output_tokens}
    include = fields.include or ()
    wants_logprobs = LOGPROBS in include
    if any(each not in _INCLUDED for each in include):
        told = told._replace(hints=(*told.hints, "include"))
    if wants_logprobs:
        chat |= {"logprobs": True, "top_logprobs": fields.top_logprobs or 0}
    elif fields.top_logprobs:
        raise wrong("top_logprobs", f"needs {LOGPROBS} in include")
    wish = wish_of(chat, fields, told, NAMES)
    if wants_logprobs and wish.tools is not None:
        raise wrong("include", f"of {LOGPROBS} cannot be combined with tools that may be called")
    return wish


_CHECKED = ("safety_identifier", "prompt_cache_key")


def read_count(values: Any) -> Asked:
    """Check the body of a count. Raises `ServeError`."""
    fields, told = _read(ResponsesCountFields, values, *OF_COUNTS)
    return wish_of(_chat(fields), fields, told, NAMES)


def _read[T: ResponsesCountFields](
    kind: type[T], values: Any, refused: Harmless, hints: Harmless
) -> tuple[T, Told]:
    """The fields of a body, without what only OpenAI can run or read."""
    values, tools = take_tools(typed(values), _TOOLS)
    values, items = take_kinds(values, "input", _ITEMS)
    fields, told = read_body(kind, values, refused, hints)
    return fields, told._replace(hints=(*told.hints, *tools, *items))


def typed(values: Any, field: str = "input") -> Any:
    """The body with the type of every message, which clients leave out."""
    items = values.get(field) if isinstance(values, dict) else None
    if not isinstance(items, list):
        return values
    plain = [
        {"type": "message"} | item if isinstance(item, dict) and "role" in item else item
        for item in items
    ]
    return values | {field: plain}


def _chat(fields: ResponsesCountFields) -> Json:
    """The fields of a chat with the same prompt."""
    text, reasoning = fields.text or TextConfig(), fields.reasoning or Reasoning()
    tools = [_tool(each, name) for name, (_, each) in functions_of(fields).items()]
    return {
        "model": fields.model,
        "messages": turns_of(fields.instructions, fields.input),
        "tools": tools if fields.tools is not None else None,
        "tool_choice": _choice(fields.tool_choice),
        "parallel_tool_calls": fields.parallel_tool_calls,
        "response_format": text.format and _format(text.format),
        "reasoning_effort": reasoning.effort,
    }


type ClientTool = FunctionTool | CustomTool


def functions_of(fields: ResponsesCountFields) -> dict[str, tuple[str | None, ClientTool]]:
    """(namespace, tool) by the name that the model knows. Raises `ServeError`."""
    found: dict[str, tuple[str | None, ClientTool]] = {}
    for index, tool in enumerate(fields.tools or ()):
        namespace = tool.name if isinstance(tool, NamespaceTool) else None
        for each in tool.tools if isinstance(tool, NamespaceTool) else [tool]:
            name = joined(namespace, each.name)
            if name in found:
                raise wrong(f"tools[{index}].name", "is that of another tool, too")
            found[name] = namespace, each
    return found


def _tool(tool: ClientTool, known: str) -> Json:
    tool = tool.function if isinstance(tool, CustomTool) else tool
    names = ("name", "description", "parameters", "strict")
    given = ((name, getattr(tool, name)) for name in names)
    function = {name: value for name, value in given if value is not None} | {"name": known}
    return {"type": "function", "function": function}


def _choice(choice: str | FunctionChoice | AllowedChoice | None) -> Any:
    """The same of a chat, whose functions are nested."""
    if isinstance(choice, FunctionChoice):
        return {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, AllowedChoice):
        allowed = {"mode": choice.mode, "tools": [_choice(each) for each in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _format(wanted: Format) -> Json:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    if wanted.schema is None:
        words = "is missing: json_schema needs one"
        raise wrong("text.format.schema", words, "missing_required_parameter")
    schema = {"name": wanted.name or "output", "schema": wanted.schema, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": schema}
