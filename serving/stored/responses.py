"""Responses that later ones build upon: what a body refers to is put before its input. No JAX.

A response is kept with its own input and the name of the one before it, as a document of the owner
that asked for it.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec

from serving.server.dialects.asked import wrong
from serving.server.errors import ServeError
from serving.stored.conversations import append, found, missing
from serving.stored.documents import Documents, FullError, Shelf
from serving.stored.items import items_of

logger = logging.getLogger(__name__)

PREFIX = "resp_"
REFERENCES = ("previous_response_id", "conversation")
MAX_CHAIN = 2048  # responses

Json = dict[str, Any]
Keep = Callable[[Sequence[Json]], Awaitable[None]]


async def keep_nothing(objects: Sequence[Json]) -> None:
    """Keep nothing of the objects of an answer."""


@dataclass(frozen=True)
class Exchange:
    """One request: its body with all that it refers to, and what keeps its answer.

    `keep` takes the objects of the answer's end, before anybody hears of them.
    """

    values: Any
    keep: Keep = keep_nothing
    ignored: tuple[str, ...] = ()  # fields that were hints


class Memory(Protocol):
    """What a dialect keeps between requests."""

    async def begin(self, owner: str, request_id: str, values: Any) -> Exchange:
        """One request of an owner. Raises `ServeError` for what is not there."""
        ...


def without_references(values: Json) -> Json:
    """A body of which all that it refers to has been recalled."""
    return {name: value for name, value in values.items() if name not in REFERENCES}


class NoMemory:
    """Of a dialect whose requests refer to nothing."""

    async def begin(self, owner: str, request_id: str, values: Any) -> Exchange:
        """The body as it is."""
        return Exchange(values)


class NoResponses:
    """Of a server that keeps no responses: what needs one is refused."""

    async def begin(self, owner: str, request_id: str, values: Any) -> Exchange:
        """The body as it is. Raises `ServeError` for one that refers to another."""
        if not isinstance(values, dict):
            return Exchange(values)
        for field in REFERENCES:
            if values.get(field) is not None:
                words = "needs a server that keeps responses: --store-responses SIZE"
                raise wrong(field, words, "unsupported_parameter")
        if values.get("store") is not True:
            return Exchange(values)
        return Exchange(values | {"store": False}, ignored=("store",))

    async def recalled(self, owner: str, values: Any) -> Any:
        """The body as it is. Raises `ServeError` as `begin` does."""
        await self.begin(owner, "", values)
        return values


@dataclass(frozen=True)
class _Asked:
    """What a body says of what is kept."""

    owner: str
    name: str  # of the response to come
    own: Any  # its input
    previous: str | None
    conversation: str | None
    stores: bool


class StoredResponses:
    """The responses of all owners. `most_bytes` bounds what a request may recall."""

    def __init__(self, documents: Documents, most_bytes: int):
        self._documents, self._most = documents, most_bytes

    @property
    def num_bytes(self) -> int:
        """Of all that is kept, conversations too."""
        return self._documents.num_bytes

    async def begin(self, owner: str, request_id: str, values: Any) -> Exchange:
        """The body with the items of what it refers to before its own. Raises `ServeError`."""
        if not isinstance(values, dict):
            return Exchange(values)
        asked = _asked(owner, request_id, values)

        def recall(shelf: Shelf) -> list[Json]:
            if shelf.raw(owner, asked.name) is not None:
                words = "A response with this id is kept."
                raise ServeError("duplicate", words, param="request_id")
            return self._recall(shelf, asked)

        before = await self._documents.run(recall)
        whole = values | {"store": values.get("store", True) is not False}
        return Exchange(_after(before, whole), partial(self._keep, asked))

    async def recalled(self, owner: str, values: Any) -> Any:
        """A body that is only counted, with what it refers to. Raises `ServeError`."""
        if not isinstance(values, dict):
            return values
        asked = _asked(owner, "", values)
        before = await self._documents.run(partial(self._recall, asked=asked))
        return _after(before, without_references(values))

    def _recall(self, shelf: Shelf, asked: _Asked) -> list[Json]:
        if asked.previous is not None:
            return self._chain(shelf, asked.owner, asked.previous)
        if asked.conversation is None:
            return []
        try:
            return found(shelf, asked.owner, asked.conversation)["items"]
        except ServeError as error:
            raise wrong("conversation", "is not found", error.code) from None

    def _chain(self, shelf: Shelf, owner: str, last: str) -> list[Json]:
        """The items of a response and of all before it, which count as used."""
        turns: list[list[Json]] = []
        names: list[str] = []
        num_bytes, name = 0, last
        while name is not None:
            body = shelf.raw(owner, name) if name.startswith(PREFIX) else None
            if body is None:
                words = "is not found" if name == last else f"follows {name!r}, which is gone"
                raise wrong("previous_response_id", words, "previous_response_not_found")
            num_bytes += len(body)
            if num_bytes > self._most or len(names) >= MAX_CHAIN:
                raise wrong("previous_response_id", "is of a conversation that is too long")
            kept = msgspec.json.decode(body)
            if kept["conversation"] is not None:
                words = f"is of conversation {kept['conversation']!r}: give conversation instead"
                raise wrong("previous_response_id", words)
            turns.append([*kept["input"], *kept["response"]["output"]])
            names.append(name)
            name = kept["previous"]
        shelf.touch(owner, names[::-1])
        return [item for turn in reversed(turns) for item in turn]

    async def _keep(self, asked: _Asked, objects: Sequence[Json]) -> None:
        """Keep the response, which says in `store` whether that worked; go on its conversation."""
        response = objects[-1].get("response", objects[-1])
        own = items_of(asked.own)

        def put(shelf: Shelf) -> None:
            if asked.conversation is not None:
                append(shelf, asked.owner, asked.conversation, [*own, *response["output"]])
            if asked.stores:
                kept = {"response": response, "input": own}
                kept |= {"previous": asked.previous, "conversation": asked.conversation}
                shelf.put(asked.owner, asked.name, kept)

        try:
            await self._documents.run(put)
        except (FullError, ServeError) as error:
            logger.warning("%s is not kept: %s", asked.name, error or "there is no room")
            response["store"] = False

    async def keep_ended(self, owner: str, values: Json, response: Json) -> None:
        """Keep a response that ended without an answer. Raises FullError."""
        asked = _asked(owner, response["id"].removeprefix(PREFIX), values)
        kept = {"response": response, "input": items_of(asked.own or [])}
        kept |= {"previous": asked.previous, "conversation": asked.conversation}
        await self._documents.run(lambda shelf: shelf.put(owner, response["id"], kept))

    # ------------------------------------------------------------------ what was kept

    async def get(self, owner: str, name: str) -> Json:
        """A response as it was given. Raises `ServeError` where there is none."""
        return (await self._documents.run(lambda shelf: _found(shelf, owner, name)))["response"]

    async def input_items(self, owner: str, name: str) -> list[Json]:
        """What a response was told, from the first of its chain on. Raises `ServeError`."""

        def recall(shelf: Shelf) -> list[Json]:
            kept = _found(shelf, owner, name)
            previous = kept["previous"]
            before = [] if previous is None else self._chain(shelf, owner, previous)
            return [*before, *kept["input"]]

        return await self._documents.run(recall)

    async def delete(self, owner: str, name: str) -> None:
        """Forget a response. Raises `ServeError` where there is none."""
        has_deleted = name.startswith(PREFIX) and await self._documents.erase(
            lambda shelf: shelf.delete(owner, name)
        )
        if not has_deleted:
            raise missing("response")


def _after(before: Sequence[Json], values: Json) -> Json:
    """A body with these items before its own."""
    own = values.get("input")
    if not before or not isinstance(own, str | list):
        return values
    return values | {"input": [*before, *(items_of(own) if isinstance(own, str) else own)]}


def _found(shelf: Shelf, owner: str, name: str) -> Json:
    kept = shelf.get(owner, name) if name.startswith(PREFIX) else None
    if kept is None:
        raise missing("response")
    return kept


def _asked(owner: str, request_id: str, values: Json) -> _Asked:
    """What a body says; wrong types of other fields are found by who reads it."""
    previous, conversation = values.get("previous_response_id"), values.get("conversation")
    if isinstance(conversation, dict):
        conversation = conversation.get("id", "")
    for field, value in (("previous_response_id", previous), ("conversation", conversation)):
        if value is not None and not isinstance(value, str):
            raise wrong(field, "must be text", "invalid_type")
    if previous is not None and conversation is not None:
        raise wrong("conversation", "cannot be combined with previous_response_id")
    given = values.get("request_id")
    name = f"{PREFIX}{given if isinstance(given, str) else request_id}"
    stores = values.get("store") is not False
    return _Asked(owner, name, values.get("input"), previous, conversation, stores)
