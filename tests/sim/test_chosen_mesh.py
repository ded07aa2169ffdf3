"""Engines that choose their mesh: by costs with experts, by the rule without."""

import pytest

from shiftjax.arch.presets import PRESETS
from shiftjax.config import EngineConfig
from shiftjax.local_deployment import deploy as deploy_here
from shiftjax.sim.chosen_mesh import with_chosen_mesh
from shiftjax.sim.estimate import Workload
from shiftjax.sim.experiments import target_of
from shiftjax.sim.live import deploy_live
from shiftjax.sim.planning import recommend

MOE = "qwen3-30b-a3b"


def opened(model: str, **options) -> tuple[int, int, int]:
    config = EngineConfig.from_options(model=model, **options)
    found = deploy_live(target_of(config, model, "h200x8"), config)
    return found.dp, found.sp, found.tp


@pytest.mark.parametrize("experts", ["auto", "all"])
def test_experts_get_the_mesh_that_a_plan_recommends(experts):
    options = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "experts": experts}
    config = EngineConfig.from_options(model=MOE, **options)
    target = target_of(config, MOE, "h200x8")
    best, _ = recommend(target, Workload(4096, 250), experts=experts) or (None, "")
    assert best is not None
    chosen = opened(MOE, **options)
    assert chosen == (best.dp, best.sp, best.tp)
    assert experts == "auto" or chosen != (1, 8, 1)  # the rule's


def test_a_dense_model_keeps_the_rule():
    assert opened("llama-70b", quantization="fp8") == (1, 8, 1)


@pytest.mark.parametrize(
    ("options", "degrees"),
    [
        ({"sp": 8}, (1, 8, 1)),
        ({"tp": 2}, (1, 4, 2)),
        ({"dp": 4}, (4, 2, 1)),
        ({"fleet": True, "tp": 2}, None),
        ({"weights": "gather"}, (1, 8, 1)),
        ({"experts": "4"}, (1, 8, 1)),
    ],
)
def test_what_the_settings_say_is_kept(options, degrees):
    config = EngineConfig.from_options(model=MOE, **options)
    target = target_of(config, MOE, "h200x8")
    assert with_chosen_mesh(config, target) is config
    if degrees is not None:
        assert opened(MOE, **options) == degrees


@pytest.mark.parametrize(
    ("model", "options", "policy"),
    [
        (MOE, {}, "cost"),
        (MOE, {"sp": 8}, "cost"),
        (MOE, {"sp": 8, "policy": "threshold"}, "threshold"),
        (MOE, {"sp": 8, "shift_threshold": 100}, "threshold"),
        (MOE, {"sp": 1}, "threshold"),  # one mode
        (MOE, {"fleet": True, "tp": 2}, "cost"),
        ("llama-8b", {"sp": 8}, "threshold"),
    ],
)
def test_modes_of_experts_are_chosen_by_cost_where_that_is_open(model, options, policy):
    config = EngineConfig.from_options(model=model, **options)
    assert deploy_live(target_of(config, model, "h200x8"), config).policy == policy


def test_as_many_devices_as_the_settings_say_are_used():
    dp, sp, tp = opened(MOE, devices=2)
    assert dp * sp * tp == 2


def test_what_fits_nowhere_is_left_to_the_rule():
    config = EngineConfig.from_options(model="llama-17b-16e")
    target = target_of(config, "llama-17b-16e", "l4x8")
    assert with_chosen_mesh(config, target) is config


def test_an_engine_on_devices_of_a_known_machine_chooses_too():
    """On CPU devices that are said to be H200s; of those of no machine file nothing is known."""
    model, options = PRESETS["tiny-qwen3-moe"], {"model": "random:tiny-qwen3-moe", "devices": 4}
    degrees = []
    for more in ({}, {"machine": "h200x8"}):
        config = EngineConfig.from_options(**options, **more)
        (found,) = deploy_here(config, model).deployments
        degrees.append((found.dp, found.sp, found.tp))
    assert degrees[0] == (1, 4, 1)
    assert degrees[1][0] > 1
