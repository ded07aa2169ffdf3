"""How far experts are split as they are stored: what the settings say, or as memory allows."""

import pytest

from shiftjax.arch.presets import PRESETS
from shiftjax.config import EngineConfig
from shiftjax.deploy.deployment import Devices
from shiftjax.deploy.resolve import resolve
from shiftjax.options import ConfigError
from shiftjax.parallel.layout import Layout

QWEN = PRESETS["qwen3-30b-a3b"]


def layout(experts: str = "auto", gb: float = 141, sp: int = 4, tp: int = 2) -> Layout:
    memory = int(gb * 1e9)
    config = EngineConfig.from_options(model="m", sp=sp, tp=tp, experts=experts)
    return resolve(config, QWEN, Devices(8, memory, memory)).layout


@pytest.mark.parametrize(("gb", "sp"), [(141, 4), (40, 2), (20, 1)])
def test_experts_are_as_whole_as_fits(gb, sp):
    """61 GB in bfloat16, of which devices store the half, a fourth or an eighth."""
    assert layout(gb=gb).experts_sp == sp


@pytest.mark.parametrize(
    ("experts", "stored", "forced"),
    [("whole", 4, 4), ("2", 4, None), ("4", 2, None), ("8", 1, None), ("all", 1, None)],
)
def test_the_settings_say_how_far_experts_are_split(experts, stored, forced):
    found = layout(experts)
    assert (found.experts_sp, found.experts_as) == (stored, forced)


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        ("3", "experts = 3: sp = 4 and tp = 2 can split them 2 or 4 or 8 ways"),
        ("1", "experts = 1: sp = 4 and tp = 2 can split them 2 or 4 or 8 ways"),
        ("0", "experts = 0 is none of auto, whole, all, and no number of ways"),
        ("half", "experts = half is none of auto, whole, all, and no number of ways"),
    ],
)
def test_what_a_group_cannot_do_is_refused(experts, words):
    with pytest.raises(ConfigError, match=words):
        layout(experts)
