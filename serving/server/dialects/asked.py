"""What the dialects share: a body becomes the fields of a chat, and is kept beside. No JAX."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from serving.server.errors import ServeError, Violation
from serving.server.fields import sampling_fields
from serving.server.hints import Harmless, take_hints
from serving.server.json_body import read
from serving.server.schema import Wish, read_chat
from shiftjax.core.sampling_params import DIALECTS

Json = dict[str, Any]


class Extras(sampling_fields(DIALECTS), kw_only=True):
    """Fields of our chats that no dialect has by another name; they mean what they mean there."""

    priority: int | None = None
    min_width: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    timeline: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Asked(Wish):
    """A chat's wish, and the body of the dialect that it came from."""

    body: Any


class OwnFieldError(ServeError):
    """An error that has the dialect's name of a field already."""


def wrong(field: str, description: str, code: str | None = None) -> OwnFieldError:
    """The error for one of the dialect's fields; the message is `field description`."""
    violations = [Violation(field, description)]
    return OwnFieldError("invalid", f"{field} {description}", code=code, violations=violations)


class Told(NamedTuple):
    """Names of fields that a client is told of."""

    unknown: tuple[str, ...]  # to everybody
    hints: tuple[str, ...]  # without effect here


def read_body[T: msgspec.Struct](
    kind: type[T], values: Any, refused: Harmless, hints: Harmless
) -> tuple[T, Told]:
    """(fields, names to tell of). Raises `ServeError`.

    `refused` and `hints` are fields that the API has and this server has not, with the values that
    ask for nothing.
    """
    told: tuple[str, ...] = ()
    if isinstance(values, dict):
        for name, harmless in refused.items():
            value = values.get(name)
            same = [each for each in harmless if type(each) is type(value)]
            if value is not None and value not in same:
                raise wrong(name, "is not supported by this server", "unsupported_parameter")
        values = {name: value for name, value in values.items() if name not in refused}
        values, told = take_hints(values, hints)
    try:
        fields, unknown = read(kind, values)
    except ServeError as error:
        raise _plainer(error) from None
    return fields, Told(unknown, told)


def _plainer(error: ServeError) -> ServeError:
    """The same of the dialect's fields; a value that nobody knows is told in our words."""
    for field, words in error.violations:
        found = re.fullmatch(r"Invalid (?:enum )?value '(.*)'", words, re.DOTALL)
        unknown = f"is {found[1]!r}, which this server does not know" if found else None
        return wrong(field, unknown or words, error.code)
    return error


def wish_of(chat: Json, body: Extras, told: Told, names: Mapping[str, str]) -> Asked:
    """The wish of a chat whose fields, where None, were not given. `names` as in `renamed`."""
    extras = {name: getattr(body, name) for name in Extras.__struct_fields__}
    chat |= {name: value for name, value in extras.items() if value is not None}
    wish = read_chat({name: value for name, value in chat.items() if value is not None})
    parts: Json = {each.name: getattr(wish, each.name) for each in dataclasses.fields(wish)}
    parts |= told._asdict() | {"effort_name": names["reasoning_effort"]}
    return Asked(**parts, body=body)


def renamed(error: ServeError, names: Mapping[str, str]) -> ServeError:
    """The same error with the names that a dialect has for fields of a chat."""
    if isinstance(error, OwnFieldError):
        return error

    def own(text: str) -> str:
        # The messages of a chat are counted otherwise, and its functions are nested.
        text = re.sub(r"^messages\[\d+\]\.?", "messages ", text).strip()
        text = re.sub(r"^(tools\[\d+\]|tool_choice)\.(function|allowed_tools)\b", r"\1", text)
        text = re.sub(r"(?<=\]\.)parameters\b", lambda found: names.get(found[0], found[0]), text)
        return re.sub(r"^\w+|\b\w+_\w+\b", lambda found: names.get(found[0], found[0]), text)

    violations = [Violation(own(field).split(" ")[0], words) for field, words in error.violations]
    return ServeError(
        error.kind_name,
        own(error.message),
        param=error.param and own(error.param).split(" ")[0],
        code=error.code,
        violations=violations,
    )
