"""Experts are stored as whole as they fit, and as steps use them; what cannot be is refused."""

from dataclasses import replace

import pytest

from shiftjax.arch.formats import formats_of
from shiftjax.arch.presets import PRESETS
from shiftjax.config import EngineConfig
from shiftjax.costs.memory import weight_bytes
from shiftjax.deploy.deployment import Deployment, Devices
from shiftjax.deploy.expert_storage import as_used
from shiftjax.deploy.resolve import WEIGHT_SHARE, resolve
from shiftjax.options import ConfigError

QWEN, GIB = PRESETS["qwen3-30b-a3b"], 1 << 30
FORMATS = formats_of("bfloat16", "auto")
DEGREES = {"sp": 8, "tp": 1, "dtype": "bfloat16"}


def resolved(memory: int = 141 * GIB, model=QWEN, **options) -> Deployment:
    config = EngineConfig.from_options(**{"model": model.name, **DEGREES, **options})
    return resolve(config, model, Devices(8, memory, memory))


@pytest.mark.parametrize(("memory", "least"), [(141, 8), (80, 4), (40, 2), (24, 1), (12, 1)])
def test_experts_are_split_least_of_what_fits(memory, least):
    layout = resolved(memory * GIB).layout
    assert layout.experts_sp == least
    room = WEIGHT_SHARE * memory * GIB
    fits = {
        sp: weight_bytes(replace(layout, experts_sp=sp), FORMATS) <= room for sp in (8, 4, 2, 1)
    }
    assert least == max((sp for sp, does in fits.items() if does), default=1)


def test_settings_and_fleets_say_how_they_are_stored():
    assert resolved(experts="all").layout.experts_sp == 1
    whole = resolved(24 * GIB, experts="whole").layout
    assert (whole.experts_sp, whole.expert_modes(whole.shift)) == (8, (whole.base,))
    assert resolved(weights="gather").layout.experts_sp == 1
    fleet = resolved(sp=None, fleet=True)
    assert [each.layout.least_split.sp for each in fleet.by_width.values()] == list(fleet.widths)
    assert resolved(model=PRESETS["llama-70b"], tp=None).layout.experts_sp == 1


def test_stages_count_their_own_layers():
    found = [resolved(56 * GIB, sp=4, pp=pp).layout.experts_sp for pp in (1, 2)]
    assert found == [2, 4]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"experts": "whole", "weights": "gather"}, "use experts = all, or weights = alias"),
        ({"experts": "4", "weights": "gather"}, "use experts = all, or weights = alias"),
        ({"experts": "4", "sp": None, "fleet": True}, "use experts = auto, whole or all"),
        ({"experts": "whole", "model": PRESETS["llama-70b"]}, "has no meaning for llama-3.3-70b"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, words):
    with pytest.raises(ConfigError, match=words):
        resolved(**options)


def test_what_no_step_uses_is_not_stored():
    """Of small steps all devices split the experts; copies would take the room of KV."""
    large = resolved()
    small = replace(large, token_buckets=(64, 128), max_num_batched_tokens=128)
    kept = as_used(large, lambda _: None)
    assert as_used(small, lambda _: None).layout.experts_sp < kept.layout.experts_sp
    forced = replace(small, layout=replace(small.layout, experts_as=8))
    assert as_used(forced, lambda _: None) is forced
