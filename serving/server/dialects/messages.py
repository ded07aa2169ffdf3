"""Anthropic's Messages as chats: https://docs.anthropic.com/en/api/messages. No JAX."""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import msgspec

from serving.server.dialects.asked import Asked, Extras, Json, Told, read_body, wish_of, wrong
from serving.server.dialects.foreign import take_kinds, take_tools
from serving.server.hints import Harmless

NO_THREADS = "thread_unsupported_request"  # the code by which packages know to send all messages
BILLING = "x-anthropic-billing-header"
LEAST_BUDGET = 1024  # tokens of thinking, as Anthropic has it


class _Block(msgspec.Struct, tag_field="type", kw_only=True):
    """A part of a message. What is cached is decided here, so `cache_control` has no effect."""

    cache_control: Json | None = None


class TextBlock(_Block, tag="text"):
    """A text."""

    text: str
    citations: list[Json] | None = None


class ThinkingBlock(_Block, tag="thinking"):
    """What an assistant thought before it answered; nothing is signed here."""

    thinking: str
    signature: str | None = None


class ToolUseBlock(_Block, tag="tool_use"):
    """A call that an assistant made."""

    id: str
    name: str
    input: Json | str  # text where it was cut
    caller: Json | None = None
    toolset_name: str | None = None


class ToolReferenceBlock(_Block, tag="tool_reference"):
    """A tool that a search for tools found; it is one of the request's."""

    tool_name: str


class ToolResultBlock(_Block, tag="tool_result"):
    """What came of a call."""

    tool_use_id: str
    content: str | list[TextBlock | ToolReferenceBlock] | None = None
    is_error: bool | None = None
    toolset_name: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]


class AnthropicTool(msgspec.Struct, kw_only=True):
    """A tool that the client runs, as there are none that this server runs.

    All are told to the model at once, so deferred loading has no effect.
    """

    name: str
    input_schema: Json
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: Json | None = None
    input_examples: list[Json] | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None


class AnthropicToolChoice(msgspec.Struct, kw_only=True):
    """Whether and which tool is called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether to think first, where the chat template can say so; `max_tokens` bounds all of it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None  # thoughts are always shown as they are


class OutputFormat(msgspec.Struct, kw_only=True):
    """The schema that the answer keeps."""

    type: Literal["json_schema"]
    schema: Json


class OutputConfig(msgspec.Struct, kw_only=True):
    """The form of the answer, and how much to think about it."""

    format: OutputFormat | None = None
    effort: str | None = None


class Metadata(msgspec.Struct, kw_only=True):
    """Who asks."""

    user_id: str | None = None


class MessagesCountFields(Extras, kw_only=True):
    """The body of /v1/messages/count_tokens."""

    messages: list[Message]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Json | None = None


class MessagesFields(MessagesCountFields, kw_only=True):
    """The body of /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None


# Fields that Anthropic has and this server has not, with the values that ask for nothing.
REFUSED: Harmless = {"container": (), "mcp_servers": ([],)}

# The same, where an answer is as good without.
HINTS: Harmless = {
    "billing_policy": (),
    "compaction": (),
    "context_management": (),
    "diagnostics": (),
    "fallback_credit_token": (),
    "fallbacks": ([],),
    "inference_geo": (),
    "output_config.task_budget": (),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "thread": (),  # null; any other is refused
    "user_profile_id": (),
    "workspace_id": (),
}

# Tools that Anthropic runs, or whose schemas only its models know.
_TOOLS = re.compile(
    r"(advisor|bash|browser|code_execution|computer|memory|text_editor|tool_search_tool|web_fetch"
    r"|web_search)_\w+|mcp_toolset"
)
# What an assistant's message keeps of them, and thoughts that only Anthropic can read.
_BLOCKS = re.compile(r"redacted_thinking|server_tool_use|mcp_tool_\w+|\w+_tool_result")

# What a chat calls these fields.
NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parameters": "input_schema",
    "chat_template_kwargs": "thinking",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}


def read_messages(values: Any) -> Asked:
    """Check the body of a message. Raises `ServeError`."""
    fields, told = _read(MessagesFields, values)
    if fields.thinking is not None and (fields.thinking.budget_tokens or 0) >= fields.max_tokens:
        raise wrong("thinking.budget_tokens", "must be less than max_tokens")
    chat = _chat(fields) | {
        "max_tokens": fields.max_tokens,
        "stream": fields.stream,
        "stop": fields.stop_sequences or None,
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "top_k": fields.top_k,
        "user": fields.metadata and fields.metadata.user_id,
    }
    return replace(wish_of(chat, fields, told, NAMES), is_capped=True)


def read_count(values: Any) -> Asked:
    """Check the body of a count. Raises `ServeError`."""
    fields, told = _read(MessagesCountFields, values)
    return wish_of(_chat(fields), fields, told, NAMES)


def _read[T: MessagesCountFields](kind: type[T], values: Any) -> tuple[T, Told]:
    """The fields of a body, without what only Anthropic can run or read."""
    if isinstance(values, dict) and values.get("thread") is not None:
        raise wrong("thread", "is not kept by this server: send all messages", NO_THREADS)
    values, tools = take_tools(values, _TOOLS)
    values, blocks = _take_blocks(values)
    fields, told = read_body(kind, values, REFUSED, HINTS)
    return fields, told._replace(hints=(*told.hints, *tools, *blocks))


def _take_blocks(values: Any) -> tuple[Any, tuple[str, ...]]:
    """(body without blocks of Anthropic's server, their names); no message is left empty."""
    messages = values.get("messages") if isinstance(values, dict) else None
    if not isinstance(messages, list):
        return values, ()
    pairs = [take_kinds(each, "content", _BLOCKS) for each in messages]
    told = tuple({f"messages.{name}": None for _, names in pairs for name in names})
    kept = [each for each, names in pairs if each["content"] or not names] if told else messages
    return values | {"messages": kept}, told


def _chat(fields: MessagesCountFields) -> Json:
    """The fields of a chat with the same prompt."""
    system = _system(fields.system)
    messages = [{"role": "system", "content": _text_parts(system)}] if system else []
    for index, message in enumerate(fields.messages):
        messages += _turns(message, f"messages[{index}]")
    is_begun = bool(fields.messages) and fields.messages[-1].role == "assistant"
    if is_begun and "tool_calls" in messages[-1]:
        raise wrong("messages", "must not end with a call: what came of it is missing")
    config = fields.output_config or OutputConfig()
    chat: Json = {
        "model": fields.model,
        "messages": messages,
        "tools": [_tool(each) for each in fields.tools or ()] or None,
        "response_format": config.format and _format(config.format),
        "reasoning_effort": config.effort,
        "continue_final_message": is_begun or None,
    }
    return chat | _thinking(fields.thinking) | _choice(fields.tool_choice)


def _system(given: str | list[TextBlock] | None) -> str | list[TextBlock] | None:
    """What the model is told, without a line that differs with every request of Claude Code.

    With it, no prompt would be in the prefix cache.
    """
    if given is None or isinstance(given, str):
        return given
    return [each for each in given if not each.text.startswith(BILLING)]


def _turns(message: Message, place: str) -> list[Json]:
    """One message as those of a chat, where what came of a call is a message of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    allowed = {"assistant": (TextBlock, ThinkingBlock, ToolUseBlock), "system": (TextBlock,)}
    kinds = allowed.get(message.role, (TextBlock, ToolResultBlock))
    for index, block in enumerate(message.content):
        if not isinstance(block, kinds):
            kind = block.__struct_config__.tag
            raise wrong(f"{place}.content[{index}].type", f"is {kind}: not in a {message.role}'s")
    if message.role == "assistant":
        return [_assistant(message.content)]
    turns: list[Json] = []
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            turns.append(_result(block))
        elif turns and turns[-1]["role"] == message.role:
            turns[-1]["content"] += _text_parts([block])
        else:
            turns.append({"role": message.role, "content": _text_parts([block])})
    return turns


def _text_parts(content: str | Iterable[Any] | None) -> str | list[Json]:
    if content is None or isinstance(content, str):
        return content or ""
    return [{"type": "text", "text": _text(block)} for block in content]


def _text(block: TextBlock | ToolReferenceBlock) -> str:
    if isinstance(block, ToolReferenceBlock):
        return f"The tool {block.tool_name} can be called now."
    return block.text


def _result(block: ToolResultBlock) -> Json:
    turn: Json = {"role": "tool", "tool_call_id": block.tool_use_id}
    turn["content"] = _text_parts(block.content)
    return turn | ({"is_error": True} if block.is_error else {})


def _assistant(blocks: list[Any]) -> Json:
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    turn: Json = {"role": "assistant", "content": _text_parts(texts) if texts else None}
    turn |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
    return turn | ({"tool_calls": calls} if calls else {})


def _call(block: ToolUseBlock) -> Json:
    is_text = isinstance(block.input, str)
    arguments = block.input if is_text else msgspec.json.encode(block.input).decode()
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _tool(tool: AnthropicTool) -> Json:
    function: Json = {"name": tool.name, "parameters": tool.input_schema}
    for name in ("description", "strict"):
        value = getattr(tool, name)
        function |= {} if value is None else {name: value}
    return {"type": "function", "function": function}


def _choice(choice: AnthropicToolChoice | None) -> Json:
    """`tool_choice` and `parallel_tool_calls` of a chat."""
    if choice is None:
        return {}
    if (choice.type == "tool") != (choice.name is not None):
        raise wrong("tool_choice.name", "is needed with the type tool, and with no other")
    named = {"type": "function", "function": {"name": choice.name}}
    kinds = {"auto": "auto", "any": "required", "none": "none", "tool": named}
    is_parallel = False if choice.disable_parallel_tool_use else None
    return {"tool_choice": kinds[choice.type], "parallel_tool_calls": is_parallel}


def _thinking(thinking: Thinking | None) -> Json:
    """The variable by which chat templates turn thinking on and off, and the budget."""
    if thinking is None:
        return {}
    if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
        raise wrong("thinking.budget_tokens", "is needed with the type enabled, and no other")
    if thinking.budget_tokens is not None and thinking.budget_tokens < LEAST_BUDGET:
        raise wrong("thinking.budget_tokens", f"must be at least {LEAST_BUDGET}")
    return {
        "chat_template_kwargs": {"enable_thinking": thinking.type != "disabled"},
        "thinking_token_budget": thinking.budget_tokens,
    }


def _format(wanted: OutputFormat) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted.schema}}
