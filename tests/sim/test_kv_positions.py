"""What `plan` says of positions that devices would split."""

import logging
import re
from dataclasses import replace

import pytest

from shiftjax.arch.formats import formats_of
from shiftjax.arch.presets import PRESETS
from shiftjax.config import EngineConfig
from shiftjax.costs.machine_files import load_engine, load_machine
from shiftjax.deploy.position_rule import split_of
from shiftjax.sim.estimate import Estimate, Workload
from shiftjax.sim.kv_positions import SplitChoice, choice_of, positions_in_words, with_chosen_split
from shiftjax.sim.live import deploy_live
from shiftjax.sim.modelled import Target
from shiftjax.sim.named import deploy

SHORT, LONG = Workload(1900, 100), Workload(32_000, 768)
NUMBERS = (
    r"position: ([\d,]+) tokens .* copies ([\d,]+); .* take ([\d.]+) ms, with copies ([\d.]+), and"
    r" are quicker from ([\d,]+) tokens of each"
)
MOE = "qwen3-30b-a3b"


def target_of(model: str, hosts: int = 1) -> Target:
    formats, machine = formats_of("bfloat16"), load_machine("h200x8", hosts)
    return Target(PRESETS[model], machine, load_engine("shiftjax"), formats)


def figures(model: str, workload: Workload) -> list[float]:
    target = target_of(model)
    words = positions_in_words(target, deploy(target, "sp8"), workload)
    assert "XLA loops" not in words
    found = re.search(NUMBERS, words)
    assert found, words
    return [float(number.replace(",", "")) for number in found.groups()]


def test_twice_the_tokens_where_two_devices_have_a_head():
    for workload, is_quicker in ((SHORT, False), (LONG, True)):
        split, whole, of_split, of_whole, crossing = figures(MOE, workload)
        assert 1.99 < split / whole < 2.01
        assert (of_split < of_whole) is is_quicker is (workload.num_tokens >= crossing)


def test_nothing_is_said_where_devices_have_no_copies():
    target = target_of("llama-70b")
    assert positions_in_words(target, deploy(target, "sp4tp2"), LONG) == ""


def test_the_same_is_said_of_a_deployment_that_splits_already():
    target = target_of(MOE)
    whole = deploy(target, "sp8")
    split = split_of(whole)
    assert split is not None and split.block_size == 2 * whole.block_size
    words = [positions_in_words(target, each, LONG) for each in (whole, split)]
    assert words[0] == words[1] != ""
    found = re.search(r"normalisers alone .* of 1 sequence these take ([\d.]+) ms less", words[0])
    assert found is not None and 0.2 < float(found[1]) < 1


def choice(split: tuple[float, ...], whole: tuple[float, ...]) -> SplitChoice:
    """Of TTFT, TPOT and tokens per second of each; () holds no request."""
    built = deploy(target_of(MOE), "sp8")
    memory = built.memory(target_of(MOE).devices)
    return SplitChoice(*(Estimate(built, memory, bool(each), *each) for each in (split, whole)))


@pytest.mark.parametrize(
    ("split", "whole", "pays"),
    [
        ((1.0, 1.2, 130.0), (1.0, 1.0, 100.0), True),  # many gain more than one loses
        ((1.0, 1.3, 120.0), (1.0, 1.0, 100.0), False),
        ((1.1, 1.1, 120.0), (1.0, 1.0, 100.0), False),  # TTFT counts, too
        ((1.0, 1.0, 101.0), (1.0, 1.0, 100.0), False),  # predictions are no better than that
        ((1.0, 1.0, 1.0), (), True),
        ((), (), False),
    ],
)
def test_splitting_pays_where_many_gain_more_than_one_loses(split, whole, pays):
    assert choice(split, whole).pays is pays


def one_head() -> Target:
    """Of a model with one KV head, which 8 devices would have."""
    return replace(target_of("llama-8b"), model=replace(PRESETS["llama-8b"], num_kv_heads=1))


@pytest.mark.parametrize(
    ("given", "splits", "words"),
    [
        ({}, False, "hold copies by predicted costs: many requests get +"),
        ({"memory_fraction": 0.15}, True, "split positions by predicted costs: many requests"),
        ({"memory_fraction": 0.15, "attention": "xla"}, True, "split positions by predicted"),
        ({"memory_fraction": 0.15, "num_blocks": 3000}, False, "num_blocks says"),
        ({"memory_fraction": 0.15, "kv_split": "replicate"}, False, ""),
    ],
)
def test_auto_is_decided_by_costs(given, splits, words, caplog):
    caplog.set_level(logging.INFO)
    options = {"sp": 8, "tp": 1}
    config = EngineConfig.from_options(**(options | given))
    assert deploy_live(one_head(), config).layout.by_position is splits
    assert words in caplog.text
    assert ("8 devices split the positions" in caplog.text) is splits


def test_what_auto_decides_is_said_beside_the_numbers():
    target = target_of(MOE)
    small = deploy(target, "sp8", memory_fraction=0.17, experts="all")
    found = choice_of(target, small, LONG)
    assert found is not None and found.pays
    words = positions_in_words(target, small, LONG)
    assert words.endswith(f"--kv-split auto splits: {found.reason}")
    latents = target_of("deepseek-v2-lite")
    words = positions_in_words(latents, deploy(latents, "sp8"), SHORT)
    assert "--kv-split auto splits: of latents every device would hold a copy; many" in words


@pytest.mark.parametrize(
    ("hosts", "given", "kv_split"),
    [
        (1, {}, "position"),
        (2, {}, "replicate"),  # where every layer would cross the network
        (2, {"num_blocks": 9000}, "auto"),
        (2, {"kv_split": "position"}, "position"),
    ],
)
def test_latents_are_split_but_where_decodes_would_take_much_longer(hosts, given, kv_split):
    target = target_of("deepseek-v2", hosts=hosts)
    config = EngineConfig.from_options(model=MOE, **({"sp": 8, "tp": hosts} | given))
    assert with_chosen_split(config, target).cache.kv_split == kv_split


def test_fleets_and_phases_are_left_to_the_rule():
    for given in ({"fleet": True, "tp": 1}, {"phases": "sp8:tp8"}):
        config = EngineConfig.from_options(model=MOE, attention="xla", **given)
        assert with_chosen_split(config, target_of(MOE)) is config
