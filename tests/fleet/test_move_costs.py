"""What it takes to move blocks between groups, by hand."""

from dataclasses import replace

import pytest
from machine_kit import FLOAT32, PLAIN, TINY

from shiftjax.costs.machine import Transfer
from shiftjax.fleet.handover import calls
from shiftjax.fleet.move_costs import MoveCosts, blocks_per_call
from shiftjax.parallel.layout import Layout


@pytest.mark.parametrize(
    ("num_blocks", "ways", "blocks"), [(256, 1, 1), (1024, 1, 4), (1024, 2, 2), (1024, 8, 1)]
)
def test_a_call_moves_a_256th_of_a_pool_whatever_the_ways(num_blocks, ways, blocks):
    assert blocks_per_call(num_blocks, ways) == blocks


def test_tokens_move_in_calls_of_equal_size():
    machine = replace(PLAIN, all_to_all=(Transfer(1.0, 100.0),), kernel_seconds=0.5)
    moves = MoveCosts(Layout(TINY, 1, 1, 4), FLOAT32, machine, block_size=4, num_blocks=1024)
    token = 2 * 2 * 4 * 8 * 4  # keys and values of 2 layers, 4 heads of 8 numbers of 4 bytes
    assert moves.block_bytes == 4 * token
    size = 2 * 2 * moves.block_bytes  # of 2 groups 2 blocks
    assert moves.call_bytes(2) == size
    call = 1.0 + size / 2 / 100.0 + 6 * size / 1000.0 + 2 * 2 * 0.5
    assert moves.call_seconds(2) == pytest.approx(call)
    for num_tokens, num_calls in ((0, 0), (1, 1), (16, 1), (17, 2), (32, 2)):
        assert moves.seconds(num_tokens, 2) == pytest.approx(num_calls * call)
    assert moves.copy_seconds(3) == pytest.approx(4 * 3 * moves.block_bytes / 1000.0)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize("wide", [2, 4, 8])
def test_split_positions_move_the_bytes_of_the_tokens_in_full_calls(num_kv_heads, wide):
    """However few heads there are: each device gets its part of every wide block, and no copies."""
    model = replace(TINY, num_heads=8, num_kv_heads=num_kv_heads)
    layout = Layout(model, 1, 1, 8, by_position=True)
    moves = MoveCosts(layout, FLOAT32, PLAIN, block_size=4, num_blocks=4096)
    size, num_tokens = layout.of_width(wide).block_tokens(4, layout), 4096
    assert size == 4 * wide  # tokens of a wide block
    pairs = [(0, (1,) * wide, block) for block in range(num_tokens // size)]
    made = calls(pairs, wide, moves.blocks_per_call(wide))
    assert moves.seconds(num_tokens, wide) == pytest.approx(len(made) * moves.call_seconds(wide))
    received = len(made) * moves.call_bytes(wide) // wide  # of one of the narrow groups
    assert received == num_tokens * moves.block_bytes // 4 // wide
