"""Weights that are stored as SHIFT uses them: the tokens, the bytes and the gathers."""

import pytest
from engines import MOE, RandomPolicy, checkpoint, make, run, tokens
from oracle import numpy_llama
from spent import thorough

from shiftjax.core.request import SamplingParams

PROMPTS = [[5, 17, 99, 3, 42, 7, 7, 121, 64, 30, 11, 150][i:] * (1 + i % 3) for i in range(6)]


@pytest.mark.costs(10)
@pytest.mark.parametrize(
    ("sp", "tp", "sizes"),
    [
        (4, 1, {}),
        *thorough((2, 2, MOE)),
    ],
)
def test_tokens_are_the_oracles_in_all_modes(sp, tp, sizes):
    """Experts stay where they are; what all tokens use is gathered as an MLP is."""
    directory, config, tensors = checkpoint(**sizes)
    built = make(directory, sp, tp, weights="gather")
    built.engine.policy = RandomPolicy(1)
    sampling = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)] * len(PROMPTS)
    events = run(built.engine, PROMPTS, sampling)
    for i, prompt in enumerate(PROMPTS):
        assert tokens(events[i, 0]) == numpy_llama.greedy(config, tensors, prompt, 8)
    assert len(built.engine.stats().steps_by_mode) > 1
