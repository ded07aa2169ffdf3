"""Made-up requests: whatever comes, the answer is one that is defined, and nobody else notices."""

import json
import socket
from contextlib import suppress

import grpc
import pytest
from google.protobuf import descriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit import MAX_MODEL_LEN, VOCAB_SIZE, running_server

from serving.fields import (
    FOREIGN,
    UNSUPPORTED,
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    TokenizeFields,
)
from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc

PATHS = {
    "/v1/completions": (CompletionFields, {"prompt": "hello", "max_tokens": 4}),
    "/v1/chat/completions": (
        ChatFields,
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    ),
    "/tokenize": (TokenizeFields, {"prompt": "hello"}),
    "/detokenize": (DetokenizeFields, {"tokens": [1, 2]}),
}
DEFINED = {200, 400, 404, 413, 422}  # for a body, by a server that has nothing else to do
STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
}
# The threads of the server draw random numbers, too, which is nothing to Hypothesis.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")
GOOD = {"prompt": "reference", "seed": 5, "n": 2, "max_tokens": 12, "logprobs": 1}


def examples(count: int):
    """Settings of a test that tries `count` examples, the same ones every time."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module")
def server():
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def reference(server):
    with server.client() as client:
        return client.post("/v1/completions", json=GOOD).json()["choices"]


@pytest.fixture
def client(server, reference):
    """Afterwards a good request must get what it got at first, and nothing may be held."""
    with server.client() as client:
        yield client
        assert client.post("/v1/completions", json=GOOD).json()["choices"] == reference
    server.assert_quiescent()


def check(response) -> None:
    """The answer is defined; an error is an error object, short, and tells nothing of us."""
    assert response.status_code in DEFINED, response.text
    if response.status_code == 200:
        assert b'data: {"error"' not in response.content
        return
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].isprintable()
    assert len(response.content) < 4096
    for secret in ("Traceback", "site-packages", "msgspec", "serving."):
        assert secret not in response.text


# ---------------------------------------------------------------- bodies

numbers = st.one_of(
    st.integers(-3, 300),
    st.sampled_from([2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**400]),
    st.floats(),
    st.floats(-2, 2),
)
characters = st.characters(codec=None) | st.sampled_from("\x00\n\r\ud800\udfff\ufffe\U0010ffff")
scalars = st.one_of(st.none(), st.booleans(), numbers, st.text(characters, max_size=12))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=6),
        st.dictionaries(st.text(characters, max_size=6), inner, max_size=4),
    ),
    max_leaves=12,
)
large = st.one_of(
    st.builds(lambda n, x: [x] * n, st.sampled_from([100, 100_000]), scalars),
    st.builds(lambda n: {str(i): i for i in range(n)}, st.sampled_from([400, 50_000])),
    st.builds(lambda n: "x" * n, st.sampled_from([300, 70_000, 1_000_000])),
    # Marks of what Python's encoder could not write: `body_of` puts it there.
    st.builds("\x1enested {} {}".format, st.integers(1, 2000), st.booleans()),
)


def body_of(value) -> bytes:
    """JSON, with NaN and infinities where they stand, and lone surrogates escaped."""
    text = json.dumps(value)
    while (start := text.find('"\\u001enested ')) >= 0:
        end = text.index('"', start + 1)
        _, depth, in_list = text[start + 1 : end].split(" ")
        opening, closing = ("[", "]") if in_list == "True" else ('{"a":', "}")
        nested = opening * int(depth) + "1" + closing * int(depth)
        text = text[:start] + nested + text[end + 1 :]
    return text.encode()


def names_of(path: str) -> list[str]:
    kind, _ = PATHS[path]
    return sorted({*kind.__struct_fields__, *UNSUPPORTED, *FOREIGN.get(kind, {}), "unheard_of"})


@pytest.mark.parametrize("path", PATHS)
def test_a_field_of_any_kind(client, path):
    _, good = PATHS[path]

    @examples(250)
    @given(name=st.sampled_from(names_of(path)), value=values | large)
    def run(name, value):
        body = body_of(good | {name: value})
        response = client.post(path, content=body, headers={"content-type": "application/json"})
        check(response)

    run()


@pytest.mark.parametrize("path", PATHS)
def test_bodies_of_any_kind(client, path):
    @examples(80)
    @given(st.one_of(values.map(body_of), st.binary(max_size=40), st.text(max_size=40)))
    def run(body):
        data = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
        response = client.post(path, content=data, headers={"content-type": "application/json"})
        assert response.status_code in DEFINED - {200}
        check(response)

    run()


# ---------------------------------------------------------------- options together

ids = st.integers(0, VOCAB_SIZE - 1)
stop_texts = st.text(st.sampled_from("aeé\ufffd !,"), min_size=1, max_size=3)
constraints = st.one_of(
    st.just({"json_object": True}),
    st.sampled_from(["[ab]{0,9}", "x|yy|", "(é|日)+", ".*"]).map(lambda text: {"regex": text}),
    st.lists(st.text(max_size=4), min_size=1, max_size=5).map(lambda texts: {"choice": texts}),
    st.just({"grammar": 'start: "a" start | ""'}),
    st.sampled_from([{"type": "integer", "minimum": -5}, {"enum": ["a", 1, None]}, True]).map(
        lambda schema: {"json": schema}
    ),
)
options = st.fixed_dictionaries(
    {"prompt": st.text(min_size=1, max_size=12) | st.lists(ids, min_size=1, max_size=12)},
    optional={
        "n": st.integers(1, 4),
        "max_tokens": st.integers(0, 24),
        "min_tokens": st.integers(0, 24),
        "temperature": st.floats(0.1, 2),
        "top_p": st.floats(0.1, 1),
        "top_k": st.integers(-1, 300),
        "seed": st.integers(0, 99),
        "stop": st.lists(stop_texts, max_size=4) | stop_texts,
        "stop_token_ids": st.lists(ids, max_size=4),
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(0, 20),
        "prompt_logprobs": st.integers(0, 20),
        "echo": st.booleans(),
        "allowed_token_ids": st.lists(ids, min_size=1, max_size=4),
        "logit_bias": st.dictionaries(ids.map(str), st.floats(-100, 100), max_size=3),
        "structured_outputs": constraints,
        "return_token_ids": st.booleans(),
        "frequency_penalty": st.integers(-2, 2),
        "cache_salt": st.just("salt"),
        "priority": st.integers(-9, 9),
    },
)


def streamed(client, body) -> tuple[int, dict[int, dict]]:
    """(status, choices with their deltas put together, usage among them)."""
    usage = {"include_usage": True, "continuous_usage_stats": body.get("n") == 2}
    fields = {"stream": True, "stream_options": usage}
    response = client.post("/v1/completions", json=body | fields)
    check(response)
    joined: dict[int, dict] = {}
    if response.status_code != 200:
        return response.status_code, joined
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        chunk = json.loads(line)
        for choice in chunk["choices"]:
            seen = joined.setdefault(choice["index"], {"text": "", "ids": [], "ends": []})
            seen["text"] += choice["text"]
            seen["ids"] += choice.get("token_ids", [])
            seen["ends"] += [choice["finish_reason"]] * (choice["finish_reason"] is not None)
    joined[-1] = chunk["usage"]
    return 200, joined


def test_options_together(client):
    """Streamed is unstreamed: the same status, text, ids, ends and usage."""
    served = 0

    @examples(250)
    @given(options)
    def run(body):
        nonlocal served
        body = {"seed": 1} | body
        response = client.post("/v1/completions", json=body)
        check(response)
        if body.get("prompt_logprobs") is not None and response.status_code == 200:
            return  # which cannot be streamed
        status, joined = streamed(client, body)
        assert status == response.status_code
        if status != 200:
            return
        served += 1
        answer = response.json()
        wanted = {
            choice["index"]: {
                "text": choice["text"],
                "ids": choice.get("token_ids", []),
                "ends": [choice["finish_reason"]],
            }
            for choice in answer["choices"]
        }
        given_usage = {k: v for k, v in joined.pop(-1).items() if k != "prompt_tokens_details"}
        assert joined == wanted
        assert given_usage.items() <= answer["usage"].items()

    run()
    assert served > 50  # or nothing has been compared


# ---------------------------------------------------------------- conversations

parts = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=8)}),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "image_url", "input_audio", "file", "refusal", ""])},
        optional={"text": scalars, "image_url": st.just({"url": "http://127.0.0.1:1/"})},
    ),
    values,
)
messages = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]) | scalars,
        "content": st.one_of(st.text(max_size=8), st.lists(parts, max_size=4), values),
        "name": scalars,
        "tool_calls": values,
        "tool_call_id": scalars,
    },
)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_conversations(client, path):
    names = st.sampled_from(["add_generation_prompt", "tools", "messages", "template", "x"])

    @examples(120)
    @given(st.lists(messages, max_size=4), st.dictionaries(names, values, max_size=2))
    def run(conversation, variables):
        body = {"messages": conversation, "chat_template_kwargs": variables}
        headers = {"content-type": "application/json"}
        check(client.post(path, content=body_of(body), headers=headers))

    run()


# ---------------------------------------------------------------- grammars

patterns = st.recursive(
    st.sampled_from([*"ab.é\\[](){}^$|?*+&~-", r"\w", r"\p{L}", r"\b", "[^a]", "(?i)"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        inner.map(lambda text: f"({text})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{0,9}", "{99}", "|"])).map("".join),
    ),
    max_leaves=10,
)
KEYWORDS = """
    type properties required items anyOf allOf oneOf not $ref enum const minimum maximum multipleOf
    minLength maxLength pattern format minItems maxItems additionalProperties patternProperties
    prefixItems if uniqueItems $defs $id $schema x-guidance
"""
keywords = st.sampled_from(KEYWORDS.split())
words = st.sampled_from(["object", "array", "string", "integer", "#", "#/$defs/a", "a*", "date"])
small = st.one_of(st.integers(-9, 99), words, st.booleans(), st.none())
schemas = st.recursive(
    st.dictionaries(keywords, small, max_size=3),
    lambda inner: st.dictionaries(
        keywords,
        st.one_of(inner, st.lists(inner | words, max_size=3), small)
        | st.dictionaries(words, inner, max_size=3),
        max_size=4,
    ),
    max_leaves=12,
)


def test_constraints(client):
    @examples(150)
    @given(
        st.one_of(
            patterns.map(lambda text: {"regex": text}),
            schemas.map(lambda schema: {"json": schema}),
            patterns.map(lambda text: {"grammar": f"start: A*\nA: /{text}/"}),
            st.lists(st.text(max_size=6), max_size=9).map(lambda texts: {"choice": texts}),
        )
    )
    def run(constraint):
        body = {"prompt": "x", "max_tokens": 6, "structured_outputs": constraint}
        check(client.post("/v1/completions", json=body))

    run()


# ---------------------------------------------------------------- gRPC

FIELD = descriptor.FieldDescriptor
scalars_of = {
    FIELD.TYPE_DOUBLE: st.floats(),
    FIELD.TYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FIELD.TYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FIELD.TYPE_SINT64: st.integers(-(2**63), 2**63 - 1),
    FIELD.TYPE_UINT32: st.integers(0, 2**32 - 1) | st.integers(0, VOCAB_SIZE),
    FIELD.TYPE_BOOL: st.booleans(),
    FIELD.TYPE_STRING: st.text(max_size=8),
}


def messages_of(kind) -> st.SearchStrategy:
    """Plain values from which a message of this type can be made, any of its fields set."""

    def one(field):
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            return st.dictionaries(one(key), one(value), max_size=3)
        if field.message_type is not None:
            plain = messages_of(field.message_type)
        else:
            plain = scalars_of[field.type]
        return st.lists(plain, max_size=3) if field.is_repeated else plain

    fields = {field.name: one(field) for field in kind.fields}
    return st.fixed_dictionaries({}, optional=fields)


METHODS = ("Generate", "GenerateOnce", "Score", "Tokenize", "Detokenize", "GetModel", "ListModels")
SERVICE = pb.DESCRIPTOR.services_by_name["Inference"]


@pytest.fixture
def channel(server, client):
    with grpc.insecure_channel(server.server.grpc.address) as channel:
        yield channel


def check_call(call) -> None:
    """The call ends well, or with a status that is defined."""
    try:
        list(call())
    except grpc.RpcError as error:
        assert error.code() in STATUSES, (error.code(), error.details())
        assert len(error.details() or "") < 1024
        assert "Traceback" not in (error.details() or "")


@pytest.mark.parametrize("name", METHODS)
def test_messages(channel, name):
    kind = getattr(pb, SERVICE.methods_by_name[name].input_type.name)
    method = getattr(pb_grpc.InferenceStub(channel), name)

    @examples(80)
    @given(messages_of(kind.DESCRIPTOR))
    def run(fields):
        request = kind(**fields)
        check_call(lambda: method(request) if name == "Generate" else [method(request)])

    run()


@pytest.mark.parametrize("name", METHODS)
def test_bytes(channel, name):
    method = channel.unary_stream(f"/{SERVICE.full_name}/{name}")

    @examples(60)
    @given(st.binary(max_size=64))
    def run(data):
        check_call(lambda: method(data))

    run()


# ---------------------------------------------------------------- the wire

BODY = b'{"prompt": "x", "max_tokens": 1}'
LAST = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
METHODS_ON_THE_WIRE = b"GET POST HEAD PUT DELETE OPTIONS TRACE CONNECT PATCH PRI FOO".split()
TARGETS = (
    b"/v1/completions /v1/models/echo * http://evil/v1/models / /health/live?x /%ff //".split()
)
VERSIONS = (b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b"")
LINES = (
    *(b"Content-Length: 32", b"Content-Length: 0", b"Content-Length: -1", b"Content-Length: 31"),
    *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Expect: 100-continue"),
    *(b"Host: localhost", b"Host: evil.example", b"Content-Type: text/plain", b"Upgrade: h2c"),
    *(b"Connection: close", b"Connection: upgrade", b"x-request-id: a", b"x-request-id: \xff"),
    *(b"traceparent: \xff", b"x-request-timeout: 5", b"X: a\r\n b", b"no colon", b"A : b", b": c"),
)
PAYLOADS = (
    b"",
    BODY,
    b"20\r\n" + BODY + b"\r\n0\r\n\r\n",
    b"20;a=b\r\n" + BODY + b"\r\n0\r\nX: y\r\n\r\n",
)
TOKENS = (b"\r\n", b"\n", b"\x00", b":", b" ", b"\t", b",", b"-1", b"ffffffff", b"\xff")
edits = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 3), st.sampled_from(TOKENS)), max_size=1
)


def exchange(server, data: bytes) -> bytes:
    """What comes back until the server closes; it is told that no more comes if it waits for it."""
    host, port = server.url.removeprefix("http://").split(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=0.25) as connection:
        with suppress(OSError):
            connection.sendall(data)
        while True:
            try:
                chunk = connection.recv(65536)
            except TimeoutError:
                connection.settimeout(10)
                connection.shutdown(socket.SHUT_WR)
                continue
            except ConnectionResetError:
                return answer
            if not chunk:
                return answer
            answer += chunk


def test_bytes_on_the_wire(server, client):
    statuses = set()

    @examples(300)
    @given(
        st.tuples(*map(st.sampled_from, (METHODS_ON_THE_WIRE, TARGETS, VERSIONS))),
        st.lists(st.sampled_from(LINES), max_size=4),
        st.booleans(),
        st.sampled_from(PAYLOADS),
        edits,
    )
    def run(start, lines, is_named, payload, changes):
        head = [b" ".join(start), *[b"Host: localhost"] * is_named, *lines]
        data = b"\r\n".join(head) + b"\r\n\r\n" + payload
        for place, length, new in changes:
            data = data[:place] + new + data[place + length :]
        answer = exchange(server, data + LAST)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
        assert b"HTTP/1.1 5" not in answer
        assert b"Traceback" not in answer
        statuses.add(answer[9:12])

    run()
    assert {b"200", b"400", b"404", b"405"} <= statuses  # or little has been tried


@pytest.mark.parametrize("path", ["/v1/models/", "/", "/health/"])
def test_paths(server, client, path):
    @examples(60)
    @given(st.text(max_size=12) | st.sampled_from(["..", "%2F..", "%00", "%ff", "*", "//", "?"]))
    def run(text):
        target = text if text.startswith("%") else "".join(f"%{b:02x}" for b in text.encode())
        head = f"GET {path}{target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        answer = exchange(server, head.encode())
        assert answer.split(b" ")[1] in (b"200", b"400", b"404"), answer

    run()


def test_headers(client):
    names = st.sampled_from(
        ["x-request-id", "x-request-timeout", "traceparent", "authorization", "accept", "warning"]
    )
    texts = st.text(
        st.characters(min_codepoint=32, max_codepoint=255, exclude_categories=["Cc"]), max_size=40
    ).map(str.strip)
    timeouts = st.floats().map(str) | st.sampled_from(["1_0", "1e308", "-0", "0x1", ""])

    @examples(150)
    @given(st.dictionaries(names, texts | timeouts, max_size=3))
    def run(headers):
        raw = {name: text.encode("latin-1") for name, text in headers.items()}
        response = client.post("/v1/completions", json=GOOD | {"max_tokens": 1}, headers=raw)
        if response.status_code != 504:  # the deadline was as short as that
            check(response)

    run()


def test_the_longest_prompt_that_is_made_of_anything(client):
    @examples(20)
    @given(st.lists(ids, min_size=MAX_MODEL_LEN - 1, max_size=MAX_MODEL_LEN + 1))
    def run(prompt):
        body = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 0}
        response = client.post("/v1/completions", json=body)
        check(response)
        assert (response.status_code == 200) == (len(prompt) < MAX_MODEL_LEN)

    run()
