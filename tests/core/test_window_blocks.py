"""Blocks that a sequence loses before it is known whether they are finite."""

import pytest

from shiftjax.core.blocks import CachedPrefix
from shiftjax.core.window_blocks import WindowBlocks


@pytest.fixture
def blocks() -> WindowBlocks:
    return WindowBlocks(4, 2)


def contents_of(name: bytes) -> CachedPrefix:
    return CachedPrefix(name, [1, 2], b"not here")


def test_an_unproven_block_is_found_when_it_is_proven(blocks):
    block, contents = blocks.allocate(), contents_of(b"a")
    assert blocks.retire(block, contents)
    blocks.check([])
    assert blocks.find(b"a", [1, 2]) is None and blocks.num_free_blocks == 3
    blocks.prove(block, contents)
    blocks.check([])
    assert blocks.find(b"a", [1, 2]) == block and blocks.find(b"a", [2, 1]) is None


def test_an_unproven_block_may_be_given_away(blocks):
    block, contents = blocks.allocate(), contents_of(b"a")
    blocks.retire(block, contents)
    table = [blocks.allocate() for _ in range(3)]  # it is the last to go
    assert table[-1] == block and blocks.next_evicted is None
    blocks.prove(block, contents)
    blocks.drop(block, contents)
    blocks.check([table])
    assert blocks.find(b"a", [1, 2]) is None


def test_of_two_equal_blocks_one_is_found(blocks):
    one, other, contents = blocks.allocate(), blocks.allocate(), contents_of(b"a")
    blocks.enter(one, contents)
    blocks.retire(other, contents)
    blocks.prove(other, contents)
    blocks.check([[one]])
    assert blocks.find(b"a", [1, 2]) == one and blocks.num_cached_blocks == 0


def test_what_is_never_proven_is_free(blocks):
    block, contents = blocks.allocate(), contents_of(b"a")
    blocks.retire(block, contents)
    blocks.drop(block, contents)
    blocks.check([])
    assert (blocks.num_free_blocks, blocks.num_cached_blocks) == (3, 0)


def test_a_block_that_others_hold_or_find_is_not_unproven(blocks):
    shared, known = blocks.allocate(), blocks.allocate()
    blocks.retain([shared])
    blocks.enter(known, contents_of(b"b"))
    assert not blocks.retire(shared, contents_of(b"a"))
    assert not blocks.retire(known, contents_of(b"b"))
    blocks.check([[shared]])
    assert blocks.find(b"b", [1, 2]) == known


def test_an_empty_cache_has_nothing_unproven(blocks):
    block, contents = blocks.allocate(), contents_of(b"a")
    blocks.retire(block, contents)
    blocks.clear_cache()
    blocks.prove(block, contents)
    blocks.check([])
    assert blocks.find(b"a", [1, 2]) is None and blocks.num_cached_blocks == 0
