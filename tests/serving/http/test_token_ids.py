"""Token ids and prompts in answers, where vLLM's clients read them."""

import pytest
from kit import CHAT, COMPLETION, EOS, USER, byte_tokenizer, events, running_server
from scripted import say, scripted_server

PROMPT = byte_tokenizer().encode("user: hi\nassistant:", False)
IDS = {"return_token_ids": True, "max_tokens": 12, "seed": 3, "n": 2}


@pytest.fixture(scope="module")
def server():
    with running_server(grpc=False, stream_interval=1) as running:
        yield running


def test_a_chat_tells_its_token_ids(server, client):
    answer = client.post(CHAT, json=IDS | {"messages": USER}).json()
    assert answer["prompt_token_ids"] == PROMPT
    outputs = [choice["token_ids"] for choice in answer["choices"]]
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert [byte_tokenizer().decode(ids) for ids in outputs] == texts
    server.runner.step_seconds = 0.005  # so that the stream is read in between
    chunks = events(client.post(CHAT, json=IDS | {"messages": USER, "stream": True}).text)
    assert len(chunks) > 6
    prompts = [chunk.get("prompt_token_ids") for chunk in chunks]
    assert prompts.count(PROMPT) == 2 and prompts.count(None) == len(chunks) - 2
    assert prompts[0] == PROMPT
    streamed: list[list[int]] = [[], []]
    for choice in (chunk["choices"][0] for chunk in chunks):
        streamed[choice["index"]] += choice.get("token_ids") or []
    assert streamed == outputs


def test_a_completion_tells_them_in_its_choices(server, client):
    hello = byte_tokenizer().encode("hello", False)
    body = IDS | {"prompt": [hello, [1, 2]], "echo": True}
    choices = client.post(COMPLETION, json=body).json()["choices"]
    assert [each["prompt_token_ids"] for each in choices] == 2 * [hello] + 2 * [[1, 2]]
    assert all(len(each["token_ids"]) <= 12 for each in choices)
    assert choices[0]["text"] == "hello" + byte_tokenizer().decode(choices[0]["token_ids"])
    streamed: list[list[int]] = [[] for _ in choices]
    prompts: list[list] = [[] for _ in choices]
    server.runner.step_seconds = 0.005
    for chunk in events(client.post(COMPLETION, json=body | {"stream": True}).text):
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["token_ids"]
        prompts[choice["index"]] += [choice.get("prompt_token_ids")]
    assert streamed == [each["token_ids"] for each in choices]
    assert [each[0] for each in prompts] == [each["prompt_token_ids"] for each in choices]
    assert not any(later for each in prompts for later in each[1:])


def test_tokens_that_are_no_text_are_told_of_in_a_stream():
    with scripted_server("think", grpc=False, stream_interval=1) as server:
        say(server, "a</think>b")
        server.runner.step_seconds = 0.005
        with server.client() as client:
            body = {"messages": USER, "return_token_ids": True, "stream": True}
            chunks = events(client.post(CHAT, json=body).text)
        script = server.runner.script
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ids = [token for choice in choices for token in choice.get("token_ids") or ()]
    assert ids == [*script, EOS]
    thought = [chunk["choices"][0]["delta"].get("reasoning") for chunk in chunks]
    assert "".join(text or "" for text in thought) == "a"


def test_log_probabilities_of_a_prompt(client):
    asked = {"prompt_logprobs": 1, "max_tokens": 1}
    answer = client.post(CHAT, json=asked | {"messages": USER}).json()
    assert len(answer["prompt_logprobs"]) == len(PROMPT)
    assert answer["prompt_logprobs"][0] is None
    assert "prompt_logprobs" not in answer["choices"][0]
    second = answer["prompt_logprobs"][1][str(PROMPT[1])]
    assert second == {"logprob": -(PROMPT[1] % 7), "rank": second["rank"], "decoded_token": "s"}
    answer = client.post(COMPLETION, json=asked | {"prompt": ["hi", "yes"]}).json()
    assert "prompt_logprobs" not in answer
    assert [len(each["prompt_logprobs"]) for each in answer["choices"]] == [2, 3]


def test_tokens_are_told_as_ids(client):
    told = {"return_tokens_as_token_ids": True, "return_token_ids": True, "max_tokens": 4}
    body = told | {"messages": USER, "logprobs": True, "top_logprobs": 1}
    (choice,) = client.post(CHAT, json=body).json()["choices"]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert [each["token"] for each in choice["logprobs"]["content"]] == names
    piece = byte_tokenizer().token_bytes.piece(choice["token_ids"][0])
    assert choice["logprobs"]["content"][0]["bytes"] == list(piece)
    assert choice["logprobs"]["content"][0]["top_logprobs"][0]["token"].startswith("token_id:")
    answer = client.post(COMPLETION, json=told | {"prompt": "a", "logprobs": 1})
    (choice,) = answer.json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(name.startswith("token_id:") for name in choice["logprobs"]["top_logprobs"][0])


# Of vLLM's ChatCompletionResponse and CompletionResponse: entrypoints/openai/*/protocol.py.
ANSWER = "id object created model choices service_tier system_fingerprint usage kv_transfer_params"
MESSAGE = "role content refusal annotations audio function_call reasoning"


def test_answers_have_the_fields_of_vllms(client):
    chat = client.post(CHAT, json={"messages": USER, "max_tokens": 2}).json()
    assert set(chat) == {*ANSWER.split(), "prompt_logprobs", "prompt_token_ids"}
    (choice,) = chat["choices"]
    fields = "index message logprobs finish_reason stop_reason token_ids"
    assert set(choice) == set(fields.split())
    assert set(choice["message"]) == set(MESSAGE.split())
    answer = client.post(COMPLETION, json={"prompt": "a", "max_tokens": 2}).json()
    assert set(answer) == set(ANSWER.split())
    (choice,) = answer["choices"]
    fields = "index text logprobs finish_reason stop_reason token_ids"
    assert set(choice) == {*fields.split(), "prompt_logprobs", "prompt_token_ids"}
    for value in (chat["prompt_token_ids"], choice["token_ids"], choice["prompt_token_ids"]):
        assert value is None
