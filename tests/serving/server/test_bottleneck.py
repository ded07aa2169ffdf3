"""What binds latency is said in a sentence, with the setting to change."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from kit import COMPLETION, make_engine, metric_total, metric_values, running_server

from serving.server.bottleneck import Look, StepInFlight, bound_of, stuck_bound
from shiftjax.targets import Target, Targets

BUSY = Look(
    running=64,
    waiting=12,
    waiting_tokens=40_000,
    kv=0.08,
    most_running=64,
    most_waiting=256,
    most_step_tokens=1024,
    step_seconds=0.031,
    step_tokens=1000.0,
    mode="base",
    prompt_rate=30_000.0,
    prompt_share=0.4,
    queue_seconds=1.3,
    prompt_seconds=0.2,
)
FEW = BUSY._replace(running=10)
ALONE = FEW._replace(waiting=0, waiting_tokens=0)


@pytest.mark.parametrize(
    ("look", "code", "words", "change"),
    [
        (Look(0, 0, 0, 0.0), "idle", "nothing runs and nothing waits", ""),
        (
            BUSY,
            "max_num_seqs",
            "held back by max_num_seqs: 64 of 64, KV 8%, 12 sequences wait, 1.3 s in the queue",
            "raise --max-num-seqs: there is KV for more",
        ),
        (
            BUSY._replace(kv=0.8, num_groups=4, waiting=1),
            "max_num_seqs",
            "held back by max_num_seqs: 64 of 64 in 4 groups, KV 80%, 1 sequence wait",
            "KV blocks would run out next",
        ),
        (
            BUSY._replace(kv=0.97, num_preempted=3),
            "kv",
            "held back by KV blocks: 97% in use, 12 sequences wait, 3 preempted",
            "--kv-cache-dtype fp8",
        ),
        (FEW._replace(kv=0.6, prompt_rate=0.0), "kv", "held back by KV blocks: 60%", "more room"),
        (
            FEW,
            "prompts",
            "prompts: 40,000 tokens wait, 1.3 s",
            "steps are full (1,024 tokens): raise --max-num-batched-tokens",
        ),
        (
            FEW._replace(most_step_tokens=4096, step_tokens=4000.0),
            *("prompts", "40,000", "steps are full (4,096 tokens): more devices or groups"),
        ),
        (FEW._replace(step_tokens=90.0), "prompts", "prompts: 40,000 tokens wait", "more devices"),
        (FEW._replace(prompt_rate=0.0), "prompts", "prompts: 40,000 tokens wait", "steps are full"),
        (
            FEW._replace(waiting=256),
            "prompts",
            "wait, 1.3 s; the queue of 256 is full, more are refused",
            "",
        ),
        (
            ALONE._replace(prompt_share=0.9),
            "prompts",
            "prompts: nothing waits, 90% of what steps compute is prompts, 200 ms each",
            "steps are full",
        ),
        (ALONE, "step", "nothing waits: a token takes a step, 31 ms in BASE", "--speculation"),
        (ALONE._replace(step_seconds=None), "step", "nothing waits: the first step runs", ""),
        (FEW._replace(peak_running=64), "max_num_seqs", "64 of 64, KV 8%", ""),
        (BUSY._replace(most_running=None), "prompts", "prompts: 40,000", ""),
    ],
)
def test_the_sentence_names_what_binds(look, code, words, change):
    bound = bound_of(look)
    assert bound.code == code
    assert words in bound.words
    assert change in bound.change


def test_the_wait_is_a_number_too():
    assert bound_of(FEW).seconds == pytest.approx(40_000 / 30_000)
    assert bound_of(BUSY).seconds == 1.3
    assert bound_of(FEW._replace(prompt_rate=0.0)).seconds is None


def test_a_stuck_step_is_named_with_the_end_of_the_process():
    step = StepInFlight("base", 512, 3, (4, 7))
    bound = stuck_bound(step, 12.3, 300.0)
    words = "a step in BASE on units 4 to 7 (512 tokens, 3 sequences) has run for 12 s"
    assert bound.words == words
    assert "ends in 4 min 48 s with exit code 75" in bound.change
    assert bound.seconds == pytest.approx(287.7)
    assert stuck_bound(None, 400.0, 300.0).seconds == 0.0
    assert "between steps" in stuck_bound(None, 12.0, 300.0).words


# ---------------------------------------------------------------- of a server


def data_of(client) -> dict:
    return client.get("/ui/data").json()


def wait_for_code(server, client, code: str) -> dict:
    server.wait_until(lambda: (data_of(client)["bound"] or {}).get("code") == code)
    return data_of(client)["bound"]


def test_a_server_that_is_full_says_so():
    engine = make_engine(max_num_seqs=4)
    with running_server(engine, grpc=False) as server, server.client() as client:
        assert data_of(client)["bound"]["code"] == "idle"
        server.runner.step_seconds = 0.01
        with ThreadPoolExecutor(1) as pool, server.client() as other:
            body = {"prompt": "p", "max_tokens": 200, "ignore_eos": True, "n": 6}
            answer = pool.submit(other.post, COMPLETION, json=body)
            bound = wait_for_code(server, client, "max_num_seqs")
            assert bound["words"].startswith("held back by max_num_seqs: 4 of 4, KV ")
            assert "2 sequences wait" in bound["words"]
            server.let_go()
            assert answer.result().status_code == 200
        assert wait_for_code(server, client, "idle")["change"] == ""


def test_a_server_whose_pool_is_full_says_so():
    engine = make_engine(num_blocks=64, max_num_seqs=8)
    with running_server(engine, grpc=False) as server, server.client() as client:
        server.runner.step_seconds = 0.01
        with ThreadPoolExecutor(1) as pool, server.client() as other:
            body = {"prompt": "p" * 40, "max_tokens": 180, "ignore_eos": True, "n": 3}
            answer = pool.submit(other.post, COMPLETION, json=body)
            assert "KV blocks" in wait_for_code(server, client, "kv")["words"]
            server.let_go()
            assert answer.result().status_code == 200


def test_a_server_that_is_stuck_says_in_which_step():
    with running_server(make_engine(), stall_timeout=0.3, grpc=False) as server:
        server.runner.gate.clear()
        with ThreadPoolExecutor(1) as pool, server.client() as client, server.client() as other:
            answer = pool.submit(other.post, COMPLETION, json={"prompt": "p" * 50})
            words = wait_for_code(server, client, "stuck")["words"]
            assert words.startswith("a step in BASE (50 tokens, 1 sequence) has run for ")
            assert data_of(client)["bound"]["seconds"] == pytest.approx(299.5, abs=5)
            server.let_go()
            assert answer.result().status_code == 200
            assert server.engine.step_in_flight() is None


def test_first_tokens_are_split_and_targets_are_counted():
    """Over time, as percentiles, and as a metric."""
    engine = make_engine(max_num_seqs=1)
    options = {"targets": Targets(Target(0.3, 60.0)), "grpc": False}
    with running_server(engine, **options) as server, server.client() as client:
        server.runner.step_seconds = 0.05
        with ThreadPoolExecutor(2) as pool:
            bodies = [{"prompt": "p", "max_tokens": n, "ignore_eos": True} for n in (8, 8)]
            answers = [pool.submit(client.post, COMPLETION, json=each) for each in bodies]
            assert [each.result().status_code for each in answers] == [200, 200]
        server.assert_quiescent()
        data = data_of(client)
        sums = {name: sum(data["columns"][name]) for name in ("firsts", "queued", "prefilled")}
        assert sums["firsts"] == 2
        assert 0.3 < sums["queued"] < 2.0  # of the second, which waits for the first
        assert 0.05 < sums["prefilled"] < 1.0
        ttfts = [row["ttft"] for row in data["requests"]]
        assert sums["queued"] + sums["prefilled"] == pytest.approx(sum(ttfts), abs=0.01)
        curves = data["curves"]
        assert {len(each) for each in curves.values()} == {9}
        assert curves["ttft"][0] == min(ttfts) and curves["ttft"][-1] == max(ttfts)
        assert data["targets"] == {"ttft": 0.3, "tpot": 60.0}
        assert (sum(data["columns"]["ended"]), sum(data["columns"]["good"])) == (2, 1)
        values = metric_values(client)
        for outcome in ("met", "missed"):
            name = "shiftjax:requests_by_targets_total"
            assert metric_total(values, name, outcome=outcome) == 1


def test_a_single_token_has_its_first_one_counted():
    with running_server(grpc=False) as server, server.client() as client:
        client.post(COMPLETION, json={"prompt": "p", "max_tokens": 1})
        server.assert_quiescent()
        assert sum(data_of(client)["columns"]["firsts"]) == 1
        assert "requests_by_targets" not in client.get("/metrics").text
