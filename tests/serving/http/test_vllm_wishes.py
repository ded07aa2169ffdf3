"""What vLLM's clients ask of an answer: no reasoning, usage in every stream, both logprobs."""

from kit import CHAT, USER, events, running_server
from scripted import say, scripted_server


def message_of(client, **fields) -> dict:
    answer = client.post(CHAT, json={"messages": USER} | fields).json()
    return answer["choices"][0]["message"]


def streamed(client, **fields) -> tuple[str, str]:
    """(reasoning, content) of a stream."""
    response = client.post(CHAT, json={"messages": USER, "stream": True} | fields)
    deltas = [choice["delta"] for each in events(response.text) for choice in each["choices"]]
    parts = (
        "".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning", "content")
    )
    reasoning, content = parts
    return reasoning, content


def test_reasoning_is_left_out_on_request():
    with scripted_server("think", grpc=False) as server, server.client() as client:
        say(server, "deep</think>answer")
        shown, hidden = message_of(client), message_of(client, include_reasoning=False)
        assert shown["reasoning"] == "deep" and shown["content"].startswith("answer")
        assert hidden["reasoning"] is None and hidden["content"] == shown["content"]
        assert streamed(client) == ("deep", shown["content"])
        assert streamed(client, include_reasoning=False) == ("", shown["content"])


def test_a_server_can_end_every_stream_with_its_usage():
    body = {"prompt": "x", "max_tokens": 2, "stream": True}
    for forced in (False, True):
        with running_server(force_include_usage=forced) as server, server.client() as client:
            told = events(client.post("/v1/completions", json=body).text)
        has_usage = {each.get("usage") is not None for each in told}
        assert has_usage == {forced} and (told[-1]["choices"] == []) is forced


def test_usage_grows_with_the_tokens_of_a_stream():
    """The object of the role comes before any token, as in vLLM."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": USER, "max_tokens": 3, "stream": True, "stream_options": options}
    with running_server() as server, server.client() as client:
        told = events(client.post(CHAT, json=body | {"ignore_eos": True}).text)
    counts = [each["usage"]["completion_tokens"] for each in told]
    assert told[0]["choices"][0]["delta"]["role"] == "assistant"
    assert counts[0] == 0 < counts[1] and counts == sorted(counts) and counts[-2:] == [3, 3]
    body["stream_options"] = {"continuous_usage_stats": True}
    with running_server() as server, server.client() as client:
        assert not any(each.get("usage") for each in events(client.post(CHAT, json=body).text))
    assert all(each["usage"]["total_tokens"] >= each["usage"]["prompt_tokens"] for each in told)


def test_prompt_logprobs_come_beside_those_of_an_echo():
    body = {"prompt": "hello", "max_tokens": 2, "echo": True, "logprobs": 1}
    with running_server() as server, server.client() as client:
        answer = client.post("/v1/completions", json=body | {"prompt_logprobs": 1}).json()
        choice = answer["choices"][0]
        assert len(choice["prompt_logprobs"]) == 5 and len(choice["logprobs"]["tokens"]) == 7
        refused = client.post("/v1/completions", json=body | {"prompt_logprobs": 2})
        assert refused.json()["error"]["param"] == "prompt_logprobs"


def test_a_wrong_key_of_logit_bias_is_named():
    with running_server() as server, server.client() as client:
        body = {"prompt": "x", "logit_bias": {"not_a_token_id": 1.0, "5": 1.0, "bad": 2.0}}
        message = client.post("/v1/completions", json=body).json()["error"]["message"]
    assert message.endswith("and not 'not_a_token_id', 'bad'")
