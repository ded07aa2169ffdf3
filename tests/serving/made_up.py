"""What made-up requests are made of, and what every answer to them must be."""

import json
from contextlib import contextmanager

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from kit import VOCAB_SIZE, Running

DEFINED = {200, 400, 404, 413, 422}  # for a body, by a server that has nothing else to do
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


@contextmanager
def undisturbed(server: Running):
    """A client. Afterwards a good request must get what it got before, and nothing be held."""

    def answer() -> list[dict]:
        return client.post("/v1/completions", json=GOOD).json()["choices"]

    with server.client() as client:
        before = answer()
        yield client
        assert answer() == before
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


ids = st.integers(0, VOCAB_SIZE - 1)
