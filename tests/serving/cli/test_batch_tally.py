"""How far a batch is: the window of lines in the engine, what is left, what is shown of it."""

import asyncio
import io
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from batch_kit import encoded
from kit import running_server
from rich.console import Console

from serving.cli.batch_formats import PLAIN, read_lines
from serving.cli.batch_lines import run_lines
from serving.cli.batch_progress import shown_tally
from serving.cli.batch_tally import MAX_STARTING, Tally
from serving.run import progress
from shiftjax.core.request import SamplingParams
from shiftjax.phases.resharding import ReshardingState


@dataclass
class Handle:
    """Of a request, what a tally reads."""

    num_prompt_tokens: int
    max_tokens: int | None = 10
    num_output_tokens: int = 0
    request: SimpleNamespace = field(init=False)

    def __post_init__(self):
        sampling = SamplingParams(max_tokens=self.max_tokens)
        prompt = [5] * self.num_prompt_tokens
        self.request = SimpleNamespace(prompt_token_ids=prompt, sampling=sampling)


def turn(at: float, phase: str | None = None, held: int = 0) -> SimpleNamespace:
    state = None if phase is None else ReshardingState(phase, 0, 0.0, 0, held, 100)  # pyright: ignore
    return SimpleNamespace(at=at, stats=SimpleNamespace(find=lambda kind: state))


def bring(tally: Tally, handle: Handle, num: int) -> None:
    handle.num_output_tokens += num
    tally.tokens(handle, 0, num, 0.0)


async def num_let_in(tally: Tally) -> int:
    """How many lines may begin now."""
    for number in range(1000):
        try:
            async with asyncio.timeout(0.01):
                await tally.room()
        except TimeoutError:
            return number
    raise AssertionError("there is no bound")


def test_lines_come_in_as_others_end_and_are_written():
    async def check() -> None:
        tally = Tally(100, 4)
        assert await num_let_in(tally) == 4
        for _ in range(4):
            tally.tokenized([])
        tally.line_ended([])
        assert await num_let_in(tally) == 1
        for _ in range(30):  # the first of all goes on, so nothing can be written
            tally.tokenized([])
            tally.line_ended([])
            await num_let_in(tally)
        assert tally.num_ended - tally.num_written > 12
        before = tally.num_begun
        assert await num_let_in(tally) == 0
        for _ in range(tally.num_ended):
            tally.written()
        assert await num_let_in(tally) > 0
        assert tally.num_begun > before

    asyncio.run(check())


def test_the_window_holds_as_many_prompts_as_the_host():
    async def check() -> None:
        tally, handles = Tally(1000, 4, most_tokens=500), [Handle(20)]
        assert await num_let_in(tally) == MAX_STARTING  # of more, the tokens are not known
        for _ in range(MAX_STARTING):
            tally.tokenized(handles)
        assert await num_let_in(tally) == MAX_STARTING
        for _ in range(MAX_STARTING):
            tally.tokenized(handles)
        assert await num_let_in(tally) == 0  # 640 tokens
        for _ in range(8):
            tally.line_ended(handles)
        assert await num_let_in(tally) == MAX_STARTING  # 480

    asyncio.run(check())


def test_a_tally_alone_takes_prompts_and_outputs_for_half_of_the_work_each():
    tally, handles = Tally(10, 100), [Handle(20, 10) for _ in range(5)]
    assert tally.seconds_left() is None
    for handle in handles:
        tally.tokenized([handle])
    tally.stepped(turn(100.0))
    tally.stepped(turn(106.0))
    assert (tally.prompt_tokens, tally.output_tokens) == (200, 100)
    assert tally.seconds_left() is None
    for handle in handles:
        bring(tally, handle, 1)
    assert tally.seconds_left() == pytest.approx(6 / (0.5 + 0.05) * 2 - 6)
    for handle in handles:
        bring(tally, handle, 3)
        tally.ended(handle, 0.0)  # sooner than it might
    assert tally.output_tokens == 40
    assert tally.seconds_left() == pytest.approx(6.0)
    assert "5 of 10" not in tally.words()


def test_each_phase_goes_on_at_its_own_rate():
    tally, handles = Tally(10, 100), [Handle(20, 10) for _ in range(5)]
    for handle in handles:
        tally.tokenized([handle])
    tally.stepped(turn(0.0, "prefill"))
    for handle in handles:
        bring(tally, handle, 1)
    tally.stepped(turn(8.0, "prefill", held=50))
    assert tally.seconds_left() is None  # nobody knows how long decodes take
    assert tally.where() == "prefill, host memory 50% full"
    tally.stepped(turn(10.0, "decode"))
    for handle in handles:
        bring(tally, handle, 4)
    tally.stepped(turn(12.0, "decode"))
    prompts, decodes = 8.0, 4.0 * (100 - 25) / 20
    assert tally.seconds_left() == pytest.approx(prompts + decodes)
    told = "decode, host memory 0% full: 0 of 10 lines, 100 of 200 prompt tokens, 25 of 100 output"
    assert tally.words() == f"{told} tokens, 12 s so far, about 23 s left"


def test_what_is_said_at_a_terminal_and_elsewhere(monkeypatch, capsys):
    tally = Tally(3, 4)
    monkeypatch.setattr(progress, "is_watched", lambda console: console.is_terminal)
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    for console in (screen, Console(file=io.StringIO())):
        with shown_tally(tally, console):
            tally.tokenized([Handle(20)])
            tally.stepped(turn(0.0, "decode", held=25))
            monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
            tally.written()
    bar = screen.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "decode, host memory 25% full" in bar
    assert "1/3 lines" in bar
    *_, said = capsys.readouterr().err.splitlines()
    assert said.startswith("decode, host memory 25% full: 2 of 3 lines, 0 of 60 prompt tokens")


def test_a_tally_agrees_with_what_a_server_did():
    bodies = [{"prompt": "x" * n, "n": 1 + n % 2, "max_tokens": 4} for n in range(1, 9)]
    lines = read_lines(encoded(*bodies, {"prompt": ""}, {}), PLAIN)
    tally = Tally(len(lines), 3)

    async def collect(service) -> list[dict]:
        return [record async for record in run_lines(service, lines, tally, PLAIN)]

    with running_server() as server:
        server.on_loop(watch(server.engine, tally))
        records = server.on_loop(collect(server.service))
    used = [record.get("usage", {}) for record in records]
    assert tally.num_computed_tokens == sum(each.get("prompt_tokens", 0) for each in used)
    assert tally.num_generated_tokens == sum(each.get("completion_tokens", 0) for each in used)
    assert tally.prompt_tokens == tally.num_computed_tokens
    assert tally.output_tokens == tally.num_generated_tokens
    assert (tally.num_begun, tally.num_ended, tally.num_written) == (10, 10, 10)
    assert tally.seconds_left() == 0.0


async def watch(engine, tally: Tally) -> None:
    engine._observers = (*engine._observers, tally)
