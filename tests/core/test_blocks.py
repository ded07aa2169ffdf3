"""The block allocator against a model of it, and its checks against sabotage."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shiftjax.core.blocks import BlockAllocator, extend_hashes, root_hash

BLOCK_SIZE = 2
ROOT = root_hash("model", "fp8 1", None, None)


def hashes_of(token_ids: list[int], root: bytes = ROOT) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, root, token_ids, BLOCK_SIZE)
    return hashes


class Tables(RuleBasedStateMachine):
    """Sequences come, share what is cached, grow and go; `contents` models the memory itself."""

    def __init__(self):
        super().__init__()
        self.allocator = BlockAllocator(9, BLOCK_SIZE)
        self.tables: list[tuple[list[int], list[int]]] = []  # token ids, block table
        self.contents: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=2, max_size=10))
    def admit(self, token_ids):
        token_ids = token_ids[: len(token_ids) // BLOCK_SIZE * BLOCK_SIZE]
        hashes = hashes_of(token_ids)
        prefix = self.allocator.match(hashes, token_ids, len(hashes) - 1)
        for number, block in enumerate(prefix):
            assert self.contents[block] == tuple(token_ids[: (number + 1) * BLOCK_SIZE])
        fresh = len(hashes) - len(prefix)
        if fresh + self.allocator.num_revived(prefix) > self.allocator.num_free_blocks:
            return
        free = self.allocator.num_free_blocks - self.allocator.num_revived(prefix) - fresh
        self.allocator.retain(prefix)
        table = prefix + [self.allocator.allocate() for _ in range(fresh)]
        assert self.allocator.num_free_blocks == free and 0 not in table
        for number in range(len(prefix), len(table)):
            start = number * BLOCK_SIZE
            self.contents[table[number]] = tuple(token_ids[: start + BLOCK_SIZE])
            tokens = token_ids[start : start + BLOCK_SIZE]
            self.allocator.register(table[number], hashes[number], tokens)
        self.tables.append((token_ids, table))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def leave(self, data):
        _, table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.allocator.release(table)

    @rule()
    def clear(self):
        self.allocator.clear_cache()
        assert self.allocator.num_cached_blocks == 0

    @invariant()
    def conservation(self):
        self.allocator.check(table for _, table in self.tables)
        held = {block for _, table in self.tables for block in table}
        assert self.allocator.num_free_blocks == 8 - len(held)


TestTables = Tables.TestCase
TestTables.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, derandomize=True
)


def filled(num_blocks=9) -> tuple[BlockAllocator, list[int], list[int]]:
    """An allocator with one registered sequence of three blocks."""
    allocator, token_ids = BlockAllocator(num_blocks, BLOCK_SIZE), [1, 2, 3, 4, 5, 6]
    table = [allocator.allocate() for _ in range(3)]
    for number, block_hash in enumerate(hashes_of(token_ids)):
        allocator.register(table[number], block_hash, token_ids[2 * number : 2 * number + 2])
    return allocator, token_ids, table


def test_the_null_block_is_never_handed_out():
    allocator = BlockAllocator(4, BLOCK_SIZE)
    assert sorted(allocator.allocate() for _ in range(3)) == [1, 2, 3]
    with pytest.raises(RuntimeError, match="no free block"):
        allocator.allocate()


def test_freed_blocks_are_revivable_until_reused_tail_first():
    allocator, token_ids, table = filled(num_blocks=4)
    allocator.release(table)
    hashes = hashes_of(token_ids)
    assert allocator.match(hashes, token_ids, 3) == table
    assert allocator.allocate() == table[2]
    assert allocator.match(hashes, token_ids, 3) == table[:2]


def test_reuse_takes_the_least_recently_used():
    allocator = BlockAllocator(3, 1)
    old, new = allocator.allocate(), allocator.allocate()
    hashes: list[bytes] = []
    extend_hashes(hashes, ROOT, [7, 8], 1)
    allocator.register(old, hashes[0], [7])
    allocator.register(new, hashes[1], [8])
    allocator.release([old])
    allocator.release([new])
    allocator.retain([old])  # used again
    allocator.release([old])
    assert allocator.allocate() == new


def test_equal_hashes_of_other_tokens_are_a_miss():
    allocator, _, table = filled()
    collision = [9, 9, 9, 9, 9, 9]
    hashes = hashes_of([1, 2, 3, 4, 5, 6])  # as if the two sequences collided
    assert allocator.match(hashes, [1, 2, *collision], 3) == table[:1]


@pytest.mark.parametrize(
    "other",
    [
        ("other", "fp8 1", None, None),
        ("model", "fp8 2", None, None),
        ("model", "fp8 1", "a", None),
        ("model", "fp8 1", None, "a"),
    ],
)
def test_model_formats_of_kv_adapter_and_salt_keep_prefixes_apart(other):
    allocator, token_ids, table = filled()
    assert allocator.match(hashes_of(token_ids), token_ids, 3) == table
    assert not allocator.match(hashes_of(token_ids, root_hash(*other)), token_ids, 3)


def test_hashes_chain_and_are_computed_once():
    hashes = hashes_of([1, 2, 3, 4])
    assert hashes[1] != hashes_of([9, 9, 3, 4])[1] and len({*hashes, ROOT}) == 3
    before = list(hashes)
    extend_hashes(hashes, ROOT, [0, 0, 0, 0, 5, 6, 7], BLOCK_SIZE)  # known hashes are kept
    assert hashes[:2] == before and len(hashes) == 3


def test_of_two_equal_blocks_the_first_is_found():
    allocator, token_ids, table = filled()
    twin = allocator.allocate()
    allocator.register(twin, hashes_of(token_ids)[0], [1, 2])
    assert allocator.match(hashes_of(token_ids), token_ids, 1) == table[:1]
    allocator.check([table, [twin]])
    allocator.release([twin])
    assert allocator.num_cached_blocks == 0  # the twin was free at once


def test_releasing_too_often_is_an_error():
    allocator, _, table = filled()
    allocator.release(table)
    with pytest.raises(RuntimeError, match="more often"):
        allocator.release(table)


def _leak(allocator, table):
    allocator._free.pop()


def _free_twice(allocator, table):
    allocator._free.append(table[0])


def _lose_a_reference(allocator, table):
    allocator._ref_counts[table[0]] += 1


def _stale_index(allocator, table):
    allocator._contents[table[0]] = None


def _cached_and_used(allocator, table):
    allocator._cached[table[1]] = None


@pytest.mark.parametrize(
    "sabotage", [_leak, _free_twice, _lose_a_reference, _stale_index, _cached_and_used]
)
def test_check_finds_sabotage(sabotage):
    allocator, _, table = filled()
    allocator.check([table])
    sabotage(allocator, table)
    with pytest.raises(RuntimeError):
        allocator.check([table])


def test_check_compares_with_the_tables():
    allocator, _, table = filled()
    for wrong in ([], [table, table], [table[:2]], [[*table, 0]]):
        with pytest.raises(RuntimeError, match="references"):
            allocator.check(wrong)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 4), (0, 4), (8, 0)])
def test_a_pool_without_room_is_refused(num_blocks, block_size):
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockAllocator(num_blocks, block_size)
