"""`logprobs_mode`: what log-probabilities are of, in a whole engine; tokens stay the same."""

import engines
import numpy as np
import pytest

from shiftjax.core.request import SamplingParams
from shiftjax.device.groups import SAMPLERS

PROMPTS = [list(range(3, 23)), [7, 9, 11], [5, 6]]
FIXED = {"seed": 11, "max_tokens": 6, "ignore_eos": True}
ASKED = [
    SamplingParams(temperature=0.5, logprobs=2, **FIXED),
    SamplingParams(temperature=1.0, top_k=2, logprobs=2, prompt_logprobs=0, **FIXED),
    SamplingParams(temperature=0.0, logprobs=0, **FIXED),
]


def served(mode: str) -> dict[int, list]:
    """The events of each request, by its number."""
    directory, *_ = engines.checkpoint()
    built = engines.make(directory, 1, 1, whole=True, logprobs_mode=mode)
    events = engines.run(built.engine, PROMPTS, ASKED)
    return {number: events[number, 0] for number in range(len(ASKED))}


def chosen(events: list) -> np.ndarray:
    return np.array([each.logprob for event in events for each in event.logprobs])


@pytest.mark.costs(10)
def test_processed_ones_are_of_what_tokens_are_drawn_from():
    raw, processed = served("raw_logprobs"), served("processed_logprobs")
    for number in raw:
        ids = [[t for event in each[number] for t in event.token_ids] for each in (raw, processed)]
        assert ids[0] == ids[1] and len(ids[0]) == 6
    gaps = [
        np.array([np.subtract(*e.top_logprobs) for event in each[0] for e in event.logprobs])
        for each in (raw, processed)
    ]
    np.testing.assert_allclose(gaps[1], gaps[0] / 0.5, rtol=1e-4, atol=1e-6)
    masses = [
        np.array([np.exp(e.top_logprobs).sum() for event in each[1] for e in event.logprobs])
        for each in (raw, processed)
    ]
    assert (masses[0] < 0.9).all()
    np.testing.assert_allclose(masses[1], 1.0, atol=1e-5)
    np.testing.assert_allclose(chosen(processed[2]), chosen(raw[2]), atol=1e-5)
    prompts = [
        [entry.logprob for event in each[1] for entry in (event.prompt_logprobs or ()) if entry]
        for each in (raw, processed)
    ]
    assert len(prompts[0]) == len(PROMPTS[1]) - 1
    np.testing.assert_allclose(prompts[1], prompts[0], atol=1e-5)


def test_who_does_not_ask_has_the_sampler_of_before():
    assert not SAMPLERS["raw_logprobs"]
