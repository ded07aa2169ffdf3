"""Lengths that are drawn anew: near what is known of them, and within the context."""

import statistics

import pytest

from shiftjax.reproduce import lengths
from shiftjax.reproduce.lengths import articles, drawn, sharegpt


@pytest.mark.parametrize("share, tokens", [(0.0, 4), (0.5, 34), (0.95, 1690), (1.0, 3900)])
def test_a_quantile_is_met(share, tokens):
    assert drawn(lengths.SHAREGPT_PROMPTS, share) == tokens


def test_between_quantiles_lengths_are_logarithmic():
    assert drawn(((0.0, 10), (1.0, 1000)), 0.5) == 100
    with pytest.raises(ValueError, match="above 1"):
        drawn(lengths.SHAREGPT_PROMPTS, 1.1)


def test_first_turns_are_short_and_few_are_long():
    found = sharegpt(2000)
    prompts = sorted(each.num_prompt_tokens for each in found)
    assert prompts[1000] == pytest.approx(34, rel=0.2)
    assert prompts[1900] == pytest.approx(1690, rel=0.25)
    replies = statistics.median(each.num_output_tokens for each in found)
    assert replies == pytest.approx(262, rel=0.1)


def test_articles_are_long_and_their_abstracts_short():
    found = articles(2000)
    assert statistics.mean(each.num_prompt_tokens for each in found) == pytest.approx(
        3000, rel=0.02
    )
    outputs = sorted(each.num_output_tokens for each in found)
    assert outputs[1000] == pytest.approx(208, rel=0.05)
    assert outputs[1800] == pytest.approx(371, rel=0.08)


@pytest.mark.parametrize("draw", lengths.DATASETS.values())
def test_requests_fit_and_are_always_the_same(draw):
    found = draw(500)
    assert found == draw(500)
    assert all(each.num_prompt_tokens + each.num_output_tokens <= 4096 for each in found)
    assert all(min(each.num_prompt_tokens, each.num_output_tokens) >= 4 for each in found)
    assert {each.arrival_seconds for each in found} == {0.0}
