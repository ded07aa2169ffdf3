"""As which mode steps use experts: chosen by what each takes, and priced as it is chosen."""

from dataclasses import replace

import numpy as np
import pytest
from machine_kit import PLAIN, TINY

from shiftjax.arch.config import Experts, stages_of
from shiftjax.arch.formats import Formats
from shiftjax.costs.expert_load import most_loaded
from shiftjax.costs.expert_part import expert_part, load_of
from shiftjax.costs.group_costs import PipelineCosts
from shiftjax.costs.kernel_costs import KernelCosts
from shiftjax.costs.machine_files import load_engine, load_machine
from shiftjax.costs.routing import Routing, price
from shiftjax.costs.step_costs import CostModel
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout
from shiftjax.sim.models import MODELS

FP8 = Formats("fp8", "bfloat16", "fp8")
BASE, SHIFT = Mode(8, 8), Mode(8, 1)
SIZES = (8, 64, 512, 2048, 8192, 16_384)


def costs(name="qwen3-30b-a3b", sp=8, tp=1, experts_sp=8, experts_as=None) -> CostModel:
    layout = Layout(MODELS[name], sp, tp, experts_sp=experts_sp, experts_as=experts_as)
    return CostModel(layout, load_machine("h200x8"), load_engine("shiftjax"), FP8)


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("qwen3-30b-a3b", {512: 8, 2048: 4, 8192: 1, 16_384: 1}),
        ("gpt-oss-120b", {512: 8, 2048: 8, 8192: 4, 16_384: 2}),
        ("qwen3-235b-a22b", {512: 8, 2048: 8, 8192: 2, 16_384: 1}),
        ("mixtral-8x7b", {8192: 1, 16_384: 1}),  # in smaller steps it makes no difference
        ("llama-17b-16e", {512: 8, 2048: 8, 8192: 2, 16_384: 1}),
    ],
)
def test_the_larger_a_step_of_base_is_the_less_it_splits_experts(name, ways):
    """As `costs.layer_costs` finds it on 8 H200s in FP8, with experts stored whole."""
    model = costs(name)
    found = {size: model.layout.ways(model.expert_modes(BASE, size)) for size in ways}
    assert found == ways


@pytest.mark.parametrize("tp", [1, 2])
def test_a_step_is_priced_with_the_experts_that_make_it_quickest(tp):
    """What devices are asked to compile is what the price assumes; every forced use is dearer."""
    auto = costs(sp=8 // tp, tp=tp)
    forced = {sp: costs(sp=8 // tp, tp=tp, experts_as=sp) for sp in (8, 4, 2, 1)}
    for mode in auto.layout.modes:
        for size in SIZES:
            seconds = {sp: each.mode_seconds(mode, (size, 8)) for sp, each in forced.items()}
            chosen = auto.expert_modes(mode, size)
            assert auto.mode_seconds(mode, (size, 8)) == min(seconds.values())
            assert seconds[chosen.sp] == min(seconds.values())


def test_experts_that_are_stored_less_split_never_make_a_step_slower():
    models = [costs(experts_sp=sp) for sp in (1, 2, 4, 8)]
    for mode in models[0].layout.modes:
        for size in SIZES:
            seconds = [each.mode_seconds(mode, (size, 8)) for each in models]
            assert seconds == sorted(seconds, reverse=True)


def test_the_reason_says_what_the_next_best_would_take():
    model = costs()
    least, *_ = sorted(
        costs(experts_as=sp).layers.cost(BASE, 16_384, 48, model.model.parts[0])[0].device
        for sp in (8, 4, 2, 1)
    )
    second = costs(experts_sp=4).layers.cost(BASE, 16_384, 48, model.model.parts[0])[0].device
    why = model.expert_modes.of(BASE, 16_384).why
    assert why == f"2 ways would take {second / least - 1:.0%} longer"
    assert costs(experts_sp=1).expert_modes.of(BASE, 16_384).why == "the only one"


def test_tokens_are_seen_by_those_that_share_the_experts():
    """By hand, of 64 experts, 4 a token, in a step of 512 tokens."""
    experts = Experts(num=64, per_token=4, intermediate_size=128)
    layout = Layout(replace(TINY, experts=experts), 8, 1, experts_sp=8)
    assert load_of(layout, (BASE, SHIFT), 512) == most_loaded(experts, 8, 512)
    assert load_of(layout, (BASE, Mode(8, 2)), 512) == most_loaded(experts, 4, 256)
    assert load_of(layout, (BASE, BASE), 512) == most_loaded(experts, 1, 64)
    assert load_of(layout, (Mode(8, 2), SHIFT), 512) == most_loaded(experts, 8, 512)
    assert load_of(layout, (Mode(8, 2), Mode(8, 2)), 512) == most_loaded(experts, 4, 256)
    dealt = load_of(layout, (Mode(8, 2), BASE), 512)
    assert dealt.pairs == 256 * 4 / 4 and dealt.experts == pytest.approx(64 / 4 + 2 - 1 / 4)


def test_pairs_that_are_dealt_are_even_whatever_the_routing():
    experts = Experts(num=64, per_token=4, intermediate_size=128)
    layout = Layout(replace(TINY, experts=experts), 8, 1, experts_sp=8)
    uneven = np.ones((1, 64))
    uneven[:, 0] = 20
    for skew, routing in ((1.0, None), (3.0, None), (1.0, Routing.of_counts(uneven, 4))):
        assert load_of(layout, (SHIFT, BASE), 512, skew, routing).pairs == pytest.approx(256)
    split = [load_of(layout, (SHIFT, SHIFT), 512, skew).pairs for skew in (1.0, 3.0)]
    assert split[0] > 256 and split[1] == 3 * split[0]


def test_a_part_is_its_products_and_what_they_read_and_write():
    """By hand: where nothing is cut, the router, two products, and numbers of tokens and pairs."""
    experts = Experts(num=64, per_token=4, intermediate_size=128)
    layout = Layout(replace(TINY, experts=experts), 8, 1, experts_sp=8)
    kernels, hidden = KernelCosts(PLAIN, Formats("float32", "float32", "float32")), 64
    engine = replace(load_engine("tensorrt_llm"), expert_kernels=3)
    part = expert_part(kernels, engine, layout, (BASE, Mode(8, 2)), 512)
    load = most_loaded(experts, 4, 256)
    products = kernels.experts(load, hidden, 128)
    assert part.products == pytest.approx(kernels.product(256, hidden, 64) + products)
    assert part.numbers == int(load.pairs * (3 * 128 + 2 * hidden)) + 256 * 5 * hidden
    assert part.num_kernels == 3


def test_what_was_counted_changes_prices_and_no_program():
    model, fresh = costs(), costs()
    counts = np.ones((48, 128))
    counts[:, :16] = 40
    price(model, counts)
    use = {(mode, n): model.expert_modes(mode, n) for mode in model.layout.modes for n in SIZES}
    assert use == {key: fresh.expert_modes(*key) for key in use}
    assert use[SHIFT, 512] == SHIFT
    assert model.mode_seconds(SHIFT, (512, 8)) > 1.1 * fresh.mode_seconds(SHIFT, (512, 8))


def test_stages_choose_for_their_own_layers():
    stages = [
        CostModel(Layout(each, 4, 1, experts_sp=4), load_machine("h200x8"), engine, FP8)
        for engine in (load_engine("shiftjax"),)
        for each in stages_of(MODELS["glm-4.5-air"], 2)
    ]
    whole = PipelineCosts(stages)
    for stage in whole.stages:
        assert stage.expert_modes(Mode(4, 4), 16_384).sp == 4
        assert stage.expert_modes(Mode(4, 4), 64).sp == 1
