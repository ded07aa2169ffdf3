"""What vLLM's answers have beside OpenAI's: token ids, and nulls that its clients read. No JAX."""

from collections.abc import Sequence
from typing import Any

from serving.server.fields import ChatFields, GenerationFields
from serving.server.handle import Delta, RequestHandle
from shiftjax.outputs import CompletionOutput

Json = dict[str, Any]

# Of answers that do not stream; what has a value stands over these.
ANSWER: Json = dict.fromkeys(("service_tier", "system_fingerprint", "kv_transfer_params"))
CHOICE: Json = {"token_ids": None}
MESSAGE: Json = dict.fromkeys(("annotations", "audio", "function_call", "reasoning"))


def echoed(fields: ChatFields) -> str:
    """The text of the assistant's last message, if the answer shall begin with it."""
    last = fields.messages[-1]
    if not fields.echo or last.get("role") != "assistant":
        return ""
    said = last.get("content") or ""
    return said if isinstance(said, str) else "\n".join(part["text"] for part in said)


def prompt_ids(fields: GenerationFields, handle: RequestHandle) -> Json:
    """`prompt_token_ids`, null where nobody asked for them."""
    ids = list(handle.request.prompt_token_ids) if fields.return_token_ids else None
    return {"prompt_token_ids": ids}


def given_ids(fields: GenerationFields, token_ids: Sequence[int]) -> Json:
    """The `token_ids` of a choice, if they were asked for."""
    return {"token_ids": token_ids} if fields.return_token_ids else {}


def weight_version(news: Delta | CompletionOutput) -> Json:
    """The version of the weights that a choice ended with; nothing of those of the start.

    Deltas before the last one have none.
    """
    return {"weight_version": news.weight_version} if news.weight_version else {}
