"""What is kept of clients, under a process that is killed, a full disk, and damaged files."""

import json
import time

import pytest
from served import inside, serve

pytestmark = pytest.mark.thorough

COMPLETION = "/v1/completions"
ENDED = ("completed", "failed", "cancelled", "expired")
BODY = {"prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
SLOW = "dispatch:delay:4+"


def begin(served, num_lines: int, **fields) -> dict:
    lines = [
        {"custom_id": f"c{n}", "method": "POST", "url": COMPLETION, "body": BODY | fields}
        for n in range(1, num_lines + 1)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = served.client.post(
        "/v1/files", files={"file": ("lines.jsonl", content)}, data={"purpose": "batch"}
    ).json()["id"]
    body = {"input_file_id": file, "endpoint": COMPLETION, "completion_window": "24h"}
    return served.client.post("/v1/batches", json=body).json()


def wait(served, batch: dict, until=lambda batch: batch["status"] in ENDED) -> dict:
    for _ in range(1200):
        batch = served.client.get(f"/v1/batches/{batch['id']}").json()
        if until(batch):
            return batch
        time.sleep(0.05)
    raise AssertionError(batch)


def tokens(served, batch: dict) -> dict[str, list[int]]:
    text = served.client.get(f"/v1/files/{batch['output_file_id']}/content").text
    records = [json.loads(line) for line in text.splitlines()]
    assert len({each["custom_id"] for each in records}) == len(records)
    return {r["custom_id"]: r["response"]["body"]["choices"][0]["token_ids"] for r in records}


def test_a_kill_loses_the_lines_in_flight_alone(model, cache_dir, tmp_path):
    """And what is kept of responses is there, too."""
    flags = [f"--files-dir={tmp_path / 'files'}", f"--store-dir={tmp_path}"]
    flags += ["--store-responses=1MiB", "--batch-requests=2"]
    with serve(model[0], cache_dir, *flags, fault=SLOW) as served:
        served.wait_for("/health/ready", 200)
        batch = begin(served, 6)
        wait(served, batch, lambda batch: batch["request_counts"]["completed"] >= 2)
        conversation = served.client.post("/v1/conversations", json={}).json()
        served.process.kill()
    with serve(model[0], cache_dir, *flags) as served:
        served.wait_for("/health/ready", 200)
        batch = wait(served, batch)
        assert batch["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
        resumed = tokens(served, batch)
        assert tokens(served, wait(served, begin(served, 6))) == resumed
        found = served.client.get(f"/v1/conversations/{conversation['id']}")
        assert found.json() == conversation
        served.end_well()


def test_a_disk_that_is_full(model, cache_dir, namespaces, tmp_path):
    """Clients are answered; what needs room says so, and does it when there is some again."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f"mount -t tmpfs -o size=4m tmpfs {disk}"
    flags = [f"--files-dir={disk}", f"--store-dir={disk}", "--store-responses=8MiB"]
    with serve(model[0], cache_dir, *flags, inside=inside(script)) as served:
        served.wait_for("/health/ready", 200)
        post = served.client.post

        def upload(num_bytes):
            file = {"file": ("f", b"x" * num_bytes)}
            return post("/v1/files", files=file, data={"purpose": "batch"})

        refused = upload(5_000_000)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_full")
        assert upload(3_000_000).status_code == 200
        batch = wait(served, begin(served, 100, echo=True, logprobs=5))
        assert batch["status"] == "failed"
        assert batch["errors"]["data"][0]["code"] == "storage_failed"
        items = [{"role": "user", "content": "x" * 400_000}] * 3
        refused = post("/v1/conversations", json={"items": items})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_full")
        assert served.tokens()
        for each in served.client.get("/v1/files").json()["data"]:
            served.client.delete(f"/v1/files/{each['id']}")
        batch = wait(served, begin(served, 3))
        assert batch["request_counts"]["completed"] == 3
        assert "Traceback" not in served.end_well()


def test_folders_that_cannot_be_used_end_the_start(model, cache_dir, tmp_path):
    flags = [f"--files-dir={tmp_path / 'files'}", f"--store-dir={tmp_path / 'kept'}"]
    flags += ["--store-responses=1MiB"]
    with serve(model[0], cache_dir, *flags) as served:
        served.wait_for("/health/ready", 200)
        for flag in flags[:2]:
            with serve(model[0], cache_dir, flag, flags[2]) as second:
                code, _, err = second.end()
                assert code == 2 and "another server uses it" in err and "Traceback" not in err
        served.end_well()
    (tmp_path / "kept" / "responses.db").write_bytes(b"no database" * 100)
    with serve(model[0], cache_dir, *flags) as served:
        code, _, err = served.end()
        assert code == 2 and "responses.db" in err and "Traceback" not in err
