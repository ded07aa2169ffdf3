"""vLLM's `/inference/v1/generate`: the tokens and log-probabilities of a completion, as ids."""

import pytest
from kit import COMPLETION, events, is_error, running_server

from serving.server.dialects.token_ids import read_token_ids
from serving.server.fields import CompletionFields
from shiftjax.core.sampling_params import PARAMS

PATH = "/inference/v1/generate"
IDS = [104, 105, 32]
SAMPLING = {"max_tokens": 12, "seed": 3, "n": 2, "ignore_eos": True, "logprobs": 2}
BODY = {"token_ids": IDS, "sampling_params": SAMPLING}


@pytest.fixture(scope="module")
def server():
    with running_server(grpc=False, stream_interval=1, strict=True) as running:
        yield running
        running.assert_quiescent()


def completed(client, **more) -> dict:
    body = {"prompt": IDS, "return_token_ids": True, "return_tokens_as_token_ids": True}
    return client.post(COMPLETION, json=body | SAMPLING | more).json()


def test_an_answer_has_what_a_completion_has(client):
    answer = client.post(PATH, json=BODY | {"request_id": "own"}).json()
    same = completed(client)
    assert (answer["request_id"], answer["usage"]) == ("own", same["usage"])
    assert answer["prompt_logprobs"] is answer["kv_transfer_params"] is None
    for choice, other in zip(answer["choices"], same["choices"], strict=True):
        content = choice.pop("logprobs")["content"]
        ids, ends = other["token_ids"], other["finish_reason"]
        assert choice == {"index": other["index"], "token_ids": ids, "finish_reason": ends}
        assert [each["token"] for each in content] == [f"token_id:{each}" for each in ids]
        assert [each["logprob"] for each in content] == other["logprobs"]["token_logprobs"]
        for each, top in zip(content, other["logprobs"]["top_logprobs"], strict=True):
            assert len(each["top_logprobs"]) == 2
            assert {
                one["token"]: one["logprob"] for one in each["top_logprobs"]
            }.items() <= top.items()


def test_a_stream_has_what_the_answer_has(server, client):
    server.runner.step_seconds = 0.005
    wish = BODY | {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(client.post(PATH, json=wish | {"request_id": "own"}).text)
    server.runner.step_seconds = 0.0
    answer = client.post(PATH, json=BODY).json()
    assert len(chunks) > 6
    assert last == {"request_id": "own", "choices": [], "usage": answer["usage"]}
    for index, whole in enumerate(answer["choices"]):
        parts = [part for each in chunks for part in each["choices"] if part["index"] == index]
        assert [each for part in parts for each in part["token_ids"]] == whole["token_ids"]
        content = [each for part in parts for each in part["logprobs"]["content"]]
        assert content == whole["logprobs"]["content"]
        ends = [part["finish_reason"] for part in parts]
        assert ends == [None] * (len(ends) - 1) + [whole["finish_reason"]]
    assert all(each["usage"] is None for each in chunks)


def test_prompts_are_scored(client):
    answer = client.post(
        PATH, json={"token_ids": IDS, "sampling_params": {"max_tokens": 0, "prompt_logprobs": 1}}
    ).json()
    (same,) = completed(client, max_tokens=1, n=1, prompt_logprobs=1)["choices"]
    assert answer["choices"][0]["token_ids"] == []
    assert len(answer["prompt_logprobs"]) == len(IDS)
    assert answer["prompt_logprobs"] == same["prompt_logprobs"]


def test_as_many_tokens_as_there_is_room_for(client):
    sampling = {"seed": 1, "ignore_eos": True, "min_tokens": 20}
    answer = client.post(PATH, json={"token_ids": IDS, "sampling_params": sampling}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 256  # the context


@pytest.mark.parametrize("name", PARAMS)
def test_every_sampling_parameter_is_taken(name):
    wish = read_token_ids({"token_ids": IDS, "sampling_params": {name: None}})
    assert not wish.unknown


@pytest.mark.parametrize(
    ("sampling", "hints", "unknown"),
    [
        ({"detokenize": False, "output_kind": 2, "logprob_token_ids": []}, [], []),
        ({"skip_reading_prefix_cache": True}, ["skip_reading_prefix_cache"], []),
        ({"prompt": "x", "model": "y", "stream": True}, [], ["model", "prompt", "stream"]),
    ],
)
def test_what_has_no_effect_is_told(sampling, hints, unknown):
    wish = read_token_ids({"token_ids": IDS, "sampling_params": sampling})
    assert list(wish.hints) == [f"sampling_params.{name}" for name in hints]
    assert list(wish.unknown) == [f"sampling_params.{name}" for name in unknown]
    assert isinstance(wish.fields, CompletionFields)
    assert wish.fields.prompt == IDS and not wish.fields.stream


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": "hi"}, "token_ids"),
        ({"token_ids": [[1], [2]]}, "token_ids[0]"),
        ({"token_ids": [1, 99999]}, "token_ids"),
        ({"sampling_params": None}, "sampling_params"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"top_k": "x"}}, "sampling_params.top_k"),
        ({"sampling_params": {"logprobs": -1}}, "sampling_params.logprobs"),
        ({"sampling_params": {"logprob_token_ids": [1]}}, "sampling_params.logprob_token_ids"),
        ({"sampling_params": {"n": 2, "max_tokens": 0}}, "sampling_params.max_tokens"),
        (
            {"sampling_params": {"prompt_logprobs": 1}, "stream": True},
            "sampling_params.prompt_logprobs",
        ),
        ({"sampling_params": {"use_magic": 1}}, "sampling_params.use_magic"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_is_wrong_is_named(client, body, param):
    response = client.post(PATH, json=BODY | body)
    is_error(response, 404 if param == "model" else 400)
    error = response.json()["error"]
    assert error["param"] == param
    assert "sampling_params.sampling_params" not in error["message"]
