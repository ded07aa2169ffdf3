"""The page in a real browser: a chat turn, words and charts that say why, keys, a narrow window."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from in_thread import server_in_thread
from kit import make_drafting_engine, make_engine, running_server

from serving.run.simulated import open_simulated
from serving.server.async_engine import AsyncEngine
from serving.server.options import ServerOptions
from serving.server.start_phases import Phases
from shiftjax.config import EngineConfig
from shiftjax.drafts.speculation import DraftStats
from shiftjax.explain.explanation import UNKNOWN
from shiftjax.parallel.grid import Group
from shiftjax.targets import Target, Targets

pytestmark = pytest.mark.thorough

api = pytest.importorskip("playwright.sync_api", reason="needs: pip install playwright")
CHAT = "**/v1/chat/completions"
COMPLETION = "/v1/completions"
MARKUP = "<script>alert(1)</script><img src=x onerror=alert(1)> **bold** `code`"
ANSWER = """<img src=x onerror="document.title = 'injected'"> **bold** and `a < b`

- [here](https://example.org/) and [not here](javascript:alert) ![x](https://example.org/x.png)

```python
print("<b>")
```
"""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LAST_START = {"load weights": 3.0, "compile": 20.0, "warm up": 4.0, "first step": 1.0}
NARROW = {"width": 360, "height": 640}


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


@pytest.fixture(scope="module")
def server():
    """Four units, base above 32 tokens, and as much room as the tests want."""
    engine = make_engine(num_blocks=1024, max_model_len=1024)
    lane = engine.lanes[0]
    lane.group, lane.modes = Group(0, 4), Group(0, 4).modes
    engine._steps = {(mode.label, 4): 0 for mode in lane.modes}
    with running_server(engine) as server:
        yield server


@pytest.fixture
def opened(page, server):
    """The page of that server; afterwards nothing is held."""
    page.goto(f"{server.url}/ui")
    page.wait_for_selector("#state:has-text('ready')")
    yield page
    page.goto("about:blank")
    server.let_go()
    server.assert_quiescent()


def answers(page, *objects: dict) -> None:
    """From now on the chat is answered with a stream of these."""
    body = "".join(f"data: {json.dumps(each)}\n\n" for each in objects) + "data: [DONE]\n\n"
    kind = "text/event-stream"
    page.route(CHAT, lambda route: route.fulfill(body=body, content_type=kind))


def delta(text: str, num_tokens: int = 1) -> dict:
    token_ids = list(range(num_tokens))
    return {"choices": [{"index": 0, "delta": {"content": text}, "token_ids": token_ids}]}


def open_chat(page) -> None:
    """Open the drawer, if it is closed."""
    if not page.is_visible("#chat"):
        page.click("#chat-button")
        page.wait_for_selector("#chat", state="visible")


def say(page, text: str) -> None:
    open_chat(page)
    page.fill("#text", text)
    page.press("#text", "Enter")


@contextmanager
def steps_of(server, num_tokens: int):
    """Meanwhile a step of about so many tokens follows another."""
    server.runner.step_seconds = 0.02
    body = {"prompt": "p", "max_tokens": 900, "ignore_eos": True, "n": num_tokens}
    with ThreadPoolExecutor(1) as pool, server.client() as client:
        answer = pool.submit(client.post, COMPLETION, json=body)
        try:
            yield
        finally:
            server.let_go()
            assert answer.result().status_code == 200


# ---------------------------------------------------------------- what the engine does


def test_the_root_leads_here_and_nothing_goes_elsewhere(opened, server):
    opened.goto(server.url)
    opened.wait_for_selector("#state:has-text('ready')")
    assert opened.url == f"{server.url}/ui"
    assert opened.inner_text("#model") == "echo"
    assert not opened.is_visible("#fleet")
    assert opened.problems == []
    assert all(url.startswith(server.url) or url == "data:," for url in opened.seen), opened.seen


def test_the_strip_says_which_mode_and_why(opened, server):
    with steps_of(server, 4):
        opened.wait_for_selector("#mode:has-text('SHIFT')")
        opened.wait_for_selector("#words:has-text('4 tokens a step')")
        assert opened.inner_text("#rule") == "(base from 33)"
        opened.wait_for_selector("#because:has-text('every device computes all 4 tokens')")
        assert opened.locator("figure.active").get_attribute("data-mode") == "shift"
        assert opened.locator("figure").count() == 2
        assert opened.locator("figure.active .mesh > div").count() == 1
        assert opened.inner_text("#tile-running") == "4"
        assert opened.inner_text("#tile-running-of") == "of 16"
        words = opened.inner_text("#binds-words")
        assert re.fullmatch(r"nothing waits: a token takes a step, .* in SHIFT", words)
        assert "--speculation" in opened.inner_text("#binds-change")
        opened.wait_for_selector("#spoken:has-text('SHIFT 4 tokens a step')", state="attached")
    with server.client() as client, ThreadPoolExecutor(1) as pool:
        server.runner.step_seconds = 0.3  # prompts of 128 tokens at once: base steps
        bodies = {"prompt": ["".join(chr(97 + (i * k) % 23) for i in range(900)) for k in (1, 5)]}
        answer = pool.submit(client.post, COMPLETION, json=bodies | {"max_tokens": 1})
        opened.wait_for_selector("#mode.base:has-text('BASE')")
        assert "tokens a step" in opened.inner_text("#words")
        assert opened.inner_text("#rule") == "(shift up to 32)"
        assert opened.locator("figure.active .mesh > div").count() == 4
        server.let_go()
        assert answer.result().status_code == 200
    opened.wait_for_selector("#mode:has-text('IDLE')")
    assert "the last step was" in opened.inner_text("#words")
    assert not opened.is_visible("#binds")


def test_the_page_says_what_binds_and_what_to_change(page):
    """In a sentence, as first tokens over time, as percentiles, and by targets."""
    options = {"targets": Targets(Target(ttft=30.0)), "grpc": False}
    with running_server(make_engine(max_num_seqs=4), **options) as server:
        page.goto(f"{server.url}/ui")
        page.wait_for_selector("#state.ready")
        assert page.inner_text("#tile-good-of") == "no request ended"
        server.runner.step_seconds = 0.02
        with ThreadPoolExecutor(6) as pool, server.client() as client:
            body = {"prompt": "p" * 20, "max_tokens": 150, "ignore_eos": True}
            answers = [pool.submit(client.post, COMPLETION, json=body) for _ in range(6)]
            page.wait_for_selector("#binds-words:has-text('held back by max_num_seqs: 4 of 4')")
            assert page.inner_text("#binds-change") == "raise --max-num-seqs: there is KV for more"
            assert page.get_attribute("#binds", "data-code") == "max_num_seqs"
            server.let_go()
            assert {each.result().status_code for each in answers} == {200}
        page.wait_for_selector("#firsts[data-count='6']")
        page.wait_for_selector("#ttft-curve[data-points='9']")
        page.wait_for_selector("#tile-good:has-text('100 %')")
        assert page.get_attribute("#tpot-curve", "data-points") == "9"
        page.focus("#firsts")
        page.keyboard.press("ArrowLeft")
        assert " ago: " in page.text_content("#told")
        page.goto("about:blank")
    assert page.problems == []


def test_charts_say_what_would_have_been_otherwise(opened, server):
    with server.client() as client:
        client.post(COMPLETION, json={"prompt": "q" * 100, "max_tokens": 8, "ignore_eos": True})
    for chart in ("steps", "tokens", "sequences", "kv"):
        opened.wait_for_selector(f"#{chart}[data-sum]:not([data-sum='0'])")
    box = opened.locator("#steps").bounding_box()
    for back in range(1, 60):  # until the pointer is over the steps
        opened.mouse.move(box["x"] + box["width"] - 4 * back, box["y"] + box["height"] / 2)
        if "it would have been" in opened.inner_text("#readout"):
            break
    told = opened.inner_text("#readout")
    assert "In SHIFT it would have been all" in told or "In BASE it would have been" in told
    opened.mouse.move(0, 0)
    assert opened.inner_text("#readout").startswith("The last 60 s:")
    opened.focus("#steps")
    found = []
    for _ in range(60):
        opened.keyboard.press("ArrowLeft")
        found.append(opened.text_content("#told"))
    assert any("would have been" in each for each in found)
    assert all(" ago: " in each for each in found)
    assert "Tokens per step, last 60 s" in opened.get_attribute("#steps", "aria-label")
    opened.keyboard.press("h")
    assert opened.is_checked("#spans input[value='600']")
    opened.wait_for_selector("#tile-switches-of:has-text('in 10 min')")
    opened.wait_for_selector("#requests[data-rows]:not([data-rows='0'])")
    assert opened.locator("#latency tbody tr").count() == 2
    assert opened.problems == []


def test_where_costs_are_unknown_the_page_says_so(opened):
    opened.wait_for_selector("#otherwise:has-text('Nothing is predicted')")
    assert opened.inner_text("#otherwise") == UNKNOWN


@pytest.mark.parametrize("fleet", [False, True], ids=["modes", "groups"])
def test_the_page_says_what_others_would_have_cost(page, fleet):
    """On simulated devices: the numbers are those of `/ui/data`, at desktop and phone widths."""
    settings = {"fleet": True, "fleet_policy": "load"} if fleet else {"sp": 4, "tp": 2}
    settings |= {"model": "llama-70b", "quantization": "fp8"}
    opened = open_simulated(EngineConfig.from_options(**settings), ServerOptions(simulate="h200x8"))

    def open_engine(service):
        engine = AsyncEngine(opened.engine, opened.served.tokenizer, service.observers)
        service.open(opened.served, engine)
        return engine

    body = {"prompt": "x" * 700, "max_tokens": 200, "ignore_eos": True}
    with server_in_thread(open_engine, simulate="h200x8") as server, server.client() as client:
        page.goto(f"{server.url}/ui")
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(client.post, COMPLETION, json=body) for _ in range(4)]
            page.wait_for_selector("#otherwise:has-text('predicted SHIFT')")
            text = page.inner_text("#otherwise")
            assert {each.result().status_code for each in answers} == {200}
        told = client.get("/ui/data").json()["explained"]
        tokens, base = re.match(r"A step of (\d+) token.* BASE ([\d.]+) ms \(", text).groups()
        rows = [step["predicted"] for step in told["steps"] if step["tokens"] == int(tokens)]
        assert base in {f"{1e3 * each['base']:.3g}" for each in rows}
        assert "up to the threshold of 256" in text
        page.wait_for_selector("#readout:has-text('The last size of a step with prompts')")
        assert page.is_visible("#groups-otherwise") == fleet
        if fleet:
            rows = page.locator("#groups-rows tr").all_inner_texts()
            assert len(rows) == len(told["fleet"]["now"]["arrangements"]) == 4
            assert page.inner_text("#groups-rows th.chosen") == "8" and "4 \u00d7 2" in rows[2]
        for size in ({"width": 1400, "height": 900}, NARROW):
            page.set_viewport_size(size)
            page.wait_for_timeout(600)
            over = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
            assert over <= 0, size
        page.goto("about:blank")
    assert page.problems == []


def test_a_hidden_page_asks_for_nothing(opened):
    opened.evaluate(
        "Object.defineProperty(document, 'hidden', { get: () => window.gone, configurable: true });"
        "window.gone = true; document.dispatchEvent(new Event('visibilitychange'));"
    )
    opened.wait_for_timeout(800)  # what was on its way
    opened.seen.clear()
    opened.wait_for_timeout(1500)
    assert opened.seen == []
    opened.evaluate("window.gone = false; document.dispatchEvent(new Event('visibilitychange'))")
    opened.wait_for_timeout(1000)
    assert any("/ui/data" in url for url in opened.seen)


def test_a_start_is_told(opened, server, monkeypatch):
    monkeypatch.setattr(server.service, "model", None)
    monkeypatch.setattr(server.service, "phases", phases := Phases())
    phases("load weights", 3, 12)
    opened.wait_for_selector("#state:has-text('starting')")
    assert opened.inner_text("#mode") == "STARTING"
    assert opened.inner_text("#words").startswith("load weights, 3 of 12")
    assert opened.locator("#started").evaluate("each => each.value") == 0.25
    phases("compile", 0, 5)
    opened.wait_for_selector("#phases .now:has-text('compile')")
    assert opened.locator("#phases li").count() == 2
    phases.plan(("load weights", "compile", "warm up", "first step"), LAST_START)
    opened.wait_for_selector("#phases .coming:has-text('warm up')")
    coming = opened.locator("#phases .coming").all_inner_texts()
    assert [each.replace("\n", " ") for each in coming] == [
        *("warm up to come, 4 s last time", "first step to come, 1 s last time")
    ]
    ready = opened.inner_text("#rule")
    assert re.fullmatch(r"\(ready in about 2[345] s, at \d\d:\d\d:\d\d, if all is .*\)", ready)
    assert not opened.is_visible("#chat-button")
    assert not opened.is_visible("#tiles") and not opened.is_visible("#charts")
    monkeypatch.undo()
    opened.wait_for_selector("#state:has-text('ready')")
    assert not opened.is_visible("#started") and not opened.is_visible("#phases")
    assert opened.problems == []


def test_a_server_that_has_gone_is_said(opened):
    opened.route("**/ui/data*", lambda route: route.abort())
    opened.wait_for_selector("#state.lost:has-text('no answer')")
    assert opened.inner_text("#mode") == "NO ANSWER"
    assert re.fullmatch(r"for \d+ s", opened.inner_text("#words"))
    opened.unroute("**/ui/data*")
    opened.wait_for_selector("#state.ready")


def test_a_step_that_hangs_and_an_engine_that_fails_are_said(page):
    """A server of its own, as it does not come back."""
    with running_server(make_engine(), stall_timeout=1.0) as server:
        page.goto(f"{server.url}/ui")
        page.wait_for_selector("#state.ready")
        server.runner.gate.clear()
        with ThreadPoolExecutor(1) as pool, server.client() as client:
            answer = pool.submit(client.post, COMPLETION, json={"prompt": "p"})
            page.wait_for_selector("#state.stalled:has-text('stalled')")
            assert page.inner_text("#mode") == "STUCK"
            words = page.inner_text("#words")
            assert words.startswith("a step in SHIFT (1 token, 1 sequence) has run for ")
            assert re.fullmatch(r"\(since \d\d:\d\d:\d\d\)", page.inner_text("#rule"))
            assert re.match(r"the process ends in 4 min 5\d s", page.inner_text("#binds-change"))
            assert page.inner_text("#because").startswith("1 request waiting for it")
            server.runner.gate.set()
            assert answer.result().status_code == 200
        page.wait_for_selector("#state.ready")
        server.on_loop(fail(server.engine))
        page.wait_for_selector("#state.failed:has-text('failed')")
        assert page.inner_text("#mode") == "FAILED"
        assert page.get_attribute("#text", "placeholder") == "The server is out of order"
        page.goto("about:blank")
    assert page.problems == []


async def fail(engine) -> None:
    """As when its thread has died; there is nobody here who would end the process."""
    engine.on_failure = None
    engine.lost(RuntimeError("the thread died"))


# ---------------------------------------------------------------- the chat


def test_a_chat_turn_stop_and_clear(opened, server):
    say(opened, "a long message " * 5)
    opened.wait_for_selector(".assistant .actions")
    texts = opened.locator(".message .body").all_text_contents()
    assert texts[0] == ("a long message " * 5).strip()
    assert len(texts) == 2
    assert texts[1]
    assert "stopped" not in opened.inner_text(".assistant .foot")
    server.runner.step_seconds = 0.05
    say(opened, "again")
    opened.wait_for_selector(".message:nth-child(4) .body:not(:empty)")
    opened.keyboard.press("Escape")
    opened.wait_for_selector(".message:nth-child(4) .told:has-text('stopped')")
    assert opened.is_visible("#chat")
    assert opened.is_enabled("#send")
    server.wait_until(lambda: not server.engine.handles)
    opened.click("#clear")
    assert opened.locator(".message").count() == 0
    server.runner.gate.clear()
    say(opened, "never answered")
    opened.wait_for_selector(".message.assistant")
    opened.click("#clear")
    server.runner.gate.set()
    server.wait_until(lambda: not server.engine.handles)
    assert opened.locator(".message").count() == 0
    assert opened.is_enabled("#send")
    assert opened.problems == []


def test_markdown_is_shown_and_markup_is_text(opened):
    answers(opened, delta(ANSWER))
    say(opened, MARKUP)
    opened.wait_for_selector(".assistant .actions")
    assert opened.locator(".user .body").text_content() == MARKUP
    assert opened.locator(".user .body *").count() == 0
    body = opened.locator(".assistant .body")
    assert body.locator("strong").all_text_contents() == ["bold"]
    assert body.locator("p code").all_text_contents() == ["a < b"]
    assert body.locator("pre code").all_text_contents() == ['print("<b>")']
    assert body.locator("img, script, b").count() == 0
    assert body.locator("a").evaluate_all("all => all.map(each => each.href)") == [
        *("https://example.org/", "https://example.org/x.png")
    ]
    assert "[not here](javascript:alert)" in body.text_content()
    assert opened.title() == "ShiftJAX"
    assert opened.problems == []


def test_a_long_answer_stays_in_sight(opened):
    answers(opened, delta("line\n\n" * 100))
    say(opened, "many lines")
    opened.wait_for_selector(".assistant .actions")
    below = "list => list.scrollHeight - list.scrollTop - list.clientHeight"
    assert opened.locator("#messages").evaluate(below) < 2


def test_marks_that_never_end_are_text(opened):
    made = (
        "async text => { const { markdown } = await import('/ui/markdown.js');"
        " return markdown(text).map(each => each.textContent).join(''); }"
    )
    texts = ["x" + "[" * 20_000, "x" + "`" * 20_000, "x " + "**a " * 20_000, "> " * 5_000 + "x"]
    for text in texts:
        shown = opened.evaluate(made, text)
        assert shown.replace("> ", "").rstrip() == text.replace("> ", "").rstrip()


def test_an_answer_has_its_timeline_and_modes(opened, server):
    server.runner.step_seconds = 0.05  # so that tokens come one by one
    open_chat(opened)
    opened.click("summary:has-text('Sampling')")
    opened.fill("#max-tokens", "12")
    say(opened, "so long that its prompt is above the threshold " * 2)
    told = opened.locator(".assistant .told")
    opened.wait_for_selector(".assistant .actions")
    phases, modes = told.all_text_contents()
    assert re.fullmatch(r"queued .+ prefill .+ \(\d+ tokens.*\), decode .+ m?s", phases)
    parts = modes.removeprefix("tokens by mode: ").split(", ")
    counts = {mode: int(count) for count, mode in map(str.split, parts)}
    assert counts["base"] == 1 and 0 < counts["shift"] <= 11
    plain = opened.text_content(".assistant .body")
    opened.check("#coloured")
    titles = opened.locator(".token").evaluate_all("all => all.map(each => each.title)")
    assert titles[0] == "base" and set(titles[1:]) == {"shift"}
    assert len(titles) <= sum(counts.values())
    opened.uncheck("#coloured")
    assert opened.locator(".token").count() == 0
    assert opened.text_content(".assistant .body") == plain


def test_a_question_that_waits_says_where(opened, server):
    with steps_of(server, 16):  # no room for another
        server.wait_until(lambda: server.num_running() == 16)
        say(opened, "hi")
        opened.wait_for_selector(".assistant .told:has-text('waits at place 1 of 1')")
    opened.wait_for_selector(".assistant .actions")


def test_a_message_is_edited_and_asked_again(opened):
    sent: list[dict] = []
    opened.on(
        "request",
        lambda r: sent.append(r.post_data_json) if r.url.endswith("completions") else None,
    )
    answers(opened, delta("an answer"))
    for text in ("first", "second"):
        say(opened, text)
        opened.wait_for_selector("#send:not([disabled])")
        opened.wait_for_selector(f".user:has-text('{text}') + .assistant .actions")
    opened.locator(".user >> text=Edit").first.click()
    assert opened.evaluate("document.activeElement.value") == "first"
    opened.keyboard.type(" of all")
    opened.click("summary:has-text('Sampling')")
    opened.fill("#temperature", "0.7")
    opened.fill("#seed", "5")
    opened.fill("#system", "be brief")
    opened.locator(".edit button").first.click()
    opened.wait_for_selector(".user:has-text('first of all') + .assistant .actions")
    assert opened.locator(".message").count() == 2
    messages = sent[-1]["messages"]
    assert [each["content"] for each in messages] == ["be brief", "first of all"]
    assert (sent[-1]["temperature"], sent[-1]["seed"]) == (0.7, 5)
    assert "top_p" not in sent[-1]


def test_what_goes_wrong_is_said_and_can_be_sent_again(opened):
    say(opened, "y" * 9000)
    opened.wait_for_selector(".error:has-text('context')")
    assert opened.input_value("#text") == "y" * 9000  # to be shortened and sent again
    assert opened.locator("article").count() == 0


# ---------------------------------------------------------------- keys, phones, other servers


def test_the_page_can_be_used_by_keys_alone(opened):
    opened.keyboard.press("/")
    assert opened.evaluate("document.activeElement.id") == "text"
    opened.keyboard.type("hello/?h")  # typed, not obeyed
    opened.keyboard.press("Enter")
    opened.wait_for_selector(".assistant .actions")
    assert opened.inner_text(".user .body") == "hello/?h"
    opened.keyboard.press("Tab")
    seen = []
    for _ in range(20):
        seen.append(opened.evaluate("document.activeElement.id"))
        opened.keyboard.press("Tab")
    order = ["send", "clear", "coloured", "steps", "seconds", "firsts", "ttft-curve"]
    assert [each for each in seen if each in order][: len(order)] == order
    opened.keyboard.press("/")
    opened.keyboard.press("Escape")  # nothing to stop: it closes
    opened.wait_for_selector("#chat", state="hidden")
    assert opened.evaluate("document.activeElement.id") == "chat-button"
    opened.keyboard.press("?")
    assert opened.evaluate("document.getElementById('keys').open")
    unnamed = "all => all.filter(e => !e.getAttribute('aria-label')).map(e => e.outerHTML)"
    assert opened.locator("canvas, section, [role=img]").evaluate_all(unnamed) == []


def test_a_narrow_window(opened):
    """What the engine does comes first, the chat lies over it, and nothing runs out of its card."""
    opened.set_viewport_size(NARROW)
    tops = [opened.locator(name).bounding_box()["y"] for name in ("#now", "#tiles", "#charts")]
    assert tops == sorted(tops) and tops[0] < 120
    assert opened.is_visible("#charts") and not opened.is_visible("#chat")
    assert opened.locator("#tokens").evaluate("each => each.clientWidth") > 250  # for five labels
    wider = "all => all.filter(each => each.scrollWidth > each.clientWidth).map(e => e.innerText)"
    assert opened.locator(".card, html").evaluate_all(wider) == []
    opened.focus("#chat-button")
    opened.keyboard.press("Enter")
    opened.wait_for_selector("#chat", state="visible")
    opened.wait_for_timeout(500)  # it slides
    box = opened.locator("#chat").bounding_box()
    assert (box["x"], box["width"]) == (0, NARROW["width"])
    assert opened.get_attribute("#chat-button", "aria-expanded") == "true"
    answers(opened, delta("a" * 300 + "\n\n```\n" + "b" * 300 + "\n```"))
    say(opened, "hi")
    opened.wait_for_selector(".assistant .actions")
    assert opened.locator(".card, html").evaluate_all(wider) == []


def test_drafts_are_counted_by_what_made_them(page):
    body = {"prompt": "p", "max_tokens": 40, "seed": 1, "ignore_eos": True}
    with running_server(make_drafting_engine(speculation="suffix")) as server:
        with server.client() as client:
            for _ in range(2):
                client.post(COMPLETION, json=body)
        page.goto(f"{server.url}/ui")
        page.wait_for_selector("#accepted[data-sum]:not([data-sum='0'])")
        drafts = server.engine.stats.find(DraftStats).by_drafter["suffix"]
        total = drafts["accepted"] + drafts["rejected"]
        assert page.inner_text("#drafters") == f"suffix {drafts['accepted']} of {total}"
        page.goto("about:blank")


def test_a_page_that_needs_a_key(page):
    with running_server(keys=("secret",)) as server:
        page.goto(f"{server.url}/ui")
        page.wait_for_selector("#key-field:not([hidden])")
        page.fill("#key", "secret")
        page.wait_for_selector("#state:has-text('ready')")
        say(page, "hello")
        page.wait_for_selector(".assistant .actions")
        page.goto("about:blank")
