"""The page: static files that stay at home, data that tells what the engine did, and `/`."""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from kit import is_error, make_drafting_engine, make_engine, running_server
from starlette.routing import Router

from serving.http.page import FILES, root_route
from shiftjax.drafts.speculation import DraftStats


def test_the_files_ask_nobody_else():
    with running_server(keys=("secret",)) as server, server.client() as client:
        for path in FILES:
            response = client.get(path)
            assert response.status_code == 200
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert not re.findall(r"(?:https?:)?//[a-z]+\.", response.text), path
            for parser in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write"):
                assert parser not in response.text, path
        page = client.get("/ui").text
        assert "<script>" not in page
        assert not re.search(r"""\s(?:on\w+|style)\s*=|["'(=]/ui""", page)
        assert client.get("/ui/data").status_code == 401


def test_every_file_of_the_page_is_served():
    with running_server() as server, server.client() as client:
        text = "".join(client.get(path).text for path in FILES)
        named = set(re.findall(r'"(?:\./|ui/)([\w.]+\.(?:js|css))"', text))
        assert {f"/ui/{name}" for name in named} | {"/ui"} == set(FILES)


def test_the_page_can_be_left_out():
    with running_server(ui=False) as server, server.client() as client:
        for path in (*FILES, "/ui/data"):
            assert client.get(path).status_code == 404
        answer = client.get("/", headers={"accept": "text/html"})
        assert answer.status_code == 200
        assert "page" not in answer.json()


def test_the_root_leads_browsers_to_the_page():
    with running_server(keys=("secret",)) as server, server.client() as client:
        browser = client.get("/", headers={"accept": "text/html,application/xhtml+xml;q=0.9"})
        assert (browser.status_code, browser.headers["location"]) == (307, "ui")
        other = client.get("/", headers={"accept": "application/json"})
        assert other.json()["page"] == "ui"
        assert other.headers["vary"] == browser.headers["vary"] == "accept"
        for path in ("openapi", "health"):
            assert client.get(f"/{other.json()[path]}").status_code in (200, 401)


@pytest.mark.parametrize(("asked", "page"), [("/llm", "/llm/ui"), ("/llm/", "/llm/ui")])
def test_the_root_leads_to_the_page_below_a_path(asked, page):
    """As where a proxy, or the server itself, takes a prefix off before the routes."""
    app = Router([root_route(True)])

    async def below(scope, receive, send):
        await app(scope | {"path": "/"}, receive, send)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(below)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.get(asked, headers={"accept": "text/html"})

    answer = asyncio.run(ask())
    assert answer.next_request is not None and answer.next_request.url.path == page


def test_the_data_shows_modes_queue_and_requests():
    with running_server(make_engine(max_num_seqs=2)) as server, server.client() as client:
        body = {"prompt": "p" * 60, "max_tokens": 20, "n": 4, "ignore_eos": True}
        client.post("/v1/completions", json=body)
        server.assert_quiescent()
        for span, seconds in ((60, 0.5), (600, 5.0)):
            data = client.get(f"/ui/data?span={span}").json()
            assert (data["span"], data["seconds"]) == (span, seconds)
            columns = data["columns"]
            assert {len(column) for column in columns.values()} == {120}
            assert data["start"] <= data["now"] - span + seconds
            assert sum(columns["base_steps"]) > 0  # prefill is above the threshold
            assert sum(columns["shift_steps"]) > 0
            assert sum(columns["base_load"]) > 32 * sum(columns["base_busy"])
            assert 0 < sum(columns["shift_load"]) <= 32 * sum(columns["shift_busy"])
            assert sum(columns["tokens"]) == 80
            assert sum(columns["switches"]) == data["load"]["switches"] > 0
            assert max(columns["running"]) == 2
            assert max(columns["waiting"]) >= 2
            assert 0 < max(columns["kv"]) <= 1
        assert data["load"]["running"] == data["load"]["waiting"] == data["load"]["kv"] == 0
        assert data["model"]["name"] == "echo"
        assert data["load"]["most_running"] == 2 and data["load"]["most_blocks"] == 255
        assert data["last_step"]["mode"] == "shift" and data["last_step"]["tokens"] <= 2
        assert (data["fleet"], data["strip"]["entries"]) == (None, [])
        (row,) = data["requests"]
        assert row["output_tokens"] == 80
        assert 0 <= row["queue"] <= row["ttft"] <= row["end"] - row["arrival"]
        assert len(data["ttft"]) == len(data["tpot"]) == 3


@pytest.mark.parametrize("span", ["", "61", "-1", "1e3", "60,600", "²"])
def test_a_span_that_is_not_kept_is_refused(span):
    with running_server() as server, server.client() as client:
        is_error(client.get("/ui/data", params={"span": span}), 400, "span")


def test_the_data_says_by_what_modes_are_chosen():
    with running_server() as server, server.client() as client:
        choice = client.get("/ui/data").json()["model"]["choice"]
    assert (choice["policy"], choice["threshold"], choice["groups"]) == ("threshold", 32, 1)
    assert [(mode["label"], mode["sp"]) for mode in choice["modes"]] == [("base", 2), ("shift", 1)]
    assert choice["predicted"] == []


def test_the_data_has_the_phases_of_open_requests():
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=64)
    with running_server(engine) as server, server.client() as client:
        server.runner.step_seconds = 0.02
        body = {"max_tokens": 100, "ignore_eos": True}
        with ThreadPoolExecutor(2) as pool:
            names = ("first", "second")
            bodies = [body | {"prompt": "p" * 100, "request_id": name} for name in names]
            answers = [pool.submit(client.post, "/v1/completions", json=each) for each in bodies]
            server.wait_until(lambda: any(map(server.has_tokens, names)))
            data = client.get("/ui/data").json()
            server.let_go()
            assert [answer.result().status_code for answer in answers] == [200, 200]
        assert data["num_open"] == 2
        decoding, waiting = sorted(data["open"], key=lambda row: row["ttft"] is None)
        assert 0 <= decoding["queue"] < decoding["ttft"]
        assert (waiting["queue"], waiting["ttft"], waiting["end"]) == (None, None, None)
        server.assert_quiescent()
        assert client.get("/ui/data").json()["num_open"] == 0


def test_the_data_shows_accepted_drafts():
    body = {"prompt": "p", "max_tokens": 40, "seed": 1, "ignore_eos": True}
    engine = make_drafting_engine(speculation="suffix")
    with running_server(engine) as server, server.client() as client:
        for _ in range(2):
            client.post("/v1/completions", json=body)
        server.assert_quiescent()
        data = client.get("/ui/data").json()
        accepted = engine.stats().find(DraftStats).num_accepted
        assert sum(data["columns"]["accepted"]) == accepted > 20
        assert data["drafts"]["suffix"]["accepted"] == accepted
    with running_server() as server, server.client() as client:
        assert client.get("/ui/data").json()["drafts"] is None
