"""What the tests of the server share: engines over echo runners, and a server that is real."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import httpx
from in_thread import InThread, server_in_thread
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import AddedToken

from serving.cli.main import main
from serving.server.async_engine import AsyncEngine
from serving.server.kv_events import KvEvents
from serving.server.served import ServedModel
from serving.server.service import Service
from serving.traces.plug import plug_traces
from shiftjax.adapters.pool import AdapterPool
from shiftjax.core.engine import Engine
from shiftjax.core.lane import Lane
from shiftjax.core.limits import RequestLimits
from shiftjax.core.policies import make_policy
from shiftjax.core.scheduler import Scheduler
from shiftjax.core.scheduler_config import SchedulerConfig
from shiftjax.draft_options import DraftOptions
from shiftjax.drafts.drafting import Drafting
from shiftjax.drafts.prices import Prices
from shiftjax.drafts.speculation import Speculation
from shiftjax.parallel.grid import Group
from shiftjax.rollouts.control import Rollouts
from shiftjax.sim.echo import EchoRunner
from shiftjax.targets import NO_TARGETS
from shiftjax.text.byte_tokenizer import byte_backend
from shiftjax.text.chat import ChatTemplate
from shiftjax.text.tokenizer import Tokenizer

BOS, EOS = 256, 257
VOCAB_SIZE = 258
MAX_MODEL_LEN = 256
MODEL_QUEUE = 64  # sequences that may wait for a compiled engine
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
SECRETS = (
    "Traceback",
    "site-packages",
    "0x",
    "msgspec",
    "serving.",
    str(Path(__file__).parents[2]),
)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def byte_tokenizer() -> Tokenizer:
    """A token for every byte, so that random tokens are all sorts of text, and <s>, </s>."""
    backend = byte_backend()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    return Tokenizer(backend, bos_token_id=BOS, eos_token_ids=[EOS], chat_template=TEMPLATE)


def run_command(capsys, *argv: str) -> tuple[int, str, list[str]]:
    """(exit code, stdout, lines of stderr) of one command."""
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err.splitlines()


class GatedRunner(EchoRunner):
    """An audited echo runner whose steps can be held back, slowed down, or made to fail."""

    def __init__(self, config: SchedulerConfig):
        super().__init__(
            VOCAB_SIZE, num_blocks=config.num_blocks, block_size=config.block_size, check=True
        )
        self.gate = threading.Event()
        self.gate.set()
        self.is_held = False
        self.step_seconds = 0.0
        self.faults: list[Exception] = []
        self.poisoned: set[int] = set()  # a prompt that begins with this token is not finite

    def run(self, plan, mode, previous_handle):
        output = super().run(plan, mode, previous_handle)
        row = 0
        for item in plan.scheduled:
            if item.sequence.token_ids[0] in self.poisoned:
                output.is_finite[row : row + item.num_rows] = False
            row += item.num_rows
        return output

    def fetch(self, handle):
        self.is_held = not self.gate.is_set()
        self.gate.wait()
        self.is_held = False
        if self.step_seconds:
            time.sleep(self.step_seconds)
        if self.faults:
            raise self.faults.pop()
        return super().fetch(handle)


def make_engine(
    *,
    num_blocks: int = 256,
    block_size: int = 4,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 128,
    max_model_len: int = MAX_MODEL_LEN,
    check: bool = True,
    runner_kind: type[GatedRunner] = GatedRunner,
) -> Engine:
    """An engine without a model."""
    config = SchedulerConfig(
        num_blocks, block_size, max_num_seqs, max_num_batched_tokens, eos_token_ids=(EOS,)
    )
    limits = RequestLimits(
        VOCAB_SIZE, max_model_len, (num_blocks - 1) * block_size, eos_token_ids=(EOS,)
    )
    runner = runner_kind(config)
    runner.check = check
    lane = Lane(Scheduler(config), runner, Group(0, 2).modes)
    return Engine([lane], make_policy("threshold", 32), limits, seed=5, clock=time.monotonic)


def make_drafting_engine(**drafts) -> Engine:
    """The same, with drafts by `DraftOptions`."""
    engine = make_engine()
    drafting = Drafting(DraftOptions(**drafts))
    engine.lanes[0].scheduler.lookahead = Speculation(drafting, Prices((128,)), max_rows=64)
    return engine


@dataclass
class Running(InThread[AsyncEngine]):
    """A server over an engine without a model."""

    runner: GatedRunner

    def let_go(self) -> None:
        """Steps, which a test may have held back or slowed down, are quick again."""
        if isinstance(self.runner, GatedRunner):
            self.runner.gate.set()
            self.runner.step_seconds = 0.0

    def assert_quiescent(self) -> None:
        """Nothing is held; what has gone in has come out."""

        async def check() -> None:
            for _ in range(400):  # a client hears the end before the server has closed its handle
                if not self.engine.handles:
                    break
                await asyncio.sleep(0.005)
            await self._check_counts()

        self.on_loop(check())

    async def _check_counts(self) -> None:
        """No request, block, queue entry or open count is held."""
        engine, counts = self.engine, self.engine.counts
        assert not engine.handles, f"open handles: {list(engine.handles)}"
        assert counts.accepted == counts.finished + counts.cancelled + counts.failed, counts
        async with asyncio.timeout(10):
            while await engine.call(lambda engine: engine.has_work()):
                await asyncio.sleep(0.005)
        await engine.call(lambda engine: engine.check())
        stats = await engine.call(lambda engine: engine.stats())
        held = stats.num_running, stats.num_waiting, stats.num_waiting_tokens, stats.kv_usage
        assert held == (0, 0, 0, 0.0), f"held at idle: {held}"
        async with asyncio.timeout(10):  # the turn that carried the calls is on its way
            while engine._submitted or engine.stats != stats:
                await asyncio.sleep(0.005)

    def has_tokens(self, request_id: str) -> bool:
        """Whether tokens of a request have come, which then is in every step until its end."""
        handles = list(self.engine.handles.values())
        return any(each.public_id == request_id and each.num_output_tokens for each in handles)

    def num_running(self) -> int:
        return self.engine.stats.num_running


@contextmanager
def running_server(
    engine: Engine | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    num_compiles: Callable[[], int] = lambda: 0,
    kv_events: KvEvents | None = None,
    rollouts: Rollouts | None = None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    adapters: AdapterPool | None = None,
    adapter_folder: Path | None = None,
    grammar_timeout: float = 60.0,  # a busy machine shall not change answers
    **options,
) -> Iterator[Running]:
    """A server over an engine; at the end it must stop cleanly and hold nothing.

    `options` are those of the server, and `targets`.
    """
    targets = options.pop("targets", NO_TARGETS)
    engine = engine or make_engine()
    tokenizer = tokenizer or byte_tokenizer()

    def open_engine(service: Service) -> AsyncEngine:
        plug_traces(service, {})
        observers, settings = service.observers, service.options
        async_engine = AsyncEngine(engine, tokenizer, observers, settings, kv_events, rollouts)
        template = ChatTemplate(tokenizer.chat_template) if tokenizer.chat_template else None
        names, told = ("echo", "echo-alias"), {"num_compiles": num_compiles, "defaults": defaults}
        told |= {"targets": targets, "adapters": adapters, "adapter_folder": adapter_folder}
        model = ServedModel(names, tokenizer, template, **told)
        service.open(model, async_engine)
        if service.grammars is not None:
            service.grammars.timeout = grammar_timeout
        return async_engine

    with server_in_thread(open_engine, **options) as opened:
        runner = cast(GatedRunner, engine.lanes[0].runner)  # or one of a model
        running = Running(**vars(opened), runner=runner)
        try:
            yield running
        finally:
            running.let_go()


@contextmanager
def serving(engine: Engine) -> Iterator[Running]:
    """A server over a compiled engine; anything that compiles from now on is counted."""
    from shiftjax.device.programs import CompileCounter

    compiles = CompileCounter()
    compiles.start()
    try:
        with running_server(
            engine,
            tokenizer=byte_tokenizer(),
            max_num_queued_reqs=MODEL_QUEUE,
            num_compiles=lambda: compiles.count,
        ) as running:
            yield running
    finally:
        compiles.stop()


def all_at_once(server: Running, body: dict, count: int) -> list[httpx.Response]:
    """What as many clients get for the same request."""

    def send(_: int) -> httpx.Response:
        with server.client() as own:
            return own.post(COMPLETION, json=body)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(send, range(count)))


def is_error(response: httpx.Response, status: int, param: str | None = None) -> None:
    """The response is an error object that tells nothing about the inside."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    for secret in SECRETS:
        assert secret not in response.text
    if param is not None:
        assert (error["param"] or "").split(".")[0].split("[")[0] == param, error


def events(text: str) -> list[dict]:
    """The objects of a stream, whose end must be marked."""
    *lines, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


def read_all(connection: socket.socket) -> bytes:
    """What comes until the other side closes or drops the connection."""
    answer = b""
    try:
        while chunk := connection.recv(65536):
            answer += chunk
    except ConnectionResetError:
        pass
    return answer


def metric_values(client) -> dict[tuple[str, tuple], float]:
    """Values by (name, sorted labels)."""
    text = client.get("/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def metric_total(values: dict, name: str, **labels: str) -> float:
    """The sum over all series of a name that have these labels."""
    return sum(
        value
        for (key, found), value in values.items()
        if key == name and set(labels.items()) <= set(found)
    )
