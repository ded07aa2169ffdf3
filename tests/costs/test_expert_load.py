"""Uneven routing: the load expected of the busiest device is that of experts drawn at random."""

import numpy as np
import pytest

from shiftjax.arch.config import Experts
from shiftjax.costs.expert_load import most_loaded


@pytest.mark.parametrize(("num", "k"), [(128, 8), (128, 4), (16, 1)])
@pytest.mark.parametrize("num_tokens", [1, 8, 32, 256])
def test_the_most_loaded_device_is_that_of_random_routing(num, k, num_tokens):
    rng, pairs, read = np.random.default_rng(0), [], []
    for _ in range(100):
        drawn = [rng.permutation(num)[:k] for _ in range(num_tokens)]
        chosen = np.concatenate(drawn) * 8 // num
        pairs.append(np.bincount(chosen, minlength=8).max())
        read.append(np.bincount(np.unique(drawn) * 8 // num, minlength=8).max())
    load = most_loaded(Experts(num, k, 1), 8, num_tokens)
    assert load.pairs == pytest.approx(np.mean(pairs), rel=0.15)
    assert load.experts == pytest.approx(np.mean(read), rel=0.15)


def test_routing_that_prefers_some_experts_adds_pairs_to_the_most_loaded():
    experts = Experts(64, 4, 128)
    even, uneven = (most_loaded(experts, 8, 512, skew) for skew in (1.0, 1.5))
    assert uneven == even._replace(pairs=1.5 * even.pairs)
    assert most_loaded(experts, 8, 0) == (0, 0)
    assert most_loaded(experts, 1, 512).pairs == 512 * 4
