"""As in which mode steps use experts: split further with few tokens, whole with many."""

from dataclasses import replace

import pytest

from shiftjax.arch.formats import formats_of
from shiftjax.arch.presets import PRESETS
from shiftjax.costs.expert_modes import ExpertModes, by_bytes, bytes_of
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout

QWEN = PRESETS["qwen3-30b-a3b"]
FORMATS = formats_of("bfloat16", "auto")
WHOLE = Layout(QWEN, 8, 1, experts_sp=8)


def degrees(layout: Layout, mode: Mode) -> list[int]:
    return [each.sp for each in layout.expert_modes(mode)]


def test_experts_are_used_as_stored_or_split_further():
    assert degrees(WHOLE, Mode(8, 4)) == [8, 4, 2, 1]
    assert degrees(replace(WHOLE, experts_sp=2), Mode(8, 4)) == [2, 1]
    assert degrees(Layout(QWEN, 8, 1), Mode(8, 8)) == [1]
    assert degrees(Layout(PRESETS["tiny"], 8, 1, experts_sp=8), Mode(8, 8)) == [1]
    assert degrees(replace(WHOLE, gathers=True), Mode(8, 8)) == [1]


def test_groups_of_experts_and_of_a_mode_lie_inside_each_other():
    layout = Layout(QWEN, 6, 1, experts_sp=6)
    assert degrees(layout, Mode(6, 6)) == [6, 3, 2, 1]
    assert degrees(layout, Mode(6, 3)) == [6, 3, 1]
    assert degrees(replace(layout, experts_sp=4), Mode(6, 6)) == [2, 1]


@pytest.mark.parametrize(("wanted", "found"), [(8, 8), (4, 4), (3, 2), (1, 1)])
def test_one_mode_can_be_forced_for_all_steps(wanted, found):
    layout = replace(WHOLE, experts_as=wanted)
    assert {tuple(degrees(layout, mode)) for mode in layout.modes} == {(found,)}


def test_experts_of_large_steps_are_split_least():
    choose = ExpertModes(WHOLE, by_bytes(FORMATS))
    chosen = [choose(WHOLE.base, tokens).sp for tokens in (64, 512, 2048, 8192, 16384)]
    assert chosen == sorted(chosen)
    assert (chosen[0], chosen[-1]) == (1, 8)
    assert "read" in choose.of(WHOLE.base, 16384).why


def test_nothing_is_moved_where_nobody_splits_a_weight():
    base = WHOLE.base
    assert bytes_of(WHOLE, base, base, 4096, FORMATS).moved == 0
    moved = [bytes_of(WHOLE, base, used, 4096, FORMATS).moved for used in WHOLE.modes]
    assert moved == sorted(moved)
