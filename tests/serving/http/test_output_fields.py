"""Fields of vLLM that change the text of an output: words, stop strings, special tokens."""

import pytest
from kit import (
    CHAT,
    COMPLETION,
    EOS,
    USER,
    byte_tokenizer,
    events,
    is_error,
    make_drafting_engine,
)
from kit import running_server as serve
from scripted import say, scripted_server

ASKED = {"prompt": "hello", "max_tokens": 40, "seed": 3, "ignore_eos": True}
TOKENIZER = byte_tokenizer()


def text_of(client, body: dict) -> str:
    """The text of the first choice, streamed and not."""
    answer = client.post(COMPLETION, json=body)
    assert answer.status_code == 200, answer.text
    text = answer.json()["choices"][0]["text"]
    chunks = events(client.post(COMPLETION, json=body | {"stream": True}).text)
    first = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == 0]
    assert "".join(choice["text"] for choice in first) == text
    return text


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"min_tokens": 40, "ignore_eos": False}])
def test_bad_words_do_not_come(client, more):
    body = ASKED | {"return_token_ids": True} | more
    (choice, *_) = client.post(COMPLETION, json=body).json()["choices"]
    ids = choice["token_ids"]
    pairs = [TOKENIZER.decode(ids[i : i + 2]) for i in range(len(ids))]
    words = [word for word in pairs if word.isascii() and word.isprintable() and word.strip()]
    assert any(len(word) == 2 for word in words)
    text = text_of(client, body | {"bad_words": words})
    assert not any(word.lstrip() in text for word in words)
    assert len(text) > 1


def test_drafts_change_nothing_of_it():
    body = ASKED | {"prompt": "abcabcabc" * 4, "bad_words": ["a", "bc"], "max_tokens": 60}
    with serve(grpc=False) as server, server.client() as client:
        expected = text_of(client, body)
    engine = make_drafting_engine(speculation="suffix", fixed_drafts=True)
    with serve(engine, grpc=False) as server, server.client() as client:
        assert text_of(client, body) == text_of(client, body) == expected
        stats = server.engine.stats
    from shiftjax.drafts.speculation import DraftStats

    accepted = stats.find(DraftStats).by_drafter["suffix"]["accepted"]
    assert accepted > 0, "nothing was guessed"


def test_bad_words_and_a_grammar_hold_together(client):
    wanted = {"structured_outputs": {"regex": "[ab]{8}"}, "max_tokens": 20, "seed": 1}
    body = {"prompt": "x"} | wanted
    assert "a" in text_of(client, body)
    assert text_of(client, body | {"bad_words": ["a"]}) == "b" * 8
    is_error(client.post(COMPLETION, json=body | {"bad_words": ["a", "b"]}), 400)
    body["structured_outputs"] = {"regex": "ab{3}"}
    is_error(client.post(COMPLETION, json=body | {"bad_words": ["bb"]}), 422)


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_stop_string_can_be_part_of_the_text(client, is_chat):
    plain = text_of(client, ASKED)
    stop = plain[5:8]
    cut = text_of(client, ASKED | {"stop": stop})
    assert plain.startswith(cut + stop) and stop not in cut
    body = ASKED | {"stop": stop, "include_stop_str_in_output": True}
    assert text_of(client, body) == cut + stop


def test_special_tokens_can_be_shown():
    with scripted_server("hermes", grpc=False) as server, server.client() as client:
        say(server, "a<s>b")
        body = {"prompt": "x", "max_tokens": 9}
        assert text_of(client, body) == "ab"
        shown = body | {"skip_special_tokens": False, "spaces_between_special_tokens": False}
        assert text_of(client, shown) == "a<s>b"
        ended = shown | {"include_stop_str_in_output": True}
        assert text_of(client, ended) == "a<s>b</s>"
        told = {"messages": USER, "skip_special_tokens": False}
        answer = client.post(CHAT, json=told).json()
        assert answer["choices"][0]["message"]["content"] == "a<s>b"
        assert text_of(client, body | {"include_stop_str_in_output": True}) == "ab"
        stopped = body | {"stop_token_ids": TOKENIZER.encode("b", False)}
        assert text_of(client, stopped) == "a"
        assert text_of(client, stopped | {"include_stop_str_in_output": True}) == "ab"
        assert EOS not in TOKENIZER.encode("b", False)
