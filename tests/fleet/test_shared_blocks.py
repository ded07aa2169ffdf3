"""Block numbers that groups of all widths share: nobody's block is given to another."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spent import examples

from shiftjax.fleet.shared_blocks import SharedBlocks, State, plan_compaction, share
from shiftjax.parallel.arrangements import all_groups, possible_widths
from shiftjax.parallel.grid import Group

UNITS, NUM_BLOCKS = 4, 12
GROUPS = all_groups(UNITS, possible_widths(UNITS))
WHOLE, HALF, UNIT = Group(0, 4), Group(0, 2), Group(0, 1)


def make() -> dict[Group, SharedBlocks]:
    return share(NUM_BLOCKS, dict.fromkeys(GROUPS, 4))


class Tables:
    """Tables of every group, and what the allocators say of them."""

    def __init__(self, rng: random.Random):
        self.rng, self.blocks = rng, make()
        self.tables: dict[Group, list[list[int]]] = {group: [] for group in GROUPS}
        self.num_hashes = 0

    def act(self) -> None:
        group = self.rng.choice(GROUPS)
        blocks, tables = self.blocks[group], self.tables[group]
        kind = self.rng.choice(["new", "new", "share", "end", "end", "register", "hit", "clear"])
        if kind == "new":
            count = self.rng.randrange(1, 4)
            if count <= blocks.num_free_blocks:
                tables.append([blocks.allocate() for _ in range(count)])
        elif kind == "share" and tables:
            table = self.rng.choice(tables)
            blocks.retain(table[:1])
            tables.append(table[:1])
        elif kind == "end" and tables:
            blocks.release(tables.pop(self.rng.randrange(len(tables))))
        elif kind == "register" and tables:
            self.num_hashes += 1
            block = self.rng.choice(self.rng.choice(tables))
            blocks.register(block, self.num_hashes.to_bytes(4, "big"), [self.num_hashes] * 4)
        elif kind == "hit" and blocks.num_cached_blocks:
            block = self.rng.choice(list(blocks._cached))
            blocks.retain([block])
            tables.append([block])
        elif kind == "clear" and self.rng.random() < 0.1:
            blocks.clear_cache()

    def check(self) -> None:
        used: dict[tuple[int, int], Group] = {}
        for group, tables in self.tables.items():
            self.blocks[group].check(tables)
            for unit in range(group.first, group.first + group.width):
                for block in {block for table in tables for block in table}:
                    assert used.setdefault((unit, block), group) == group
        for group in GROUPS:
            units = range(group.first, group.first + group.width)
            taken = {b for unit, b in used if unit in units}
            assert self.blocks[group].num_free_blocks == NUM_BLOCKS - 1 - len(taken)
            own = {b for table in self.tables[group] for b in table}
            assert self.blocks[group].num_used_blocks == len(own)


@pytest.mark.costs(15)
@settings(max_examples=examples(600), deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_a_block_has_one_owner_on_every_unit(seed):
    tables = Tables(random.Random(seed))
    for _ in range(40):
        tables.act()
        tables.check()


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 1 << 30), wanted=st.integers(1, NUM_BLOCKS))
def test_compaction_frees_numbers_on_all_units(seed, wanted):
    rng = random.Random(seed)
    blocks = make()
    owners = rng.choice([[Group(u, 1) for u in range(4)], [HALF, Group(2, 1), Group(3, 1)]])
    tables: dict[Group, list[list[int]]] = {}
    for group in owners:
        numbers = rng.sample(range(1, NUM_BLOCKS), rng.randrange(NUM_BLOCKS // 2 + 2))
        for number in numbers:
            blocks[group].take(number)
        tables[group] = [[number] for number in numbers]
    wide, before = blocks[WHOLE], blocks[WHOLE].num_free_blocks
    held = {group: blocks[group].num_used_blocks for group in owners}
    copies = plan_compaction(wide, [blocks[group] for group in owners], wanted)
    by_owner = {id(blocks[group]): group for group in owners}
    sources = [(id(owner), block) for owner, block, _ in copies]
    assert not {(id(owner), new) for owner, _, new in copies} & {*sources}
    for owner, block, new in copies:
        owner.replace(block, new)
        for table in tables[by_owner[id(owner)]]:
            table[:] = [new if each == block else each for each in table]
    for group in owners:
        blocks[group].check(tables[group])
        assert blocks[group].num_used_blocks == held[group]
    most = NUM_BLOCKS - 1 - max(held.values(), default=0)
    assert wide.num_free_blocks >= min(before, most)
    if copies:
        assert before < wide.num_free_blocks <= max(wanted, before)
    if max(held.values()) <= (NUM_BLOCKS - 1) // 2:
        assert wide.num_free_blocks >= min(wanted, most) - 1


def test_narrow_groups_take_low_numbers_and_wide_ones_high():
    blocks = make()
    assert [blocks[UNIT].allocate() for _ in range(3)] == [1, 2, 3]
    assert [blocks[Group(1, 1)].allocate() for _ in range(2)] == [1, 2]
    assert [blocks[WHOLE].allocate() for _ in range(2)] == [11, 10]
    assert blocks[HALF].num_free_blocks == NUM_BLOCKS - 1 - 5
    assert blocks[Group(2, 2)].num_free_blocks == NUM_BLOCKS - 1 - 2


def test_what_others_cache_is_taken_after_the_clean_and_before_ones_own():
    blocks = share(4, dict.fromkeys(GROUPS, 4))
    unit, whole = blocks[UNIT], blocks[WHOLE]
    (first, second) = whole.allocate(), unit.allocate()
    whole.register(first, b"whole", [1] * 4)
    unit.register(second, b"unit", [2] * 4)
    whole.release([first])
    unit.release([second])
    assert (unit.state_of(first), unit.state_of(second)) == (State.FOREIGN, State.CACHED)
    assert [unit.allocate() for _ in range(3)] == [2, first, second]
    assert not whole.is_indexed(b"whole") and not unit.is_indexed(b"unit")


def test_a_block_of_another_group_cannot_be_taken():
    blocks = make()
    number = blocks[WHOLE].allocate()
    with pytest.raises(RuntimeError, match="belongs to another group"):
        blocks[UNIT].take(number)


def test_a_group_that_starts_anew_forgets_what_others_cache_on_its_units():
    blocks = make()
    unit, other = blocks[UNIT], blocks[Group(3, 1)]
    for allocator, name in ((unit, b"unit"), (other, b"other")):
        block = allocator.allocate()
        allocator.register(block, name, [1] * 4)
        allocator.release([block])
    blocks[HALF].allocate()
    blocks[HALF].reset()
    assert blocks[HALF].num_used_blocks == 0
    assert not unit.is_indexed(b"unit") and other.is_indexed(b"other")
    for allocator in blocks.values():
        allocator.check([])
