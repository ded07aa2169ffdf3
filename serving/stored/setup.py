"""What a server keeps, as its settings say. No JAX."""

import asyncio
import importlib.util
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from serving.server.errors import ServeError
from serving.server.service import Service
from serving.stored.background import Background
from serving.stored.batch_run import Limits
from serving.stored.batches import Batches
from serving.stored.conversations import Conversations
from serving.stored.documents import Documents
from serving.stored.files import Files
from serving.stored.responses import NoResponses, StoredResponses
from shiftjax.metric import Metric, gauge
from shiftjax.options import ConfigError, num_bytes_of

RESPONSES_FILE, FILES_FILE = "responses.db", "files.db"


class Talks(NamedTuple):
    """Responses, conversations, and responses that have not ended."""

    responses: StoredResponses
    conversations: Conversations
    background: Background


class Store(NamedTuple):
    """Files and batches."""

    files: Files
    batches: Batches


@dataclass(frozen=True)
class Kept:
    """All that is kept; None: that kind is off."""

    maybe_talks: Talks | None = None
    maybe_store: Store | None = None

    @property
    def memory(self) -> NoResponses | StoredResponses:
        """What requests for responses refer to."""
        return NoResponses() if self.maybe_talks is None else self.maybe_talks.responses

    @property
    def talks(self) -> Talks:
        """Responses and conversations. Raises `ServeError` where none are kept."""
        if self.maybe_talks is None:
            words = "This server keeps no responses and conversations: --store-responses SIZE."
            raise ServeError("not_found", words, code="store_off")
        return self.maybe_talks

    @property
    def store(self) -> Store:
        """Files and batches. Raises `ServeError` where none are kept."""
        if self.maybe_store is None:
            words = "This server keeps no files and batches: --files-dir DIR."
            raise ServeError("not_found", words, code="files_off")
        return self.maybe_store


def when_ready(service: Service, start: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Have a coroutine run once, as soon as the service takes requests."""
    tasks: list[asyncio.Task[None]] = []

    def begin(is_ready: bool) -> None:
        if is_ready and not tasks:
            tasks.append(asyncio.create_task(start()))

    service.listeners.append(begin)
    begin(service.is_ready)


def open_kept(service: Service) -> Kept:
    """What the service keeps, until it closes. Raises ConfigError for a folder of no use."""
    kept = Kept(_open_talks(service), _open_store(service))
    service.metrics.collectors.append(lambda: metrics(kept))
    return kept


def metrics(kept: Kept) -> Iterator[Metric]:
    """What is kept, and what is to be done; nothing of what is off."""
    if (talks := kept.maybe_talks) is not None:
        text = "Bytes of responses and conversations that are kept."
        yield gauge("stored_response_bytes", text, talks.responses.num_bytes)
        text = "Responses in the background that have not ended."
        yield gauge("num_background_responses", text, talks.background.num_open)
    if (store := kept.maybe_store) is not None:
        text = "Lines of batches that have no answer yet."
        yield gauge("num_batch_lines_waiting", text, store.batches.num_lines)


def _open_talks(service: Service) -> Talks | None:
    options = service.options
    most, folder = num_bytes_of(options.store_responses), options.store_dir
    if not most:
        return None
    documents = Documents(None if folder is None else Path(folder) / RESPONSES_FILE, most)
    responses = StoredResponses(documents, options.max_request_bytes)
    background = Background(documents, responses)
    service.on_close += [background.close, documents.close]
    return Talks(responses, Conversations(documents), background)


def _open_store(service: Service) -> Store | None:
    options = service.options
    if options.files_dir is None:
        return None
    if importlib.util.find_spec("python_multipart") is None:
        raise ConfigError(["files_dir needs python-multipart: pip install 'shiftjax[serving]'"])
    folder = Path(options.files_dir)
    documents = Documents(folder / FILES_FILE, None)
    try:
        files = Files(folder, documents, num_bytes_of(options.files_bytes))
    except OSError as error:
        raise ConfigError([f"{folder}: {error.strerror}"]) from None
    batches = Batches(documents, files, Limits(options.max_request_bytes))
    service.on_close += [batches.close, documents.close]
    return Store(files, batches)
