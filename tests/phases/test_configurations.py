"""`phases` as a setting: what a pair comes to, and what it cannot be had with."""

from dataclasses import replace

import pytest

from shiftjax.arch.config import ModelConfig
from shiftjax.config import EngineConfig
from shiftjax.deploy.deployment import Devices
from shiftjax.options import ConfigError
from shiftjax.phases.configurations import limits_of, merge_phases, resolve_phases
from shiftjax.settings import resolve

GIB = 1 << 30
MODEL = ModelConfig("tiny", "llama", 1000, 512, 1536, 32, 8, 4, 64, 4096)
DEVICES = Devices(8, 8 * GIB, 8 * GIB)


def phases_of(phases: str, **options):
    config = EngineConfig.from_options(phases=phases, **options)
    return resolve_phases(config, MODEL, DEVICES, host_bytes=4 * GIB)


def test_each_phase_is_a_deployment_of_its_own():
    found = phases_of("dp2pp4:tp8", num_blocks=100, max_num_seqs=32)
    prefill, decode = found["prefill"], found["decode"]
    assert (prefill.name, prefill.dp, prefill.pp, prefill.sp, prefill.tp) == ("dp2pp4", 2, 4, 1, 1)
    assert (decode.name, decode.dp, decode.pp, decode.sp, decode.tp) == ("tp8", 1, 1, 1, 8)
    assert [prefill.parks, decode.parks] == [True, False]
    for each in found.values():
        assert (each.preemption, each.host_bytes, each.block_size) == ("swap", 2 * GIB, 16)
        assert each.grid.num_devices == 8
    assert limits_of(found.values()).num_kv_tokens == 99 * 16


@pytest.mark.parametrize(
    ("phases", "ways", "size"),
    [("pp8:tp8", (1, 2), 32), ("pp2sp3:sp6", (1, 2), 32), ("pp3tp4:pp2tp6", (2, 3), 96)],
)
def test_phases_have_one_stripe_that_both_can_split(phases, ways, size):
    """And as many bytes of blocks on a device, but for a part of a block."""
    num_kv_heads = {"pp2sp3:sp6": 3, "pp3tp4:pp2tp6": 2}.get(phases, 4)
    model = replace(MODEL, num_kv_heads=num_kv_heads, num_heads=12)
    config = EngineConfig.from_options(phases=phases, num_blocks=241, kv_split="position")
    devices = DEVICES._replace(num_devices=12)
    found = list(resolve_phases(config, model, devices, host_bytes=4 * GIB).values())
    assert tuple(each.layout.position_ways for each in found) == ways
    assert [each.block_size for each in found] == [size] * 2
    assert [each.num_blocks for each in found] == [240 * 16 * n // size + 1 for n in ways]


def test_phases_whose_pools_hold_no_sequence_are_refused():
    sizes = {"num_blocks": 241, "max_model_len": 3840}
    assert phases_of("pp8:tp8", kv_split="position", **sizes)
    with pytest.raises(ConfigError, match="pp8: 120 blocks of 32 tokens, which all can split"):
        phases_of("pp8:tp8", kv_split="position", num_blocks=240, max_model_len=3824)


def test_the_host_memory_that_is_given_holds():
    assert phases_of("pp8:tp8", host_memory="1GiB")["decode"].host_bytes == GIB
    config = EngineConfig.from_options(phases="pp8:tp8")
    with pytest.raises(ConfigError, match="needs host_memory"):
        resolve_phases(config, MODEL, DEVICES)


@pytest.mark.parametrize(
    ("phases", "degrees"),
    [
        ("sp8:tp8", (1, 1, 8, 1)),
        ("dp2sp2tp2:dp2tp4", (2, 1, 2, 2)),
        ("pp4tp2:pp4tp2", (1, 4, 1, 2)),
    ],
)
def test_modes_of_one_deployment_need_no_phases(phases, degrees):
    parallel = merge_phases(EngineConfig.from_options(phases=phases, max_num_seqs=8)).parallel
    assert (parallel.dp, parallel.pp, parallel.sp, parallel.tp) == degrees
    assert parallel.phases is None


@pytest.mark.parametrize("phases", ["pp8:tp8", "tp8:sp8", "dp2sp4:tp8", "pp2sp4:pp2tp4", "auto"])
def test_all_others_do(phases):
    config = EngineConfig.from_options(phases=phases)
    assert merge_phases(config) is config


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"phases": "pp8"}, "is no pair"),
        ({"phases": "pp8:tp4"}, "pp8 takes 8 devices and tp4 takes 4"),
        ({"phases": "pp8:tp8", "devices": 4}, "takes 8 devices, but devices = 4"),
        ({"phases": "pp8:tp8", "tp": 2}, "cannot be had with tp = 2: it says the degrees"),
        ({"phases": "auto", "pp": 2}, "cannot be had with pp = 2: it says the degrees"),
        ({"phases": "pp8:tp8", "speculation": "suffix"}, "cannot be had with speculation"),
        ({"phases": "pp8:tp8", "fleet": True}, "cannot be had with fleet"),
    ],
)
def test_what_phases_cannot_be_had_with(options, words):
    with pytest.raises(ConfigError, match=words) as caught:
        EngineConfig.from_options(**options)
    assert len(caught.value.problems) == 1


def test_host_memory_has_a_meaning_with_phases_alone():
    found = phases_of("pp8:tp8", host_memory="1GiB", prefix_caching=False)
    assert {each.host_bytes for each in found.values()} == {GIB}


def test_what_model_and_machine_refuse_is_said_of_the_phase():
    with pytest.raises(ConfigError, match=r"phases, decode in tp16: sp . tp = 16 is more"):
        phases_of("pp16:tp16")
    with pytest.raises(ConfigError, match="phases, prefill in pp16: 16 devices are asked for"):
        phases_of("pp16:tp16")
    with pytest.raises(ConfigError, match="auto is of batch"):
        phases_of("auto")


def test_auto_is_a_value_wherever_it_comes_from():
    flag, variable = {"phases": "auto"}, {"SHIFTJAX_PHASES": "auto"}
    found = [resolve(flag, {}), resolve({}, variable), resolve({}, {}, "phases: auto")]
    assert [config.parallel.phases for config in found] == ["auto"] * 3
    assert resolve({"tp": "auto"}, {}).parallel.tp is None


@pytest.mark.parametrize(
    "use",
    [
        lambda: EngineConfig.from_options(stages="pp8:tp8"),
        lambda: resolve({}, {"SHIFTJAX_STAGES": "pp8:tp8"}),
        lambda: resolve({}, {}, "stages: pp8:tp8"),
    ],
    ids=("keyword", "variable", "file"),
)
def test_the_former_name_is_refused_with_the_new_one(use):
    with pytest.raises(ConfigError, match=r"(?i)'stages'; it is now called phases$") as caught:
        use()
    assert len(caught.value.problems) == 1
