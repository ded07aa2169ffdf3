"""The APIs by which text is asked for: a table of what they read, write and say when they fail."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from serving.server.dialects import messages, responses_api, token_ids
from serving.server.dialects.messages_writer import MessagesWriter
from serving.server.dialects.messages_writer import error_body as messages_error
from serving.server.dialects.responses_api_writer import ResponsesWriter
from serving.server.dialects.token_ids_writer import TokenIdsWriter
from serving.server.errors import ServeError
from serving.server.fields import ChatFields, CompletionFields
from serving.server.handle import Delta
from serving.server.responses import Writer
from serving.server.schema import Wish, read_chat, read_completion
from serving.server.served import Generation
from shiftjax.text.tokenizer import Tokenizer

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"


class DialectWriter(Protocol):
    """Writes one generation, whole or as a stream."""

    def encoded(self) -> Json:
        """The response to a request that does not stream."""
        ...

    def chunks(self, number: int, deltas: list[Delta]) -> list[Json]:
        """Events for what the continuations of prompt `number` have gained."""
        ...

    def last_chunks(self) -> list[Json]:
        """Return the closing events of a stream."""
        ...

    def failure(self, error: ServeError) -> list[Json]:
        """Events of a stream that fails after it has begun."""
        ...


@dataclass(frozen=True)
class Dialect:
    """How one API is spoken."""

    summary: str
    fields: type[msgspec.Struct]  # of a body
    read: Callable[[Any], Wish]
    writer: Callable[[Generation, Tokenizer | None], DialectWriter] = Writer
    has_event_names: bool = False  # events are named by the `type` of their object
    end: bytes = DONE  # of every stream
    error_body: Callable[[ServeError], Json] = ServeError.body
    names: Mapping[str, str] = field(default_factory=dict)  # of fields, by those of a chat

    def event(self, value: Json) -> bytes:
        """An object as a server-sent event."""
        name = b"event: " + value["type"].encode() + b"\n" if self.has_event_names else b""
        return name + b"data: " + msgspec.json.encode(value) + b"\n\n"


DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        "/v1/completions": Dialect("Continue prompts", CompletionFields, read_completion),
        "/v1/chat/completions": Dialect("Answer a conversation", ChatFields, read_chat),
        "/v1/messages": Dialect(
            "Answer a conversation (Anthropic's Messages)",
            messages.MessagesFields,
            messages.read_messages,
            MessagesWriter,
            has_event_names=True,
            end=b"",
            error_body=messages_error,
            names=messages.NAMES,
        ),
        "/v1/responses": Dialect(
            "Answer a conversation (OpenAI's Responses)",
            responses_api.ResponsesFields,
            responses_api.read_response,
            ResponsesWriter,
            has_event_names=True,
            end=b"",
            names=responses_api.NAMES,
        ),
        "/inference/v1/generate": Dialect(
            "Continue token ids, without text (vLLM's)",
            token_ids.GenerateFields,
            token_ids.read_token_ids,
            TokenIdsWriter,
            names=token_ids.NAMES,
        ),
    }
)


def error_body(path: str, error: ServeError) -> Json:
    """The error object of the API that a path, or what lies below it, belongs to."""
    fitting = (each for place, each in DIALECTS.items() if f"{path}/".startswith(f"{place}/"))
    dialect = next(fitting, None)
    return error.body() if dialect is None else dialect.error_body(error)
