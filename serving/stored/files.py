"""Files of clients in a folder: bounded, by owner, their names of our making alone. No JAX."""

import asyncio
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving.server.errors import ServeError
from serving.stored.conversations import missing
from serving.stored.documents import Documents, Shelf, no_room

PREFIX = "file-"
MAX_FILES = 10_000  # of an owner

Json = dict[str, Any]


class Files:
    """What is kept of each file is a document; its bytes are a file of its id.

    `most_bytes` is how much an owner may keep; what batches write is not refused for it. Methods
    raise `ServeError` for a file that the owner has not.
    """

    def __init__(self, folder: Path, documents: Documents, most_bytes: int):
        self._folder, self._documents, self._most = folder / "content", documents, most_bytes
        self._incoming = folder / "incoming"
        for each in (self._folder, self._incoming):
            each.mkdir(mode=0o700, exist_ok=True)

    async def tidy(self) -> None:
        """Remove what uploads that were cut have left, and bytes that no document knows."""
        documents = await self._documents.run(lambda shelf: shelf.all(None, PREFIX))
        known = {document["file"]["id"] for _, document in documents}
        for path in (*self._incoming.iterdir(), *self._folder.iterdir()):
            if path.parent == self._incoming or path.name not in known:
                path.unlink(missing_ok=True)

    def incoming(self) -> Path:
        """A new name for the bytes of an upload."""
        return self._incoming / uuid.uuid4().hex

    def path(self, name: str) -> Path:
        """Where the bytes of a file are. `name` is an id that a document has, not a client's."""
        return self._folder / name

    async def check_room(self, owner: str, num_bytes: int) -> None:
        """Refuse with `ServeError` a file that the owner has no room for."""
        await self._documents.run(lambda shelf: self._check(shelf, owner, num_bytes))

    def _check(self, shelf: Shelf, owner: str, num_bytes: int) -> None:
        sizes = [document["file"]["bytes"] for _, document in shelf.all(owner, PREFIX)]
        if sum(sizes) + num_bytes > self._most or len(sizes) >= MAX_FILES:
            words = f"The files of a key may have {self._most} bytes, and be {MAX_FILES}."
            raise ServeError("too_large", words, code="files_quota_exceeded", param="file")

    async def add(self, owner: str, incoming: Path, filename: str, purpose: str) -> Json:
        """The file that an upload has become."""
        about = _about(filename, purpose, incoming.stat().st_size)

        def put(shelf: Shelf) -> None:
            self._check(shelf, owner, about["bytes"])
            _sync(incoming)
            os.replace(incoming, self.path(about["id"]))
            shelf.put(owner, about["id"], {"file": about, "at": time.time_ns(), "is_open": False})

        await self._run(put)
        return about

    async def open_output(self, owner: str, filename: str) -> str:
        """The id of a file that a batch writes; until `close_output` nobody sees it."""
        about = _about(filename, "batch_output", 0)
        document = {"file": about, "at": time.time_ns(), "is_open": True}
        await self._run(lambda shelf: shelf.put(owner, about["id"], document))
        return about["id"]

    async def close_output(self, owner: str, name: str) -> bool:
        """The batch has ended: show what it wrote. False: that is nothing, and the file goes."""
        path = self.path(name)

        def put(shelf: Shelf) -> bool:
            document = shelf.get(owner, name)
            if document is None:
                return False
            size = path.stat().st_size if path.exists() else 0
            if not size:
                shelf.delete(owner, name)
                path.unlink(missing_ok=True)
                return False
            document["file"]["bytes"] = size
            shelf.put(owner, name, document | {"is_open": False})
            return True

        return await self._run(put)

    async def get(self, owner: str, name: str) -> Json:
        """What a file is."""
        return await self._documents.run(lambda shelf: found(shelf, owner, name))

    async def all(self, owner: str, purpose: str | None) -> list[Json]:
        """All files of an owner, of a purpose, in the order in which they came."""
        documents = await self._documents.run(lambda shelf: shelf.all(owner, PREFIX))
        shown = (each for _, each in documents if not each["is_open"])
        files = [each["file"] for each in sorted(shown, key=lambda each: each["at"])]
        return [each for each in files if purpose in (None, each["purpose"])]

    async def delete(self, owner: str, name: str, check: Callable[[Shelf], None]) -> None:
        """Forget a file, unless `check` raises."""

        def delete(shelf: Shelf) -> bool:
            found(shelf, owner, name)
            check(shelf)
            self.path(name).unlink(missing_ok=True)
            return shelf.delete(owner, name)

        await self._documents.erase(delete)

    async def _run[T](self, function: Callable[[Shelf], T]) -> T:
        try:
            return await self._documents.change(function)
        except OSError:
            raise no_room() from None


def found(shelf: Shelf, owner: str, name: str) -> Json:
    """What a file is. Raises `ServeError` where the owner has none of this id."""
    document = shelf.get(owner, name) if name.startswith(PREFIX) else None
    if document is None or document["is_open"]:
        raise missing("file")
    return document["file"]


async def remove(path: Path) -> None:
    """Delete a file that may not be there."""
    await asyncio.to_thread(path.unlink, missing_ok=True)


def _about(filename: str, purpose: str, num_bytes: int) -> Json:
    return {
        "id": f"{PREFIX}{uuid.uuid4().hex}",
        "object": "file",
        "bytes": num_bytes,
        "created_at": int(time.time()),
        "expires_at": None,
        "filename": filename,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
    }


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
