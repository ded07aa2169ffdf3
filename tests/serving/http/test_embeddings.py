"""Embeddings over HTTP and gRPC are those of `Embedder`; what is wrong with a request is named."""

import base64
import json
import struct

import grpc
import numpy as np
import openai
import pytest
from embed_server import embed_server
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from kit import USER, byte_tokenizer, is_error, metric_total, metric_values

from serving.proto import shiftjax_pb2 as pb
from serving.server.embedding import shortened
from shiftjax import Embedder
from shiftjax.arch.pooling import Pooling
from shiftjax.text.embedding_inputs import InputReader, cut

PATH = "/v1/embeddings"
MOST = 64  # tokens of a text
TEXTS = ["a mode", "how a step splits its tokens", "a mode, too", "é"]


@pytest.fixture(scope="module")
def embedder():
    """A random model whose tokens are bytes; it normalises."""
    return Embedder("random:tiny-bert", devices=1, cache_dir="none", max_num_batched_tokens=256)


@pytest.fixture(scope="module")
def server(embedder):
    pooling = Pooling("mean", False, MOST, (("query", "q: "),), dimensions=(16, 32))
    reader = InputReader(byte_tokenizer(), pooling, 256, MOST)
    with embed_server(embedder.runner, reader) as running:
        yield running


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client
    server.assert_quiescent()


@pytest.fixture(scope="module")
def expected(embedder) -> np.ndarray:
    return embedder.embed(ids_of(TEXTS))


def ids_of(texts: list[str]) -> list[list[int]]:
    return byte_tokenizer().encode_batch(texts)


def post(client, **fields):
    answer = client.post(PATH, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def matrix_of(answer: dict) -> np.ndarray:
    assert [each["index"] for each in answer["data"]] == list(range(len(answer["data"])))
    return np.array([each["embedding"] for each in answer["data"]], np.float32)


def test_texts_and_token_ids_have_the_embeddings_of_the_python_api(client, expected):
    """Exactly: JSON has all digits of a float32, base64 all its bits."""
    for given_input in (TEXTS, ids_of(TEXTS)):
        answer = post(client, input=given_input)
        np.testing.assert_allclose(matrix_of(answer), expected, atol=1e-6)
    size = sum(map(len, ids_of(TEXTS)))
    assert answer["usage"] == {"prompt_tokens": size, "total_tokens": size}
    assert answer["model"] == "encoder"
    for alone in (TEXTS[0], ids_of(TEXTS)[0]):
        coded = post(client, input=alone, encoding_format="base64")["data"][0]["embedding"]
        plain = matrix_of(post(client, input=alone))[0]
        assert np.array_equal(np.frombuffer(base64.b64decode(coded), "<f4"), plain)


@given(arrays(np.float32, 8, elements=st.floats(-4, 4, width=32, allow_subnormal=False)))
def test_json_keeps_every_bit_of_a_float32(numbers):
    short = shortened(numbers[None])[0]
    assert np.array_equal(short.astype(np.float32), numbers)
    assert all(len(f"{value!r}") <= 16 for value in short.tolist() if abs(value) > 1e-4)


def test_the_client_of_openai_understands_it(server, expected):
    """It asks for base64 by default."""
    url = f"{server.server.http_address}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="encoder", input=TEXTS)
    found = np.array([each.embedding for each in answer.data], np.float32)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_dimensions_are_cut_and_normalised_where_the_model_is_made_for_it(client, expected):
    found = matrix_of(post(client, input=TEXTS, dimensions=16))
    wanted = expected[:, :16] / np.linalg.norm(expected[:, :16], axis=1, keepdims=True)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    is_error(client.post(PATH, json={"input": "a", "dimensions": 17}), 400, "dimensions")


def test_a_long_text_is_refused_by_its_place_or_cut_where_that_is_asked_for(client):
    long = "x" * 70
    answer = client.post(PATH, json={"input": ["short", long]})
    is_error(answer, 400, "input")
    words = "input[1] has 70 tokens; the model takes at most 64"
    assert answer.json()["error"] == {
        "message": words,
        "type": "invalid_request_error",
        "param": "input[1]",
        "code": "context_length_exceeded",
    }
    whole = post(client, input=["short", long], truncate_prompt_tokens=-1)
    assert np.array_equal(matrix_of(whole)[1], matrix_of(post(client, input="x" * MOST))[0])
    assert whole["usage"]["prompt_tokens"] == 5 + MOST
    assert post(client, input=long, truncate_prompt_tokens=3)["usage"]["prompt_tokens"] == 3


def test_what_ends_a_text_is_not_cut():
    assert cut([101, 7, 8, 9, 102], 4, frozenset((101, 102))) == [101, 7, 8, 102]
    assert cut([7, 8, 9], 2, frozenset((101,))) == [7, 8]
    assert cut([101, 7, 102], 1, frozenset((101, 102))) == [102]


def test_a_prompt_is_put_before_the_text(client):
    with_prompt = matrix_of(post(client, input="abc", prompt_name="query"))
    assert np.array_equal(with_prompt, matrix_of(post(client, input="q: abc")))
    is_error(client.post(PATH, json={"input": "a", "prompt_name": "b"}), 400, "prompt_name")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[1], []]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [[1], ["a"]]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": [256]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a\ud800"}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        ({"input": "a", "dimensions": "16"}, "dimensions"),
        ({"input": "a", "user": ""}, "user"),
        ({"input": "a", "priority": 1 << 40}, "priority"),
        ({"input": "a", "prompt_embeds": 1}, "prompt_embeds"),
    ],
)
def test_what_is_wrong_is_named(client, fields, param):
    answer = client.post(PATH, content=json.dumps(fields))
    if fields.get("input") == "a\ud800":
        is_error(answer, 400)  # no such JSON
    else:
        is_error(answer, 400, param)


def test_other_models_and_passed_deadlines_are_refused(client):
    is_error(client.post(PATH, json={"input": "a", "model": "other"}), 404, "model")
    late = client.post(PATH, json={"input": "a"}, headers={"x-request-timeout": "0"})
    is_error(late, 504)


def test_a_full_request_is_answered(client):
    """2,048 lists of ids, in steps of many texts."""
    found = matrix_of(post(client, input=[[1 + i % 250, 7] for i in range(2048)]))
    assert found.shape == (2048, 64)
    np.testing.assert_allclose(found[0], found[250], atol=1e-6)
    assert np.abs(found[0] - found[1]).max() > 1e-3


def test_documents_are_ordered_by_their_cosine_to_the_query(client, expected):
    unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    scores = unit[1:] @ unit[0]
    body = {"query": TEXTS[0], "documents": TEXTS[1:]}
    answer = client.post("/v1/rerank", json=body).json()
    assert answer["method"] == "cosine"
    order = [each["index"] for each in answer["results"]]
    assert order == np.argsort(-scores).tolist()
    for each in answer["results"]:
        assert each["relevance_score"] == pytest.approx(scores[each["index"]], abs=1e-5)
        assert each["document"] == {"text": TEXTS[1 + each["index"]]}
    best = client.post("/v1/rerank", json={**body, "top_n": 1, "return_documents": False}).json()
    assert best["results"] == [
        {"index": order[0], "relevance_score": answer["results"][0]["relevance_score"]}
    ]
    is_error(client.post("/v1/rerank", json={"query": "a", "documents": []}), 400, "documents")
    is_error(client.post("/v1/rerank", json={**body, "top_n": -1}), 400, "top_n")
    whole = client.post("/rerank", json={**body, "top_n": 0}).json()
    assert whole["results"] == answer["results"]


def test_an_encoder_generates_nothing_and_a_decoder_embeds_nothing(client, stub):
    """And `/v1/models` says which it is."""
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["task"], model["max_model_len"]) == ("embed", MOST)
    assert stub.GetModel(pb.GetModelRequest()).task == "embed"
    completion = client.post("/v1/completions", json={"prompt": "a"})
    is_error(completion, 400, "model")
    assert "encoder embeds texts (/v1/embeddings" in completion.json()["error"]["message"]
    is_error(client.post("/v1/chat/completions", json={"messages": USER}), 400, "model")
    assert client.post("/tokenize", json={"prompt": "ab"}).json()["max_model_len"] == MOST


def test_grpc_brings_one_matrix_for_texts_and_for_ids(stub, server, expected):
    ids = ids_of(TEXTS)
    flat = b"".join(struct.pack(f"<{len(each)}i", *each) for each in ids)
    by_ids = pb.EmbedRequest(token_ids=flat, lengths=map(len, ids), request_id="mine")
    for request in (pb.EmbedRequest(texts=TEXTS), by_ids):
        answer = stub.Embed(request)
        assert answer.dim == 64
        found = np.frombuffer(answer.embeddings, "<f4").reshape(-1, answer.dim)
        np.testing.assert_allclose(found, expected, atol=1e-6)
        assert list(answer.num_tokens) == list(map(len, ids))
    assert (answer.request_id, answer.model) == ("mine", "encoder")
    assert stub.Embed(pb.EmbedRequest(texts=["a"], dimensions=16)).dim == 16
    server.assert_quiescent()


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (pb.EmbedRequest(), "texts or token_ids"),
        (pb.EmbedRequest(texts=["a"], lengths=[1], token_ids=b"1234"), "texts or token_ids"),
        (pb.EmbedRequest(lengths=[2], token_ids=b"1234"), "must have 4 bytes for each of 2"),
        (pb.EmbedRequest(lengths=[1], token_ids=b"\xff\xff\xff\xff"), "beyond the vocabulary"),
        (pb.EmbedRequest(texts=["x" * 70]), "input[0] has 70 tokens"),
        (pb.EmbedRequest(texts=["x"], dimensions=3), "dimensions must be one of 16, 32"),
    ],
)
def test_grpc_refuses_in_the_same_words(stub, request_, words):
    with pytest.raises(grpc.RpcError) as caught:
        stub.Embed(request_)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert words in caught.value.details()


def test_metrics_count_texts_fill_and_waiting(client):
    before = metric_values(client)
    post(client, input=TEXTS)
    is_error(client.post(PATH, json={"input": ""}), 400)
    after = metric_values(client)

    def gained(name: str, **labels: str) -> float:
        return metric_total(after, name, **labels) - metric_total(before, name, **labels)

    assert gained("shiftjax:embedding_texts_total", outcome="ok") == len(TEXTS)
    assert gained("shiftjax:embedding_queue_time_seconds_count") == len(TEXTS)
    assert gained("shiftjax:embedding_rows_fill_count") >= 1
    assert (
        0
        < gained("shiftjax:embedding_rows_fill_sum")
        <= gained("shiftjax:embedding_rows_fill_count")
    )
    assert gained("shiftjax:prompt_tokens_total") == sum(map(len, ids_of(TEXTS)))
    assert gained("shiftjax:request_success_total", finished_reason="stop") == 1
    assert gained("shiftjax:requests_rejected_total") == 1
    data = client.get("/ui/data").json()
    assert data["model"]["task"] == "embed"
    assert sum(data["columns"]["texts"]) >= len(TEXTS)
    assert max(data["columns"]["running"]) >= 1 and data["model"]["choice"] is None


def test_a_batch_of_embeddings(embedder, expected, tmp_path):
    pooling = Pooling("mean", False, MOST, ())
    reader = InputReader(byte_tokenizer(), pooling, 256, MOST)
    lines = [
        {"custom_id": str(number), "method": "POST", "url": PATH, "body": {"input": text}}
        for number, text in enumerate(TEXTS)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    with embed_server(embedder.runner, reader, files_dir=str(tmp_path)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
        with client:
            file = client.files.create(file=("lines.jsonl", content), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint=PATH, completion_window="24h"
            )
            while batch.status != "completed":
                batch = client.batches.retrieve(batch.id)
            text = client.files.content(batch.output_file_id).text
        records = {each["custom_id"]: each for each in map(json.loads, text.splitlines())}
        found = [
            records[str(n)]["response"]["body"]["data"][0]["embedding"] for n in range(len(TEXTS))
        ]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        server.assert_quiescent()
