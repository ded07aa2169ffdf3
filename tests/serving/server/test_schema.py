"""What a body asks for is what the engine is asked for: no option is dropped, none is bent."""

import pytest

from serving.server.errors import ServeError
from serving.server.schema import read_chat, read_completion

READERS = [
    (read_completion, {"prompt": "x"}),
    (read_chat, {"messages": [{"role": "user", "content": "x"}]}),
]


@pytest.mark.parametrize(("read", "body"), READERS)
def test_options_of_the_request_arrive(read, body):
    wish = read(body | {"priority": -3, "min_width": 2, "max_completion_tokens": 7})
    assert (wish.priority, wish.min_width, wish.sampling.max_tokens) == (-3, 2, 7)
    plain = read(body)
    assert (plain.priority, plain.min_width) == (0, 1)


def test_log_probabilities_are_asked_for_in_two_ways():
    (_, completion), (_, chat) = READERS
    for number in (0, 3):
        assert read_completion(completion | {"logprobs": number}).sampling.logprobs == number
        wish = read_chat(chat | {"logprobs": True, "top_logprobs": number})
        assert wish.sampling.logprobs == number
    assert read_chat(chat | {"logprobs": True}).sampling.logprobs == 0
    assert read_chat(chat | {"logprobs": False}).sampling.logprobs is None
    echo = read_completion(completion | {"logprobs": 3, "echo": True})
    assert echo.sampling.prompt_logprobs == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_does_not_go_together_is_refused(fields, param):
    (_, chat) = READERS[1]
    with pytest.raises(ServeError) as refused:
        read_chat(chat | fields)
    assert (refused.value.kind_name, refused.value.param) == ("invalid", param)
