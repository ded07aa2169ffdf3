"""What is refused at the door, and that each refusal says what and why."""

import math
from dataclasses import replace

import pytest

from shiftjax.core.limits import RequestLimits, validate_request
from shiftjax.core.request import Request, RequestError, SamplingParams, derive_seed
from shiftjax.core.sampling_params import SamplingError
from shiftjax.text.token_rules import BannedWords


class Ends(BannedWords):
    """Allows all, and decides the end."""

    decides_end = True

    def __init__(self):
        super().__init__([], 100)


class Nothing(BannedWords):
    """Allows nothing."""

    def __init__(self):
        super().__init__([[token] for token in range(100)], 100)


def ruled(*constraints: BannedWords, **sampling) -> Request:
    return Request("r", [1], SamplingParams(**sampling), constraints=constraints)


LIMITS = RequestLimits(
    vocab_size=100, max_model_len=32, num_kv_tokens=24, max_logprobs=5, eos_token_ids=(2, 3)
)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, -1, True, 1.0, "1", None, 129, 10**400]),
        ("temperature", [-0.1, math.nan, math.inf, "1", True, None, -1e-30, 1e9, 10**400, 1j]),
        ("top_k", [-2, 1.5, 2**63, True]),
        ("top_p", [0, -1, 1.0001, math.nan, 1e-300]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("repetition_penalty", [0, -1, 1e9, math.inf, math.nan, 1e-9]),
        ("presence_penalty", [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.1, 2.1, "0"]),
        ("logit_bias", [[1], {-1: 0.0}, {"1": 0.0}, {1: math.nan}, {1: 101}, {True: 0.0}]),
        ("logit_bias", [dict.fromkeys(range(301), 0.0)]),
        ("allowed_token_ids", [[], [-1], [1.0], [True], 5, "abc", [1] * 1025, [2**40]]),
        ("seed", [2**63, -(2**63) - 1, 1.0, True, "7"]),
        ("max_tokens", [-1, 2**63, "10", 1.0, False]),
        ("min_tokens", [-1, None, 1.5]),
        ("stop", [[""], "", [None], ["a"] * 1000, "x" * 10**6, 5, b"x", None, {"a": 1}, "\ud800"]),
        ("stop_token_ids", [[-1], [1] * 129, None, "12", [2.0], [False]]),
        ("ignore_eos", [1, "yes", None]),
        ("logprobs", [-1, True, 1.0]),
        ("prompt_logprobs", [-1, False, "1"]),
    ],
)
def test_bad_fields_are_refused_by_name(field, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^{field} ") as caught:
            SamplingParams(**{field: value})
        assert len(str(caught.value)) < 250


def test_all_problems_come_in_one_error():
    with pytest.raises(SamplingError, match=r"n must.*top_p must.*stop entries") as caught:
        SamplingParams(n=0, top_p=0, stop=[""])
    assert [field for field, _ in caught.value.problems] == ["n", "top_p", "stop"]


@pytest.mark.parametrize(
    ("min_width", "widest", "words"),
    [
        (0, 8, "min_width must be an integer between 1 and 1024"),
        (1025, 1024, "min_width must be an integer between 1 and 1024"),
        (True, 8, "min_width must be an integer"),
        (2.0, 8, "min_width must be an integer"),
        (2, 1, "all groups of this server have one width: leave it out"),
        (9, 8, "min_width is 9, but the widest group has 8 units"),
    ],
)
def test_a_width_that_no_group_has_is_refused(min_width, widest, words):
    limits = replace(LIMITS, widest=widest)
    with pytest.raises(RequestError, match=words) as caught:
        validate_request(Request("r", [5], min_width=min_width), limits)
    assert caught.value.field == "min_width"
    for width in {1, widest}:
        validate_request(Request("r", [5], SamplingParams(max_tokens=2), min_width=width), limits)


def test_rows_of_prompts_are_refused_where_the_last_layers_leave_them_out():
    limits = replace(LIMITS, computes_prompts=False)
    validate_request(Request("r", [5, 6], SamplingParams(logprobs=2)), limits)
    for fields in ({"prompt_logprobs": 0}, {"prompt_logprobs": 1, "max_tokens": 0}):
        request = Request("r", [5, 6], SamplingParams(**fields))
        validate_request(request, LIMITS)
        with pytest.raises(RequestError, match="for output tokens only, so prompt log-prob"):
            validate_request(request, limits)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"max_tokens": 0, "prompt_logprobs": 1, "n": 2}, "n must be 1"),
    ],
)
def test_fields_that_contradict_each_other(fields, problem):
    with pytest.raises(SamplingError, match=problem) as caught:
        SamplingParams(**fields)
    assert {field for field, _ in caught.value.problems} <= set(fields)


def test_edges_that_are_allowed_and_normalised():
    params = SamplingParams(
        n=128, temperature=0, top_k=-1, top_p=1, min_p=1, seed=-(2**63), max_tokens=None,
        stop="end", stop_token_ids=[1], logit_bias={1: -100}, allowed_token_ids=[0] * 1024,
    )  # fmt: skip
    assert params.is_greedy and type(params.temperature) is float
    for tiny in (1e-300, 1e-30, 9.9e-9):
        assert SamplingParams(temperature=tiny).temperature == 0.0
    assert not SamplingParams(temperature=1e-8).is_greedy
    assert (params.stop, params.stop_token_ids) == (("end",), (1,))
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).prompt_logprobs == 0


def request(prompt=(1,), *, name="r", priority=0, arrival=0.0, adapter=None, salt=None, **sampling):
    return Request(name, prompt, SamplingParams(**sampling), arrival, priority, adapter, salt)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (request([]), "empty"),
        (request("abc"), "list of token ids"),
        (request({1: 2}), "list of token ids"),
        (request([1, -1]), "-1 is out of vocabulary, which has 100 tokens"),
        (request([100]), "100 is out of"),
        (request([2**31]), "out of vocabulary"),
        (request([1.0]), "integers"),
        (request([True]), "integers"),
        (request([1, [2]]), "integers"),
        (request([1] * 33), "context length is 32"),
        (
            request([1] * 20, max_tokens=13),
            "context length is 32 tokens, but 20 prompt tokens and 13 output",
        ),
        (request([1] * 20, max_tokens=6), "never fit the KV pool, which holds 24"),
        (request([1] * 25, max_tokens=None), "never fit"),
        (request([1] * 25, max_tokens=0, prompt_logprobs=0), "never fit"),
        (request(max_tokens=4, stop_token_ids=[100]), "stop_token_ids.*out of"),
        (request(max_tokens=4, logit_bias={100: 1}), "logit_bias.*out of"),
        (request(max_tokens=4, allowed_token_ids=[100]), "allowed_token_ids.*out of"),
        (request(max_tokens=4, logprobs=6), "logprobs must be at most 5"),
        (request(max_tokens=4, prompt_logprobs=6), "prompt_logprobs must be at most 5"),
        (request(max_tokens=4, min_tokens=1, allowed_token_ids=[2, 3]), "all stop ids"),
        (request(name="", max_tokens=4), "request_id"),
        (request(name="a\r\nb", max_tokens=4), "control characters"),
        (request(name="a" * 257, max_tokens=4), "1 to 256"),
        (request(name=7, max_tokens=4), "request_id"),
        (request(salt="", max_tokens=4), "cache_salt"),
        (request(priority=2**40, max_tokens=4), "priority"),
        (request(priority=math.nan, max_tokens=4), "priority"),
        (request(priority=True, max_tokens=4), "priority"),
        (request(arrival=math.nan, max_tokens=4), "arrival_seconds"),
        (request(adapter="french", max_tokens=4), "not loaded"),
        (Request("r", [1], {"n": 1}), "SamplingParams"),
    ],
)
def test_bad_requests_get_one_sentence(bad, problem):
    with pytest.raises(RequestError, match=problem) as caught:
        validate_request(bad, LIMITS)
    assert str(caught.value).endswith(".") and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("bad", "field", "code"),
    [
        (request([]), "prompt", None),
        (request([100]), "prompt", None),
        (request([1] * 33), "prompt", "context_length_exceeded"),
        (request([1] * 20, max_tokens=6), "prompt", "kv_capacity"),
        (request(stop_token_ids=[100]), "stop_token_ids", None),
        (request(prompt_logprobs=6), "prompt_logprobs", None),
        (request(min_tokens=1, allowed_token_ids=[2, 3]), "min_tokens", None),
        (ruled(Ends(), ignore_eos=True), "ignore_eos", None),
        (ruled(Ends(), Ends()), "constraints", None),
        (ruled(Nothing()), "constraints", None),
        (ruled(BannedWords([[1]], 100), allowed_token_ids=[1]), "allowed_token_ids", None),
        (request(bad_words=["x"]), "bad_words", None),
        (request(name=""), "request_id", None),
        (request(salt="\n"), "cache_salt", None),
        (request(priority=2**40), "priority", None),
        (request(arrival=math.nan), "arrival_seconds", None),
        (request(adapter="french"), "adapter", None),
        (Request("r", [1], {"n": 1}), "sampling", None),
    ],
)
def test_refusals_say_of_which_field_and_kind_they_are(bad, field, code):
    with pytest.raises(RequestError) as caught:
        validate_request(bad, LIMITS)
    assert (caught.value.field, caught.value.code) == (field, code)


@pytest.mark.parametrize(
    "good",
    [
        request([99], max_tokens=24),  # 25 tokens, of which the last needs no KV
        request([1] * 24, max_tokens=None),
        request([1] * 24, max_tokens=0, prompt_logprobs=5),
        request((1, 2), max_tokens=4, min_tokens=1, allowed_token_ids=[2, 3, 4]),
        request(max_tokens=4, min_tokens=1, allowed_token_ids=[2, 3], ignore_eos=True),
        request(max_tokens=4, top_k=2**31 - 1, priority=-(2**31) + 1, salt="é"),
    ],
)
def test_good_requests_pass(good):
    validate_request(good, LIMITS)


def test_without_max_tokens_the_pool_bounds_the_length():
    assert LIMITS.max_length(5, None) == 25  # the pool's 24 and a last token without KV
    assert RequestLimits(100, 16, 24).max_length(5, None) == 16
    assert LIMITS.max_length(5, 7) == 12


def test_seeds_differ_by_index_and_fit_31_bits():
    seeds = {derive_seed(seed, index) for seed in (0, 1, -1, 2**63 - 1) for index in range(64)}
    assert len(seeds) == 4 * 64
    assert min(seeds) >= 0 and max(seeds) < 2**31
    assert derive_seed(7, 0) == derive_seed(7, 0)
