"""Messages of systems and developers, where the chat template has a place for them. No JAX.

Agents send several, and in the middle of a conversation. Some templates fail on those, and others
leave them out without a word.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from shiftjax.text.chat import ChatTemplate
from shiftjax.text.errors import ChatRequestError, ChatTemplateError

Json = Any
ROLES = ("system", "developer")


class SystemTurns:
    """What a template does with such messages, which is tried when it first matters."""

    def __init__(self, template: ChatTemplate | None):
        self._template = template

    def placed(self, messages: Sequence[dict[str, Json]]) -> list[dict[str, Json]]:
        """The messages, where those that the template would drop are in the first one.

        A developer is a system to a template that does not know developers.
        """
        at = [i for i, each in enumerate(messages) if each.get("role") in ROLES]
        is_plain = at in ([], [0]) and all(each.get("role") != "developer" for each in messages)
        if is_plain or not self._knows_systems:
            return [*messages]
        turns = [*messages]
        if not self._knows_developers:
            turns = [_with_role(each, "system") for each in messages]
        return turns if self._keeps(at) else _joined(turns)

    def _keeps(self, at: Sequence[int]) -> bool:
        """Whether the template writes them where they stand."""
        if len(at) < at[-1] + 1:
            return self._keeps_later
        return len(at) == 1 or self._keeps_several

    @cached_property
    def _knows_systems(self) -> bool:
        return self._shows("system", "user")

    @cached_property
    def _knows_developers(self) -> bool:
        return self._shows("developer", "user")

    @cached_property
    def _keeps_several(self) -> bool:
        return self._shows("system", "system", "user")

    @cached_property
    def _keeps_later(self) -> bool:
        return self._shows("system", "user", "system", "assistant", "user")

    def _shows(self, *roles: str) -> bool:
        """Whether the template writes what each of these roles says."""
        if self._template is None:
            return False
        said = [{"role": role, "content": f"<{i}:{role}>"} for i, role in enumerate(roles)]
        try:
            prompt = self._template.render(said, bos_token="", eos_token="")
        except (ChatRequestError, ChatTemplateError):
            return False
        return all(each["content"] in prompt for each in said)


def _with_role(message: dict[str, Json], role: str) -> dict[str, Json]:
    return message | {"role": role} if message.get("role") in ROLES else message


def _joined(messages: Iterable[dict[str, Json]]) -> list[dict[str, Json]]:
    """The messages with all of systems and developers in the first one, in their order."""
    first: list[dict[str, Json]] = []
    others: list[dict[str, Json]] = []
    for each in messages:
        (first if each.get("role") in ROLES else others).append(each)
    parts = [part for each in first for part in _parts(each.get("content"))]
    return [first[0] | {"content": parts}, *others]


def _parts(content: Json) -> list[Json]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if isinstance(content, str) else []
