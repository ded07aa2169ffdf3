"""The moving histogram of chosen experts: what it forgets, whom it tells, what it shows."""

import numpy as np
import pytest

from shiftjax.routing.history import (
    HALF_LIFE,
    LEAST_TOKENS,
    RoutingHistory,
    metrics,
    page_part,
    plain_state,
    plain_sums,
)

EVEN = np.full((2, 8), 1)


def history(layers=2, ways=(2, 4)) -> RoutingHistory:
    """Of 8 experts, of which a token has two."""
    return RoutingHistory(layers, (8, 2), ways, devices=4)


def counts_of(num_tokens: int, weights=EVEN) -> np.ndarray:
    weights = np.asarray(weights)
    return 2 * num_tokens * weights // weights.sum(axis=1, keepdims=True)


def test_half_a_lifetime_later_old_tokens_count_half():
    seen = history()
    seen.add(0, counts_of(8192, [[1] + 7 * [0]] * 2))
    before = seen.state.counts[0, 0]
    for _ in range(64):
        seen.add(0, counts_of(HALF_LIFE // 64, [7 * [0] + [1]] * 2))
    assert seen.state.counts[0, 0] == pytest.approx(before / 2)
    assert seen.state.num_tokens == 8192 + HALF_LIFE
    assert before == 2 * 8192, "what was told does not change afterwards"


def test_stages_add_their_own_layers_and_tokens_count_once():
    seen, told = history(layers=4), []
    seen.watchers.append(told.append)
    skewed = counts_of(2 * LEAST_TOKENS, [[4, 4, 1, 1, 1, 1, 1, 1]] * 2)
    seen.add(0, skewed)
    assert not told, "half of the layers are known"
    seen.add(2, skewed)
    assert seen.state.num_tokens == skewed[0].sum() // 2
    assert len(told) == 1


def test_watchers_are_told_of_changes_and_of_nothing_else():
    seen, told = history(), []
    seen.watchers.append(told.append)
    seen.add(0, counts_of(LEAST_TOKENS // 2))
    assert not told, "even routing is what everybody begins with"
    skewed = counts_of(64 * LEAST_TOKENS, [[9, 9, 1, 1, 1, 1, 1, 1]] * 2)
    seen.add(0, skewed // 256)
    assert not told, "so few tokens tell nothing"
    seen.add(0, skewed)
    assert len(told) == 1
    np.testing.assert_array_equal(told[0], seen.state.counts)
    for _ in range(40):
        seen.add(0, skewed)
    assert len(told) == 1, "nothing has changed"
    seen.add(0, counts_of(HALF_LIFE))
    assert len(told) == 2, "traffic has"


def test_what_is_shown_is_the_load_of_devices():
    """The first of 4 devices has 12 of 16 parts, the first half 13; a hot expert has 6."""
    seen = history()
    assert list(metrics(seen.state)) == list(metrics(None)) == []
    assert page_part(seen.state) is None
    seen.add(0, np.array([[600, 600, 100, 0, 100, 100, 100, 0], 8 * [200]]))
    found = {metric.name: metric for metric in metrics(seen.state)}
    assert found["routed_tokens"].values == {(): 800}
    skew = found["expert_skew"]
    assert skew.labels == ("devices", "layers")
    assert skew.values["4", "worst"] == pytest.approx(4 * 12 / 16)
    assert skew.values["4", "mean"] == pytest.approx((4 * 12 / 16 + 1) / 2)
    assert skew.values["2", "worst"] == pytest.approx(2 * 13 / 16)
    assert found["expert_hottest_share"].values["worst",] == pytest.approx(6 / 16)
    plain = plain_state(seen.state)
    assert plain["skew"]["4"] == [3.0, 1.0] and plain["counts"][1] == 8 * [200]
    sums = {"num_tokens": 800, "skew": {2: 1.3125, 4: 2.0}, "hottest_share": 0.25}
    assert plain_sums(seen.state) == sums
    words = "Experts over 4 devices: the most loaded one has 2.00 times the mean"
    assert page_part(seen.state) == {"words": f"{words}, in the worst layer 3.00."}
    assert page_part(history(ways=()).state) is None


def test_a_router_that_sends_all_to_one_expert_has_the_skew_of_all_devices():
    seen = RoutingHistory(1, (16, 1), (2, 4, 8), devices=8)
    counts = np.zeros((1, 16), int)
    counts[0, 11] = 500
    seen.add(0, counts)
    assert {ways: found[0] for ways, found in seen.state.skews.items()} == {2: 2, 4: 4, 8: 8}
    assert seen.state.hottest[0] == 1
