"""The messages of a chat as they come, before a template sees them. No JAX."""

from collections.abc import Mapping
from typing import Any

from serving.server.errors import invalid

MAX_CHAT_VALUES = 1 << 16  # in the messages and template variables of one request


def num_characters(value: Any) -> int:
    """Characters in the texts of plain values. Raises `ServeError` for too many values."""
    total, num_values, pending = 0, 0, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping | list):
            num_values += len(item)
            if num_values > MAX_CHAT_VALUES:
                raise invalid("messages", f"must have at most {MAX_CHAT_VALUES} values in all")
            pending += (*item.keys(), *item.values()) if isinstance(item, Mapping) else item
    return total


def with_content(message: dict[str, Any]) -> dict[str, Any]:
    """The message; what an assistant says is empty where clients send null."""
    is_empty = message.get("role") == "assistant" and message.get("content", "") is None
    return message | {"content": ""} if is_empty else message
