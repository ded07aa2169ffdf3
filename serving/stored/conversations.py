"""Conversations: lists of items that responses go on with, each a document of its owner. No JAX."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from serving.server.errors import ServeError
from serving.stored.documents import Documents, Shelf
from serving.stored.items import items_of

PREFIX = "conv_"
MAX_ITEMS = 4096  # of a conversation, as of a body

Json = dict[str, Any]


class Conversations:
    """The conversations of all owners. Raises `ServeError` for one that is not there."""

    def __init__(self, documents: Documents):
        self._documents = documents

    async def create(self, owner: str, items: Sequence[Json], metadata: Json) -> Json:
        """What a new conversation is. Raises `ServeError` where it has no room."""
        about = {
            "id": f"{PREFIX}{uuid.uuid4().hex}",
            "object": "conversation",
            "created_at": int(time.time()),
            "metadata": metadata,
        }
        document = {"conversation": about, "items": items_of(items)}
        await self._documents.change(lambda shelf: shelf.put(owner, about["id"], document))
        return about

    async def get(self, owner: str, name: str) -> Json:
        """`conversation`, which is what it is, and `items`."""
        return await self._documents.run(lambda shelf: found(shelf, owner, name))

    async def describe(self, owner: str, name: str, metadata: Json) -> Json:
        """What a conversation is with other metadata."""

        def change(shelf: Shelf) -> Json:
            document = found(shelf, owner, name)
            document["conversation"]["metadata"] = metadata
            shelf.put(owner, name, document)
            return document["conversation"]

        return await self._documents.change(change)

    async def add(self, owner: str, name: str, items: Sequence[Json]) -> list[Json]:
        """Items that have come to the end of a conversation."""
        added = items_of(items)
        await self._documents.change(lambda shelf: append(shelf, owner, name, added))
        return added

    async def remove(self, owner: str, name: str, item: str) -> Json:
        """What a conversation is without an item."""

        def change(shelf: Shelf) -> Json:
            document = found(shelf, owner, name)
            left = [each for each in document["items"] if each["id"] != item]
            if len(left) == len(document["items"]):
                raise missing("item")
            shelf.put(owner, name, document | {"items": left})
            return document["conversation"]

        return await self._documents.change(change)

    async def delete(self, owner: str, name: str) -> None:
        """Forget a conversation; responses that went on with it stay."""
        has_deleted = name.startswith(PREFIX) and await self._documents.erase(
            lambda shelf: shelf.delete(owner, name)
        )
        if not has_deleted:
            raise missing("conversation")


def found(shelf: Shelf, owner: str, name: str) -> Json:
    """A conversation as it is kept, which counts as used. Raises `ServeError`."""
    document = shelf.get(owner, name) if name.startswith(PREFIX) else None
    if document is None:
        raise missing("conversation")
    shelf.touch(owner, [name])
    return document


def append(shelf: Shelf, owner: str, name: str, items: Sequence[Json]) -> None:
    """Add items to a conversation. Raises `ServeError` for one too many."""
    document = found(shelf, owner, name)
    document["items"] += items
    if len(document["items"]) > MAX_ITEMS:
        raise ServeError("invalid", f"A conversation has at most {MAX_ITEMS} items.")
    shelf.put(owner, name, document)


def missing(what: str) -> ServeError:
    """The error for an id that the owner has nothing of."""
    return ServeError("not_found", f"There is no such {what}.", code=f"{what}_not_found")
