"""What a server of a decoder says to those who want embeddings."""

import pytest
from kit import is_error


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_it_has_none(client, path, body):
    answer = client.post(path, json=body)
    is_error(answer, 400, "model")
    assert "echo generates text; a server with --task embed" in answer.json()["error"]["message"]
    assert {model["task"] for model in client.get("/v1/models").json()["data"]} == {"generate"}
