"""Fields that ask for what others do and whose answers are as good without it. No JAX.

They are taken, and a warning names them; a server with `--strict` takes them, too.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from serving.server.errors import invalid

Json = Any
MAX_CHARACTERS = 256  # of a hint
_TYPES = {bool: "bool", str: "str", int: "int", list: "array", dict: "object"}
Harmless = Mapping[str, tuple[Any, ...]]  # by path: the values that ask for nothing

# Of completions and chats: what OpenAI's clients send to OpenAI.
HINTS: Harmless = MappingProxyType(
    {
        "moderation": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in-memory", "in_memory"),
        "service_tier": ("auto", "default"),
        "session_id": (),
        "stream_interval": (1,),
        "store": (False,),
        "stream_options.include_obfuscation": (False,),
        "verbosity": ("medium",),
    }
)


def take_hints(values: Json, table: Harmless, place: str = "") -> tuple[Json, tuple[str, ...]]:
    """(values without the fields of a table, paths of those that ask for something).

    Raises `ServeError` for a value of another type than those that ask for nothing.
    """
    if not isinstance(values, dict):
        return values, ()
    told: list[str] = []
    for path, harmless in table.items():
        name, _, inner = path.partition(".")
        nested = values.get(name)
        if inner and isinstance(nested, dict):
            rest, paths = take_hints(nested, {inner: harmless}, f"{place}{name}.")
            values = values | {name: rest}
            told += paths
        elif not inner and name in values:
            if nested is not None and not is_same(nested, harmless):
                _check_type(place + name, nested, harmless)
                told.append(place + name)
            values = {each: value for each, value in values.items() if each != name}
    return values, tuple(told)


def _check_type(path: str, value: Json, harmless: tuple[Any, ...]) -> None:
    if harmless and type(value) is not type(harmless[0]):
        raise invalid(path, f"must be {_TYPES[type(harmless[0])]}", "invalid_type")
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        raise invalid(path, f"must be at most {MAX_CHARACTERS} characters")


def is_same(value: Json, harmless: tuple[Any, ...]) -> bool:
    """Whether a value is one of these; true is not 1, and false is not 0."""
    return value in [each for each in harmless if isinstance(each, bool) == isinstance(value, bool)]
