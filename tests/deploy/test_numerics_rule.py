"""What strict numerics come to, and what they are refused with, by name."""

import re
from dataclasses import replace

import pytest

from shiftjax.arch.numerics import LEAST_ROWS, NUMERICS
from shiftjax.arch.presets import PRESETS
from shiftjax.config import EngineConfig
from shiftjax.deploy.deployment import Deployment, Devices
from shiftjax.deploy.resolve import resolve
from shiftjax.options import ConfigError

GB = 1 << 30
CPUS = Devices(8, 32 * GB, 32 * GB, has_kernels=False)
LLAMA = PRESETS["llama-8b"]


def resolved(model=LLAMA, **given) -> Deployment:
    degrees = {} if {"fleet", "phases", "pp"} & given.keys() else {"sp": 4, "tp": 2}
    options = {"dtype": "bfloat16", "numerics": "invariant"} | degrees | given
    return resolve(EngineConfig.from_options(**options), model, CPUS)


@pytest.mark.parametrize("numerics", NUMERICS)
def test_a_device_has_enough_rows_in_every_mode(numerics):
    deployment = resolved(numerics=numerics)
    least = min(bucket.tokens for bucket in deployment.buckets) // deployment.sp
    assert (least >= LEAST_ROWS) == NUMERICS[numerics].is_strict
    assert min(bucket.rows for bucket in deployment.buckets) >= LEAST_ROWS
    assert deployment.is_deterministic == NUMERICS[numerics].is_strict
    assert deployment.sums_by_switch == (numerics == "fast")


@pytest.mark.parametrize(
    ("model", "given", "name"),
    [
        (LLAMA, {"sp": 3, "tp": 1}, "3 devices"),
        (LLAMA, {"dtype": "float32"}, "dtype = float32"),
        (replace(LLAMA, num_kv_heads=2), {"kv_split": "position"}, "kv_split = position"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(model, given, name):
    refused = rf"numerics = invariant cannot be had with .*{re.escape(name)}.*"
    with pytest.raises(ConfigError, match=refused):
        resolved(model, **given)
    assert resolved(model, **given, numerics="float32").numerics == "float32"


@pytest.mark.parametrize(
    "given", [{"fleet": True, "devices": 8, "tp": 1}, {"pp": 2}, {"sp": 3, "tp": 1}]
)
def test_integers_are_had_with_any_number_of_devices(given):
    assert resolved(**given, numerics="integer").of_numerics.is_strict


def test_copies_stay_where_positions_would_be_split():
    """What `kv_split = auto` chooses gives other bits by the number of devices."""
    few, devices = replace(LLAMA, num_kv_heads=2), CPUS._replace(total_bytes=4 * GB)
    sizes = {"sp": 1, "tp": 8, "max_model_len": 131_072, "max_num_seqs": 1, "dtype": "bfloat16"}
    for numerics, splits in (("fast", True), ("invariant", False)):
        config = EngineConfig.from_options(numerics=numerics, **sizes)
        found = resolve(config, few, devices._replace(free_bytes=4 * GB))
        assert found.layout.by_position is splits
