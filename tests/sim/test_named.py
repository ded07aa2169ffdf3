"""Deployments by name: fragments of settings, resolved as an engine's are."""

import pytest

from shiftjax.config import SERVER_BUDGETS, EngineConfig
from shiftjax.core.policies import POLICIES
from shiftjax.deploy.deployment import Deployment
from shiftjax.deploy.resolve import resolve
from shiftjax.options import ConfigError
from shiftjax.parallel.arrangements import FleetOptions
from shiftjax.sim.experiments import choose_deployments, target_from
from shiftjax.sim.named import deploy_named, fragment_of, standard_deployments

TARGET = target_from({"model": "llama-70b", "machine": "h200x8", "dtype": "fp8"})
FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}


def settings(text: str) -> Deployment:
    found = deploy_named(TARGET, text)
    assert isinstance(found, Deployment)
    return found


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("policy=shift,tp=8", {"policy": "shift", "tp": 8}),
        ("shift,tp=2", {"tp": 2}),
        ("sp,sp=2,tp=4,dtype=float16", {"policy": "base", "sp": 2, "tp": 4, "dtype": "float16"}),
        (
            "fleet:soft,tp=2",
            {"fleet": True, "policy": "cost", "tp": 2, "controls": {"switch": "soft"}},
        ),
        ("cost,step_sizes=largest", {"policy": "cost", "controls": {"step_sizes": "largest"}}),
        ("cost,num_blocks=99", {"policy": "cost", "num_blocks": 99}),
        ("fleet:load:tp2", {"fleet": True, "policy": "cost", "fleet_policy": "load", "tp": 2}),
        ("tp=8,token_buckets=16,8192", {"tp": 8, "token_buckets": (16, 8192)}),
        ("dp2sp2tp2", {"dp": 2, "sp": 2, "tp": 2}),
    ],
)
def test_a_fragment_is_what_an_engine_of_these_settings_is(text, options):
    config = EngineConfig.from_options(**{**SERVER_BUDGETS, **FP8, **options})
    expected = resolve(config, TARGET.model, TARGET.devices)
    found = settings(text)
    assert found.name == text
    assert found.__dict__ | {"name": ""} == expected.__dict__ | {"name": ""}


def test_settings_win_over_names_wherever_they_stand():
    assert settings("policy=cost,dp").policy == settings("dp,policy=cost").policy == "cost"


def test_every_policy_is_a_name():
    for name, policy in POLICIES.items():
        assert fragment_of(TARGET, name)["policy"] in (name, "threshold")
        assert policy.in_words(7)
    assert settings("base").policy == "base"
    assert settings("greedy").policy_class.is_simulated


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("policy=fastest", "policy: must be one of threshold, cost, base, shift"),
        ("shift,tpp=8", "unknown option 'tpp'; did you mean tp?"),
        ("shift,stages=pp8:tp8", "unknown option 'stages'; it is now called phases"),
        ("shift,tp=many", "tp: must be a whole number"),
        ("base,shift_threshold=9", "shift_threshold = 9 has no meaning with policy = base"),
        ("tp=16", "16 devices are asked for, but this machine has 8"),
    ],
)
def test_fragments_that_are_none(text, words):
    with pytest.raises(ConfigError, match=words):
        deploy_named(TARGET, text)


def test_the_problems_of_all_names_are_told():
    with pytest.raises(ConfigError) as failed:
        choose_deployments(TARGET, ["tp", "tpp", "policy=fastest"])
    assert len(failed.value.problems) == 2


def test_a_budget_reaches_the_names_that_read_it_and_no_others():
    options = FleetOptions(fleet=True, switch="soft")
    budgets = {"threshold": 9, "fleet": options, "host_bytes": 1 << 30}
    found = standard_deployments(TARGET, ("sp", "shift", "fleet", "fleet:4+4"), **budgets)
    assert (found["shift"].threshold, found["sp"].threshold) == (9, 256)
    assert found["fleet"].fleet == options
    assert found["fleet:4+4"].fleet == FleetOptions(fleet=True, fleet_policy="fixed:4+4")
    assert {each.host_bytes for each in found.values()} == {0}
