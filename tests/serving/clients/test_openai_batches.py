"""The `openai` package uploads files and runs batches, as its documentation shows."""

import json
import time

import httpx
import openai
import pytest
from kit import running_server

KEY = "sk-test-key"
CHAT = {"model": "echo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
RESPONSE = {"model": "echo", "input": "hi", "max_output_tokens": 5}
COMPLETION = {"model": "echo", "prompt": "hi", "max_tokens": 5}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("files"))
    with running_server(keys=(KEY,), files_dir=folder, store_responses="1MiB") as running:
        yield running


@pytest.fixture
def client(server):
    with openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key=KEY,
        max_retries=0,
        http_client=httpx.Client(trust_env=False),
    ) as client:
        yield client
    server.assert_quiescent()


def begin(client, tmp_path, url: str, bodies: list[dict]) -> openai.types.Batch:
    path = tmp_path / "lines.jsonl"
    lines = [
        {"custom_id": f"request-{number}", "method": "POST", "url": url, "body": body}
        for number, body in enumerate(bodies, 1)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    with path.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    assert uploaded.filename == "lines.jsonl"
    return client.batches.create(
        input_file_id=uploaded.id,
        endpoint=url,
        completion_window="24h",
        metadata={"what": "nightly"},
    )


def wait(client, batch: openai.types.Batch) -> openai.types.Batch:
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", COMPLETION),
        ("/v1/responses", RESPONSE),
    ],
)
def test_a_batch(client, tmp_path, url, body):
    batch = begin(client, tmp_path, url, [body, body | {"model": "none"}, body])
    assert batch.metadata == {"what": "nightly"}
    batch = wait(client, batch)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
    content = client.files.content(batch.output_file_id).text
    records = [json.loads(line) for line in content.splitlines()]
    assert {record["custom_id"] for record in records} == {"request-1", "request-3"}
    for record in records:
        assert record["response"]["status_code"] == 200 and record["error"] is None
    errors = client.files.content(batch.error_file_id).text
    (error,) = map(json.loads, errors.splitlines())
    assert error["response"]["status_code"] == 404
    assert error["error"]["code"] == "model_not_found"


def test_responses_of_batches_are_kept_where_that_is_asked(client, tmp_path):
    batch = begin(client, tmp_path, "/v1/responses", [RESPONSE, RESPONSE | {"store": True}])
    lines = client.files.content(wait(client, batch).output_file_id).text.splitlines()
    records = {record["custom_id"]: record for record in map(json.loads, lines)}
    stored, kept = (records[f"request-{n}"]["response"]["body"] for n in (2, 1))
    assert client.responses.retrieve(stored["id"]).output_text  # under the key of the batch
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept["id"])


def test_lists_cancel_and_delete(server, client, tmp_path):
    server.runner.step_seconds = 0.02
    batch = begin(client, tmp_path, "/v1/completions", [COMPLETION | {"max_tokens": 200}] * 30)
    assert next(iter(client.batches.list(limit=1))).id == batch.id
    assert client.batches.cancel(batch.id).status == "cancelling"
    assert wait(client, batch).status == "cancelled"
    server.let_go()
    files = [*client.files.list(limit=2, purpose="batch")]
    assert files[0].id == batch.input_file_id
    assert client.files.delete(batch.input_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(batch.input_file_id)
    assert len([*client.files.list(limit=1, purpose="batch")]) == len(files) - 1
