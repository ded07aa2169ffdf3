"""Decodes at split positions of which normalisers travel alone: the same sums, in fewer bytes."""

import pytest

from scripts.labs.kv_normalisers import DEVICES, compiled, predicted
from shiftjax.arch.presets import PRESETS
from shiftjax.costs.collectives import row_exchanges
from shiftjax.parallel.layout import Layout

LAYOUT = Layout(PRESETS["tiny-qwen3"], DEVICES, 1, by_position=True)


def test_both_ways_give_the_same_and_move_what_is_said():
    moved, error = compiled(LAYOUT, 3)
    assert error < 1e-5
    last = {("all-reduce", 3 * LAYOUT.model.hidden_size * 4)}
    exchanges = {(move.kind, move.num_bytes) for move in row_exchanges(LAYOUT, 3, 4)}
    assert set(moved["parts"]) == last | exchanges
    ways, heads = LAYOUT.position_ways, LAYOUT.heads_per_device
    assert set(moved["normalisers"]) == last | {("all-gather", ways * 3 * ways * heads * 8)}


@pytest.mark.parametrize("rows", [1, 256])
def test_one_exchange_less_is_quicker_where_weights_are_small(rows):
    layout = Layout(PRESETS["qwen3-30b-a3b"], DEVICES, 1, by_position=True)
    seconds = predicted(layout, rows, "h200x8")
    assert seconds["normalisers"] < seconds["parts"]
