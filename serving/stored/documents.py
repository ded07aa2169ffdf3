"""Documents of clients in one SQLite database, in memory or in a file, bounded in bytes. No JAX.

A document is JSON under an owner and an id; an owner sees its own alone. The database has a thread,
on which every transaction runs: whole, or not at all. Where there is no room, the document goes
that has been unused longest, of the owner that holds most: others do not push out mine.
"""

import asyncio
import hashlib
import logging
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec

from serving.server.errors import ServeError
from serving.server.quotas import CALLER
from shiftjax.options import ConfigError

logger = logging.getLogger(__name__)

ROW_BYTES = 256  # of a document beside its body: about what the database adds
_SCHEMA = """
CREATE TABLE IF NOT EXISTS documents(
    owner TEXT NOT NULL, id TEXT NOT NULL, used INTEGER NOT NULL, size INTEGER NOT NULL,
    body BLOB NOT NULL, PRIMARY KEY(owner, id)
);
CREATE INDEX IF NOT EXISTS by_use ON documents(owner, used);
"""

Json = dict[str, Any]


class FullError(Exception):
    """There is no room on the disk."""


class TooBigError(FullError):
    """A document is larger than all that may be kept."""


ON_BEHALF: ContextVar[str | None] = ContextVar("on_behalf", default=None)
"""The owner for whom the current task asks, when no client waits for it."""


def owner_now() -> str:
    """Whose documents the current task may see: those of its API key, which it does not tell."""
    key = CALLER.get().key or b""
    owner = hashlib.blake2b(key, digest_size=16, person=b"shiftjax-owner").hexdigest()
    return ON_BEHALF.get() or owner


class Shelf:
    """The documents, for functions that run in a transaction."""

    def __init__(self, connection: sqlite3.Connection, most_bytes: int | None):
        self._connection, self._most = connection, most_bytes
        self.num_bytes: Counter[str] = Counter()  # by owner
        self._clock = 0
        self.reload()

    def reload(self) -> None:
        """Count anew what is there."""
        rows = self._ask("SELECT owner, sum(size), max(used) FROM documents GROUP BY owner")
        self.num_bytes = Counter({owner: size for owner, size, _ in rows})
        self._clock = max((used for *_, used in rows), default=0)

    def _ask(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._connection.execute(query, values).fetchall()

    def raw(self, owner: str, name: str) -> bytes | None:
        """The JSON of a document; None: the owner has none of this name."""
        rows = self._ask("SELECT body FROM documents WHERE owner = ? AND id = ?", owner, name)
        return rows[0][0] if rows else None

    def get(self, owner: str, name: str) -> Json | None:
        """A document; None: the owner has none of this name."""
        body = self.raw(owner, name)
        return None if body is None else msgspec.json.decode(body)

    def all(self, owner: str | None, prefix: str) -> list[tuple[str, Json]]:
        """(owner, document) of all whose names begin so, in order of their last use."""
        whose, values = ("owner = ? AND ", (owner,)) if owner is not None else ("", ())
        query = f"SELECT owner, body FROM documents WHERE {whose} substr(id, 1, ?) = ?"
        rows = self._ask(f"{query} ORDER BY used", *values, len(prefix), prefix)
        return [(each, msgspec.json.decode(body)) for each, body in rows]

    def put(self, owner: str, name: str, document: Json) -> None:
        """Keep a document, in the place of what has its name. Raises TooBigError."""
        body = msgspec.json.encode(document)
        size = len(body) + ROW_BYTES
        if self._most is not None and size > self._most:
            raise TooBigError
        self.delete(owner, name)
        self._make_room(size)
        self._clock += 1
        values = (owner, name, self._clock, size, body)
        self._ask(
            "INSERT INTO documents(owner, id, used, size, body) VALUES(?, ?, ?, ?, ?)", *values
        )
        self.num_bytes[owner] += size

    def _make_room(self, size: int) -> None:
        while self._most is not None and self.num_bytes.total() + size > self._most:
            (owner, _), *_ = self.num_bytes.most_common(1)
            rows = self._ask(
                "SELECT id FROM documents WHERE owner = ? ORDER BY used LIMIT 1", owner
            )
            self.delete(owner, rows[0][0])

    def delete(self, owner: str, name: str) -> bool:
        """Forget a document; False: there is none."""
        query = "DELETE FROM documents WHERE owner = ? AND id = ? RETURNING size"
        rows = self._ask(query, owner, name)
        for (size,) in rows:
            self.num_bytes[owner] -= size
        return bool(rows)

    def touch(self, owner: str, names: Sequence[str]) -> None:
        """Note that documents are in use; the last is the one that is forgotten last.

        On a disk that is full they can be read nevertheless.
        """
        for name in names:
            self._clock += 1
            query = "UPDATE documents SET used = ? WHERE owner = ? AND id = ?"
            try:
                self._ask(query, self._clock, owner, name)
            except sqlite3.Error as error:
                if not _is_full(error):
                    raise
                return


class Documents:
    """The database and its thread. Raises ConfigError for a file that cannot be used."""

    def __init__(self, path: Path | None, most_bytes: int | None):
        self._connection = _open(path)
        self._shelf = Shelf(self._connection, most_bytes)
        self.num_bytes = self._shelf.num_bytes.total()  # for any thread
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="documents")

    async def run[T](self, function: Callable[[Shelf], T]) -> T:
        """What a function of the shelf returns; all that it changes, or nothing, is kept.

        Raises what the function raises, FullError for a disk that is full, and `ServeError` for a
        database that cannot be read.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._transact, function)

    def _transact[T](self, function: Callable[[Shelf], T]) -> T:
        try:
            with self._connection:
                value = function(self._shelf)
            self.num_bytes = self._shelf.num_bytes.total()
            return value
        except sqlite3.Error as error:
            self._recover()
            logger.error("the store fails: %s", error)
            if _is_full(error):
                raise FullError from None
            raise _unreadable() from None
        except msgspec.MsgspecError:
            self._recover()
            logger.error("the store fails: a document is no JSON")
            raise _unreadable() from None
        except Exception:
            self._recover()
            raise

    def _recover(self) -> None:
        with suppress(sqlite3.Error):
            self._shelf.reload()

    async def change[T](self, function: Callable[[Shelf], T]) -> T:
        """The same for clients: it raises `ServeError` also where there is no room."""
        try:
            return await self.run(function)
        except TooBigError:
            words = "There is no room for this: it is larger than the store."
            raise ServeError("too_large", words) from None
        except FullError:
            raise no_room() from None

    async def erase(self, function: Callable[[Shelf], bool]) -> bool:
        """The same for what deletes: afterwards the text is in no file any more."""
        has_deleted = await self.change(function)
        if has_deleted:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._checkpoint)
        return has_deleted

    def _checkpoint(self) -> None:
        with suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    async def close(self) -> None:
        """Finish what runs, and close the file."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown()


def no_room() -> ServeError:
    """The error for a disk that is full."""
    return ServeError("busy", "There is no room on the server's disk.", code="storage_full")


def _is_full(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL


def _unreadable() -> ServeError:
    return ServeError("internal", "What was kept cannot be read.", code="store_failed")


def _open(path: Path | None) -> sqlite3.Connection:
    try:
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600))
        name = ":memory:" if path is None else str(path)
        connection = sqlite3.connect(name, timeout=0.5, check_same_thread=False)
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from None
    try:
        # One process at a time; what is deleted is overwritten; a kill loses nothing.
        for pragma in ("locking_mode = EXCLUSIVE", "secure_delete = ON", "journal_mode = WAL"):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint = 256").fetchall()  # pages: a mebibyte
        connection.executescript(_SCHEMA)
        connection.execute("BEGIN IMMEDIATE")
        connection.commit()
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        connection.close()
        is_locked = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
        words = "another server uses it" if is_locked else f"{error}; move it away"
        raise ConfigError([f"{path}: {words}"]) from None
    if found != "ok":
        connection.close()
        raise ConfigError([f"{path}: damaged ({found}); move it away"])
    return connection
