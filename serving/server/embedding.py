"""Requests for embeddings: their fields, checked; what the service answers; how it is written."""

import base64
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from serving.server.errors import ServeError, invalid
from serving.server.json_body import read
from serving.server.schema import MAX_TEXT_CHARACTERS
from shiftjax.core.errors import RequestError
from shiftjax.text.embedding_inputs import Input, InputReader, scored_inputs

if TYPE_CHECKING:
    from serving.server.service import Service

MAX_INPUTS = 2048  # in one request
DIGITS = 9  # of a float32 in JSON: fewer could be another number
LEAST_FLOAT32 = 1e-45


class PoolingFields(msgspec.Struct, kw_only=True):
    """What all bodies have that are answered with numbers of texts."""

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    request_id: str | None = None


class EmbeddingFields(PoolingFields, kw_only=True):
    """The body of /v1/embeddings."""

    input: str | list[Any]
    encoding_format: str | None = None
    dimensions: int | None = None
    prompt_name: str | None = None


@dataclass(frozen=True)
class Embeddings:
    """What a request for embeddings, or for scores, comes to."""

    id: str
    model: str
    matrix: np.ndarray  # [texts, dimensions] float32; of scores [texts, labels]
    num_tokens: list[int]  # of each text, special ones included
    unknown: tuple[str, ...]  # names of fields that nobody knows


@dataclass(frozen=True)
class EmbedWish:
    """A request that has been checked, with the token ids of its inputs."""

    fields: PoolingFields
    ids: list[tuple[list[int], int | None]]  # with the place where a pair's second text begins
    unknown: tuple[str, ...]
    deadline: float | None  # of time.monotonic()


async def embed(
    service: "Service", values: Any, request_id: str | None = None, timeout: float | None = None
) -> tuple[EmbeddingFields, Embeddings]:
    """Embed what the body of /v1/embeddings asks for. Raises `ServeError`."""
    with counted(service):
        fields, unknown = read(EmbeddingFields, values)
        if fields.encoding_format not in (None, "float", "base64"):
            raise invalid("encoding_format", "must be float or base64")
        check_kind(service, scores=False)
        _check_dimensions(fields.dimensions, service)
        wish = await prepare(service, fields, inputs_of(fields.input), unknown, timeout)
    found = await computed(service, wish, request_id)
    if fields.dimensions is None:
        return fields, found
    return fields, replace(found, matrix=unit(found.matrix[:, : fields.dimensions]))


@contextmanager
def counted(service: "Service") -> Iterator[None]:
    """Count what is refused before it is accepted."""
    try:
        yield
    except ServeError as error:
        service.refuse(error)
        raise


async def prepare(
    service: "Service",
    fields: PoolingFields,
    inputs: Sequence[Any],
    unknown: tuple[str, ...],
    timeout: float | None,
) -> EmbedWish:
    """Check a request and tokenize its inputs, all of them in one call to a thread."""
    model, embedder = service.embedding()
    service.model_named(fields.model)
    longest = embedder.request_limits.max_model_len
    _check_common(fields, longest)
    if unknown and service.options.strict:
        raise invalid(unknown[0], "is not a field of this request", "unknown_parameter")
    if timeout is not None and timeout <= 0:
        raise ServeError("deadline", "The deadline had passed when the request came.")
    deadline = None if timeout is None else time.monotonic() + timeout
    most = fields.truncate_prompt_tokens
    truncate_to = longest if most == -1 else most or 0
    prompt_name = fields.prompt_name if isinstance(fields, EmbeddingFields) else None
    assert model.reader is not None
    with embedder.coming():
        try:
            ids = await service.in_thread(_read, model.reader, inputs, prompt_name, truncate_to)
        except RequestError as error:
            raise ServeError("invalid", str(error), param=error.field, code=error.code) from None
    return EmbedWish(fields, ids, unknown, deadline)


def _read(
    reader: InputReader, inputs: Sequence[Any], prompt_name: str | None, truncate_to: int
) -> list[tuple[list[int], int | None]]:
    if reader.pooling.scores:
        return scored_inputs(reader, inputs, truncate_to)
    return [(ids, None) for ids in reader.read(inputs, prompt_name, truncate_to)]


def check_kind(service: "Service", *, scores: bool) -> None:
    """Raise `ServeError` where a model embeds texts and scores are asked for, or otherwise."""
    model, _ = service.embedding()
    assert model.reader is not None
    if model.reader.pooling.scores == scores:
        return
    words = "scores texts (/v1/score, /v1/rerank, /v1/classify): it has no embeddings"
    if scores:
        words = "embeds texts: it has no head that classifies them"
    raise ServeError("invalid", f"{model.name} {words}.", param="model", code="wrong_task")


async def computed(service: "Service", wish: EmbedWish, request_id: str | None) -> Embeddings:
    """The embeddings, or the numbers of labels, of a request's texts. Raises `ServeError`."""
    model, embedder = service.embedding()
    name = wish.fields.request_id or request_id or uuid.uuid4().hex
    rest = None if wish.deadline is None else wish.deadline - time.monotonic()
    priority = wish.fields.priority or 0
    ids, seconds = [list(each) for each in zip(*wish.ids, strict=True)]
    asked = embedder.embed(name, ids, priority=priority, timeout=rest, seconds=seconds)
    return Embeddings(name, model.name, await asked, list(map(len, ids)), wish.unknown)


def unit(matrix: np.ndarray) -> np.ndarray:
    """Scale rows to length 1; zeros stay zeros. float32 `[texts, dimensions]`."""
    lengths = np.linalg.norm(matrix, axis=1, keepdims=True)
    return (matrix / np.maximum(lengths, 1e-12)).astype(np.float32)


def _check_dimensions(dimensions: int | None, service: "Service") -> None:
    model, _ = service.embedding()
    assert model.reader is not None
    allowed = model.reader.pooling.dimensions
    if dimensions is None or dimensions in allowed:
        return
    if not allowed:
        words = "needs a model whose config.json has matryoshka_dimensions"
        raise invalid("dimensions", words, "unsupported_parameter")
    known = f"1 to {allowed[-1]}" if isinstance(allowed, range) else ", ".join(map(str, allowed))
    raise invalid("dimensions", f"must be one of {known}")


def inputs_of(given: str | list[Any]) -> list[Input]:
    """The inputs as a list; a single one comes without. Types are checked, lengths are not."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise invalid("input", "is empty: it needs at least one text")
    if {type(item) for item in given} == {int}:
        return [given]
    if len(given) > MAX_INPUTS:
        raise invalid("input", f"must have at most {MAX_INPUTS} entries, not {len(given)}")
    if {type(item) for item in given} not in ({str}, {list}):
        raise invalid("input", "must be text, a list of texts, token ids or lists of token ids")
    for index, item in enumerate(given):
        if isinstance(item, list) and {type(token) for token in item} - {int}:
            raise invalid(f"input[{index}]", "must be a list of token ids")
    return given


def _check_common(fields: PoolingFields, longest: int) -> None:
    most = fields.truncate_prompt_tokens
    if most is not None and most != -1 and not 1 <= most <= longest:
        raise invalid("truncate_prompt_tokens", f"must be -1 or between 1 and {longest}")
    if fields.priority is not None and abs(fields.priority) >= 1 << 31:
        raise invalid("priority", "must be a number of 32 bits")
    for name in ("user", "request_id"):
        text = getattr(fields, name)
        if text is not None and not (0 < len(text) <= MAX_TEXT_CHARACTERS and text.isprintable()):
            raise invalid(name, f"must be 1 to {MAX_TEXT_CHARACTERS} printable characters")


# ---------------------------------------------------------------- answers


def embedding_body(fields: EmbeddingFields, found: Embeddings) -> bytes:
    """The answer of /v1/embeddings, as OpenAI writes it."""
    if fields.encoding_format == "base64":
        little = found.matrix.astype("<f4", copy=False)
        vectors: list[Any] = [base64.b64encode(row.tobytes()).decode() for row in little]
    else:
        vectors = shortened(found.matrix).tolist()
    data = [
        {"object": "embedding", "index": index, "embedding": vector}
        for index, vector in enumerate(vectors)
    ]
    total = sum(found.num_tokens)
    usage = {"prompt_tokens": total, "total_tokens": total}
    answer = {"object": "list", "data": data, "model": found.model, "usage": usage}
    return msgspec.json.encode(answer)


def shortened(matrix: np.ndarray) -> np.ndarray:
    """The same float32 numbers as float64 with `DIGITS` digits, which JSON writes in half."""
    wide = matrix.astype(np.float64)
    digits = DIGITS - 1 - np.floor(np.log10(np.maximum(np.abs(wide), LEAST_FLOAT32)))
    scale = 10.0**digits
    return np.round(wide * scale) / scale


async def written(service: "Service", write: Any, *arguments: Any) -> bytes:
    """What a function above writes, in a thread if that takes long."""
    matrix = arguments[-1].matrix
    if matrix.size <= 1 << 14:
        return write(*arguments)
    return await service.in_thread(write, *arguments)
