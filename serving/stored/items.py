"""The items of a conversation as clients read them back: with an id, a type and a state. No JAX."""

import uuid
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from serving.server.errors import ServeError, invalid

Json = dict[str, Any]

PREFIXES = MappingProxyType(
    {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
)
LIMIT, MAX_LIMIT = 20, 100  # items in one answer


def items_of(given: str | Sequence[Json]) -> list[Json]:
    """The items of an input that has been checked."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_item(each) for each in given]


def _item(given: Json) -> Json:
    kind = given.get("type", "message")
    name = given.get("id") or f"{PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}"
    item = given | {"id": name, "type": kind, "status": given.get("status") or "completed"}
    content = given.get("content")
    if kind == "message" and isinstance(content, str):
        part = "output_text" if given["role"] == "assistant" else "input_text"
        extra: Json = {"annotations": [], "logprobs": []} if part == "output_text" else {}
        item["content"] = [{"type": part, "text": content, **extra}]
    return item


def page(items: Sequence[Json], query: Mapping[str, str], most: int = MAX_LIMIT) -> Json:
    """A part of a list, by the query's `limit`, `order` and `after`. Raises `ServeError`."""
    text, order = query.get("limit", str(LIMIT)), query.get("order", "desc")
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= most):
        raise invalid("limit", f"must be between 1 and {most}")
    if order not in ("asc", "desc"):
        raise invalid("order", "must be asc or desc")
    found = list(items) if order == "asc" else list(reversed(items))
    after = query.get("after")
    if after is not None:
        names = [each["id"] for each in found]
        if after not in names:
            raise ServeError("not_found", "There is nothing with the id of after.", param="after")
        found = found[names.index(after) + 1 :]
    shown = found[: int(text)]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(found) > len(shown),
    }
