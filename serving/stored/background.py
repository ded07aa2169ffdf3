"""Responses that nobody waits for: answered in tasks, asked for by their id, resumed. No JAX.

Until a response ends, its body is a document beside those of responses. So a server that starts
again asks once more for what the last one has not ended.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any

from serving.server.errors import ServeError, internal_error
from serving.stored.batch_run import PATIENT, RETRY_SECONDS
from serving.stored.documents import ON_BEHALF, Documents, FullError
from serving.stored.responses import PREFIX, StoredResponses

logger = logging.getLogger(__name__)

QUEUED = "queued_"  # before the id of a response
MAX_OPEN = 64  # responses of an owner that have not ended

Json = dict[str, Any]
Ask = Callable[[Json, str], Awaitable[Json]]
"""The response to a body, under the id of a request. Raises `ServeError`."""


@dataclass
class _Job:
    owner: str
    response: Json  # as clients see it
    values: Json  # the body
    task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.response["id"]


class Background:
    """The responses that have not ended, of all owners."""

    def __init__(self, documents: Documents, responses: StoredResponses):
        self._documents, self._responses = documents, responses
        self._jobs: dict[tuple[str, str], _Job] = {}
        self._ask: Ask | None = None

    async def start(self, ask: Ask) -> None:
        """Ask for what a former process has left, and from now on for what comes."""
        self._ask = ask
        documents = await self._documents.run(lambda shelf: shelf.all(None, QUEUED))
        for owner, document in documents:
            job = _Job(owner, document["response"], document["values"])
            if await self._documents.run(lambda shelf, job=job: shelf.raw(job.owner, job.name)):
                await self._forget(job)  # it had ended
            elif (owner, job.name) not in self._jobs:
                self._begin(job, Context())

    @property
    def num_open(self) -> int:
        """Responses that have not ended."""
        return len(self._jobs)

    async def close(self) -> None:
        """Stop; what has not ended is asked for again by the next process."""
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def begin(self, owner: str, response: Json, values: Json) -> None:
        """Have a body answered, in the context of who asks. Raises `ServeError`."""
        if (owner, response["id"]) in self._jobs:
            raise ServeError("duplicate", "A response with this id runs.", param="request_id")
        if sum(key[0] == owner for key in self._jobs) >= MAX_OPEN:
            raise ServeError("queue_full", f"{MAX_OPEN} responses run in the background.")
        job = _Job(owner, response, values)
        self._jobs[owner, job.name] = job
        document = {"response": dict(response), "values": values}
        try:
            await self._documents.change(
                lambda shelf: shelf.put(owner, f"{QUEUED}{job.name}", document)
            )
        except ServeError:
            del self._jobs[owner, job.name]
            raise
        self._begin(job, copy_context())

    def running(self, owner: str, name: str) -> Json | None:
        """A response that has not ended, as it is now."""
        job = self._jobs.get((owner, name))
        return None if job is None else job.response

    async def cancel(self, owner: str, name: str) -> None:
        """End a response if it has not ended."""
        job = self._jobs.get((owner, name))
        if job is None or job.task is None:
            return
        job.task.cancel()
        await asyncio.gather(job.task, return_exceptions=True)
        if not await self._documents.run(lambda shelf: shelf.raw(owner, name)):
            await self._end(job, "cancelled", None)
        await self._forget(job)

    # ------------------------------------------------------------------ a job

    def _begin(self, job: _Job, context: Context) -> None:
        self._jobs[job.owner, job.name] = job
        job.task = asyncio.create_task(self._run(job), context=context)
        job.task.add_done_callback(lambda _: self._jobs.pop((job.owner, job.name), None))

    async def _run(self, job: _Job) -> None:
        ON_BEHALF.set(job.owner)
        try:
            answer = await self._patiently(job)
            if not answer["store"]:
                raise ServeError("too_large", "There was no room to keep the response.")
        except ServeError as error:
            await self._end(job, "failed", error)
        except Exception:
            logger.exception("%s fails.", job.name)
            await self._end(job, "failed", internal_error())
        await self._forget(job)

    async def _patiently(self, job: _Job) -> Json:
        assert self._ask is not None
        job.response["status"] = "in_progress"
        while True:
            try:
                return await self._ask(job.values, job.name.removeprefix(PREFIX))
            except ServeError as error:
                if error.kind_name not in PATIENT:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    async def _end(self, job: _Job, status: str, error: ServeError | None) -> None:
        told = None if error is None else {"code": error.code, "message": error.message}
        job.response |= {"status": status, "error": told}
        job.response |= {"completed_at": int(time.time())} if error is None else {}
        try:
            await self._responses.keep_ended(job.owner, job.values, job.response)
        except FullError:
            logger.warning("%s is not kept: there is no room", job.name)

    async def _forget(self, job: _Job) -> None:
        try:
            await self._documents.run(lambda shelf: shelf.delete(job.owner, f"{QUEUED}{job.name}"))
        except FullError:  # the next process sees that it has ended
            logger.warning("%s has ended, and its body stays: there is no room", job.name)
