"""`default_chat_template_kwargs`: variables of the chat template that requests need not give."""

import pytest
from kit import byte_tokenizer, running_server

from serving.server.options import ServerOptions, server_problems
from shiftjax.text.tokenizer import Tokenizer

TEMPLATE = "{{ messages[0].content }}{{ ' thinks' if thinking is not defined or thinking else '' }}"
MESSAGES = [{"role": "user", "content": "x"}]


def text_of(client, **fields) -> str:
    ids = client.post("/tokenize", json={"messages": MESSAGES, **fields}).json()["tokens"]
    return client.post("/detokenize", json={"tokens": ids}).json()["prompt"]


def test_a_request_goes_before_the_server():
    plain = byte_tokenizer()
    ends = {"bos_token_id": plain.bos_token_id, "eos_token_ids": plain.eos_token_ids}
    tokenizer = Tokenizer(plain.backend, chat_template=TEMPLATE, **ends)
    given = '{"thinking": false}'
    with (
        running_server(tokenizer=tokenizer, default_chat_template_kwargs=given) as server,
        server.client() as client,
    ):
        assert text_of(client) == "x"
        assert text_of(client, chat_template_kwargs={"thinking": True}) == "x thinks"
        body = {"model": "echo", "messages": MESSAGES, "max_tokens": 1}
        answer = client.post("/v1/chat/completions", json=body).json()
        assert answer["usage"]["prompt_tokens"] == 1
    with running_server(tokenizer=tokenizer) as server, server.client() as client:
        assert text_of(client) == "x thinks"


@pytest.mark.parametrize("text", ["[]", "{", "1", "null"])
def test_what_is_no_object_is_refused(text):
    problems = server_problems(ServerOptions(default_chat_template_kwargs=text))
    assert problems == ["default_chat_template_kwargs must be a JSON object"]
