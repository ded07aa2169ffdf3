"""Requests for scores of texts and pairs: their fields, what the service answers, its form.

A model with a head (a cross-encoder) reads both texts of a pair together. Of any other encoder the
score of a pair is the cosine of two embeddings. Names and shapes are vLLM's.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from serving.server.embedding import (
    MAX_INPUTS,
    Embeddings,
    EmbedWish,
    PoolingFields,
    check_kind,
    computed,
    counted,
    inputs_of,
    prepare,
    unit,
)
from serving.server.errors import ServeError, invalid
from serving.server.json_body import read
from shiftjax.embed.scores import activated

if TYPE_CHECKING:
    from serving.server.service import Service

Pair = tuple[str, str]
# By which names a body has the two sides of its pairs.
SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class TextDocument(msgspec.Struct):
    """A document as an object, as other rerankers take it."""

    text: str


class ScoringFields(PoolingFields, kw_only=True):
    """What all bodies have that are answered with scores."""

    use_activation: bool | None = None  # false: the numbers of the head as they are
    activation: bool | None = None  # its older name


class RerankFields(ScoringFields, kw_only=True):
    """The body of /v1/rerank."""

    query: str
    documents: list[str | TextDocument]
    top_n: int | None = None
    return_documents: bool | None = None


class ScoreFields(ScoringFields, kw_only=True):
    """The body of /v1/score: two sides, of one text and any number, or of equally many."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None


class ClassifyFields(ScoringFields, kw_only=True):
    """The body of /v1/classify."""

    input: str | list[Any]


@dataclass(frozen=True)
class Scores(Embeddings):
    """Scores, `[pairs, 1]` or `[texts, labels]`, and how they were made."""

    method: str  # cross-encoder or cosine
    labels: tuple[str, ...]
    created: int


async def rerank(
    service: "Service", values: Any, request_id: str | None = None, timeout: float | None = None
) -> tuple[RerankFields, Scores]:
    """Score documents for a query. Raises `ServeError`."""
    with counted(service):
        fields, unknown = read(RerankFields, values)
        if not 0 < len(fields.documents) < MAX_INPUTS:
            raise invalid("documents", f"must have 1 to {MAX_INPUTS - 1} entries")
        if fields.top_n is not None and fields.top_n < 0:
            raise invalid("top_n", "must be at least 1, or 0 for all")
        pairs = [(fields.query, text_of(each)) for each in fields.documents]
        wish = await _prepare_pairs(service, fields, pairs, unknown, timeout)
    return fields, await _scored(service, wish, pairs, request_id)


async def score(
    service: "Service", values: Any, request_id: str | None = None, timeout: float | None = None
) -> tuple[ScoreFields, Scores]:
    """Score pairs of texts. Raises `ServeError`."""
    with counted(service):
        fields, unknown = read(ScoreFields, values)
        pairs = pairs_of(fields)
        wish = await _prepare_pairs(service, fields, pairs, unknown, timeout)
    return fields, await _scored(service, wish, pairs, request_id)


async def classify(
    service: "Service", values: Any, request_id: str | None = None, timeout: float | None = None
) -> tuple[ClassifyFields, Scores]:
    """Give texts the shares of all labels. Raises `ServeError`."""
    with counted(service):
        fields, unknown = read(ClassifyFields, values)
        check_kind(service, scores=True)
        wish = await prepare(service, fields, inputs_of(fields.input), unknown, timeout)
    return fields, await _by_head(service, wish, request_id)


async def _prepare_pairs(
    service: "Service",
    fields: ScoringFields,
    pairs: Sequence[Pair],
    unknown: tuple[str, ...],
    timeout: float | None,
) -> EmbedWish:
    """A cross-encoder reads pairs, any other each text once."""
    model, _ = service.embedding()
    assert model.reader is not None
    pooling = model.reader.pooling
    if pooling.scores and len(pooling.labels) != 1:
        words = f"{model.name} has {len(pooling.labels)} labels: use /v1/classify"
        raise ServeError("invalid", f"{words}.", param="model", code="wrong_task")
    inputs = pairs if pooling.scores else _texts_of(pairs)
    return await prepare(service, fields, inputs, unknown, timeout)


def _texts_of(pairs: Sequence[Pair]) -> list[str]:
    return list(dict.fromkeys(text for pair in pairs for text in pair))


async def _scored(
    service: "Service", wish: EmbedWish, pairs: Sequence[Pair], request_id: str | None
) -> Scores:
    """The score of each pair, `[pairs, 1]`."""
    model, _ = service.embedding()
    assert model.reader is not None
    if model.reader.pooling.scores:
        return await _by_head(service, wish, request_id)
    found = await computed(service, wish, request_id)
    place = {text: number for number, text in enumerate(_texts_of(pairs))}
    first, second = np.array([[place[one], place[other]] for one, other in pairs]).T
    matrix = unit(found.matrix)
    cosines = np.clip((matrix[first] * matrix[second]).sum(axis=1, keepdims=True), -1.0, 1.0)
    return _as_scores(replace(found, matrix=cosines), "cosine", ())


async def _by_head(service: "Service", wish: EmbedWish, request_id: str | None) -> Scores:
    """The numbers of the head, activated unless the request wants them as they are."""
    model, _ = service.embedding()
    assert model.reader is not None and isinstance(wish.fields, ScoringFields)
    pooling, found = model.reader.pooling, await computed(service, wish, request_id)
    if wish.fields.use_activation is not False and wish.fields.activation is not False:
        found = replace(found, matrix=activated(found.matrix, pooling.activation))
    return _as_scores(found, "cross-encoder", pooling.labels)


def _as_scores(found: Embeddings, method: str, labels: tuple[str, ...]) -> Scores:
    return Scores(**vars(found), method=method, labels=labels, created=int(time.time()))


def text_of(document: str | TextDocument) -> str:
    """The text of a document."""
    return document if isinstance(document, str) else document.text


def pairs_of(fields: ScoreFields) -> list[Pair]:
    """The pairs of a body: N with N, or one text with all others. Raises `ServeError`."""
    given = {name for names in SIDES for name in names if getattr(fields, name) is not None}
    names = next((each for each in SIDES if set(each) == given), None)
    if names is None:
        known = ", or ".join(" and ".join(each) for each in SIDES)
        raise invalid("text_1", f"and text_2 are needed (or {known}), and no other side")
    sides = []
    for name in names:
        side = getattr(fields, name)
        sides.append([side] if isinstance(side, str) else side)
        if not 0 < len(sides[-1]) < MAX_INPUTS:
            raise invalid(name, f"must have 1 to {MAX_INPUTS - 1} entries")
    first, second = sides
    first = first * len(second) if len(first) == 1 else first
    if len(first) != len(second):
        words = f"must have as many entries as {names[0]}, or that only one"
        raise invalid(names[1], f"{words}: {len(second)} and {len(first)}")
    return list(zip(first, second, strict=True))


# ---------------------------------------------------------------- answers


def _usage(found: Scores) -> dict[str, Any]:
    total = sum(found.num_tokens)
    return {"prompt_tokens": total, "total_tokens": total}


def rerank_body(fields: RerankFields, found: Scores) -> bytes:
    """The answer of /v1/rerank: documents by their scores."""
    scores = found.matrix[:, 0]
    order = np.argsort(-scores, kind="stable")[: fields.top_n or None]
    results: list[dict[str, Any]] = [
        {"index": int(place), "relevance_score": float(scores[place])} for place in order
    ]
    if fields.return_documents is not False:
        for result in results:
            result["document"] = {"text": text_of(fields.documents[result["index"]])}
    head = {"id": found.id, "model": found.model, "method": found.method, "usage": _usage(found)}
    return msgspec.json.encode({**head, "results": results})


def score_body(fields: ScoreFields, found: Scores) -> bytes:
    """The answer of /v1/score: a number for each pair."""
    data = [
        {"index": index, "object": "score", "score": float(value)}
        for index, value in enumerate(found.matrix[:, 0])
    ]
    return _list_of(found, f"score-{found.id}", data)


def classify_body(fields: ClassifyFields, found: Scores) -> bytes:
    """The answer of /v1/classify: the most likely label of each text, and what all have."""
    data = [
        {
            "index": index,
            "label": found.labels[int(row.argmax())],
            "probs": row.tolist(),
            "num_classes": len(row),
        }
        for index, row in enumerate(found.matrix)
    ]
    return _list_of(found, f"classify-{found.id}", data)


def _list_of(found: Scores, name: str, data: list[dict[str, Any]]) -> bytes:
    head = {"id": name, "object": "list", "created": found.created, "model": found.model}
    return msgspec.json.encode({**head, "data": data, "usage": _usage(found)})
