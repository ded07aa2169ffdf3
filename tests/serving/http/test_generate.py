"""The HTTP front end over an engine without a model, through a real socket."""

import pytest
from kit import BOS, EOS, byte_tokenizer, events, running_server


def test_a_completion(client):
    body = {"prompt": "hello", "max_tokens": 5, "seed": 1}
    answer = client.post("/v1/completions", json=body).json()
    assert answer["object"] == "text_completion"
    assert answer["model"] == "echo"
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 5,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert client.post("/v1/completions", json=body).json()["choices"] == answer["choices"]


def test_the_usage_is_that_of_all_prompts_and_continuations(client):
    body = {"prompt": [[1, 2, 3], [4, 5]], "n": 2, "max_tokens": 6, "ignore_eos": True}
    response = client.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in response["choices"]] == [0, 1, 2, 3]
    counts = {name: response["usage"][f"{name}_tokens"] for name in ("prompt", "completion")}
    assert counts == {"prompt": 5, "completion": 4 * 6}
    assert response["usage"]["total_tokens"] == 5 + 4 * 6


@pytest.mark.parametrize("n", [1, 3])
def test_streamed_text_is_unstreamed_text(client, n):
    body = {"prompt": ["é日本", "x"], "max_tokens": 40, "seed": 3, "n": n, "stop": ["a", "\ufffdb"]}
    whole = client.post("/v1/completions", json=body).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    stream = client.post("/v1/completions", json=body | options)
    assert stream.headers["content-type"].startswith("text/event-stream")
    objects = events(stream.text)
    texts, reasons = [""] * 2 * n, [None] * 2 * n
    for each in objects[:-1]:
        for choice in each["choices"]:
            assert reasons[choice["index"]] is None
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert reasons == [choice["finish_reason"] for choice in whole["choices"]]
    assert objects[-1]["choices"] == []
    tokens = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [objects[-1]["usage"][k] for k in tokens] == [whole["usage"][k] for k in tokens]


def test_an_echo_comes_once_in_a_stream():
    body = {"prompt": "hello", "max_tokens": 40, "seed": 3, "echo": True, "ignore_eos": True}
    with running_server(grpc=False, stream_interval=1) as server, server.client() as client:
        (whole,) = client.post("/v1/completions", json=body).json()["choices"]
        server.runner.step_seconds = 0.005  # so that the stream is read in between
        parts = events(client.post("/v1/completions", json=body | {"stream": True}).text)
    texts = [part["choices"][0]["text"] for part in parts]
    assert len(texts) > 1 and "".join(texts) == whole["text"]
    assert whole["text"].startswith("hello")


def test_a_chat(client):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 8, "seed": 1}
    answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["object"] == "chat.completion"
    message = answer["choices"][0]["message"]
    prompt = "user: hi\nassistant:"
    same = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 8, "seed": 1})
    assert message["content"] == same.json()["choices"][0]["text"]
    assert message["role"] == "assistant"
    stream = events(client.post("/v1/chat/completions", json=body | {"stream": True}).text)
    deltas = [each["choices"][0]["delta"] for each in stream]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    assert stream[-1]["choices"][0]["finish_reason"] == "length"


def test_scoring_with_echo_and_logprobs(client):
    body = {"prompt": [BOS, 104, 105], "max_tokens": 0, "echo": True, "logprobs": 2}
    (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [None, -(104 % 7), -(105 % 7)]
    assert logprobs["top_logprobs"][0] is None
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == 3
    assert logprobs["text_offset"][0] == 0
    assert choice["text"] == byte_tokenizer().decode([BOS, 104, 105], skip_special_tokens=False)
    body |= {"max_tokens": 2, "stream": True}
    chunks = events(client.post("/v1/completions", json=body).text)
    scored = [value for c in chunks for value in c["choices"][0]["logprobs"]["token_logprobs"]]
    assert scored[:3] == logprobs["token_logprobs"]
    assert len(scored) == 5


def test_logprobs_of_a_chat(client):
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "max_tokens": 3,
        "logprobs": True,
        "top_logprobs": 2,
    }
    answer = client.post("/v1/chat/completions", json=body).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    assert set(content[0]) == {"token", "logprob", "bytes", "top_logprobs"}
    assert len(content[0]["top_logprobs"]) == 2


def test_the_end_of_sequence_ends(client):
    body = {"prompt": "q", "max_tokens": 200, "logit_bias": {str(EOS): 1.0}}
    (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    assert choice["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize("interval", [1, 8])
def test_a_stream_delivers_so_many_tokens_together(interval):
    body = {"prompt": "hello", "max_tokens": 30, "seed": 1, "ignore_eos": True}
    asked = body | {"stream": True, "return_token_ids": True}
    with running_server(stream_interval=interval) as server, server.client() as client:
        whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        server.runner.step_seconds = 0.005  # so that the stream is read in between
        choices = [c["choices"][0] for c in events(client.post("/v1/completions", json=asked).text)]
    sizes = [len(choice["token_ids"]) for choice in choices]
    assert "".join(choice["text"] for choice in choices) == whole
    assert sum(sizes) == 30
    assert all(size >= interval for size in sizes[1:-1])
    assert 1 < len(sizes) <= 2 + 29 // interval
