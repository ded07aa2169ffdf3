"""Batches: files of requests, run beside all others, resumed after a restart, by owner. No JAX."""

import asyncio
import time
import uuid
from collections.abc import Mapping
from contextvars import Context
from typing import Any

from serving.server.errors import ServeError
from serving.stored.batch_run import Call, Gate, Job, Limits, run
from serving.stored.conversations import missing
from serving.stored.documents import Documents, Shelf
from serving.stored.files import Files
from serving.stored.files import found as found_file

PREFIX = "batch_"
MAX_OPEN, MAX_ENDED = 64, 1000  # batches of an owner
ENDED = frozenset(("failed", "completed", "expired", "cancelled"))
WINDOW_SECONDS = {"24h": 24 * 3600}

Json = dict[str, Any]


class Batches:
    """The batches of all owners; those that have not ended run, each as a task.

    Methods raise `ServeError` for a batch that the owner has not.
    """

    def __init__(self, documents: Documents, files: Files, limits: Limits):
        self._documents, self._files, self._limits = documents, files, limits
        self._jobs: dict[str, Job] = {}  # that run, by the id of their batch
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: tuple[Call, Gate] | None = None

    async def start(self, call: Call, gate: Gate) -> None:
        """Run what a former process has left, and all that comes from now on."""
        await self._files.tidy()
        self._running = call, gate
        documents = await self._documents.run(lambda shelf: shelf.all(None, PREFIX))
        for owner, document in sorted(documents, key=lambda each: each[1]["at"]):
            if document["batch"]["status"] not in ENDED:
                self._begin(owner, document)

    @property
    def num_lines(self) -> int:
        """Lines of batches that run which have no record."""
        counts = [job.batch["request_counts"] for job in self._jobs.values()]
        return sum(c["total"] - c["completed"] - c["failed"] for c in counts)

    async def close(self) -> None:
        """Stop; what has not ended goes on in the next process."""
        self._running = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, owner: str, document: Json) -> None:
        name = document["batch"]["id"]
        if self._running is None or name in self._jobs:
            return
        call, gate = self._running
        job = self._jobs[name] = Job(owner, document, self._note, self._files, self._limits)
        # Not in the context of the client that may have begun it: it is not its caller's request.
        task = asyncio.create_task(run(job, call, gate), context=Context())
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._ended(name, task))

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._jobs.pop(name, None)

    async def _note(self, job: Job) -> None:
        """Keep what a job has come to."""
        counts = {**job.batch["request_counts"]}  # as they are now: the thread reads them later
        name, batch = job.batch["id"], job.batch | {"request_counts": counts}
        document = job.document | {"batch": batch}
        await self._documents.run(lambda shelf: shelf.put(job.owner, name, document))

    # ------------------------------------------------------------------ for clients

    async def create(self, owner: str, file: str, url: str, metadata: Mapping[str, str]) -> Json:
        """A new batch of a file's lines."""
        now = int(time.time())
        batch = {
            "id": f"{PREFIX}{uuid.uuid4().hex}",
            "object": "batch",
            "endpoint": url,
            "errors": None,
            "input_file_id": file,
            "completion_window": "24h",
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "in_progress_at": None,
            "expires_at": now + WINDOW_SECONDS["24h"],
            "finalizing_at": None,
            "completed_at": None,
            "failed_at": None,
            "expired_at": None,
            "cancelling_at": None,
            "cancelled_at": None,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": metadata or None,
        }
        outputs = [
            await self._files.open_output(owner, f"{batch['id']}_{what}.jsonl")
            for what in ("output", "error")
        ]
        document = {"batch": batch, "at": time.time_ns(), "outputs": outputs}

        def put(shelf: Shelf) -> None:
            if found_file(shelf, owner, file)["purpose"] != "batch":
                raise ServeError("invalid", "The file was not uploaded for a batch.")
            _make_room(shelf, owner)
            shelf.put(owner, batch["id"], document)

        try:
            await self._documents.change(put)
        except ServeError:
            for name in outputs:
                await self._files.close_output(owner, name)
            raise
        self._begin(owner, document)
        return batch

    async def get(self, owner: str, name: str) -> Json:
        """What a batch is now."""
        if (job := self._jobs.get(name)) is not None and job.owner == owner:
            return job.batch
        return (await self._documents.run(lambda shelf: _found(shelf, owner, name)))["batch"]

    async def all(self, owner: str) -> list[Json]:
        """All batches of an owner, in the order in which they came."""
        documents = await self._documents.run(lambda shelf: shelf.all(owner, PREFIX))
        ordered = sorted((each for _, each in documents), key=lambda each: each["at"])
        batches = (each["batch"] for each in ordered)
        return [self._jobs[b["id"]].batch if b["id"] in self._jobs else b for b in batches]

    async def cancel(self, owner: str, name: str) -> Json:
        """A batch that begins to end; what has been answered stays."""
        document = await self._documents.run(lambda shelf: _found(shelf, owner, name))
        if document["batch"]["status"] in ENDED:
            raise ServeError("not_now", "The batch has ended.", code="batch_ended")
        if (job := self._jobs.get(name)) is not None:
            await job.cancel()
            return job.batch
        document["batch"] |= {"status": "cancelling", "cancelling_at": int(time.time())}
        await self._documents.change(lambda shelf: shelf.put(owner, name, document))
        return document["batch"]

    def check_unused(self, shelf: Shelf, owner: str, file: str) -> None:
        """Refuse with `ServeError` that a file goes which a batch reads."""
        for _, document in shelf.all(owner, PREFIX):
            batch = document["batch"]
            if batch["input_file_id"] == file and batch["status"] not in ENDED:
                raise ServeError("not_now", f"{batch['id']} reads this file.", code="file_in_use")


def _found(shelf: Shelf, owner: str, name: str) -> Json:
    document = shelf.get(owner, name) if name.startswith(PREFIX) else None
    if document is None:
        raise missing("batch")
    return document


def _make_room(shelf: Shelf, owner: str) -> None:
    """Forget the oldest batches that have ended. Raises `ServeError` for too many that have not."""
    documents = sorted((d for _, d in shelf.all(owner, PREFIX)), key=lambda each: each["at"])
    ended = [each for each in documents if each["batch"]["status"] in ENDED]
    if len(documents) - len(ended) >= MAX_OPEN:
        raise ServeError("queue_full", f"{MAX_OPEN} batches of this key have not ended.")
    for each in ended[: max(0, len(ended) - MAX_ENDED + 1)]:
        shelf.delete(owner, each["batch"]["id"])
