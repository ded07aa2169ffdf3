"""Everything that is wrong is refused, by rule, with the field's name; and the server lives on."""

import gzip
import json
import socket
import threading

import pytest
from kit import MAX_MODEL_LEN, VOCAB_SIZE, running_server

from serving.errors import MAX_MESSAGE
from serving.fields import UNSUPPORTED
from serving.grammar_trial import Trial
from serving.http import generate
from serving.http.responses import Writer

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
BIG = 2**63


@pytest.fixture(scope="module")
def server():
    with running_server() as running:
        yield running


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client
    server.assert_quiescent()


def is_error(response, status: int, param: str | None = None) -> None:
    """The response is an error object that tells nothing about the inside."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    for secret in ("Traceback", "/work", "site-packages", "0x", "msgspec", "serving."):
        assert secret not in response.text
    if param is not None:
        assert (error["param"] or "").split(".")[0].split("[")[0] == param, error


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
}
NUMBERS = {
    "temperature": [-0.1, 101, 1e-9],
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
        ({"prompt": "x", "bad_words": ["a"]}, "bad_words"),
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
    "constraint",
    [
        {"regex": "("},
        {"regex": "(?<=a)b"},
        {"regex": "(a{1000}){1000}{1000}"},
        {"regex": "a" * 100_000},
        {"regex": "[^\\u0000-\\U0010ffff]"},
        {"grammar": "start: nothing"},
        {"grammar": "no grammar at all"},
        {"choice": []},
        {"choice": [""] * 3},
        {"json": "{"},
        {"json": "[]"},
        {"json": False},
        {"json": {"type": "number", "minimum": 5, "maximum": 1}},
        {"json": {"$ref": "http://example.org/schema"}},
        {"json": {"$ref": "#/nowhere"}},
        {"json": {"const": "x" * 1_000_000}},
        {"json": {"type": "whatever"}},
        {"json": {"unknownKeyword": 5, "not": {"type": "string"}}},
    ],
    ids=lambda value: repr(value)[:40],
)
def test_constraints_of_no_use(client, constraint):
    body = {"prompt": "x", "structured_outputs": constraint}
    response = client.post(COMPLETION, json=body)
    if constraint == {"choice": ["", "", ""]}:  # only the empty text: that can be served
        assert response.json()["choices"][0]["text"] == ""
        return
    is_error(response, 400)


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


def test_unknown_fields_are_told(client):
    response = client.post(COMPLETION, json={"prompt": "x", "tempreature": 1, "ignored\r\n": 2})
    assert response.status_code == 200
    assert "tempreature" in response.headers["warning"]


def test_unknown_fields_are_refused_if_strict():
    with running_server(strict=True) as server, server.client() as client:
        response = client.post(COMPLETION, json={"prompt": "x", "tempreature": 1})
        is_error(response, 400, "tempreature")


def test_paths_and_methods(client):
    is_error(client.get("/v2/completions"), 404)
    response = client.get(COMPLETION)
    is_error(response, 405)
    assert response.headers["allow"] == "POST"
    is_error(client.delete("/v1/models"), 405)


def test_kinds_of_body(client):
    data = json.dumps({"prompt": "x"}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        is_error(client.post(COMPLETION, content=data, headers={"content-type": kind}), 415)
    packed = {"content-type": "application/json", "content-encoding": "gzip"}
    is_error(client.post(COMPLETION, content=gzip.compress(data), headers=packed), 415)
    assert client.post(COMPLETION, content=data).status_code == 200  # no type at all


def test_sizes_are_checked_before_parsing(client):
    data = b'{"prompt": "' + b"x" * (9 << 20)
    headers = {"content-type": "application/json"}
    is_error(client.post(COMPLETION, content=data, headers=headers), 413)
    chunks = (data[: 1 << 20] for _ in range(9))
    is_error(client.post(COMPLETION, content=chunks, headers=headers), 413)
    is_error(client.post("/tokenize", content=data, headers=headers), 413)


def test_headers_are_bounded(client):
    is_error(client.get("/v1/models", headers={f"x-{i}": "a" for i in range(101)}), 431)
    is_error(client.get("/v1/models", headers={"x-long": "a" * (17 << 10)}), 431)
    is_error(client.get("/v1/models", headers={"host": "evil.example"}), 400, "host")


def test_ids_in_headers_are_not_echoed_raw(client):
    for name in ("x" * 1000, "a b", "<script>"):
        response = client.get("/v1/models", headers={"x-request-id": name})
        is_error(response, 400, "x-request-id")
        assert response.headers["x-request-id"] != name


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "soon", "1e9", "1_0", ""])
def test_bad_deadlines(client, seconds):
    headers = {"x-request-timeout": seconds}
    is_error(client.post(COMPLETION, json={"prompt": "x"}, headers=headers), 400)


def test_a_deadline_that_has_passed(client):
    response = client.post(COMPLETION, json={"prompt": "x"}, headers={"x-request-timeout": "0"})
    is_error(response, 504)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/0.9\r\n\r\n",
        b"\x00" * 100,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /admin HTTP/1.1\r\n\r\n",
    ],
    ids=lambda data: repr(data)[:20],
)
def test_garbage_on_the_wire(server, client, data):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := connection.recv(4096):
            answer += chunk
    assert answer == b"" or answer.split(b" ")[1] in (b"400", b"404", b"405", b"413"), answer
    assert client.get("/health/live").status_code == 200


# ---------------------------------------------------------------- served or refused, never dropped

CHAT_BODY = {"messages": USER, "max_tokens": 3}
BODIES = {COMPLETION: {"prompt": "x", "max_tokens": 3}, CHAT: CHAT_BODY}
OF_BOTH = [
    *({name: None} for name in UNSUPPORTED if "." not in name),
    *({"best_of": 1}, {"suffix": ""}, {"tools": []}, {"tool_choice": "none"}, {"functions": []}),
    *({"store": False}, {"service_tier": "auto"}, {"parallel_tool_calls": False}, {"user": "me"}),
    *({"metadata": {"a": "b"}}, {"modalities": ["text"]}, {"prompt_cache_key": "a"}),
    *({"skip_special_tokens": True}, {"spaces_between_special_tokens": True}, {"stop": []}),
    *({"bad_words": []}, {"length_penalty": 1}, {"use_beam_search": False}, {"echo": False}),
    *({"frequency_penalty": 0}, {"presence_penalty": 0}, {"temperature": 0}, {"top_p": 1}),
    *({"repetition_penalty": 1}, {"logit_bias": {}}, {"top_logprobs": 0}, {"top_k": -1}),
    *({"stop_token_ids": []}, {"response_format": {"type": "text", "json_schema": None}}),
    *({"max_completion_tokens": 3}, {"stream": False, "stream_options": None}),
    {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": False}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": None}}},
]
OF_CHATS = [
    *({"logprobs": False, "top_logprobs": 0}, {"logprobs": True}, {"add_special_tokens": False}),
    *({"add_generation_prompt": True}, {"continue_final_message": False}),
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [{"role": "developer", "content": "x"}, *USER]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    {"messages": [*USER, {"role": "assistant", "content": None, "refusal": None}, *USER]},
    {"messages": [*USER, {"role": "assistant", "content": None, "tool_calls": [{"bad": "{"}]}]},
    {"messages": [*USER, {"role": "tool", "content": "", "tool_call_id": "1"}]},
]
OF_COMPLETIONS = [
    *({"logprobs": 0}, {"add_special_tokens": True}, {"prompt": [[1], [2]]}, {"messages": None}),
]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *((path, fields) for path in (COMPLETION, CHAT) for fields in OF_BOTH),
        *((CHAT, fields) for fields in OF_CHATS),
        *((COMPLETION, fields) for fields in OF_COMPLETIONS),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_clients_send_is_served(client, path, fields):
    response = client.post(path, json=BODIES[path] | fields)
    assert response.status_code == 200, response.text
    assert "warning" not in response.headers


def test_an_assistant_that_said_nothing(client):
    """null is an empty text to a template, not the word None."""
    said = [{"role": "assistant", "content": text} for text in ("", None)]
    counts = {client.post("/tokenize", json={"messages": [each]}).json()["count"] for each in said}
    assert counts == {len("assistant: \nassistant:")}


@pytest.mark.parametrize("add", [True, False])
def test_special_tokens_can_be_left_out(client, add):
    body = {"prompt": "ab", "max_tokens": 1, "add_special_tokens": add}
    plain = client.post("/tokenize", json={"prompt": "ab", "add_special_tokens": add})
    used = client.post(COMPLETION, json=body).json()["usage"]["prompt_tokens"]
    assert used == plain.json()["count"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETION, {"best_of": True}, "best_of"),
        (COMPLETION, {"use_beam_search": 0}, "use_beam_search"),
        (COMPLETION, {"guided_json": {"type": "object"}}, "guided_json"),
        (COMPLETION, {"regex": "a"}, "regex"),
        (COMPLETION, {"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
        (COMPLETION, {"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        (COMPLETION, {"top_logprobs": 3}, "top_logprobs"),
        (COMPLETION, {"messages": USER}, "messages"),
        (COMPLETION, {"response_format": {"type": "json_object", "schema": {}}}, "response_format"),
        (COMPLETION, {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        (CHAT, {"prompt": "x"}, "prompt"),
        (CHAT, {"echo": True}, "echo"),
        (CHAT, {"store": True}, "store"),
        (CHAT, {"service_tier": "flex"}, "service_tier"),
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
        (CHAT, {"web_search_options": {}}, "web_search_options"),
    ],
)
def test_what_is_not_done_is_refused(client, path, fields, param):
    response = client.post(path, json=BODIES[path] | fields)
    is_error(response, 400, param)
    assert response.json()["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize("path", [COMPLETION, CHAT, "/tokenize", "/detokenize"])
def test_unknown_fields_everywhere(client, path):
    body = {**BODIES, "/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [1]}}[path]
    response = client.post(path, json=body | {"unheard_of": 1})
    assert "unheard_of" in response.headers["warning"]
    with running_server(strict=True, grpc=False) as server, server.client() as strict:
        is_error(strict.post(path, json=body | {"unheard_of": 1}), 400, "unheard_of")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "x", "messages": USER}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "x", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"prompt": "x", "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": USER, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": USER, "tools": [{}]}, "tools"),
    ],
)
def test_bad_tokenizing(client, fields, param):
    is_error(client.post("/tokenize", json=fields), 400, param)


def test_unknown_fields_inside(client):
    format = {"type": "text", "unheard": 1}
    response = client.post(COMPLETION, json={"prompt": "x", "response_format": format})
    assert "response_format.unheard" in response.headers["warning"]


# ---------------------------------------------------------------- what would take long


@pytest.mark.parametrize(
    "value",
    [
        b"[" + b"[[[[[[[[]]]]]]]]," * 100_000 + b"1]",
        b"[" + b"{}," * 100_000 + b"1]",
        b"[" + b"1," * 2_000_000 + b"1]",
        b"[" + b'"",' * 1_000_000 + b"1]",
        b"{" + b",".join(b'"%d":1' % i for i in range(200_000)) + b"}",
        b'["\\\\",' + b'"\\"",' * 400_000 + b"1]",
    ],
    ids=lambda value: repr(value)[:24],
)
@pytest.mark.parametrize("path", [COMPLETION, CHAT, "/tokenize", "/detokenize"])
def test_more_values_than_any_request_has(client, path, value):
    """They are refused before they are decoded, which would keep the loop busy for seconds."""
    headers = {"content-type": "application/json"}
    response = client.post(path, content=b'{"ignored":%s}' % value, headers=headers)
    is_error(response, 400)
    assert "too many" in response.json()["error"]["message"]


def test_marks_within_texts_count_for_nothing(client):
    text = '[{"a": 1, "b\\\\": [2, 3]}, ' * 50_000 + '\\"'
    response = client.post(COMPLETION, json={"prompt": text})
    is_error(response, 400, "prompt")
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("place", ["messages", "chat_template_kwargs"])
def test_chats_of_too_many_values(client, place):
    numbers = [1] * 100_000
    message = {"role": "user", "content": "hi"}
    body = {"messages": [message], "chat_template_kwargs": {}}
    body |= (
        {"messages": [message | {"x": numbers}]} if place == "messages" else {place: {"x": numbers}}
    )
    for path in (CHAT, "/tokenize"):
        is_error(client.post(path, json=body), 400, "messages")


def test_texts_deep_inside_messages_are_counted(client):
    inner: object = "x" * 100_000
    for _ in range(20):
        inner = [inner]
    body = {"messages": [{"role": "user", "content": "x", "tool_calls": inner}]}
    response = client.post(CHAT, json=body)
    assert response.json()["error"]["code"] == "context_length_exceeded"


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


NEVER_ENDING = [
    {"json": {"type": "integer", "multipleOf": 9999991}},
    {"json": {"allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(300)]}},
    {"grammar": 'start: %json {"type": "integer", "multipleOf": 9999991}'},
]


def test_grammars_that_never_end(client):
    """They are given up, and take no thread away from those that come later."""
    for constraint in NEVER_ENDING:
        body = {"prompt": "x", "structured_outputs": constraint}
        response = client.post(COMPLETION, json=body)
        is_error(response, 400, "structured_outputs")
        assert response.json()["error"]["code"] == "grammar_invalid"
    for number in range(4):
        schema = {"type": "string", "maxLength": 20 + number}
        body = {"prompt": "x", "structured_outputs": {"json": schema}}
        assert client.post(COMPLETION, json=body).status_code == 200


def test_a_trial_is_made_again_after_its_process_has_died():
    trial = Trial()
    try:
        assert trial.survives("not even a grammar")
        process = trial._process
        assert process is not None
        process.kill()
        process.wait()
        assert trial.survives("not even a grammar")
        assert trial._process is not process
    finally:
        trial.close()
    assert trial._process is None


def test_big_answers_are_written_in_a_thread(client, monkeypatch):
    body = {"prompt": "hello", "seed": 1, "n": 3, "logprobs": 5, "echo": True}
    inline = client.post(COMPLETION, json=body).json()["choices"]
    monkeypatch.setattr(generate, "INLINE_LOGPROBS", 0)
    names = []
    encode = Writer.encoded

    def encoded(writer):
        names.append(threading.current_thread().name)
        return encode(writer)

    monkeypatch.setattr(Writer, "encoded", encoded)
    assert client.post(COMPLETION, json=body).json()["choices"] == inline
    assert names[0].startswith("text")
