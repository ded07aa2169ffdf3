"""Devices compile the use of weights that prices assume: both ask one function."""

import jax
import pytest

from shiftjax.arch.presets import PRESETS
from shiftjax.config import EngineConfig
from shiftjax.costs.expert_modes import ExpertModes, by_bytes
from shiftjax.costs.machine_files import load_engine, load_machine
from shiftjax.deploy.deployment import Deployment, Devices
from shiftjax.deploy.resolve import resolve
from shiftjax.device.choosers import choosers_of, expert_modes_of, query_modes_of
from shiftjax.parallel.grid import Mode

MEMORY = 141_000_000_000


def deployment(**options) -> Deployment:
    config = EngineConfig.from_options(model="m", sp=8, tp=1, **options)
    return resolve(config, PRESETS["qwen3-30b-a3b"], Devices(8, MEMORY, MEMORY))


def uses(modes: ExpertModes, of: Deployment) -> dict[tuple[Mode, int], Mode]:
    sizes = [bucket.tokens for bucket in of.buckets]
    return {(mode, n): modes(mode, n) for mode in of.layout.modes for n in sizes}


@pytest.mark.parametrize("policy", ["cost", "threshold", "base"])
def test_where_costs_are_known_they_are_asked(policy):
    asked = deployment(policy=policy, machine="h200x8", max_num_batched_tokens=8192)
    device = jax.devices()[0]
    found = uses(expert_modes_of(asked, device), asked)
    simulated = asked.costs(load_machine("h200x8"), load_engine("shiftjax")).stages[0]
    assert found == uses(simulated.expert_modes, asked)
    assert len(set(found.values())) > 1
    if (believed := choosers_of(asked, device)[0][8]) is not None:  # as the policy does
        assert found == uses(believed.stages[0].expert_modes, asked)


def test_where_they_are_not_bytes_decide():
    unknown = deployment(max_num_batched_tokens=8192, shift_threshold=64)
    found = uses(expert_modes_of(unknown, jax.devices()[0]), unknown)
    assert found == uses(ExpertModes(unknown.layout, by_bytes(unknown.formats)), unknown)


def test_who_makes_queries_follows_from_costs_or_is_left_alone():
    priced, unknown, same_bits = (
        deployment(kv_split="position", max_num_batched_tokens=8192, **more)
        for more in (
            {"policy": "cost", "machine": "h200x8"},
            {"shift_threshold": 64},
            {"policy": "cost", "machine": "h200x8", "deterministic": True},
        )
    )
    shift, wide, found = priced.layout.shift, Mode(8, 2), []
    simulated = priced.costs(load_machine("h200x8"), load_engine("shiftjax")).stages[0].query_modes
    for each in (priced, unknown, same_bits):
        modes = query_modes_of(each, jax.devices()[0])
        found.append({(mode, b[:2]): modes(mode, b[:2]) for b in each.buckets for mode in (shift,)})
    assert found[0] == {key: simulated(*key) for key in found[0]}
    assert set(found[0].values()) == {shift, wide}
    assert set(found[1].values()) == set(found[2].values()) == {shift}
    assert unknown.layout.query_modes(shift) == (shift, wide)
    assert same_bits.layout.query_modes(shift) == (shift,)
