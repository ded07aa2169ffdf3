"""What a server keeps, as its settings say. No JAX."""

from dataclasses import dataclass
from pathlib import Path

from serving.server.errors import ServeError
from serving.server.options import ServerOptions
from serving.server.service import Service
from serving.stored.conversations import Conversations
from serving.stored.documents import Documents
from serving.stored.responses import Memory, NoResponses, StoredResponses
from shiftjax.options import num_bytes_of

RESPONSES_FILE = "responses.db"


@dataclass(frozen=True)
class Kept:
    """Responses and conversations; None: nothing is kept."""

    stored: tuple[StoredResponses, Conversations] | None = None

    @property
    def memory(self) -> Memory:
        """What requests for responses refer to."""
        return NoResponses() if self.stored is None else self.stored[0]

    @property
    def responses(self) -> StoredResponses:
        """The responses. Raises `ServeError` where none are kept."""
        return self._both()[0]

    @property
    def conversations(self) -> Conversations:
        """The conversations. Raises `ServeError` where none are kept."""
        return self._both()[1]

    def _both(self) -> tuple[StoredResponses, Conversations]:
        if self.stored is None:
            words = "This server keeps no responses and conversations: --store-responses SIZE."
            raise ServeError("not_found", words, code="store_off")
        return self.stored


def open_kept(service: Service) -> Kept:
    """What the service keeps, until it closes. Raises ConfigError for a folder of no use."""
    options: ServerOptions = service.options
    most = num_bytes_of(options.store_responses)
    if not most:
        return Kept()
    folder = options.store_dir
    documents = Documents(None if folder is None else Path(folder) / RESPONSES_FILE, most)
    service.on_close.append(documents.close)
    responses = StoredResponses(documents, options.max_request_bytes)
    return Kept((responses, Conversations(documents)))
