"""Between protobuf messages and the values of `serving.server.schema`. Pure functions."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from serving.proto import shiftjax_pb2 as pb
from serving.server.errors import ServeError, invalid
from serving.server.handle import RequestHandle
from serving.server.responses import usage
from serving.server.schema import MAX_MESSAGES, MAX_VALUES, parse_json
from shiftjax.control.request import TokenLogprobs
from shiftjax.outputs import CompletionOutput

SCALARS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "max_tokens", "min_tokens", "prompt_logprobs"),
)
OPTIONAL = ("cache_salt", "min_width")
EMBED_OPTIONS = ("dimensions", "truncate_prompt_tokens", "prompt_name")
LISTS = ("allowed_token_ids", "stop", "stop_token_ids")
REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


def bounded[T](field: str, values: Collection[T], most: int = MAX_MESSAGES) -> list[T]:
    """A list of what a message repeats. Raises `ServeError` for what takes long to copy.

    64 MiB can hold sixty million entries. What a field may have of them, the schema says.
    """
    if len(values) > most:
        raise invalid(field, f"must have at most {most} entries, not {len(values)}")
    return list(values)


def generate_values(request: pb.GenerateRequest, *, stream: bool) -> dict[str, Any]:
    """The body that an HTTP client would send for the same request."""
    values = prompt_values(request) | sampling_values(request)
    values |= {"model": request.model or None, "request_id": request.request_id or None}
    values |= {"priority": request.priority, "stream": stream}
    values |= {name: getattr(request, name) for name in OPTIONAL if request.HasField(name)}
    if request.HasField("prediction"):
        values["prediction"] = {"type": "content", "content": request.prediction}
    return values


def is_chat(request: pb.GenerateRequest | pb.TokenizeRequest) -> bool:
    """Whether the prompt is a conversation."""
    return request.WhichOneof("prompt") == "chat"


def prompt_values(
    request: pb.GenerateRequest | pb.ScoreRequest | pb.TokenizeRequest,
) -> dict[str, Any]:
    """The fields `prompt`, or `messages` and their variables; none if there is no prompt."""
    match request.WhichOneof("prompt"):
        case "text":
            return {"prompt": request.text}
        case "token_ids":
            assert not isinstance(request, pb.TokenizeRequest)
            return {"prompt": bounded("prompt", request.token_ids.ids, MAX_VALUES)}
        case "chat":
            assert not isinstance(request, pb.ScoreRequest)
            return _chat_values(request.chat)
        case _:
            return {}


def _chat_values(chat: pb.Chat) -> dict[str, Any]:
    messages = [
        {"role": each.role, "content": each.content}
        | ({"name": each.name} if each.HasField("name") else {})
        for each in bounded("messages", chat.messages)
    ]
    values: dict[str, Any] = {"messages": messages}
    if chat.template_variables_json:
        try:
            variables = parse_json(chat.template_variables_json.encode())
        except ServeError:
            raise invalid("chat.template_variables_json", "must be a JSON object") from None
        values["chat_template_kwargs"] = variables
    return values


def sampling_values(request: pb.GenerateRequest) -> dict[str, Any]:
    """The sampling fields that are set."""
    sampling = request.sampling
    values: dict[str, Any] = {n: getattr(sampling, n) for n in SCALARS if sampling.HasField(n)}
    given = {name: getattr(sampling, name) for name in LISTS}
    values |= {name: bounded(name, entries) for name, entries in given.items() if entries}
    if sampling.logit_bias:
        keys = bounded("logit_bias", sampling.logit_bias)
        values["logit_bias"] = {str(key): sampling.logit_bias[key] for key in keys}
    if sampling.ignore_eos:
        values["ignore_eos"] = True
    if sampling.HasField("logprobs"):
        chat = {"logprobs": True, "top_logprobs": sampling.logprobs}
        values |= chat if is_chat(request) else {"logprobs": sampling.logprobs}
    constraint = sampling.WhichOneof("constraint")
    if constraint == "choice":
        values["structured_outputs"] = {
            "choice": bounded("structured_outputs.choice", sampling.choice.options)
        }
    elif constraint is not None:
        name = "json" if constraint == "json_schema" else constraint
        values["structured_outputs"] = {name: getattr(sampling, constraint)}
    return values


def embed_values(request: pb.EmbedRequest) -> dict[str, Any]:
    """The body that an HTTP client would send for the same texts. Raises `ServeError`."""
    texts = bounded("texts", request.texts)
    lengths = bounded("lengths", request.lengths)
    if bool(texts) == bool(lengths):
        raise invalid("texts", "or token_ids and lengths must be given, and only one of them")
    if len(request.token_ids) != 4 * sum(lengths):
        words = f"must have 4 bytes for each of {sum(lengths)} tokens, as lengths has it"
        raise invalid("token_ids", f"{words}, not {len(request.token_ids)}")
    ids, start = np.frombuffer(request.token_ids, "<i4").tolist(), 0
    pieces = []
    for length in lengths:
        pieces.append(ids[start : start + length])
        start += length
    values: dict[str, Any] = {"input": texts or pieces, "priority": request.priority}
    values |= {"model": request.model or None, "request_id": request.request_id or None}
    given = (name for name in EMBED_OPTIONS if request.HasField(name))
    return values | {name: getattr(request, name) for name in given}


# ---------------------------------------------------------------- results


def logprob_messages(entries: Sequence[TokenLogprobs | None]) -> list[pb.TokenLogprob]:
    """Log-probabilities of tokens; None is the first token of a prompt."""
    return [pb.TokenLogprob() if entry is None else _logprob(entry) for entry in entries]


def _logprob(entry: TokenLogprobs) -> pb.TokenLogprob:
    pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
    top = [pb.TopToken(token_id=token_id, logprob=logprob) for token_id, logprob in pairs]
    return pb.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, top=top)


def finished(index: int, reason: str, stop_reason: str | int | None) -> pb.Finished:
    """How a continuation ended."""
    message = pb.Finished(index=index, reason=REASONS[reason])
    if isinstance(stop_reason, str):
        message.stop = stop_reason
    elif stop_reason is not None:
        message.stop_token_id = stop_reason
    return message


def usage_message(handle: RequestHandle) -> pb.Usage:
    """Tokens in and out."""
    counts = usage([handle])
    return pb.Usage(
        prompt_tokens=counts["prompt_tokens"],
        completion_tokens=counts["completion_tokens"],
        cached_tokens=counts["prompt_tokens_details"]["cached_tokens"],
        **counts.get("completion_tokens_details", {}),
    )


def completion(output: CompletionOutput) -> pb.Completion:
    """One continuation that has ended."""
    return pb.Completion(
        index=output.index,
        text=output.text,
        token_ids=output.token_ids,
        logprobs=logprob_messages(output.logprobs or []),
        finished=finished(output.index, output.finish_reason or "", output.stop_reason),
    )
