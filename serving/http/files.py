"""The routes of files, as OpenAI has them: upload, list, content, by API key."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from serving.http.described import Described, json_response
from serving.server.errors import ServeError, invalid
from serving.server.service import Service
from serving.stored.documents import no_room, owner_now
from serving.stored.files import Files, remove
from serving.stored.items import page
from serving.stored.setup import Kept
from serving.stored.upload import Upload, too_large
from shiftjax.options import num_bytes_of

PURPOSE = "batch"
MAX_UPLOADS = 8  # at once
IDLE_SECONDS = 30.0  # that a client may send nothing
SPARE_SECONDS, LEAST_RATE = 30.0, 64 << 10  # that a file may take: at so many bytes a second
FORM_BYTES = 64 << 10  # of a form beside its file
MAX_LIMIT = 10_000  # files in one answer

Json = dict[str, Any]
FILE = "/v1/files/{id}"


def file_routes(service: Service, kept: Kept) -> list[Described]:
    """The routes; on a server that keeps nothing they say how it would."""
    uploads = Uploads(num_bytes_of(service.options.max_file_bytes))

    async def upload(request: Request) -> Response:
        return json_response(await uploads.receive(request, kept.store.files, owner_now()))

    async def files(request: Request) -> Response:
        found = await kept.store.files.all(owner_now(), request.query_params.get("purpose"))
        return json_response(page(found, request.query_params, MAX_LIMIT))

    async def file(request: Request) -> Response:
        return json_response(await kept.store.files.get(owner_now(), request.path_params["id"]))

    async def content(request: Request) -> Response:
        about = await kept.store.files.get(owner_now(), request.path_params["id"])
        path = kept.store.files.path(about["id"])
        if not await asyncio.to_thread(path.exists):
            raise ServeError("internal", "The file is lost.", code="storage_failed")
        return FileResponse(path, media_type="application/octet-stream", filename=about["filename"])

    async def delete(request: Request) -> Response:
        owner, name, store = owner_now(), request.path_params["id"], kept.store
        await store.files.delete(
            owner, name, lambda shelf: store.batches.check_unused(shelf, owner, name)
        )
        return json_response({"id": name, "object": "file", "deleted": True})

    binary = "application/octet-stream"
    return [
        Described("/v1/files", upload, "Upload a file of a batch (a form)", methods=("POST",)),
        Described("/v1/files", files, "The files that are kept"),
        Described(FILE, file, "A file"),
        Described(FILE, delete, "Forget a file", methods=("DELETE",)),
        Described(f"{FILE}/content", content, "What is in a file", media_type=binary),
    ]


class Uploads:
    """Takes uploads, a number of them at once, of files with at most `most` bytes."""

    def __init__(self, most: int):
        self._most, self._num_open = most, 0

    async def receive(self, request: Request, files: Files, owner: str) -> Json:
        """The file that a request brings. Raises `ServeError`."""
        if self._num_open >= MAX_UPLOADS:
            raise ServeError("queue_full", f"{MAX_UPLOADS} files are being uploaded.")
        length = request.headers.get("content-length", "0")
        num_bytes = int(length) if length.isascii() and length.isdigit() else 0
        if num_bytes > self._most + FORM_BYTES:
            raise too_large(self._most)
        await files.check_room(owner, max(0, num_bytes - FORM_BYTES))
        self._num_open += 1
        path = files.incoming()
        try:
            upload = await self._take(request, Upload(_form(request), path, self._most))
            _check_fields(upload.fields)
            return await files.add(owner, path, upload.filename, PURPOSE)
        except OSError:
            raise no_room() from None
        finally:
            self._num_open -= 1
            await remove(path)

    async def _take(self, request: Request, upload: Upload) -> Upload:
        """The upload when all of it has come."""
        num_bytes, loop = 0, asyncio.get_running_loop()
        started = loop.time()
        try:
            while True:
                async with asyncio.timeout(IDLE_SECONDS):
                    message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ServeError("cancelled", "The client closed the request.")
                num_bytes += len(data := message.get("body", b""))
                if num_bytes > self._most + FORM_BYTES:
                    raise too_large(self._most)
                if loop.time() - started > SPARE_SECONDS + num_bytes / LEAST_RATE:
                    raise TimeoutError
                await asyncio.to_thread(upload.feed, data)
                if not message.get("more_body"):
                    await asyncio.to_thread(upload.finish)
                    return upload
        except TimeoutError:
            raise ServeError("slow_sender", "The file took too long to arrive.") from None
        finally:
            upload.close()


def _form(request: Request) -> bytes:
    """The type of the body, which is a form."""
    return request.headers.get("content-type", "").encode("latin-1")


def _check_fields(fields: dict[str, str]) -> None:
    for name in fields:
        if name != "purpose":
            raise invalid(name, "is not supported by this server", "unsupported_parameter")
    if "purpose" not in fields:
        raise invalid("purpose", "is missing", "missing_required_parameter")
    if fields["purpose"] != PURPOSE:
        raise invalid("purpose", f"must be {PURPOSE}: this server has no other use for files")
