"""Which layers share block tables, and how much of a sequence each group keeps."""

import pytest

from pallas_kernels.window import Chunk, first_seen
from shiftjax.arch.cache import MOST_GROUPS, blocks_kept, first_block, groups_of, longest_kept
from shiftjax.arch.presets import PRESETS


@pytest.mark.parametrize(
    ("name", "num", "places"),
    [("llama-4-scout", 4, 12), ("gpt-oss-120b", 2, 18), ("gemma-3-27b", 7, 10)],
)
def test_groups_have_as_many_layers_as_see_everything(name, num, places):
    windows = [kind.window for kind in PRESETS[name].kinds]
    groups = groups_of(windows)
    assert len(groups) == num and max(len(group.layers) for group in groups) == places
    assert groups[0].window is None and len(groups[0].layers) == places
    layers = [layer for group in groups for layer in group.layers]
    assert sorted(layers) == list(range(len(windows)))
    assert all(windows[layer] == group.window for group in groups for layer in group.layers)


def test_groups_are_few():
    assert len(groups_of([None, *[4] * 40])) <= MOST_GROUPS
    assert [group.window for group in groups_of([4, 4])] == [4]
    assert [group.window for group in groups_of([2, Chunk(9), 2, Chunk(9)])] == [Chunk(9), 2]


@pytest.mark.parametrize("window", [None, 1, 3, 4, 9, Chunk(4), Chunk(6), 100])
@pytest.mark.parametrize("size", [1, 4])
def test_a_group_keeps_what_tokens_see_and_no_more_than_it_says(window, size):
    for position in range(40):
        first, seen = first_block(position, window, size), max(0, first_seen(position, window))
        assert first * size <= seen < (first + 1) * size
        assert position // size + 1 - first <= blocks_kept(position + 1, window, size)
        for step in (1, 5, 16):
            end = -(-(position + step) // size)
            assert end - first <= blocks_kept(position + step, window, size, step)


@pytest.mark.parametrize("windows", [(), (None, 4), (None, Chunk(8), Chunk(8)), (8,)])
def test_the_longest_sequence_fits_and_no_longer_one(windows):
    for num_blocks in range(1, 40):
        longest = longest_kept(num_blocks, windows, 2, 6)

        def taken(length: int) -> int:
            return sum(blocks_kept(length, window, 2, 6) for window in windows or (None,))

        if taken(10_000) > num_blocks:
            assert taken(longest) <= num_blocks < taken(longest + 1)
        assert longest >= 2 * (num_blocks // max(1, len(windows)))
