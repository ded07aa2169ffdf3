"""Files and batches over HTTP: what they come to, who sees what, and what is refused."""

import json
import sqlite3
import threading
import time
from pathlib import Path

import pytest
from kit import CHAT, COMPLETION, is_error, metric_total, metric_values, running_server

FILES, BATCHES = "/v1/files", "/v1/batches"
ONE, OTHER = ({"authorization": f"Bearer {key}"} for key in ("key-one", "key-other"))
ENDED = ("completed", "failed", "cancelled", "expired")
BODY = {"prompt": "hi", "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("files"))
    options = {"files_dir": folder, "max_file_bytes": "1MiB", "files_bytes": "2MiB"}
    keys = ("key-one", "key-other")
    with running_server(grpc=False, keys=keys, max_request_bytes=1 << 19, **options) as running:
        yield running


@pytest.fixture
def client(server):
    with server.client(headers=ONE) as client:
        yield client
        for each in client.get(FILES, params={"limit": 10_000}).json()["data"]:
            client.delete(f"{FILES}/{each['id']}")
    server.let_go()
    server.assert_quiescent()


def jsonl(*bodies, url=COMPLETION) -> bytes:
    lines = (
        {"custom_id": f"c{number}", "method": "POST", "url": url, "body": body}
        for number, body in enumerate(bodies, 1)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def upload(client, content: bytes, filename="lines.jsonl", **fields):
    form = {"purpose": "batch"} | fields
    return client.post(FILES, files={"file": (filename, content)}, data=form)


def begin(client, content: bytes, url=COMPLETION) -> dict:
    file = upload(client, content).json()["id"]
    body = {"input_file_id": file, "endpoint": url, "completion_window": "24h"}
    made = client.post(BATCHES, json=body)
    assert made.status_code == 200, made.text
    return made.json()


def wait(client, batch: dict, *states) -> dict:
    for _ in range(1000):
        batch = client.get(f"{BATCHES}/{batch['id']}").json()
        if batch["status"] in (states or ENDED):
            return batch
        time.sleep(0.01)
    raise AssertionError(batch)


def records(client, name: str | None) -> dict[str, dict]:
    if name is None:
        return {}
    lines = client.get(f"{FILES}/{name}/content").text.splitlines()
    return {record["custom_id"]: record for record in map(json.loads, lines)}


def contents(server) -> list[Path]:
    return [*Path(server.service.options.files_dir).joinpath("content").iterdir()]


def test_a_file_comes_and_goes(server, client):
    content = b'{"a": 1}\n' * 300
    file = upload(client, content, "some.jsonl").json()
    (path,) = contents(server)
    assert path.stat().st_mode & 0o777 == 0o600
    assert (file["bytes"], file["filename"], file["purpose"]) == (2700, "some.jsonl", "batch")
    path = f"{FILES}/{file['id']}"
    assert client.get(path).json() == file
    assert client.get(f"{path}/content").content == content
    second = upload(client, content).json()
    listed = client.get(FILES, params={"limit": 1}).json()
    assert (listed["data"], listed["has_more"]) == ([second], True)
    assert client.get(FILES, params={"after": second["id"]}).json()["data"] == [file]
    assert client.get(FILES, params={"purpose": "vision"}).json()["data"] == []
    assert client.delete(path).json() == {"id": file["id"], "object": "file", "deleted": True}
    for gone in (client.get(path), client.get(f"{path}/content"), client.delete(path)):
        is_error(gone, 404)


def test_answers_are_those_of_the_endpoint(client):
    """With the same draws; a line that is wrong is its own trouble, and in the other file."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "seed": 7}
    wrong = {"messages": [], "max_tokens": 5}
    batch = begin(client, jsonl(chat, wrong, chat | {"stream": True}, chat, url=CHAT), CHAT)
    assert (batch["status"], batch["endpoint"]) == ("validating", CHAT)
    batch = wait(client, batch)
    assert batch["status"] == "completed" and batch["completed_at"] >= batch["in_progress_at"]
    assert batch["request_counts"] == {"total": 4, "completed": 2, "failed": 2}
    good, bad = records(client, batch["output_file_id"]), records(client, batch["error_file_id"])
    assert (set(good), set(bad)) == ({"c1", "c4"}, {"c2", "c3"})
    direct = client.post(CHAT, json=chat).json()
    response = good["c1"]["response"]
    assert response["status_code"] == 200 and good["c1"]["error"] is None
    assert response["body"]["choices"] == direct["choices"]
    assert response["body"]["object"] == "chat.completion"
    refused = client.post(CHAT, json=wrong)
    assert bad["c2"]["response"]["status_code"] == refused.status_code == 400
    assert bad["c2"]["response"]["body"] == refused.json()
    assert bad["c3"]["error"]["param"] == "stream"


def test_draws_depend_on_the_line_alone(client):
    content = jsonl(*[BODY | {"temperature": 1.0}] * 4)
    texts = []
    for _ in range(2):
        found = records(client, wait(client, begin(client, content))["output_file_id"])
        texts.append({name: r["response"]["body"]["choices"] for name, r in found.items()})
    assert texts[0] == texts[1]
    assert len({str(choices[0]["text"]) for choices in texts[0].values()}) == 4


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (b"", "empty_file", None),
        (b"\n \n", "empty_file", None),
        (b"no JSON\n", "invalid_json_line", 1),
        (b"[]\n", "invalid_json_line", 1),
        (b'{"custom_id": 3, "url": "/v1/completions", "body": {}}\n', "invalid_json_line", 1),
        (b"\xff\xfe\n", "invalid_json_line", 1),
        (b"[" * 50_000 + b"\n", "invalid_json_line", 1),
        (jsonl(BODY) * 2, "duplicate_custom_id", 2),
        (jsonl(BODY, url=CHAT), "mismatched_endpoint", 1),
        (jsonl("text"), "invalid_body", 1),
        (jsonl(BODY).replace(b"POST", b"GET"), "invalid_method", 1),
        (jsonl(BODY).replace(b"c1", b""), "invalid_custom_id", 1),
        (jsonl(BODY | {"prompt": "x" * (1 << 19)}), "line_too_large", 1),
    ],
)
def test_a_file_that_is_no_batch_fails_as_a_whole(client, content, code, line):
    batch = wait(client, begin(client, content))
    assert (batch["status"], batch["output_file_id"]) == ("failed", None)
    error = batch["errors"]["data"][0]
    assert (error["code"], error["line"]) == (code, line)
    assert batch["request_counts"]["total"] == 0


def test_a_line_with_more_than_a_body_may_hold_is_refused_alone(client):
    many = jsonl({"prompt": "x", "nested": [[]] * 70_000})
    batch = wait(client, begin(client, many + jsonl(BODY).replace(b"c1", b"c2")))
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}


def test_no_key_sees_what_is_of_another(server, client):
    batch = wait(client, begin(client, jsonl(BODY)))
    with server.client(headers=OTHER) as other:
        for name in (batch["input_file_id"], batch["output_file_id"]):
            is_error(other.get(f"{FILES}/{name}"), 404)
            is_error(other.get(f"{FILES}/{name}/content"), 404)
            is_error(other.delete(f"{FILES}/{name}"), 404)
        is_error(other.get(f"{BATCHES}/{batch['id']}"), 404)
        is_error(other.post(f"{BATCHES}/{batch['id']}/cancel"), 404)
        assert other.get(FILES).json()["data"] == other.get(BATCHES).json()["data"] == []
        body = {"endpoint": COMPLETION, "completion_window": "24h"}
        is_error(other.post(BATCHES, json=body | {"input_file_id": batch["input_file_id"]}), 404)
    with server.client() as nobody:
        is_error(nobody.get(FILES), 401)
        is_error(upload(nobody, b"x"), 401)


def test_a_batch_is_cancelled_and_keeps_what_it_has(server, client):
    quick, endless = BODY, BODY | {"max_tokens": 200}
    server.runner.step_seconds = 0.02
    batch = begin(client, jsonl(quick, *[endless] * 40))
    for _ in range(500):
        if wait(client, batch, "in_progress")["request_counts"]["completed"]:
            break
        time.sleep(0.01)
    is_error(client.delete(f"{FILES}/{batch['input_file_id']}"), 409)
    (file,) = client.get(FILES).json()["data"]  # of outputs there is nothing to see
    assert file["id"] == batch["input_file_id"]
    assert client.post(f"{BATCHES}/{batch['id']}/cancel").json()["status"] == "cancelling"
    batch = wait(client, batch)
    assert batch["status"] == "cancelled" and batch["cancelled_at"] >= batch["cancelling_at"]
    assert "c1" in records(client, batch["output_file_id"])
    assert batch["request_counts"]["completed"] < 41
    is_error(client.post(f"{BATCHES}/{batch['id']}/cancel"), 409)
    listed = client.get(BATCHES, params={"limit": 1}).json()
    assert listed["data"] == [batch]


def test_clients_go_before_lines(server, client):
    """Lines take half of the places, and none while a client waits."""
    server.runner.step_seconds = 0.01
    batch = begin(client, jsonl(*[BODY | {"max_tokens": 100, "priority": 3}] * 60))
    server.wait_until(lambda: server.num_running() >= 8)
    assert server.num_running() == 8
    waiting = metric_total(metric_values(client), "shiftjax:num_batch_lines_waiting")
    assert 40 < waiting <= 60
    requests = [each.request for each in server.engine.handles.values()]
    assert {each.priority for each in requests} == {(1 << 20) + 3}
    started = time.monotonic()
    assert client.post(COMPLETION, json=BODY).status_code == 200
    assert time.monotonic() - started < 0.01 * 40
    client.post(f"{BATCHES}/{batch['id']}/cancel")
    server.runner.step_seconds = 0
    wait(client, batch)


def test_no_line_begins_while_a_client_waits(server, client):
    """A prompt that is longer than a step keeps a client waiting."""
    server.runner.gate.clear()
    waiting = [threading.Thread(target=ask, args=(server, number)) for number in range(24)]
    for thread in waiting:
        thread.start()
    server.wait_until(lambda: len(server.engine.handles) == 24)
    server.runner.step_seconds = 0.01
    server.runner.gate.set()
    server.wait_until(lambda: server.engine.stats.num_waiting > 0)
    batch = begin(client, jsonl(*[BODY] * 8))
    wait(client, batch, "in_progress")
    num_waiting = 24
    while num_waiting:  # some of the 24 wait for the 16 places
        handles = [*server.engine.handles.values()]
        num_waiting = server.engine.stats.num_waiting
        lines = [each for each in handles if each.request.priority]
        assert not (num_waiting and lines)
        time.sleep(0.002)
    for thread in waiting:
        thread.join()
    server.let_go()
    assert wait(client, batch)["request_counts"]["completed"] == 8


def ask(server, number: int) -> None:
    with server.client(headers=ONE) as own:
        body = BODY | {"max_tokens": 100, "request_id": f"client-{number}"}
        assert own.post(COMPLETION, json=body).status_code == 200


def test_a_queue_that_is_full_is_waited_for(tmp_path):
    options = {"grpc": False, "files_dir": str(tmp_path), "batch_requests": 8}
    with running_server(max_num_queued_reqs=2, **options) as server, server.client() as client:
        server.runner.gate.clear()
        batch = begin(client, jsonl(*[BODY] * 8))
        server.wait_until(lambda: server.engine.counts.rejected > 0)
        server.let_go()
        assert wait(client, batch)["request_counts"] == {"total": 8, "completed": 8, "failed": 0}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/messages"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"output_expires_after": {"seconds": 3600}}, "output_expires_after"),
        ({"metadata": {"a": "x" * 600}}, "metadata"),
        ({"input_file_id": 3}, "input_file_id"),
    ],
)
def test_a_batch_that_is_wrong(client, fields, param):
    file = upload(client, jsonl(BODY)).json()["id"]
    body = {"input_file_id": file, "endpoint": COMPLETION, "completion_window": "24h"}
    is_error(client.post(BATCHES, json=body | fields), 400, param)


def test_outputs_are_no_input(client):
    batch = wait(client, begin(client, jsonl(BODY)))
    body = {"endpoint": COMPLETION, "completion_window": "24h"}
    is_error(client.post(BATCHES, json=body | {"input_file_id": batch["output_file_id"]}), 400)


@pytest.mark.parametrize(
    "name", ["..%2ffiles.db", "file-", "file-..", "%00", "files.db", "batch_1"]
)
def test_paths_with_ids_that_are_none(client, name):
    for path in (f"{FILES}/{name}", f"{FILES}/{name}/content", f"{BATCHES}/{name}"):
        is_error(client.get(path), 404)
    is_error(client.delete(f"{FILES}/{name}"), 404)


@pytest.mark.parametrize(
    "filename", ["../../etc/passwd", "..\\evil", "a/b\0c.jsonl", "x" * 900, '"; rm', "\u202etxt"]
)
def test_a_name_of_a_file_is_only_shown(server, client, filename):
    file = upload(client, b"{}\n", filename).json()
    shown = file["filename"]
    assert 0 < len(shown) <= 255 and shown.isprintable() and "/" not in shown and "\\" not in shown
    assert client.get(f"{FILES}/{file['id']}/content").content == b"{}\n"


def test_forms_that_are_wrong(client):
    is_error(client.post(FILES, json={"purpose": "batch"}), 415)
    kind = {"content-type": "multipart/form-data; boundary=b"}
    is_error(client.post(FILES, content=b"no form", headers=kind), 400)
    is_error(client.post(FILES, content=b"--b\r\n", headers=kind), 400)
    is_error(client.post(FILES, content=b"", headers=kind), 400)
    is_error(client.post(FILES, headers={"content-type": "multipart/form-data"}), 415)
    is_error(client.post(FILES, files={"other": ("a", b"x")}, data={"purpose": "batch"}), 400)
    is_error(client.post(FILES, files={"file": ("a", b"x")}), 400, "purpose")
    is_error(upload(client, b"x", purpose="fine-tune"), 400, "purpose")
    is_error(upload(client, b"x", purpose="x" * 2000), 400, "purpose")
    is_error(upload(client, b"x", **{"expires_after[seconds]": "5"}), 400)
    two = [("file", ("a", b"x")), ("file", ("b", b"y"))]
    is_error(client.post(FILES, files=two, data={"purpose": "batch"}), 400, "file")
    parts = {f"p{number}": "x" for number in range(20)}
    is_error(upload(client, b"x", **parts), 400)
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="' + b"x" * 100_000
    is_error(client.post(FILES, content=head, headers=kind), 400)
    assert client.get(FILES).json()["data"] == []


def test_sizes_are_bounded(server, client, tmp_path):
    is_error(upload(client, b"x" * (1 << 20) + b"y"), 413)

    def pieces():
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        yield from [b"x" * (1 << 16)] * 20

    kind = {"content-type": "multipart/form-data; boundary=b"}
    is_error(client.post(FILES, content=pieces(), headers=kind), 413)  # of no length before
    first, second = (upload(client, b"x" * 1_000_000) for _ in range(2))
    assert (first.status_code, second.status_code) == (200, 200)
    refused = upload(client, b"x" * 200_000)
    is_error(refused, 413)
    assert refused.json()["error"]["code"] == "files_quota_exceeded"
    with server.client(headers=OTHER) as other:  # which has as much for itself
        file = upload(other, b"x" * 200_000)
        assert file.status_code == 200
        other.delete(f"{FILES}/{file.json()['id']}")


def test_a_server_that_keeps_nothing_says_what_would():
    with running_server(grpc=False) as server, server.client() as client:
        for answer in (client.get(FILES), upload(client, b"x"), client.get(f"{BATCHES}/batch_1")):
            is_error(answer, 404)
            assert "--files-dir" in answer.text


def test_a_restart_goes_on_where_it_was(tmp_path):
    """Texts are those of a run without a break; a record that was cut is asked again."""
    options = {"grpc": False, "files_dir": str(tmp_path), "batch_requests": 2}
    content = jsonl(*[BODY | {"temperature": 1.0, "max_tokens": 20}] * 30)

    def texts(client, batch):
        found = records(client, batch["output_file_id"])
        return {name: r["response"]["body"]["choices"][0]["text"] for name, r in found.items()}

    with running_server(**options, drain_seconds=0.0) as server, server.client() as client:
        whole = texts(client, wait(client, begin(client, content)))
        server.runner.step_seconds = 0.01
        batch = begin(client, content)
        while wait(client, batch, "in_progress")["request_counts"]["completed"] < 3:
            time.sleep(0.01)
    largest = max((tmp_path / "content").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    with largest.open("ab") as file:
        file.write(b'{"id":"batch_req_29","custom_id":"c29","respon')
    (tmp_path / "incoming" / "left").write_bytes(b"x")
    (tmp_path / "content" / "stray").write_bytes(b"x")
    with running_server(**options) as server, server.client() as client:
        batch = wait(client, batch)
        assert batch["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
        assert texts(client, batch) == whole
        assert len(client.get(f"{FILES}/{batch['output_file_id']}/content").text.splitlines()) == 30
        assert not (tmp_path / "incoming" / "left").exists()
        assert not (tmp_path / "content" / "stray").exists()
        assert client.get(f"{FILES}/{batch['input_file_id']}/content").content == content


def test_lines_that_were_not_asked_in_time_are_recorded(tmp_path):
    options = {"grpc": False, "files_dir": str(tmp_path), "batch_requests": 1}
    with running_server(**options, drain_seconds=0.0) as server, server.client() as client:
        server.runner.step_seconds = 0.02
        batch = begin(client, jsonl(*[BODY | {"max_tokens": 20}] * 8))
        while wait(client, batch, "in_progress")["request_counts"]["completed"] < 2:
            time.sleep(0.01)
    with sqlite3.connect(tmp_path / "files.db") as database:  # as if a day had passed
        query = "UPDATE documents SET body = CAST(replace(body, ?, ?) AS BLOB) WHERE id = ?"
        names = f'"expires_at":{batch["expires_at"]}', '"expires_at":1', batch["id"]
        assert database.execute(query, names).rowcount == 1
    database.close()
    with running_server(**options) as server, server.client() as client:
        batch = wait(client, batch)
        counts = batch["request_counts"]
        assert batch["status"] == "expired" and batch["expired_at"]
        assert counts["completed"] >= 2 and counts["completed"] + counts["failed"] == 8
        late = records(client, batch["error_file_id"])
        assert len(late) == counts["failed"]
        assert all(each["response"] is None for each in late.values())
        assert {each["error"]["code"] for each in late.values()} == {"batch_expired"}
        assert len(records(client, batch["output_file_id"])) == counts["completed"]


def test_files_that_are_damaged_or_lost_are_errors_of_their_own(tmp_path):
    options = {"grpc": False, "files_dir": str(tmp_path), "batch_requests": 1}
    content = tmp_path / "content"
    with running_server(**options, drain_seconds=0.0) as server, server.client() as client:
        file = upload(client, b"x").json()["id"]
        (content / file).unlink()
        is_error(client.get(f"{FILES}/{file}/content"), 500)
        assert client.delete(f"{FILES}/{file}").status_code == 200
        server.runner.step_seconds = 0.02
        batch = begin(client, jsonl(*[BODY | {"max_tokens": 20}] * 8))
        while wait(client, batch, "in_progress")["request_counts"]["completed"] < 2:
            time.sleep(0.01)
    (largest, *_) = sorted(content.iterdir(), key=lambda path: -path.stat().st_mtime_ns)
    damaged = b"\xff" * 20 + largest.read_bytes()[20:]
    largest.write_bytes(damaged)
    with running_server(**options) as server, server.client() as client:
        batch = wait(client, batch)
        assert batch["status"] == "failed"
        assert batch["errors"]["data"][0]["code"] == "storage_failed"
        assert wait(client, begin(client, jsonl(BODY)))["status"] == "completed"
