"""Traces of every kind, from small files written here; arrivals that are made up."""

import itertools
import math
import statistics

import pytest

from shiftjax.options import ConfigError
from shiftjax.sim.trace import (
    TraceRequest,
    arrival_times,
    load_trace,
    on_off_times,
    poisson,
    requests_at,
    scale_rate,
    window,
)

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:18:03.9799600,5,0
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,API log
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 0, "input_length": 1030, "output_length": 6, "hash_ids": [0, 1, 3]}
{"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [4, 1]}
"""
OWN = """{"arrival_seconds": 0, "prompt_tokens": 10, "output_tokens": 2}
{"arrival_seconds": 1.5, "prompt_tokens": 700, "output_tokens": 3, "prefix_ids": [8, 9]}
"""


def load(tmp_path, text):
    path = tmp_path / "trace"
    path.write_text(text)
    return load_trace(path)


def test_azure(tmp_path):
    first, second = load(tmp_path, AZURE)  # the request without output is left out
    assert (first.num_prompt_tokens, first.num_output_tokens) == (4808, 10)
    assert first.arrival_seconds == 0.0
    assert second.arrival_seconds == pytest.approx(0.052)


def test_burstgpt(tmp_path):
    assert load(tmp_path, BURST) == [TraceRequest(0.0, 472, 18), TraceRequest(40.0, 1087, 230)]


def test_mooncake_spreads_a_tick_and_keeps_the_ids(tmp_path):
    requests = load(tmp_path, MOONCAKE)
    assert [r.arrival_seconds for r in requests] == [0.0, 1.5, 3.0]
    assert [r.prefix_ids for r in requests] == [(0, 1, 2), (0, 1, 3), (4, 1)]


def test_our_own_format(tmp_path):
    requests = [TraceRequest(0.0, 10, 2), TraceRequest(1.5, 700, 3, (8, 9))]
    assert load(tmp_path, OWN) == requests


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "is empty"),
        ("a,b\n1,2\n", "neither"),
        (AZURE + "x,y,z\n", "trace, line 5: Invalid isoformat"),
        (BURST + "5,GPT-4,-7,1,1,log\n", "line 4: -7 tokens; there can be 0 to"),
        (BURST + "inf,GPT-4,7,1,1,log\n", "line 4: arrives at inf s"),
        (MOONCAKE + "\n{}\n", "line 5: 'input_length' is missing"),
        (MOONCAKE + "nonsense\n", "line 4: Expecting value"),
        (OWN.replace("[8, 9]", '"89"'), "line 2: ids of prefixes must be a list, got '89'"),
        (OWN.replace("[8, 9]", "[-8]"), "line 2: ids of prefixes must be a list of whole numbers"),
        (OWN.replace("700", "70000000000"), "line 2: 70000000000 tokens; there can be 0 to"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, text, fragment):
    with pytest.raises(ConfigError, match=fragment):
        load(tmp_path, text)


def common_prefix(a, b):
    pairs = zip(a, b, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_prompts_share_exactly_the_blocks_that_the_ids_say(tmp_path):
    prompts = [r.prompt(number, 997) for number, r in enumerate(load(tmp_path, MOONCAKE))]
    assert [len(prompt) for prompt in prompts] == [1100, 1030, 600]
    assert common_prefix(prompts[0], prompts[1]) == 2 * 512
    assert common_prefix(prompts[0], prompts[2]) == 0
    assert all(0 <= token < 997 for prompt in prompts for token in prompt)


def test_prompts_without_ids_share_nothing():
    request = TraceRequest(0.0, 40, 1)
    prompts = [tuple(request.prompt(number, 97)) for number in range(500)]
    assert len(set(prompts)) == 500
    assert {len(prompt) for prompt in prompts} == {40}


def test_windows_and_rates():
    requests = [TraceRequest(float(at), 1, 1) for at in range(10)]
    assert [r.arrival_seconds for r in window(requests, 3, 4)] == [0.0, 1.0, 2.0, 3.0]
    assert [r.arrival_seconds for r in scale_rate(requests, 2.0)][-1] == 4.5
    with pytest.raises(ValueError, match="above 0"):
        scale_rate(requests, 0.0)


@pytest.mark.parametrize(
    ("make", "fragment"),
    [
        (lambda: poisson(-1.0, 10.0, 8, 4), "rate must be above 0 and finite, got -1"),
        (lambda: arrival_times(1.0, 10.0, 0.0), "cv must be above 0"),
        (lambda: poisson(1.0, 10.0, 0, 4), "prompt_tokens must be above 0"),
        (lambda: poisson(1.0, 10.0, 8, 1.5), "must be whole and at most"),
        (lambda: poisson(math.nan, 10.0, 8, 4), "rate must be above 0 and finite, got nan"),
        (lambda: poisson(math.inf, 10.0, 8, 4), "rate must be above 0 and finite, got inf"),
        (lambda: poisson("fast", 10.0, 8, 4), "rate must be a number, got 'fast'"),
        (lambda: poisson(1e9, 1e9, 8, 4), "are more than 10,000,000 requests"),
        (lambda: arrival_times(1.0, 10.0, 1e9), "cv must be at most 100"),
        (lambda: poisson(1.0, 10.0, 8, 4, length_cv=-1), "length_cv must be a number from 0 to"),
        (lambda: poisson(1.0, 10.0, 8, 4, length_cv="x"), "length_cv must be a number from 0 to"),
        (lambda: on_off_times(1.0, 2.0, math.nan, 1.0, 20.0), "period_seconds must be above 0"),
        (lambda: window([], math.nan, 5.0), "a window of 5 s from nan s on"),
        (lambda: on_off_times(1.0, 2.0, 10.0, 11.0, 20.0), "a burst of 11 s in a period of 10 s"),
        (lambda: window([], -1.0, 5.0), "a window of 5 s from -1 s on"),
    ],
)
def test_arguments_that_make_no_trace_are_refused(make, fragment):
    with pytest.raises(ValueError, match=fragment):
        make()


@pytest.mark.parametrize("cv", [1.0, 3.0])
def test_gaps_have_the_mean_and_the_spread_that_was_asked_for(cv):
    arrivals = arrival_times(50.0, 1000.0, cv)
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    assert 1 / statistics.mean(gaps) == pytest.approx(50.0, rel=0.05)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.05)


@pytest.mark.parametrize("cv", [0.3, 1.5])
def test_lengths_have_the_mean_and_the_spread_that_was_asked_for(cv):
    requests = poisson(50.0, 1000.0, 800, 200, length_cv=cv)
    alike = poisson(50.0, 1000.0, 800, 200)
    assert [r.arrival_seconds for r in requests] == [r.arrival_seconds for r in alike]
    prompts = [r.num_prompt_tokens for r in requests]
    outputs = [r.num_output_tokens for r in requests]
    for lengths, mean in ((prompts, 800), (outputs, 200)):
        assert statistics.mean(lengths) == pytest.approx(mean, rel=0.05)
        assert statistics.stdev(lengths) / mean == pytest.approx(cv, rel=0.1)
        assert min(lengths) >= 1
    assert abs(statistics.correlation(prompts, outputs)) < 0.05


def test_lengths_may_be_spelled_with_an_exponent():
    (first, *_) = poisson(5.0, 20.0, 1e1, 4)
    assert first.num_prompt_tokens == 10 and isinstance(first.num_prompt_tokens, int)


def test_the_same_seed_gives_the_same_trace():
    assert poisson(5.0, 20.0, 8, 4, seed=3) == poisson(5.0, 20.0, 8, 4, seed=3)
    assert poisson(5.0, 20.0, 8, 4, seed=3) != poisson(5.0, 20.0, 8, 4, seed=4)


def test_bursts_come_at_the_end_of_every_period():
    requests = requests_at(on_off_times(2.0, 40.0, 10.0, 3.0, 1000.0), 8, 4)
    burst = sum(r.arrival_seconds % 10 >= 7 for r in requests)
    assert burst == pytest.approx(40 * 300, rel=0.05)
    assert len(requests) - burst == pytest.approx(2 * 700, rel=0.1)
