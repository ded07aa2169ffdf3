"""Everything that is wrong is refused, by rule, with the field's name; and the server lives on."""

import pytest
from kit import CHAT, COMPLETION, MAX_MODEL_LEN, USER, VOCAB_SIZE, is_error

from serving.server.errors import MAX_MESSAGE

BIG = 2**63
# A few values that are wrong for every field of a kind; the field must be named.
WRONG_NUMBERS = ["10", True, [1], {"a": 1}]
WRONG_INTEGERS = [*WRONG_NUMBERS, 1.5, 1e3, -BIG * 4]
INTEGERS = {
    "max_tokens": [-1, BIG],
    "min_tokens": [-1, 17, BIG],
    "n": [0, -1, 129, BIG],
    "top_k": [-2, BIG],
    "seed": [2**64, -(2**64)],
    "logprobs": [-1, 21, BIG],
    "prompt_logprobs": [-1, 21, BIG],
    "priority": [2**40, -(2**40)],
    "min_width": [0, -1, 2, 1025, BIG],  # there is no fleet
}
NUMBERS = {
    "temperature": [-0.1, 101, -1e-9],
    "top_p": [0, -1, 1.0001],
    "min_p": [-0.1, 1.1],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, -1, 1e9],
}
OTHERS = {
    "stop": ["", ["x"] * 1000, [None], [""], 5, "x" * 2000, {}],
    "stop_token_ids": [[VOCAB_SIZE], [-1], [1] * 129, [1.5], ["a"], 5],
    "allowed_token_ids": [[], [VOCAB_SIZE], list(range(200)) * 10, "a"],
    "logit_bias": [
        {"07": 1, "7": 2},
        {"999": 1},
        {"-1": 1},
        {"a": 1},
        {"1": 101},
        {"1": "x"},
        [1],
        5,
    ],
    "stream": ["yes", 1],
    "stream_options": [{"include_usage": True}, 5],
    "ignore_eos": ["no", 0],
    "echo": ["no", 0],
    "model": [5, ["echo"]],
    "cache_salt": ["", "x" * 1_000_000, "a\nb", 5],
    "user": ["", "x" * 1_000_000, "a\r\nb", {}],
    "metadata": [5, {"a": 1}, {"a": "x" * 513}, {str(i): "x" for i in range(17)}],
    "store": ["no"],
    "service_tier": [5, "x" * 1000],
    "safety_identifier": ["", "a\nb"],
    "request_id": ["", "x" * 300, "a\x00b"],
    "response_format": [
        *({}, {"type": "xml"}, {"type": "json_schema"}, "json", 5, {"type": 5}),
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "text", "json_schema": {"schema": True}},
    ],
    "structured_outputs": [{}, {"regex": ""}, {"json": "", "regex": "a"}, {"json_object": False}],
    "prompt": [5, {"a": 1}, [1, "a"], [[[1]]], [], "", [""], [[]], None, [1.5], [True], ["a", 1]],
}
FIELDS = [
    *((name, value) for name, values in INTEGERS.items() for value in values + WRONG_INTEGERS),
    *((name, value) for name, values in NUMBERS.items() for value in values + WRONG_NUMBERS),
    *((name, value) for name, values in OTHERS.items() for value in values),
]


@pytest.mark.parametrize(("field", "value"), FIELDS, ids=lambda value: repr(value)[:30])
def test_a_bad_field_is_named(client, field, value):
    body = {"prompt": "hello", "max_tokens": 16} | {field: value}
    is_error(client.post(COMPLETION, json=body), 400, field)


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 2**31, 2**70])
def test_tokens_outside_the_vocabulary(client, token):
    is_error(client.post(COMPLETION, json={"prompt": [1, token]}), 400, "prompt")
    is_error(client.post("/detokenize", json={"tokens": [1, token]}), 400, "tokens")


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-Infinity", b"1e400", b"0x10", b"01"])
@pytest.mark.parametrize("field", [b"temperature", b"top_p", b"priority"])
def test_numbers_that_json_has_not(client, field, value):
    body = b'{"prompt": "x", "%s": %s}' % (field, value)
    headers = {"content-type": "application/json"}
    is_error(client.post(COMPLETION, content=body, headers=headers), 400)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"5",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"prompt":"\\ud800"}',
    ],
    ids=lambda body: repr(body)[:20],
)
def test_bodies_that_are_no_object(client, body):
    headers = {"content-type": "application/json"}
    for path in (COMPLETION, CHAT, "/tokenize", "/detokenize"):
        is_error(client.post(path, content=body, headers=headers), 400)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [5]}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": USER, "max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"messages": USER, "max_completion_tokens": -1}, "max_completion_tokens"),
        ({"messages": USER, "max_completion_tokens": 0}, "max_tokens"),
        ({"messages": USER, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": USER, "logprobs": 5}, "logprobs"),
        ({"messages": USER, "tools": [{"type": "function"}]}, "tools"),
        ({"messages": USER, "tool_choice": "required"}, "tool_choice"),
        ({"messages": USER, "chat_template": "{{ x }}"}, "chat_template"),
        ({"messages": USER, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": USER, "chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
        ({"messages": USER, "chat_template_kwargs": {"template": "x"}}, "chat_template_kwargs"),
        ({"messages": USER, "chat_template_kwargs": 5}, "chat_template_kwargs"),
    ],
)
def test_bad_chats(client, body, param):
    is_error(client.post(CHAT, json=body), 400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 0, "echo": True, "n": 2}, "max_tokens"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "typical_p": 0.5}, "typical_p"),
        ({"prompt": "x", "bad_words": ["a", " "]}, "bad_words"),
        ({"prompt": "x", "bad_words": ["a"], "allowed_token_ids": [3]}, "allowed_token_ids"),
        ({"prompt": "x", "lora": "a"}, "lora"),
        ({"prompt": "x", "max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"prompt": "x", "max_completion_tokens": -1}, "max_completion_tokens"),
        ({"prompt": ["x"] * 300}, "prompt"),
        ({"prompt": ["x"] * 100, "n": 100}, None),
        ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": "x" * MAX_MODEL_LEN, "max_tokens": 1}, "prompt"),
        ({"prompt": "x", "max_tokens": MAX_MODEL_LEN}, "prompt"),
        ({"prompt": "x" * 1_000_000}, "prompt"),
        ({"prompt": "x", "allowed_token_ids": [257], "min_tokens": 1}, "min_tokens"),
        (
            {
                "prompt": "x",
                "response_format": {"type": "json_object"},
                "structured_outputs": {"regex": "a"},
            },
            "structured_outputs",
        ),
        ({"prompt": "x", "structured_outputs": {"regex": "a"}, "min_tokens": 1}, "min_tokens"),
        ({"prompt": "x", "structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_bad_combinations(client, body, param):
    is_error(client.post(COMPLETION, json=body), 400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "x", "messages": USER}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "x", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"prompt": "x", "add_generation_prompt": False}, "add_generation_prompt"),
        ({"prompt": "x", "continue_final_message": True}, "continue_final_message"),
        ({"messages": USER, "tools": [{}]}, "tools"),
    ],
)
def test_bad_tokenizing(client, fields, param):
    is_error(client.post("/tokenize", json=fields), 400, param)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1, 10**4000]},
        {"messages": [{"role": "a\n\x00\u2028" * 100, "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "y" * 800}]}]},
    ],
    ids=["token", "role", "part"],
)
def test_errors_are_one_short_line(client, body):
    response = client.post(CHAT if "messages" in body else COMPLETION, json=body)
    is_error(response, 400)
    message = response.json()["error"]["message"]
    assert message.isprintable()
    assert len(message) <= MAX_MESSAGE


def test_the_longest_request_is_served(client):
    body = {"prompt": "x" * 200, "max_tokens": MAX_MODEL_LEN - 200, "ignore_eos": True}
    answer = client.post(COMPLETION, json=body)
    assert answer.json()["usage"]["total_tokens"] == MAX_MODEL_LEN


@pytest.mark.parametrize("fields", [{"top_k": -1}, {"top_k": 0}, {"top_k": 10**6}, {"seed": -5}])
def test_values_at_the_edge_are_served(client, fields):
    assert client.post(COMPLETION, json={"prompt": "x"} | fields).status_code == 200


@pytest.mark.parametrize("prompt", [" ", "\n", "<s>", "<s></s>"])
def test_short_prompts_are_served(client, prompt):
    assert client.post(COMPLETION, json={"prompt": prompt}).status_code == 200


def test_null_is_as_good_as_absent(client):
    names = [*INTEGERS, *NUMBERS, *OTHERS, "suffix", "best_of", "tools"]
    body = {name: None for name in names} | {"prompt": "hello"}
    assert client.post(COMPLETION, json=body).status_code == 200


@pytest.mark.parametrize("model", ["other", "../../etc/passwd", "/etc/passwd", "echo\n", ""])
def test_unknown_models(client, model):
    response = client.post(COMPLETION, json={"model": model, "prompt": "x"})
    is_error(response, 404, "model")
    assert response.json()["error"]["code"] == "model_not_found"
