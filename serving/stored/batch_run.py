"""One batch at work: its lines go to the engine behind all that clients wait for. No JAX.

Each answer is a record at the end of one of two files, the outputs and the errors, as soon as it is
there. So a process that is killed loses the lines in flight alone, and the next one asks those
again. What a line without a seed draws depends on its number, so it draws the same again.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from serving.server.errors import ServeError, internal_error
from serving.stored.appended import append, private, whole_records
from serving.stored.batch_lines import (
    Line,
    Problem,
    answered,
    body_of,
    number_of,
    read_lines,
    unasked,
)
from serving.stored.documents import ON_BEHALF, FullError
from serving.stored.files import Files

logger = logging.getLogger(__name__)

# Errors that say nothing of a line: it is asked again.
PATIENT = frozenset(("queue_full", "quota", "busy", "starting", "restarting", "draining"))
RETRY_SECONDS = 1.0
WAIT_SECONDS = 0.05  # between looks whether clients wait
NOTE_SECONDS = 2.0  # between counts that are kept

Json = dict[str, Any]
Call = Callable[[str, Json, Line, str], Awaitable[tuple[int, Any]]]
"""(status, answer) of a body at an endpoint, for a line and under the id of a request."""


@dataclass(frozen=True)
class Limits:
    """What a batch may have."""

    most_line_bytes: int


class Gate:
    """Lets lines in, a number at a time, of all batches in turn, and none while clients wait."""

    def __init__(self, most: int, do_clients_wait: Callable[[], bool]):
        self._room, self._do_clients_wait = asyncio.Semaphore(most), do_clients_wait

    async def enter(self) -> None:
        """Wait for a place; the caller leaves it."""
        await self._room.acquire()
        try:
            while self._do_clients_wait():
                await asyncio.sleep(WAIT_SECONDS)
        except asyncio.CancelledError:
            self._room.release()
            raise

    def leave(self) -> None:
        """Give a place back."""
        self._room.release()


@dataclass
class Job:
    """A batch that runs; `document` has it as clients see it, and the ids of its outputs."""

    owner: str
    document: Json
    note: Callable[["Job"], Awaitable[None]]
    files: Files
    limits: Limits
    stop: asyncio.Event = field(default_factory=asyncio.Event)  # ask no more lines
    is_full: bool = False  # the disk
    _last: float = 0.0

    @property
    def batch(self) -> Json:
        """What clients see."""
        return self.document["batch"]

    @property
    def source(self) -> Path:
        """The input."""
        return self.files.path(self.batch["input_file_id"])

    def output(self, is_error: bool) -> Path:
        """The file of records."""
        return self.files.path(self.document["outputs"][is_error])

    async def become(self, status: str, **values: Any) -> None:
        """Change the state, and keep it."""
        self.batch.update({"status": status, f"{status}_at": int(time.time())} | values)
        await self.note(self)

    async def cancel(self) -> None:
        """Ask no more lines, and let go of those in flight."""
        self.stop.set()
        if self.batch["status"] in ("validating", "in_progress"):
            with suppress(FullError):  # the end will be kept, too
                await self.become("cancelling")

    def count(self, status: int) -> None:
        """Count a record."""
        self.batch["request_counts"]["completed" if status == 200 else "failed"] += 1

    async def note_counts(self) -> None:
        """Keep the counts, now and then."""
        if time.monotonic() - self._last > NOTE_SECONDS:
            self._last = time.monotonic()
            await self.note(self)


async def run(job: Job, call: Call, gate: Gate) -> None:
    """Run a batch from where it stands to its end, and keep what became of it."""
    ON_BEHALF.set(job.owner)
    try:
        await _run(job, call, gate)
    except (OSError, FullError, msgspec.MsgspecError) as error:  # the last: of a damaged file
        logger.error("%s fails: %s", job.batch["id"], error or "the disk is full")
        await _fail(job, [Problem("storage_failed", None, "The server's disk failed.")])
    except Exception:
        logger.exception("%s fails.", job.batch["id"])
        await _fail(job, [Problem("internal_error", None, "The server failed.")])


async def _run(job: Job, call: Call, gate: Gate) -> None:
    most, url = job.limits.most_line_bytes, job.batch["endpoint"]
    lines, problems = await asyncio.to_thread(read_lines, job.source, url, most)
    if problems:
        await _fail(job, problems)
        return
    done = await _recount(job, len(lines))
    if job.batch["status"] == "cancelling":
        job.stop.set()
    elif job.batch["status"] == "validating":
        await job.become("in_progress")
    left = [line for line in lines if line.number not in done]
    async with _outputs(job) as write:
        unasked_lines = await _ask_all(job, left, _Asking(job, call, write), gate)
        if job.batch["status"] == "in_progress" and unasked_lines:
            await _expire(job, unasked_lines, write)
    await _recount(job, len(lines))
    await _finalize(job, is_expired=bool(unasked_lines))


async def _recount(job: Job, num_lines: int) -> set[int]:
    """The lines with a record; they are counted anew."""

    def numbers(is_error: bool) -> set[int]:
        return {number_of(record) for record in whole_records(job.output(is_error))}

    ok, bad = await asyncio.to_thread(numbers, False), await asyncio.to_thread(numbers, True)
    counts = {"total": num_lines, "completed": len(ok), "failed": len(bad)}
    job.batch["request_counts"] = counts
    return ok | bad


Write = Callable[[bool, bytes], Awaitable[None]]  # whether it is an error, a record


@asynccontextmanager
async def _outputs(job: Job) -> AsyncIterator[Write]:
    """What appends records to the two files, one after another, on a thread."""
    loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, thread_name_prefix="batch")
    with (
        open(job.output(False), "ab", buffering=0, opener=private) as good,
        open(job.output(True), "ab", buffering=0, opener=private) as bad,
    ):

        async def write(is_error: bool, record: bytes) -> None:
            await loop.run_in_executor(thread, append, bad if is_error else good, record)

        try:
            yield write
        finally:  # it may still write for who was cancelled
            await asyncio.shield(loop.run_in_executor(None, thread.shutdown))


@dataclass
class _Asking:
    """Asks lines and writes what comes."""

    job: Job
    call: Call
    write: Write

    async def __call__(self, line: Line) -> None:
        """Ask a line until there is an answer, and record that."""
        job, name = self.job, f"{self.job.batch['id']}-{line.number}"
        try:
            status, body = await self._patiently(line, name)
        except ServeError as error:
            status, body = error.kind.status, error.body()
        except OSError:
            raise
        except Exception:  # a bug is that line's alone, as it is that request's in a server
            logger.exception("Line %d of %s failed.", line.number, job.batch["id"])
            error = internal_error()
            status, body = error.kind.status, error.body()
        await self.write(status != 200, answered(line, status, name, body))
        job.count(status)
        await job.note_counts()

    async def _patiently(self, line: Line, name: str) -> tuple[int, Any]:
        values = await asyncio.to_thread(body_of, self.job.source, line)
        while True:
            try:
                return await self.call(self.job.batch["endpoint"], values, line, name)
            except ServeError as error:
                if error.kind_name not in PATIENT:
                    raise
            await asyncio.sleep(RETRY_SECONDS)


async def _ask_all(job: Job, lines: Iterable[Line], ask: _Asking, gate: Gate) -> list[Line]:
    """Ask lines until they end, the batch shall stop, or its time is over; those not asked."""
    left, tasks = list(lines)[::-1], set[asyncio.Task[None]]()
    failed: list[BaseException] = []

    def leave(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        gate.leave()
        if not task.cancelled() and (error := task.exception()) is not None:
            failed.append(error)
            job.stop.set()

    expires = job.batch["expires_at"]
    stopped = asyncio.create_task(job.stop.wait())
    try:
        while left and time.time() < expires:
            entered = asyncio.create_task(gate.enter())
            await asyncio.wait(
                (entered, stopped),
                return_when="FIRST_COMPLETED",
                timeout=max(0.0, expires - time.time()),
            )
            if not entered.done() or job.stop.is_set():
                await _let_go(entered, gate)
                break
            task = asyncio.create_task(ask(left.pop()))
            tasks.add(task)
            task.add_done_callback(leave)
        while tasks and not job.stop.is_set():
            await asyncio.wait((*tasks, stopped), return_when="FIRST_COMPLETED")
    finally:
        stopped.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if failed:
        raise failed[0]
    return left[::-1]


async def _let_go(entered: asyncio.Task[None], gate: Gate) -> None:
    """Give back a place that may have been got meanwhile."""
    if not entered.done():
        entered.cancel()
    with suppress(asyncio.CancelledError):
        await entered
        gate.leave()


async def _expire(job: Job, lines: list[Line], write: Write) -> None:
    words = "The completion window of the batch ended before this line was asked."
    error = ServeError("deadline", words, code="batch_expired")
    for line in lines:
        await write(True, unasked(line, error))
        job.count(error.kind.status)


async def _finalize(job: Job, is_expired: bool) -> None:
    """Show the outputs, and end as the batch was asked to."""
    is_cancelled = job.batch["status"] == "cancelling"
    if not is_cancelled:
        await job.become("finalizing")
    names = job.document["outputs"]
    shown = [name if await job.files.close_output(job.owner, name) else None for name in names]
    status = "cancelled" if is_cancelled else "expired" if is_expired else "completed"
    await job.become(status, output_file_id=shown[0], error_file_id=shown[1])


async def _fail(job: Job, problems: list[Problem]) -> None:
    """End for these reasons. Where that finds no room on the disk, wait for some."""
    names = job.document["outputs"]
    errors = {"object": "list", "data": [each._asdict() for each in problems]}
    job.batch.update(status="failed", errors=errors)
    while True:
        with suppress(ServeError, FullError):
            shown = [n if await job.files.close_output(job.owner, n) else None for n in names]
            outputs = {"output_file_id": shown[0], "error_file_id": shown[1]}
            await job.become("failed", **outputs)
            return
        await asyncio.sleep(NOTE_SECONDS)
