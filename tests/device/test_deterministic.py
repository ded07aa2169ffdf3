"""`deterministic`: a request gets the same bits whatever is computed beside it."""

import engines
import numpy as np
import pytest

from shiftjax.core.request import SamplingParams

PROMPT = list(range(3, 53))
OTHERS = [[i + 2, 7, 9 + i] * (3 + 5 * i) for i in range(5)]
SEEDED = SamplingParams(temperature=0.8, seed=11, max_tokens=40, ignore_eos=True, logprobs=0)


def served(built, others: list[list[int]]) -> list[tuple[int, float]]:
    """The tokens of the prompt and the bits of their log-probabilities."""
    events = engines.run(built.engine, [PROMPT, *others], [SEEDED] * (1 + len(others)))
    return [
        (token, event.logprobs[0].logprob) for event in events[0, 0] for token in event.token_ids
    ]


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_request_alone_and_among_others(deterministic):
    """One bucket: products of matrices have one shape, so that only attention could differ."""
    directory, *_ = engines.checkpoint()
    options = {"token_buckets": [32], "prefix_caching": False, "num_blocks": 300}
    built = engines.make(directory, 1, 1, whole=True, deterministic=deterministic, **options)
    alone, among = served(built, []), served(built, OTHERS)
    assert [token for token, _ in alone] == [token for token, _ in among]
    same = np.array_equal([bits for _, bits in alone], [bits for _, bits in among])
    assert same == deterministic
