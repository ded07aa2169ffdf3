"""What `plan` says of positions that devices would split."""

import re

from shiftjax.arch.formats import formats_of
from shiftjax.arch.presets import PRESETS
from shiftjax.costs.machine_files import load_engine, load_machine
from shiftjax.deploy.position_rule import split_of
from shiftjax.sim.estimate import Workload
from shiftjax.sim.kv_positions import positions_in_words
from shiftjax.sim.modelled import Target
from shiftjax.sim.named import deploy

SHORT, LONG = Workload(1900, 100), Workload(32_000, 768)
NUMBERS = r"position: ([\d,]+) tokens .* copies ([\d,]+); .* take ([\d.]+) ms, with copies ([\d.]+)"


def target_of(model: str, machine: str = "h200x8") -> Target:
    formats = formats_of("bfloat16")
    return Target(PRESETS[model], load_machine(machine), load_engine("shiftjax"), formats)


def figures(model: str, workload: Workload) -> list[float]:
    target = target_of(model)
    words = positions_in_words(target, deploy(target, "sp8"), workload)
    assert words.endswith("; prompts then run as XLA loops, several times slower")
    found = re.search(NUMBERS, words)
    assert found, words
    return [float(number.replace(",", "")) for number in found.groups()]


def test_twice_the_tokens_where_two_devices_have_a_head():
    for workload, is_quicker in ((SHORT, False), (LONG, True)):
        split, whole, of_split, of_whole = figures("qwen3-30b-a3b", workload)
        assert 1.99 < split / whole < 2.01
        assert (of_split < of_whole) is is_quicker


def test_nothing_is_said_where_devices_have_no_copies():
    target = target_of("llama-70b")
    assert positions_in_words(target, deploy(target, "sp4tp2"), LONG) == ""


def test_the_same_is_said_of_a_deployment_that_splits_already():
    target = target_of("qwen3-30b-a3b")
    whole = deploy(target, "sp8")
    split = split_of(whole)
    assert split is not None and split.block_size == 2 * whole.block_size
    words = [positions_in_words(target, each, LONG) for each in (whole, split)]
    assert words[0] == words[1] != ""
