"""What settings come to: the mesh, what fits, and the same answers whoever asks."""

from dataclasses import replace

import pytest

from shiftjax.arch.config import Codes, Experts, ModelConfig
from shiftjax.arch.formats import Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.config import EngineConfig, ParallelOptions
from shiftjax.deploy.deployment import Devices
from shiftjax.deploy.resolve import (
    base_rule,
    check_experts,
    check_model,
    choose_degrees,
    formats_in,
    resolve,
)
from shiftjax.options import ConfigError

MODEL = ModelConfig("tiny", "llama", 1000, 576, 1536, 30, 9, 3, 64, 8192)
FORMATS = Formats()


@pytest.mark.parametrize(
    ("codes", "quantization", "weights"),
    [
        (None, "auto", "float32"),
        (None, "none", "float32"),
        (None, "fp8", "fp8"),
        (Codes(), "auto", "fp8"),
        (Codes(), "none", "float32"),
        (Codes(are_made_anew=True), "auto", "fp8"),
    ],
)
def test_matrices_are_as_the_checkpoint_has_them_unless_asked_otherwise(
    codes, quantization, weights
):
    config = EngineConfig.from_options(dtype="float32", quantization=quantization)
    formats = formats_in(config, replace(MODEL, codes=codes))
    assert formats == Formats(weights, "float32", "float32")


@pytest.mark.parametrize(
    ("options", "num_devices", "fragments"),
    [
        ({"sp": 4, "tp": 2}, 8, []),
        ({"max_model_len": 8192}, 1, []),
        ({"max_model_len": 8193}, 1, ["max_model_len = 8193 is beyond tiny's 8192 positions"]),
        ({"sp": 4, "tp": 2}, 4, ["8 devices are asked for, but this machine has 4"]),
        ({"tp": 2, "dp": 4}, 4, ["8 devices are asked for, but this machine has 4"]),
        ({"pp": 2, "tp": 2}, 4, []),
        ({"pp": 4, "tp": 2}, 4, ["8 devices are asked for, but this machine has 4"]),
        ({"pp": 31}, 31, ["pp = 31 is more than tiny's 30 layers"]),
        ({"devices": 9}, 8, ["9 devices are asked for, but this machine has 8"]),
        ({"tp": 16}, 16, ["sp * tp = 16 is more than tiny's 9 query heads"]),
        ({"devices": 16}, 16, ["sp * tp = 16 is more than tiny's 9 query heads"]),
        ({"tp": 10, "max_model_len": 9000}, 9, ["positions", "10 devices", "query heads"]),
    ],
)
def test_what_the_model_and_the_machine_refuse(options, num_devices, fragments):
    problems = check_model(EngineConfig.from_options(**options), MODEL, num_devices)
    assert len(problems) == len(fragments)
    for problem, fragment in zip(problems, fragments, strict=True):
        assert fragment in problem


def test_experts_are_refused_where_devices_would_hold_none_or_no_checkpoint_has_them():
    config, model = EngineConfig.from_options(model="m", tp=4), PRESETS["tiny-mixtral"]
    assert check_model(config, model, 8) == []
    few = replace(model, experts=Experts(3, 1, 64))
    assert check_model(config, few, 8) == [
        "sp * tp = 4 is more than tiny-mixtral's 3 experts: some devices would hold none"
    ]
    other = replace(MODEL, experts=Experts(4, 1, 64))
    assert check_model(config, other, 8) == []  # as `plan` asks
    problem = f"{other.name}'s kind of experts can be planned for, but not loaded"
    with pytest.raises(ConfigError, match=problem):
        check_experts(other)


GIB = 2**30


@pytest.mark.parametrize(
    ("weight_gib", "num_devices", "expected"),
    [(1, 8, (8, 1)), (48, 8, (8, 1)), (49, 8, (4, 2)), (140, 8, (2, 4)), (70, 6, (3, 2))],
)
def test_the_base_is_the_least_tp_that_fits(weight_gib, num_devices, expected):
    assert base_rule(weight_gib * GIB, 80 * GIB, num_devices) == expected


def test_all_devices_split_experts_whatever_tp_is():
    assert base_rule(384 * GIB, 80 * GIB, 8, 384 * GIB) == (8, 1)
    assert base_rule(300 * GIB, 80 * GIB, 8, 280 * GIB) == (4, 2)  # 20 / 2 + 280 / 8 of 48
    assert base_rule(376 * GIB, 80 * GIB, 8, 280 * GIB) == (1, 8)


def test_tp_is_a_divisor_even_where_a_smaller_number_would_fit():
    assert base_rule(150 * GIB, 80 * GIB, 6) == (1, 6)  # 4 would be enough


def test_weights_that_fit_nowhere_are_refused_with_the_numbers():
    assert base_rule(500 * GIB, 80 * GIB, 8) == (1, 8)  # more than a smaller TP may take
    assert base_rule(15 * GIB, 23 * GIB, 1) == (1, 1)
    assert base_rule(500 * GIB, 80 * GIB, 16) == (1, 16)
    assert base_rule(500 * GIB, 80 * GIB, 16, per_host=8) == (2, 8)  # no sums between hosts
    with pytest.raises(ConfigError, match=r"520\.0 GiB.*8 devices offer 64\.0 GiB"):
        base_rule(520 * GIB, 80 * GIB, 8)


@pytest.mark.parametrize(
    ("parallel", "num_devices", "expected"),
    [
        (ParallelOptions(), 8, (8, 1)),
        (ParallelOptions(), 16, (8, 1)),  # 9 heads: a group of 8 of the 16 devices
        (ParallelOptions(dp=2), 8, (4, 1)),
        (ParallelOptions(devices=4), 8, (4, 1)),
        (ParallelOptions(sp=2), 8, (2, 4)),
        (ParallelOptions(sp=2), 9, (2, 4)),
        (ParallelOptions(tp=8), 8, (1, 8)),
        (ParallelOptions(tp=2, dp=2), 8, (2, 2)),
        (ParallelOptions(sp=1, tp=2), 8, (1, 2)),
    ],
)
def test_degrees_that_are_left_open_use_the_devices(parallel, num_devices, expected):
    devices = Devices(num_devices, 80 * GIB, 80 * GIB)
    assert choose_degrees(parallel, MODEL, FORMATS, devices) == expected


# ---------------------------------------------------------------- fleets

FLEET_MODEL = replace(MODEL, num_heads=16, num_kv_heads=8)
EIGHT = Devices(8, 80 * GIB, 80 * GIB)


def fleet_of(**options):
    given = {"fleet": True, "devices": 8, "num_blocks": 11} | options
    return resolve(EngineConfig.from_options(**given), FLEET_MODEL, EIGHT)


@pytest.mark.parametrize(
    ("options", "widths", "widest", "num_kv_tokens"),
    [
        ({}, (1, 2, 4, 8), 8, 10 * 8 * 16),
        ({"tp": 2}, (1, 2, 4), 4, 10 * 4 * 16),
        ({"fleet_widths": (1, 4)}, (1, 4), 4, 10 * 4 * 16),
        ({"fleet_policy": "fixed:4+2+1+1"}, (1, 2, 4), 4, 10 * 4 * 16),
        ({"fleet_policy": "fixed:2+2+2+2"}, (2,), 2, 10 * 2 * 16),
        ({"fleet_policy": "fixed:2+2+2+2", "fleet_widths": (1, 2, 8)}, (1, 2, 8), 2, 10 * 2 * 16),
    ],
)
def test_a_request_may_want_what_some_group_can_give(options, widths, widest, num_kv_tokens):
    found = fleet_of(**options)
    limits = found.limits
    assert (found.widths, limits.widest, limits.num_kv_tokens) == (widths, widest, num_kv_tokens)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tp": 8}, "devices = 8 are one unit of tp = 8, and a fleet has several"),
        ({"fleet_widths": (1, 16)}, "8 units cannot be cut into groups of 16"),
        ({"fleet_widths": (8,)}, "8 units in groups of 8 alone have nothing to choose from"),
        ({"fleet_policy": "fixed:4+2+1"}, "4\\+2\\+1 has 7 units, there are 8"),
        ({"fleet_policy": "fixed:1+4+2+1"}, "a group of 4 cannot begin at unit 1"),
        ({"fleet_policy": "fixed:wide"}, "'wide' is no arrangement"),
        ({"fleet_policy": "fixed:5+3"}, "no groups of 5 units"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(options, problem):
    with pytest.raises(ConfigError, match=problem):
        fleet_of(**options)
