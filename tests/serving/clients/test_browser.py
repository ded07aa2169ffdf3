"""The page in a real browser: a chat turn, charts that move, no error, no request elsewhere."""

import json
import shutil

import pytest
from kit import make_drafting_engine, make_engine, running_server

api = pytest.importorskip("playwright.sync_api", reason="needs: pip install playwright")
CHAT = "**/v1/chat/completions"
MARKUP = "<script>alert(1)</script><img src=x onerror=alert(1)> **bold** `code`"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("needs Debian's package chromium")
    with api.sync_playwright() as playwright:
        flags = ["--no-sandbox"]  # tests may run as root
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A page whose errors and outside requests fail the test."""
    page = browser.new_page()
    problems: list[str] = []
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: page.seen.append(request.url))
    page.seen = []
    page.problems = problems
    yield page
    page.close()


def test_a_chat_turn_and_moving_charts(page):
    engine = make_engine(max_num_batched_tokens=64, max_num_seqs=8)
    with running_server(engine) as server:
        server.runner.step_seconds = 0.005
        page.goto(f"{server.url}/ui")
        page.wait_for_selector("#state:has-text('ready')")
        assert page.inner_text("#model") == "echo"
        assert not page.is_visible("#fleet")
        message = "a long message " * 5  # its prompt is above the threshold: a base step
        page.fill("#text", message)
        page.click("#send")
        page.wait_for_selector("#send:not([disabled])")
        texts = page.locator(".message").all_text_contents()
        assert texts[0] == message.strip()
        assert len(texts) == 2
        assert texts[1]
        for chart in ("modes", "tokens", "batch", "kv"):
            page.wait_for_selector(f"#{chart}[data-sum]:not([data-sum='0'])")
        page.wait_for_selector("#requests[data-rows='1']")
        assert page.locator("#latency tbody tr").count() == 2
        page.click("#clear")
        assert page.locator(".message").count() == 0
        page.fill("#text", "again")
        server.runner.gate.clear()
        page.click("#send")
        page.click("#stop")
        page.wait_for_selector("#send:not([disabled])")
        server.runner.gate.set()
        server.wait_until(lambda: not server.engine.handles)
        assert page.problems == []
        assert all(url.startswith(server.url) or url == "data:," for url in page.seen), page.seen
    server_counts = server.engine.counts
    assert server_counts.finished + server_counts.cancelled == server_counts.accepted


def test_what_goes_wrong_in_a_chat(page):
    """Markup is text; a long answer stays in sight; a cleared one is gone; an error is said."""
    engine = make_engine(num_blocks=1024, max_model_len=1024)
    with running_server(engine) as server:
        page.goto(f"{server.url}/ui")
        page.wait_for_selector("#state:has-text('ready')")
        event = {"choices": [{"index": 0, "delta": {"content": "line\n" * 100}}]}
        body = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
        kind = "text/event-stream"
        page.route(CHAT, lambda route: route.fulfill(body=body, content_type=kind))
        page.fill("#text", MARKUP)
        page.press("#text", "Enter")
        page.wait_for_selector("#send:not([disabled])")
        assert page.locator(".message").first.text_content() == MARKUP
        assert page.locator(".message *").count() == 0
        below = "list => list.scrollHeight - list.scrollTop - list.clientHeight"
        assert page.locator("#messages").evaluate(below) < 2
        page.unroute(CHAT)
        server.runner.gate.clear()
        page.fill("#text", "never answered")
        page.press("#text", "Enter")
        page.click("#clear")
        server.runner.gate.set()
        page.wait_for_selector("#send:not([disabled])")
        server.wait_until(lambda: not server.engine.handles)
        assert page.locator(".message").count() == 0
        assert page.evaluate("conversation") == []
        assert page.problems == []
        page.fill("#text", "y" * 9000)
        page.press("#text", "Enter")
        page.wait_for_selector(".error:has-text('the context has room')")
        assert page.input_value("#text") == "y" * 9000  # to be shortened and sent again
        assert page.evaluate("conversation") == []
        page.goto("about:blank")


def test_drafts_are_counted_by_what_made_them(page):
    body = {"prompt": "p", "max_tokens": 40, "seed": 1, "ignore_eos": True}
    with running_server(make_drafting_engine(speculation="suffix")) as server:
        with server.client() as client:
            for _ in range(2):
                client.post("/v1/completions", json=body)
        page.goto(f"{server.url}/ui")
        page.wait_for_selector("#accepted[data-sum]:not([data-sum='0'])")
        drafts = server.engine.stats.drafts.by_drafter["suffix"]
        total = drafts["accepted"] + drafts["rejected"]
        assert page.inner_text("#drafters") == f"suffix {drafts['accepted']} of {total}"
        page.goto("about:blank")


def test_a_narrow_window(page):
    """Nothing runs out of its card, or of the window."""
    page.set_viewport_size({"width": 360, "height": 640})
    with running_server() as server:
        page.goto(f"{server.url}/ui")
        page.wait_for_selector("#state:has-text('ready')")
        wider = (
            "all => all.filter(each => each.scrollWidth > each.clientWidth).map(e => e.innerText)"
        )
        assert page.locator(".card, html").evaluate_all(wider) == []
        assert page.locator("#tokens").evaluate("each => each.clientWidth") > 250  # for five labels
        page.goto("about:blank")


def test_a_page_that_needs_a_key(page):
    with running_server(keys=("secret",)) as server:
        page.goto(f"{server.url}/ui")
        page.wait_for_selector("#key-field:not([hidden])")
        page.fill("#key", "secret")
        page.wait_for_selector("#state:has-text('ready')")
        page.fill("#text", "hello")
        page.press("#text", "Enter")
        page.wait_for_selector("#send:not([disabled])")
        assert page.locator(".message.assistant").count() == 1
        page.goto("about:blank")
