"""Scores over HTTP are those of `Embedder`; with embeddings they are cosines."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from embed_server import embed_server
from kit import byte_tokenizer, is_error

from serving.run.serve import front_of_embedder
from serving.server.options import ServerOptions
from serving.server.service import Service
from shiftjax import Embedder
from shiftjax.arch.pooling import Pooling
from shiftjax.text.embedding_inputs import InputReader

DATA = Path(__file__).parents[2] / "data" / "encoders"
OPTIONS = {"devices": 1, "cache_dir": "none", "max_num_batched_tokens": 80}
QUERY = "how many tokens"
DOCUMENTS = ["a step splits its tokens", "base", "document about query", "shift says how many"]


def cases_of(name: str) -> list[dict]:
    return json.loads((DATA / name / "scores.json").read_text())["cases"]


@pytest.fixture(scope="module")
def cross():
    embedder = Embedder(str(DATA / "bert-scores"), **OPTIONS)
    with embed_server(embedder.runner, embedder.reader) as running:
        yield running, embedder


@pytest.fixture(scope="module")
def labelled():
    embedder = Embedder(str(DATA / "xlm-roberta-scores"), **OPTIONS)
    with embed_server(embedder.runner, embedder.reader) as running:
        yield running


@pytest.fixture(scope="module")
def embedding():
    embedder = Embedder("random:tiny-bert", **OPTIONS)
    reader = InputReader(byte_tokenizer(), Pooling("mean", False, 64), 256, 64)
    with embed_server(embedder.runner, reader) as running:
        yield running, embedder


def post(server, path: str, **fields) -> dict:
    with server.client() as client:
        answer = client.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(server, path: str, fields: dict, param: str) -> str:
    with server.client() as client:
        answer = client.post(path, json=fields)
    is_error(answer, 400, param)
    return answer.json()["error"]["message"]


def test_a_cross_encoder_reads_both_texts_together(cross):
    server, _ = cross
    pairs = [each for each in cases_of("bert-scores") if isinstance(each["input"], list)]
    one, other = zip(*(each["input"] for each in pairs), strict=True)
    wanted = np.array([each["logits"][0] for each in pairs])
    plain = {"use_activation": False}
    answer = post(server, "/v1/score", text_1=list(one), text_2=list(other), **plain)
    assert (answer["object"], answer["model"]) == ("list", "encoder")
    assert [each["index"] for each in answer["data"]] == [0, 1, 2]
    scores = [each["score"] for each in answer["data"]]
    np.testing.assert_allclose(scores, wanted, rtol=2e-5)
    size = sum(len(each["token_ids"]) for each in pairs)
    assert answer["usage"] == {"prompt_tokens": size, "total_tokens": size}
    usual = post(server, "/score", queries=list(one), items=list(other))
    shares = [each["score"] for each in usual["data"]]
    np.testing.assert_allclose(shares, 1 / (1 + np.exp(-wanted)), rtol=1e-5)


@pytest.mark.parametrize(
    "sides",
    [
        {"text_1": QUERY, "text_2": DOCUMENTS},
        {"queries": [QUERY], "documents": DOCUMENTS},
        {"data_1": [QUERY] * 4, "data_2": DOCUMENTS},
    ],
)
def test_one_text_goes_with_all_others(cross, sides):
    server, embedder = cross
    answer = post(server, "/v1/score", **sides)
    wanted = embedder.score([(QUERY, each) for each in DOCUMENTS])[:, 0]
    np.testing.assert_allclose([each["score"] for each in answer["data"]], wanted, rtol=1e-5)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ordered_by_their_scores(cross, path):
    server, embedder = cross
    scores = embedder.score([(QUERY, each) for each in DOCUMENTS])[:, 0]
    given = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]]
    answer = post(server, path, query=QUERY, documents=given)
    assert answer["method"] == "cross-encoder"
    assert [each["index"] for each in answer["results"]] == np.argsort(-scores).tolist()
    for each in answer["results"]:
        assert each["document"] == {"text": DOCUMENTS[each["index"]]}
        assert each["relevance_score"] == pytest.approx(scores[each["index"]], rel=1e-5)
    assert len(post(server, path, query=QUERY, documents=given, top_n=2)["results"]) == 2


def test_texts_are_labelled(labelled):
    cases = [each for each in cases_of("xlm-roberta-scores") if isinstance(each["input"], str)]
    logits = np.array([each["logits"] for each in cases])
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = np.array(["contradiction", "entailment", "neutral"])[logits.argmax(1)].tolist()
    for given in ([each["input"] for each in cases], [each["token_ids"] for each in cases]):
        answer = post(labelled, "/v1/classify", input=given)
        assert answer["id"].startswith("classify-")
        assert [each["label"] for each in answer["data"]] == labels
        assert {each["num_classes"] for each in answer["data"]} == {3}
        found = [each["probs"] for each in answer["data"]]
        np.testing.assert_allclose(found, shares, rtol=2e-5)
    plain = post(labelled, "/classify", input=cases[0]["input"], activation=False)
    np.testing.assert_allclose(plain["data"][0]["probs"], logits[0], rtol=2e-5)


def test_a_cross_encoder_with_one_label_classifies_too(cross):
    server, embedder = cross
    answer = post(server, "/classify", input=QUERY)
    (found,) = answer["data"]
    assert found["label"] == "LABEL_0"
    assert found["probs"] == pytest.approx(embedder.score([QUERY])[0].tolist(), rel=1e-5)


def test_embeddings_are_compared_by_cosine(embedding):
    server, embedder = embedding
    ids = byte_tokenizer().encode_batch([QUERY, *DOCUMENTS])
    query, *others = embedder.embed(ids)
    norms = np.linalg.norm(query) * np.linalg.norm(others, axis=1)
    answer = post(server, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)
    found = [each["score"] for each in answer["data"]]
    np.testing.assert_allclose(found, np.array(others) @ query / norms, rtol=1e-5)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    same = post(server, "/v1/score", text_1=[QUERY], text_2=[QUERY])["data"][0]["score"]
    assert same == pytest.approx(1.0, abs=1e-6)


def test_what_a_model_cannot_do(cross, labelled, embedding):
    assert "it has no embeddings" in refused(cross[0], "/v1/embeddings", {"input": "a"}, "model")
    assert "scores texts (/v1/score" in refused(
        cross[0], "/v1/completions", {"prompt": "a"}, "model"
    )
    pair = {"text_1": "a", "text_2": "a"}
    assert "3 labels: use /v1/classify" in refused(labelled, "/v1/score", pair, "model")
    assert "no head" in refused(embedding[0], "/v1/classify", {"input": "a"}, "model")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text_1"),
        ({"text_1": "a"}, "text_1"),
        ({"text_1": "a", "text_2": "a", "queries": "a"}, "text_1"),
        ({"text_1": ["a", "a"], "text_2": ["a"]}, "text_2"),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"text_1": "a", "text_2": [1]}, "text_2"),
        ({"text_1": "a", "text_2": "mode " * 60}, "input"),
        ({"text_1": "a", "text_2": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_wrong_pairs(cross, fields, param):
    refused(cross[0], "/v1/score", fields, param)


def test_a_long_pair_can_be_cut(cross):
    server, embedder = cross
    answer = post(server, "/v1/score", text_1="a", text_2="mode " * 60, truncate_prompt_tokens=-1)
    wanted = embedder.score([("a", "mode " * 60)])[0, 0]
    assert answer["data"][0]["score"] == pytest.approx(wanted, rel=1e-5)
    assert answer["usage"]["prompt_tokens"] == 40


@pytest.mark.parametrize("name", ["bert-scores", "qwen3-scores"])
def test_a_server_starts_with_a_first_step(name):
    embedder = Embedder(str(DATA / name), **OPTIONS)

    async def start() -> None:
        engine, model = await front_of_embedder(embedder, Service(ServerOptions()), None)
        found = await engine.embed("a", [[1, 2]], seconds=[1])
        assert model.reader is not None and model.reader.pooling.scores
        assert found.shape == (1, 1) and np.isfinite(found).all()
        assert await engine.close()

    asyncio.run(start())
