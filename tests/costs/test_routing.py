"""Loads of counted routing: those of drawn tokens, and what the cost model makes of them."""

from dataclasses import replace

import numpy as np
import pytest
from machine_kit import TINY

from shiftjax.arch.config import Experts, stages_of
from shiftjax.arch.formats import Formats
from shiftjax.costs.expert_load import most_loaded
from shiftjax.costs.group_costs import PipelineCosts
from shiftjax.costs.machine_files import load_engine, load_machine
from shiftjax.costs.routing import Routing, price
from shiftjax.costs.step_costs import CostModel
from shiftjax.costs.work import Work
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout

EXPERTS = Experts(num=64, per_token=4, intermediate_size=512)
MODEL = replace(TINY, num_layers=4, experts=EXPERTS)
SHIFT = Mode(8, 1)


def cost_model(model=MODEL) -> CostModel:
    formats = Formats("bfloat16", "bfloat16", "bfloat16")
    return CostModel(Layout(model, 8, 1), load_machine("h200x8"), load_engine("shiftjax"), formats)


@pytest.mark.parametrize(("num", "k"), [(128, 8), (60, 4), (16, 1)])
@pytest.mark.parametrize("num_tokens", [1, 32, 512])
def test_even_counts_give_the_load_of_random_routing(num, k, num_tokens):
    padded = Routing.of_counts(np.full((3, num), 1000), k, padded_for=4)
    assert padded.chances.shape[1] % 4 == 0
    found, formula = (
        padded.most_loaded(4, num_tokens),
        most_loaded(Experts(num, k, 1), 4, num_tokens),
    )
    assert found == pytest.approx(formula, rel=0.03)
    assert padded.skews(4) == pytest.approx(np.ones(3))


@pytest.mark.parametrize("num_tokens", [8, 32, 512])
def test_the_load_is_that_of_tokens_drawn_with_these_chances(num_tokens):
    """Tokens choose one expert of 32, some more often than others; devices have 4 each."""
    rng = np.random.default_rng(3)
    weights = rng.dirichlet(np.ones(32), size=2)
    pairs, read = [], []
    for layer in range(2):
        drawn = rng.choice(32, size=(400, num_tokens), p=weights[layer])
        for tokens in drawn:
            counts = np.bincount(tokens, minlength=32).reshape(8, -1)
            pairs.append(counts.sum(axis=1).max())
            read.append((counts > 0).sum(axis=1).max())
    load = Routing(weights).most_loaded(8, num_tokens)
    assert load.pairs == pytest.approx(np.mean(pairs), rel=0.12)
    assert load.experts == pytest.approx(np.mean(read), rel=0.12)


def test_all_tokens_to_one_expert_load_one_device_with_all():
    counts = np.zeros((2, 16))
    counts[:, 5] = 70
    routing = Routing.of_counts(counts, 1, padded_for=8)
    assert [routing.skews(ways).tolist() for ways in (1, 4, 8)] == [[1, 1], [4, 4], [8, 8]]
    assert routing.most_loaded(8, 100) == pytest.approx((100, 1), rel=1e-3)
    assert routing.most_loaded(1, 100) == pytest.approx((100, 1), rel=1e-3)
    assert routing.most_loaded(8, 0) == (0, 0)


def test_experts_that_are_padding_have_no_tokens():
    """10 experts on 8 devices are two each on five of them."""
    routing = Routing.of_counts(np.full((1, 10), 7), 3, padded_for=8)
    assert routing.skews(8)[0] == pytest.approx(8 / 5)
    assert routing.skews(2)[0] == pytest.approx(2 * 8 / 10)
    first = Routing.of_counts(np.array([[4, 3, *[1] * 7]]), 2, padded_for=8)
    assert first.skews(8)[0] == pytest.approx(8 * 7 / 14), "the first two experts are together"


def test_prices_follow_what_is_counted():
    costs, work = cost_model(), Work.prefill(4096)
    before = costs.device_seconds(SHIFT, work)
    even = np.full((4, 64), 1000.0)
    price(costs, even)
    assert costs.device_seconds(SHIFT, work) == pytest.approx(before, rel=0.01)
    skewed = even.copy()
    skewed[:, :8] *= 5  # the first of 8 devices has 40 / 96 of all pairs
    price(costs, skewed)
    dearer = costs.device_seconds(SHIFT, work)
    assert dearer > 1.15 * before
    price(costs, even)
    assert costs.device_seconds(SHIFT, work) < 1.01 * before


def test_stages_are_priced_by_their_own_layers_with_experts():
    """Six layers in two stages; the first layer has an MLP, and the last stage all of the skew."""
    model = replace(MODEL, num_layers=6, experts=replace(EXPERTS, dense_layers=(0,)))
    costs = PipelineCosts([cost_model(stage) for stage in stages_of(model, 2)])
    work = Work.prefill(4096)
    first, last = costs.stage_seconds(SHIFT, work)
    counts = np.full((5, 64), 10.0)
    counts[2:, 8:] = 0
    price(costs, counts)
    now = costs.stage_seconds(SHIFT, work)
    assert now[0] == pytest.approx(first, rel=0.01) and now[1] > 1.2 * last


def test_a_device_with_all_experts_has_all_pairs_and_no_trifle_more():
    """Sums of drawn chances are a little more or less than their experts, and tiles are cut."""
    for seed in range(20):
        counts = np.random.default_rng(seed).integers(1, 2000, (3, 128))
        assert Routing.of_counts(counts, 8).most_loaded(1, 16384).pairs == 16384 * 8
