"""Uneven routing: the load expected of the busiest device is that of experts drawn at random."""

import numpy as np
import pytest

from shiftjax.arch.config import Experts
from shiftjax.costs.expert_load import Load, dealt, most_loaded, skew_of


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


@pytest.mark.parametrize(("num", "k"), [(128, 8), (128, 4), (16, 1), (8, 2)])
@pytest.mark.parametrize("num_tokens", [1, 8, 32, 256])
def test_pairs_that_are_dealt_are_equal_parts_of_what_is_sorted(num, k, num_tokens):
    """On 8 devices that have all experts; a part is less than two experts beyond what is read."""
    rng, read = np.random.default_rng(0), []
    for _ in range(50):
        pairs = np.sort(np.concatenate([rng.permutation(num)[:k] for _ in range(num_tokens)]))
        parts = np.array_split(pairs, 8)
        read.append(max(len(np.unique(part)) for part in parts))
    load = dealt(most_loaded(Experts(num, k, 1), 1, num_tokens), 8)
    assert load.pairs == max(1, num_tokens * k / 8)
    assert load.experts == pytest.approx(np.mean(read), abs=1.0, rel=0.1)


def test_what_devices_cannot_share_is_not_dealt():
    assert dealt(Load(64.0, 8.0), 1) == (64, 8)
    assert dealt(Load(0.0, 0.0), 4) == (0, 0)
    assert dealt(Load(64.0, 1.0), 4) == (16, 1)


@pytest.mark.parametrize("ways", [2, 4])
def test_experts_that_are_split_fewer_ways_have_less_skew(ways):
    """Of shares of 8 devices that are drawn at random."""
    shares = 1 + 0.2 * np.random.default_rng(0).standard_normal((4000, 8))
    wide, narrow = (
        shares.reshape(4000, count, -1).mean(axis=2).max(axis=1).mean() for count in (8, ways)
    )
    assert skew_of(wide, 8, ways) == pytest.approx(narrow, rel=0.01)
    assert skew_of(wide, 8, 8) == wide
    assert skew_of(wide, 8, 1) == 1.0
