"""Documents by owner: bounded, whole or not at all, over restarts, and out of damaged files."""

import asyncio
import sqlite3

import pytest

from serving.server.errors import ServeError
from serving.stored.documents import ROW_BYTES, Documents, FullError
from shiftjax.options import ConfigError

ROOM = 4 * (ROW_BYTES + 1000)


def with_documents(path, function, most=ROOM):
    """What a coroutine function of open documents returns."""

    async def main():
        documents = Documents(path, most)
        try:
            return await function(documents)
        finally:
            await documents.close()

    return asyncio.run(main())


def names(documents, owner: str, *wanted: str):
    return documents.run(lambda shelf: [n for n in wanted if shelf.raw(owner, n) is not None])


def put(documents, owner: str, name: str, num_bytes: int = 900):
    return documents.run(lambda shelf: shelf.put(owner, name, {"text": "x" * num_bytes}))


def test_an_owner_sees_its_own_alone():
    async def check(documents):
        await put(documents, "a", "one")
        assert await names(documents, "b", "one") == []
        assert not await documents.erase(lambda shelf: shelf.delete("b", "one"))
        assert await names(documents, "a", "one") == ["one"]

    with_documents(None, check)


def test_the_longest_unused_goes_first():
    async def check(documents):
        for name in "abcd":
            await put(documents, "me", name)
        await documents.run(lambda shelf: shelf.touch("me", ["a"]))
        await put(documents, "me", "e")
        assert await names(documents, "me", *"abcde") == [*"acde"]
        return await documents.run(lambda shelf: shelf.num_bytes.total())

    assert with_documents(None, check) <= ROOM


def test_who_holds_most_pushes_out_its_own():
    async def check(documents):
        await put(documents, "a quiet one", "old")
        for number in range(20):
            await put(documents, "loud", f"n{number}")
        assert await names(documents, "a quiet one", "old") == ["old"]

    with_documents(None, check)


def test_what_is_larger_than_all_is_refused_and_harms_nothing():
    async def check(documents):
        await put(documents, "me", "a")
        with pytest.raises(FullError):
            await put(documents, "me", "a", 2 * ROOM)
        assert await names(documents, "me", "a") == ["a"]

    with_documents(None, check)


def test_a_function_that_fails_changes_nothing():
    async def check(documents):
        await put(documents, "me", "a")

        def fail(shelf):
            shelf.delete("me", "a")
            raise ValueError

        with pytest.raises(ValueError):
            await documents.run(fail)
        assert await names(documents, "me", "a") == ["a"]
        return await documents.run(lambda shelf: shelf.num_bytes["me"])

    assert with_documents(None, check) > 900


def test_a_restart_keeps_order_and_sizes(tmp_path):
    path = tmp_path / "new" / "folder" / "kept.db"

    async def fill(documents):
        for name in "abcd":
            await put(documents, "me", name)

    async def check(documents):
        await put(documents, "me", "e")
        return await names(documents, "me", *"abcde")

    with_documents(path, fill)
    assert with_documents(path, check) == [*"bcde"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_what_was_deleted_is_in_no_file(tmp_path):
    async def check(documents):
        await documents.run(lambda shelf: shelf.put("me", "a", {"text": "a-secret-text"}))
        files = [each.read_bytes() for each in tmp_path.iterdir()]
        assert any(b"a-secret-text" in each for each in files)
        assert await documents.erase(lambda shelf: shelf.delete("me", "a"))
        assert not any(b"a-secret-text" in each.read_bytes() for each in tmp_path.iterdir())

    with_documents(tmp_path / "kept.db", check)


def test_one_server_at_a_time(tmp_path):
    async def check(documents):
        with pytest.raises(ConfigError, match="another server uses it"):
            Documents(tmp_path / "kept.db", ROOM)

    with_documents(tmp_path / "kept.db", check)


@pytest.mark.parametrize("content", [b"no database", b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_damaged_file_is_named_and_left_alone(tmp_path, content):
    path = tmp_path / "kept.db"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"kept\.db: .*move it away"):
        Documents(path, ROOM)
    assert path.read_bytes() == content


def test_damage_within_a_file_is_found_at_the_start(tmp_path):
    path = tmp_path / "kept.db"

    async def fill(documents):
        for number in range(40):
            await put(documents, "me", f"n{number}", 3000)

    with_documents(path, fill, 1 << 20)
    data = bytearray(path.read_bytes())
    data[8192:12288] = b"\xff" * 4096
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"kept\.db: "):
        Documents(path, ROOM)


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "kept.db").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError):
        Documents(tmp_path / "kept.db", ROOM)
    assert not (tmp_path / "elsewhere").exists()


def test_a_disk_that_is_full_and_then_is_not(tmp_path):
    """SQLite says of a full disk what it says of a full database."""

    def limit(num_pages):
        return lambda shelf: shelf._ask(f"PRAGMA max_page_count = {num_pages}")

    async def check(documents):
        await put(documents, "me", "a")
        await documents.run(limit(1))
        with pytest.raises(FullError):
            await put(documents, "me", "b", 100_000)
        assert await names(documents, "me", "a", "b") == ["a"]
        await documents.run(limit(1 << 20))
        await put(documents, "me", "b", 100_000)
        return await names(documents, "me", "a", "b")

    assert with_documents(tmp_path / "kept.db", check, 1 << 20) == ["a", "b"]


def test_a_document_that_is_no_json_is_an_error_of_the_server(tmp_path):
    path = tmp_path / "kept.db"
    with_documents(path, lambda documents: put(documents, "me", "a"))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE documents SET body = x'7b7b'")
    connection.close()

    async def check(documents):
        with pytest.raises(ServeError, match="cannot be read"):
            await documents.run(lambda shelf: shelf.get("me", "a"))

    with_documents(path, check)
