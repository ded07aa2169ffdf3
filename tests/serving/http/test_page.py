"""The page: static files that stay at home, and data that tells what the engine did."""

import re

from kit import make_drafting_engine, make_engine, running_server

FILES = ("/ui", "/ui/app.js", "/ui/style.css")


def test_the_files_ask_nobody_else():
    with running_server(keys=("secret",)) as server, server.client() as client:
        for path in FILES:
            response = client.get(path)
            assert response.status_code == 200
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert not re.findall(r"(?:https?:)?//[a-z]+\.", response.text), path
            assert "innerHTML" not in response.text
        page = client.get("/ui").text
        assert "<script>" not in page
        assert " on" not in re.sub(r"<(?:title|h1|h2).*?</", "", page).replace(" on\n", "")
        assert client.get("/ui/data").status_code == 401


def test_the_page_can_be_left_out():
    with running_server(ui=False) as server, server.client() as client:
        for path in (*FILES, "/ui/data"):
            assert client.get(path).status_code == 404


def test_the_data_shows_modes_queue_and_requests():
    with running_server(make_engine(max_num_seqs=2)) as server, server.client() as client:
        body = {"prompt": "p" * 60, "max_tokens": 20, "n": 4, "ignore_eos": True}
        client.post("/v1/completions", json=body)
        server.assert_quiescent()
        data = client.get("/ui/data").json()
        buckets = data["buckets"]
        assert data["model"] == "echo"
        assert (data["fleet"], data["strip"]) == (None, [])
        assert sum(bucket["base"] for bucket in buckets) > 0  # prefill is above the threshold
        assert sum(bucket["shift"] for bucket in buckets) > 0
        assert sum(bucket["tokens"] for bucket in buckets) == 80
        assert max(bucket["running"] for bucket in buckets) == 2
        assert max(bucket["waiting"] for bucket in buckets) >= 2
        assert 0 < max(bucket["kv"] for bucket in buckets) <= 1
        (row,) = data["requests"]
        assert row["output_tokens"] == 80
        assert 0 <= row["queue"] <= row["ttft"] <= row["end"] - row["arrival"]
        assert len(data["ttft"]) == len(data["tpot"]) == 3


def test_the_data_shows_accepted_drafts():
    body = {"prompt": "p", "max_tokens": 40, "seed": 1, "ignore_eos": True}
    engine = make_drafting_engine(speculation="suffix")
    with running_server(engine) as server, server.client() as client:
        for _ in range(2):
            client.post("/v1/completions", json=body)
        server.assert_quiescent()
        data = client.get("/ui/data").json()
        accepted = engine.stats().drafts.num_accepted
        assert sum(bucket["accepted"] for bucket in data["buckets"]) == accepted > 20
        assert data["load"]["drafts"]["suffix"]["accepted"] == accepted
    with running_server() as server, server.client() as client:
        assert client.get("/ui/data").json()["load"]["drafts"] is None
