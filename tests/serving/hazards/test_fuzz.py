"""Made-up bodies: whatever comes, the answer is one that is defined, and nobody else notices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import MAX_MODEL_LEN, events
from made_up import DEFINED, body_of, check, examples, ids, large, scalars, undisturbed, values

from serving.server.fields import (
    FOREIGN,
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    TokenizeFields,
)
from serving.server.refused_fields import REFUSED

# The threads of the server draw random numbers, too, which is nothing to Hypothesis.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")
PATHS = {
    "/v1/completions": (CompletionFields, {"prompt": "hello", "max_tokens": 4}),
    "/v1/chat/completions": (
        ChatFields,
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    ),
    "/tokenize": (TokenizeFields, {"prompt": "hello"}),
    "/detokenize": (DetokenizeFields, {"tokens": [1, 2]}),
}


@pytest.fixture
def client(server):
    with undisturbed(server) as client:
        yield client


def names_of(path: str) -> list[str]:
    kind, _ = PATHS[path]
    return sorted({*kind.__struct_fields__, *REFUSED, *FOREIGN.get(kind, {}), "unheard_of"})


@pytest.mark.costs(10)
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
    chunks = events(response.text)
    for chunk in chunks:
        for choice in chunk["choices"]:
            seen = joined.setdefault(choice["index"], {"text": "", "ids": [], "ends": []})
            seen["text"] += choice["text"]
            seen["ids"] += choice.get("token_ids", [])
            seen["ends"] += [choice["finish_reason"]] * (choice["finish_reason"] is not None)
    joined[-1] = chunks[-1]["usage"]
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
                "ids": choice["token_ids"] or [],
                "ends": [choice["finish_reason"]],
            }
            for choice in answer["choices"]
        }
        given_usage = {k: v for k, v in joined.pop(-1).items() if k != "prompt_tokens_details"}
        assert joined == wanted
        assert given_usage.items() <= answer["usage"].items()

    run()
    assert served > 50  # or nothing has been compared


def test_the_longest_prompt_that_is_made_of_anything(client):
    @examples(20)
    @given(st.lists(ids, min_size=MAX_MODEL_LEN - 1, max_size=MAX_MODEL_LEN + 1))
    def run(prompt):
        body = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 0}
        response = client.post("/v1/completions", json=body)
        check(response)
        assert (response.status_code == 200) == (len(prompt) < MAX_MODEL_LEN)

    run()


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
