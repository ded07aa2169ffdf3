"""What systems and developers say reaches the model, whatever its template does with it."""

import pytest
from kit import CHAT, running_server
from scripted import marked_tokenizer

from serving.server.system_turns import SystemTurns
from shiftjax.text.chat import ChatTemplate

ALL = "{% for m in messages %}{{ m.role }}: {{ m.content }} | {% endfor %}"
FIRST = (
    "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]"
    "{% set messages = messages[1:] %}{% endif %}"
)
REFUSES = FIRST + (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('first only') }}{% endif %}{{ m.content }} | {% endfor %}"
)
DROPS = FIRST + "{% for m in messages if m.role == 'user' %}{{ m.content }} | {% endfor %}"
NONE = (
    "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('users only') }}{% endif %}"
    "{{ m.content }} | {% endfor %}"
)


def says(*words: str) -> list[dict]:
    roles = {"s": "system", "d": "developer", "u": "user"}
    return [{"role": roles[word[0]], "content": word} for word in words]


@pytest.mark.parametrize("source", [REFUSES, DROPS], ids=["refuses", "drops"])
@pytest.mark.parametrize(
    ("words", "prompt"),
    [
        (("s1", "u1"), "[s1]u1 | "),
        (("d1", "u1"), "[d1]u1 | "),
        (("s1", "d2", "u1"), "[s1\nd2]u1 | "),
        (("s1", "u1", "s2", "u2"), "[s1\ns2]u1 | u2 | "),
        (("u1", "s1", "u2"), "[s1]u1 | u2 | "),
        (("u1",), "u1 | "),
    ],
)
def test_a_template_with_one_place(source, words, prompt):
    template = ChatTemplate(source)
    assert template.render(SystemTurns(template).placed(says(*words))) == prompt


def test_parts_stay_in_their_order():
    template = ChatTemplate(DROPS)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turns = [{"role": "system", "content": parts}, *says("d2", "u1")]
    assert template.render(SystemTurns(template).placed(turns)) == "[a\nb\nd2]u1 | "


@pytest.mark.parametrize("source", [ALL, NONE], ids=["all", "none"])
def test_a_template_that_has_all_or_no_place_gets_what_came(source):
    turns = says("s1", "u1", "d2", "s3", "u2")
    assert SystemTurns(ChatTemplate(source)).placed(turns) == turns
    assert SystemTurns(None).placed(turns) == turns


def test_over_http():
    tokenizer = marked_tokenizer(REFUSES)
    with running_server(tokenizer=tokenizer, grpc=False) as server, server.client() as client:
        turns = says("d1", "u1", "s2")
        answer = client.post(CHAT, json={"messages": turns, "max_tokens": 1})
        assert answer.json()["usage"]["prompt_tokens"] == len("[d1\ns2]u1 | ")
