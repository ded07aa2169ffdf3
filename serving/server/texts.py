"""Texts and conversations become token ids: bounded first, and in a thread if they are long."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from serving.server.errors import ServeError, invalid
from serving.server.tools import other_forms
from shiftjax.text.chat import ChatTemplate, encode_chat
from shiftjax.text.errors import ChatRequestError, ChatTemplateError
from shiftjax.text.tokenizer import Tokenizer

INLINE_CHARACTERS = 1024  # texts up to this are tokenized on the event loop
MAX_TEXTS = 1024  # in the threads, or waiting for one
MAX_CHAT_VALUES = 1 << 16  # in the messages and template variables of one request
LONGEST_TOKEN = 256  # characters, for a tokenizer that does not say


class Texts:
    """What the tokenizer and the chat template of one model do; either may be absent."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        max_model_len: int,
        threads: ThreadPoolExecutor,
    ):
        self._tokenizer, self._template, self._threads = tokenizer, template, threads
        pieces = tokenizer.token_bytes if tokenizer is not None else None
        longest = max(map(len, pieces.pieces), default=1) if pieces else LONGEST_TOKEN
        self.max_model_len = max_model_len
        self._max_characters = max_model_len * longest  # of a prompt that fills the context
        self._num_texts = 0

    def tokenizer_for(self, field: str) -> Tokenizer:
        """The tokenizer. Raises the `ServeError` of a field that cannot be read without one."""
        if self._tokenizer is None:
            raise invalid(field, "needs a tokenizer, which this model has not: send token ids")
        return self._tokenizer

    async def encode(
        self, text: str, *, special: bool = True, field: str = "prompt", keep: str = ""
    ) -> list[int]:
        """Token ids of a text. Raises `ServeError` for one that no context could hold.

        With `keep`, left or right, as much of it as a context can hold on that side is encoded.
        """
        tokenizer, most = self.tokenizer_for(field), self._max_characters
        if keep and len(text) > most:
            text = text[:most] if keep == "left" else text[-most:]
        self._check_length(len(text), field)
        if len(text) <= INLINE_CHARACTERS:
            return tokenizer.encode(text, special)
        return await self._in_thread(lambda: tokenizer.encode(text, special))

    async def encode_chat(
        self, messages: list[dict[str, object]], variables: Mapping[str, Any]
    ) -> list[int]:
        """Token ids of a conversation. Raises `ServeError`, also for what the template refuses."""
        tokenizer = self.tokenizer_for("messages")
        self._check_length(_num_characters([messages, variables]), "messages")
        plain = [_with_content(message) for message in messages]

        def work() -> list[int]:
            try:
                return encode_chat(tokenizer, plain, template=self._template, **variables)
            except (ChatRequestError, ChatTemplateError):
                for form in other_forms(plain):
                    with contextlib.suppress(ChatRequestError, ChatTemplateError):
                        return encode_chat(tokenizer, form, template=self._template, **variables)
                raise

        try:
            return await self._in_thread(work)
        except ChatRequestError as error:
            raise ServeError("invalid", str(error), param="messages") from None
        except ChatTemplateError:
            message = "The model's chat template fails on these messages."
            raise ServeError("invalid", message, param="messages") from None
        except TypeError:
            message = "chat_template_kwargs must not hold names that are reserved."
            raise ServeError("invalid", message, param="chat_template_kwargs") from None

    async def _in_thread(self, work: Callable[[], list[int]]) -> list[int]:
        if self._num_texts >= MAX_TEXTS:
            raise ServeError("queue_full", "Too many texts wait to be tokenized.")
        self._num_texts += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_texts -= 1

    def _check_length(self, num_characters: int, field: str) -> None:
        """Refuse, before any tokenizing, what has more characters than a full context can have."""
        if num_characters > self._max_characters:
            words = f"This model's maximum context length is {self.max_model_len} tokens"
            message = f"{words}, but {field} has {num_characters} characters: more than that holds."
            code = "context_length_exceeded"
            raise ServeError("invalid", message, param=field, code=code)


def _num_characters(value: Any) -> int:
    """Characters in the texts of plain values. Raises `ServeError` for too many values."""
    total, num_values, pending = 0, 0, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping | list):
            num_values += len(item)
            if num_values > MAX_CHAT_VALUES:
                raise invalid("messages", f"must have at most {MAX_CHAT_VALUES} values in all")
            pending += (*item.keys(), *item.values()) if isinstance(item, Mapping) else item
    return total


def _with_content(message: dict[str, Any]) -> dict[str, Any]:
    """The message; what an assistant says is empty where clients send null."""
    is_empty = message.get("role") == "assistant" and message.get("content", "") is None
    return message | {"content": ""} if is_empty else message
