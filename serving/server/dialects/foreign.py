"""What a server of others runs itself, in the tools and in the past of a conversation. No JAX.

Beside tools of the client it is left out, and a warning names it. Raises nothing: what is left is
checked like all else.
"""

import re
from typing import Any

Json = Any


def take_tools(values: Json, foreign: re.Pattern[str]) -> tuple[Json, tuple[str, ...]]:
    """(body without tools of these types, `tools.TYPE` of them), if there are others, too."""
    rest, told = take_kinds(values, "tools", foreign)
    return (rest, told) if told and rest["tools"] else (values, ())


def take_kinds(values: Json, field: str, foreign: re.Pattern[str]) -> tuple[Json, tuple[str, ...]]:
    """(object without entries of these types in its list `field`, `field.TYPE` of them)."""
    entries = values.get(field) if isinstance(values, dict) else None
    if not isinstance(entries, list):
        return values, ()
    types = [each.get("type") if isinstance(each, dict) else None for each in entries]
    found = [isinstance(each, str) and bool(foreign.fullmatch(each)) for each in types]
    if not any(found):
        return values, ()
    kept = [entry for entry, is_foreign in zip(entries, found, strict=True) if not is_foreign]
    told = {
        f"{field}.{each}": None for each, is_foreign in zip(types, found, strict=True) if is_foreign
    }
    return values | {field: kept}, tuple(told)
