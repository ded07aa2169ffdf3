"""Made-up messages of gRPC, and bytes and headers of HTTP: the server answers or hangs up."""

import socket
from contextlib import suppress

import grpc
import pytest
from google.protobuf import descriptor
from hypothesis import given
from hypothesis import strategies as st
from kit import VOCAB_SIZE
from made_up import GOOD, check, examples, undisturbed

from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc

STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
}
# The threads of the server draw random numbers, too, which is nothing to Hypothesis.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")


@pytest.fixture
def client(server):
    with undisturbed(server) as client:
        yield client


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


# ---------------------------------------------------------------- HTTP

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
    answer = b""
    with socket.create_connection(server.address, timeout=0.25) as connection:
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
