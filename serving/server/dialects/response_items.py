"""The items of OpenAI's Responses, which are a conversation, as the messages of a chat. No JAX."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from serving.server.dialects.asked import Json
from serving.server.dialects.namespaces import joined


class _Part(msgspec.Struct, tag_field="type", kw_only=True):
    """A part of a message."""


class InputText(_Part, tag="input_text"):
    """A text that came in."""

    text: str
    prompt_cache_breakpoint: Json | None = None


class OutputText(_Part, tag="output_text"):
    """A text that went out."""

    text: str
    annotations: list[Json] | None = None
    logprobs: list[Json] | None = None


class Refusal(_Part, tag="refusal"):
    """An answer that was refused; it is text like any other here."""

    refusal: str


class ReasoningText(_Part, tag="reasoning_text"):
    """What the model thought."""

    text: str


class SummaryText(_Part, tag="summary_text"):
    """What it thought, in short; not read: the template has the thoughts, or nothing."""

    text: str


class _Item(msgspec.Struct, tag_field="type", kw_only=True):
    """A part of a conversation; `id` and `status` are those of an earlier response."""

    id: str | None = None
    status: str | None = None


class MessageItem(_Item, tag="message"):
    """One turn; the type may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | Refusal]
    phase: str | None = None


class CallItem(_Item, tag="function_call"):
    """A call that the model made."""

    call_id: str
    name: str
    arguments: str
    caller: Json | None = None
    namespace: str | None = None


class CallOutputItem(_Item, tag="function_call_output"):
    """What came of a call."""

    call_id: str
    output: str | list[InputText]
    name: str | None = None
    caller: Json | None = None
    namespace: str | None = None


class CustomCallItem(_Item, tag="custom_tool_call"):
    """A call of a tool that takes a text."""

    call_id: str
    name: str
    input: str
    caller: Json | None = None
    namespace: str | None = None


class CustomCallOutputItem(CallOutputItem, tag="custom_tool_call_output"):
    """What came of it."""


class ReasoningItem(_Item, tag="reasoning"):
    """What the model thought before a message or a call."""

    summary: list[SummaryText]
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


Item = (
    MessageItem | CallItem | CallOutputItem | CustomCallItem | CustomCallOutputItem | ReasoningItem
)


def turns_of(instructions: str | None, given: str | list[Item]) -> list[Json]:
    """The messages of a chat with the same instructions and items."""
    turns: list[Json] = []
    if instructions is not None:
        turns.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*turns, {"role": "user", "content": given}]
    for item in given:
        _ADD[type(item)](turns, item)
    return turns


def _add_message(turns: list[Json], item: MessageItem) -> None:
    content: Any = item.content
    if not isinstance(content, str):
        texts = (p.refusal if isinstance(p, Refusal) else p.text for p in content)
        content = [{"type": "text", "text": text} for text in texts]
    if item.role == "assistant":
        _said(turns)["content"] = content
    else:
        turns.append({"role": item.role, "content": content})


def _add_call(turns: list[Json], item: CallItem) -> None:
    function = {"name": joined(item.namespace, item.name), "arguments": item.arguments}
    call = {"id": item.call_id, "type": "function", "function": function}
    is_same = bool(turns) and turns[-1]["role"] == "assistant"
    turn = turns[-1] if is_same else _said(turns)
    turn.setdefault("tool_calls", []).append(call)


def _add_custom_call(turns: list[Json], item: CustomCallItem) -> None:
    arguments = msgspec.json.encode({"input": item.input}).decode()
    names = {"name": item.name, "namespace": item.namespace}
    _add_call(turns, CallItem(call_id=item.call_id, arguments=arguments, **names))


def _add_output(turns: list[Json], item: CallOutputItem) -> None:
    output: Any = item.output
    if not isinstance(output, str):
        output = [{"type": "text", "text": part.text} for part in output]
    turns.append({"role": "tool", "tool_call_id": item.call_id, "content": output})


def _add_reasoning(turns: list[Json], item: ReasoningItem) -> None:
    if item.content:
        text = "".join(part.text for part in item.content)
        turns.append({"role": "assistant", "content": None, "reasoning_content": text})


def _said(turns: list[Json]) -> Json:
    """The turn of the assistant that begins, or has begun with what it thought."""
    last = turns[-1] if turns else {}
    if last.get("role") == "assistant" and last["content"] is None and "tool_calls" not in last:
        return last
    turns.append({"role": "assistant", "content": None})
    return turns[-1]


_ADD: Mapping[type, Callable[[list[Json], Any], None]] = MappingProxyType(
    {
        MessageItem: _add_message,
        CallItem: _add_call,
        CallOutputItem: _add_output,
        CustomCallItem: _add_custom_call,
        CustomCallOutputItem: _add_output,
        ReasoningItem: _add_reasoning,
    }
)
