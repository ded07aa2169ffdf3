"""Fields of vLLM that change the prompt: continued messages, documents, special tokens, cuts."""

import httpx
import pytest
from kit import BOS, CHAT, COMPLETION, MAX_MODEL_LEN, USER, byte_tokenizer, events, is_error
from kit import running_server as serve

SHORT = {"max_tokens": 4, "seed": 2, "return_token_ids": True}
PREFILL = [*USER, {"role": "assistant", "content": "So: "}]
DOCUMENTS = [{"title": "a", "text": "b"}]


def tokenizer_with(template: str):
    """The tokenizer of bytes, which puts <s> before a text and has this chat template."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.backend.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def server():
    template = (
        "{% for d in documents or [] %}[{{ d.title }}: {{ d.text }}]{% endfor %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content | trim if trims else m.content }};"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    with serve(tokenizer=tokenizer_with(template), grpc=False) as running:
        yield running


def prompt_of(client: httpx.Client, body: dict) -> str:
    answer = client.post(CHAT, json=SHORT | body)
    assert answer.status_code == 200, answer.text
    return byte_tokenizer().decode(answer.json()["prompt_token_ids"], False)


def test_the_last_message_is_continued(client):
    continued = {"messages": PREFILL, "continue_final_message": True}
    assert prompt_of(client, {"messages": PREFILL}) == "user: hi;assistant: So: ;assistant:"
    for more in ({}, {"add_generation_prompt": False}):
        assert prompt_of(client, continued | more) == "user: hi;assistant: So: "
    trimmed = continued | {"chat_template_kwargs": {"trims": True}}
    assert prompt_of(client, trimmed) == "user: hi;assistant: So:"
    count = client.post("/tokenize", json=continued).json()["count"]
    assert count == len("user: hi;assistant: So: ")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": [*USER, {"role": "assistant", "content": ""}]}, "messages"),
        ({"chat_template_kwargs": {"add_generation_prompt": True}}, "messages"),
        ({"chat_template_kwargs": {"continue_final_message": False}}, "chat_template_kwargs"),
    ],
)
def test_what_cannot_be_continued(client, body, param):
    body = {"messages": PREFILL, "continue_final_message": True} | body
    is_error(client.post(CHAT, json=body), 400, param)


@pytest.mark.parametrize("n", [1, 2])
def test_an_answer_begins_with_what_it_continues(client, n):
    body = SHORT | {"messages": PREFILL, "continue_final_message": True, "n": n}
    plain = client.post(CHAT, json=body).json()["choices"]
    echoed = client.post(CHAT, json=body | {"echo": True}).json()["choices"]
    texts = [choice["message"]["content"] for choice in echoed]
    assert texts == ["So: " + choice["message"]["content"] for choice in plain]
    assert echoed[0]["token_ids"] == plain[0]["token_ids"]
    streamed = [""] * n
    for chunk in events(client.post(CHAT, json=body | {"echo": True, "stream": True}).text):
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["delta"].get("content") or ""
    assert streamed == texts


def test_nothing_of_a_user_is_echoed(client):
    body = SHORT | {"messages": USER}
    plain = client.post(CHAT, json=body).json()["choices"]
    assert client.post(CHAT, json=body | {"echo": True}).json()["choices"] == plain


def test_documents_go_to_the_template(client):
    body = {"messages": USER, "documents": DOCUMENTS}
    assert prompt_of(client, body) == "[a: b]user: hi;assistant:"
    given = body | {"chat_template_kwargs": {"documents": []}}
    is_error(client.post(CHAT, json=given), 400, "chat_template_kwargs")
    is_error(client.post(COMPLETION, json={"prompt": "x", "documents": DOCUMENTS}), 400)


def test_special_tokens_of_a_chat(client):
    assert prompt_of(client, {"messages": USER}) == "user: hi;assistant:"
    added = {"messages": USER, "add_special_tokens": True}
    assert prompt_of(client, added) == "<s>user: hi;assistant:"
    assert client.post("/tokenize", json=added).json()["tokens"][0] == BOS


@pytest.mark.parametrize("prompt", ["abcdefgh", [*range(97, 105)]])
def test_a_prompt_is_cut(client, prompt):
    special = {} if isinstance(prompt, list) else {"add_special_tokens": False}
    plain = client.post(COMPLETION, json=SHORT | special | {"prompt": prompt}).json()
    (ids,) = [choice["prompt_token_ids"] for choice in plain["choices"]]
    for more, kept in (
        ({"truncate_prompt_tokens": 3}, ids[-3:]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, ids[:3]),
        ({"truncate_prompt_tokens": 8}, ids),
        ({"truncate_prompt_tokens": -1}, ids),
    ):
        body = SHORT | special | {"prompt": prompt, "echo": True} | more
        (choice,) = client.post(COMPLETION, json=body).json()["choices"]
        assert choice["prompt_token_ids"] == kept
        assert choice["text"].startswith(byte_tokenizer().decode(kept))


def test_a_prompt_is_cut_to_the_context(client):
    text = "x" * 40_000 + "the end"
    is_error(client.post(COMPLETION, json=SHORT | {"prompt": text}), 400, "prompt")
    cut = SHORT | {"prompt": text, "truncate_prompt_tokens": -1}
    answer = client.post(COMPLETION, json=cut).json()
    assert answer["usage"]["prompt_tokens"] == MAX_MODEL_LEN - SHORT["max_tokens"]
    ids = answer["choices"][0]["prompt_token_ids"]
    assert byte_tokenizer().decode(ids).endswith("xthe end")
    long = [{"role": "user", "content": "y" * 300}]
    chat = {"messages": long, "truncate_prompt_tokens": -1, "return_token_ids": True}
    answer = client.post(CHAT, json=chat).json()
    assert len(answer["prompt_token_ids"]) == MAX_MODEL_LEN - 1


@pytest.mark.parametrize("most", [0, -2, MAX_MODEL_LEN + 1])
def test_a_cut_that_is_none(client, most):
    body = SHORT | {"prompt": "x", "truncate_prompt_tokens": most}
    is_error(client.post(COMPLETION, json=body), 400, "truncate_prompt_tokens")
