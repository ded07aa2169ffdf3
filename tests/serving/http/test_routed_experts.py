"""Which experts tokens chose, over HTTP: as vLLM tells it, to who asks."""

import base64
import io

import numpy as np
import pytest
from chosen_kit import let_tell
from kit import CHAT, COMPLETION, USER, events, is_error, make_engine, running_server

PATH = "/inference/v1/generate"
IDS = [104, 105, 32, 97, 98]
SAMPLING = {"max_tokens": 7, "ignore_eos": True, "seed": 3}
GENERATE = {"token_ids": IDS, "sampling_params": SAMPLING}
COMPLETE = {"prompt": IDS, "return_token_ids": True} | SAMPLING
TALK = {"messages": USER, "return_token_ids": True} | SAMPLING
ASK = {"return_routed_experts": True}


@pytest.fixture(scope="module")
def server():
    engine = make_engine()
    let_tell(engine)
    with running_server(engine, grpc=False, stream_interval=1, strict=True) as running:
        yield running
        running.assert_quiescent()


def check(choice: dict, prompt: list[int], start: int = 0) -> None:
    """Echo runners tell each token and its place, of all but the last."""
    told = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
    texts = [*prompt, *choice["token_ids"]]
    assert told.dtype == np.uint16
    expected = np.array([texts, range(len(texts))]).T[start:-1, None]
    np.testing.assert_array_equal(told, expected)


def test_token_ids_have_them_as_of_vllm(client):
    (choice,) = client.post(PATH, json=GENERATE).json()["choices"]
    check(choice, IDS)
    sampling = SAMPLING | {"routed_experts_prompt_start": 3}
    (choice,) = client.post(PATH, json=GENERATE | {"sampling_params": sampling}).json()["choices"]
    check(choice, IDS, 3)
    answer = client.post(PATH, json=GENERATE | {"return_routed_experts": False}).json()
    assert "routed_experts" not in answer["choices"][0]


@pytest.mark.parametrize("case", ["one", "two", "stop"])
def test_a_stream_of_token_ids_has_them_at_its_end(client, case):
    """With a stop string it may be behind the end, when the engine has heard of it."""
    stop = stop_of(client) if case == "stop" else ""
    more = {"one": {}, "two": {"n": 2}, "stop": {"stop": [stop]}}[case]
    body = GENERATE | {"stream": True, "sampling_params": SAMPLING | more}
    chunks = [each["choices"][0] for each in events(client.post(PATH, json=body).text)]
    for index in range(more.get("n", 1)):
        own = [each for each in chunks if each["index"] == index]
        ids = [each for chunk in own for each in chunk["token_ids"]]
        assert (len(ids) < SAMPLING["max_tokens"]) == (case == "stop")
        assert [each for each in own if "routed_experts" in each] == own[-1:]
        check(own[-1] | {"token_ids": ids}, IDS)


def stop_of(client) -> str:
    """A character of the answer, but not of its end."""
    text = client.post(COMPLETION, json=COMPLETE).json()["choices"][0]["text"]
    return next(each for each in text[1:-1] if each.isprintable() and each != "\ufffd")


def test_completions_and_chats_have_them_where_they_ask(client):
    assert "routed_experts" not in client.post(COMPLETION, json=COMPLETE).json()["choices"][0]
    body = COMPLETE | ASK | {"n": 2}
    for choice in client.post(COMPLETION, json=body).json()["choices"]:
        check(choice, IDS)
    (choice,) = client.post(COMPLETION, json=COMPLETE | ASK | {"stop": [stop_of(client)]}).json()[
        "choices"
    ]
    check(choice, IDS)
    given = {"routed_experts_prompt_start": 2}  # who says from where asks
    check(client.post(COMPLETION, json=COMPLETE | given).json()["choices"][0], IDS, 2)
    answer = client.post(CHAT, json=TALK | ASK).json()
    check(answer["choices"][0], answer["prompt_token_ids"])


@pytest.mark.parametrize("start", [-1, 5, 9])
def test_a_start_that_is_no_token_of_the_prompt_is_refused(client, start):
    got = client.post(COMPLETION, json=COMPLETE | {"routed_experts_prompt_start": start})
    is_error(got, 400)
    assert "from 0 to 4" in got.text
    sampling = SAMPLING | {"routed_experts_prompt_start": start}
    got = client.post(PATH, json=GENERATE | {"sampling_params": sampling})
    is_error(got, 400)
    assert "sampling_params.routed_experts_prompt_start" in got.text


def test_completions_and_chats_do_not_stream_them(client):
    for path, body in ((COMPLETION, COMPLETE), (CHAT, TALK)):
        got = client.post(path, json=body | ASK | {"stream": True})
        is_error(got, 400)
        assert "cannot be streamed" in got.text


def test_a_server_that_does_not_tell_says_so():
    with running_server(grpc=False, strict=True) as running, running.client() as client:
        for path, body in ((COMPLETION, COMPLETE), (CHAT, TALK), (PATH, GENERATE)):
            got = client.post(path, json=body | ASK)
            is_error(got, 400)
            assert "--enable-return-routed-experts" in got.text
        (choice,) = client.post(PATH, json=GENERATE).json()["choices"]
        assert "routed_experts" not in choice
