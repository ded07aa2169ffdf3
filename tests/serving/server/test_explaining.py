"""Explanations do not wait for a long step: the last one is told, one is asked for at a time."""

import asyncio
from concurrent.futures import Future

import pytest

from serving.server import explaining
from serving.server.errors import ServeError
from serving.server.explaining import Explanations


def explanations(asked: list[Future]) -> Explanations:
    def ask(function):
        asked.append(Future())
        return asked[-1]

    return Explanations(ask)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(explaining, "WHOLE_SECONDS", 0.01)
    monkeypatch.setattr(explaining, "PAGE_SECONDS", 0.01)
    monkeypatch.setattr(explaining, "MAX_AGE", 0.0)


def test_while_a_step_takes_long_the_last_one_is_told():
    async def run():
        asked: list[Future] = []
        made = explanations(asked)
        assert await made.page() is None and len(asked) == 1
        with pytest.raises(ServeError, match="A step takes long"):
            await made.whole()
        assert len(asked) == 2
        asked[0].set_result({"number": 1})
        assert await made.page() == {"number": 1}
        assert await made.page() == {"number": 1}  # the next is on its way
        assert await made.page() == {"number": 1} and len(asked) == 3
        asked[2].set_result({"number": 2})
        assert await made.page() == {"number": 2} and len(asked) == 3

    asyncio.run(run())


def test_who_comes_meanwhile_gets_the_same(monkeypatch):
    monkeypatch.setattr(explaining, "WHOLE_SECONDS", 30.0)

    async def run():
        asked: list[Future] = []
        made = explanations(asked)
        both = [asyncio.create_task(made.whole()) for _ in range(2)]
        await asyncio.sleep(0)
        asked[0].set_result({"number": 1})
        assert await asyncio.gather(*both) == [{"number": 1}] * 2 and len(asked) == 1

    asyncio.run(run())


def test_an_answer_does_for_all_who_ask_soon_after(monkeypatch):
    monkeypatch.setattr(explaining, "MAX_AGE", 1e9)

    async def run():
        asked: list[Future] = []
        made = explanations(asked)
        await made.page()
        asked[0].set_result({"number": 1})
        assert [await made.page() for _ in range(5)] == [{"number": 1}] * 5
        assert len(asked) == 1

    asyncio.run(run())


def test_what_goes_wrong_is_raised_once():
    async def run():
        asked: list[Future] = []
        made = explanations(asked)
        await made.page()
        asked[0].set_exception(ValueError("broken"))
        with pytest.raises(ValueError, match="broken"):
            await made.page()
        await made.page()
        asked[1].set_result({})
        assert await made.page() == {}

    asyncio.run(run())
