"""Budgets of thinking over HTTP: chats, completions, messages; streams, drafts, several answers."""

import pytest
from kit import CHAT, COMPLETION, USER, events
from scripted import TEMPLATES, marked_tokenizer, say, scripted_server

from shiftjax.draft_options import DraftOptions
from shiftjax.drafts.drafting import Drafting
from shiftjax.drafts.prices import Prices
from shiftjax.drafts.speculation import DraftStats, Speculation

FORCED = "\n</think>\n\n"
# What a model says that goes on with its script behind what was forced.
THOUGHT = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def server():
    with scripted_server("think", grpc=False) as running:
        yield running


def ask(client, budget: int, **more) -> list[dict]:
    """The messages of a chat, streamed and not."""
    body = {"messages": USER, "thinking_token_budget": budget} | more
    answer = client.post(CHAT, json=body)
    assert answer.status_code == 200 and "warning" not in answer.headers, answer.text
    whole = [choice["message"] for choice in answer.json()["choices"]]
    joined = [{"content": "", "reasoning": ""} for _ in whole]
    for chunk in events(client.post(CHAT, json=body | {"stream": True}).text):
        for choice in chunk["choices"]:
            for name in ("content", "reasoning"):
                joined[choice["index"]][name] += choice["delta"].get(name) or ""
    told = [{name: each[name] or "" for name in ("content", "reasoning")} for each in whole]
    assert joined == told
    return whole


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("budget", [0, 5, 20])
def test_thoughts_end_at_the_budget(server, client, budget, n):
    say(server, THOUGHT)
    for message in ask(client, budget, n=n):
        assert (message["reasoning"] or "") == THOUGHT[:budget]
        # The script is by place, so what stood where the end was forced has not been said.
        assert message["content"] == (THOUGHT[budget + len(FORCED) :] or None)


@pytest.mark.parametrize("budget", [-1, 99])
def test_a_large_budget_changes_nothing(server, client, budget):
    say(server, "short</think>answer")
    (message,) = ask(client, budget)
    assert (message["reasoning"], message["content"]) == ("short", "answer")


def test_other_rules_hold_beside_it(server, client):
    say(server, THOUGHT)
    (message,) = ask(client, 5, bad_words=["b"], min_tokens=30, seed=2, max_tokens=40)
    assert message["reasoning"] != THOUGHT[:5] and "b" not in message["reasoning"]
    body = {"prompt": "x<think>\n", "thinking_token_budget": 3, "max_tokens": 26}
    (choice,) = client.post(COMPLETION, json=body).json()["choices"]
    assert choice["text"] == "abc" + FORCED + THOUGHT[3 + len(FORCED) :]
    formed = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 1}}}}
    (message,) = ask(client, 0, **formed)
    assert message["content"] == "1"


def test_a_message_has_a_budget_too(server, client):
    say(server, "w" * 1100)
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = {"messages": USER, "max_tokens": 2000, "thinking": thinking}
    answer = client.post("/v1/messages", json=body)
    assert "warning" not in answer.headers
    thought, text = answer.json()["content"]
    assert thought["thinking"] == "w" * 1024
    assert text["text"] == "w" * (1100 - 1024 - len(FORCED))


def test_a_model_that_does_not_think_says_so():
    with scripted_server("hermes", grpc=False) as server, server.client() as client:
        say(server, "plain")
        answer = client.post(CHAT, json={"messages": USER, "thinking_token_budget": 3})
        assert answer.json()["choices"][0]["message"]["content"] == "plain"
        assert "thinking_token_budget" in answer.headers["warning"]


class Foreseen(Drafting):
    """Drafts what a model will say, without the end that a budget forces."""

    def __init__(self, output: list[int]):
        super().__init__(DraftOptions(fixed_drafts=True, draft_max_seqs=0))
        self.output = output

    def draft(self, name, most):
        guesses = self.output[name.num_output_tokens :][: min(most, 8)]
        return self.rated(name, guesses, [0.5] * len(guesses), "oracle") if guesses else None


def test_drafts_change_nothing(server, client):
    tokenizer = marked_tokenizer(TEMPLATES["think"])
    say(server, THOUGHT)
    expected = ask(client, 11)
    with scripted_server("think", grpc=False) as other, other.client() as own:
        foreseen = Foreseen(tokenizer.encode(THOUGHT, False))
        scheduler = other.engine._engine.lanes[0].scheduler
        scheduler.lookahead = Speculation(foreseen, Prices((128,)), max_rows=64)
        say(other, THOUGHT)
        assert ask(own, 11) == expected
        stats = other.engine.stats.find(DraftStats).by_drafter
    assert stats["oracle"]["accepted"] > 0 and stats["grammar"]["accepted"] >= len(FORCED)
