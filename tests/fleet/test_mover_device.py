"""The mover of a fleet against the definition of the layouts; there is no engine, and no step."""

import itertools
import random
from dataclasses import replace
from functools import cache
from typing import NamedTuple
from unittest import mock

import jax
import numpy as np
import pytest
from echo_pools import EchoMover, EchoPools
from harness import silent

from shiftjax.arch.formats import formats_of
from shiftjax.arch.presets import PRESETS
from shiftjax.device import pool
from shiftjax.device.group_memory import GroupMemory
from shiftjax.device.mesh import group_mesh, joined_mesh
from shiftjax.device.mode_weights import ModeWeights
from shiftjax.device.place import define, load
from shiftjax.device.pool import DevicePools, PoolOptions
from shiftjax.fleet import move_costs as moves
from shiftjax.fleet.handover import Copy, Crossing
from shiftjax.fleet.mover_device import DeviceMover
from shiftjax.parallel.arrangements import all_groups
from shiftjax.parallel.grid import Grid, Group, unit_order
from shiftjax.parallel.layout import Layout
from shiftjax.weights.random import RandomSource

NUM_BLOCKS, UNIT_BLOCK = 160, 4  # a unit's block: tokens
SHAPES = {  # KV heads, units and tp, widths, the part of a pool that a call moves, pools
    # 8 devices: in a group of 4 units two keep each head; several blocks in a call
    "4-heads-tp2": (4, 4, 2, (1, 2, 4), 1 / 10, 1),
    "3-heads": (3, 8, 1, (1, 2, 8), 1 / 256, 2),  # padded; a block in a call; two layers and one
    # The same where devices split positions; those of a unit, too; heads, and then positions.
    "4-heads-tp2-split": (4, 4, 2, (1, 2, 4), 1 / 10, 1, True),
    "1-head-tp2-split": (1, 4, 2, (1, 2, 4), 1 / 10, 1, True),
    "2-heads-split": (2, 8, 1, (1, 2, 8), 1 / 256, 2, True),
}


class Moved(NamedTuple):
    """What moves blocks, and what it moves them in."""

    grid: Grid
    layouts: dict[int, Layout]
    memories: dict[Group, GroupMemory]
    mover: DeviceMover


@cache
def make_fleet(
    num_kv_heads: int,
    units: int,
    tp: int,
    widths: tuple[int, ...],
    share: float,
    num_pools: int,
    by_position: bool = False,
) -> Moved:
    num_heads = 8 if by_position else 2 * num_kv_heads
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    config = replace(PRESETS["tiny"], num_layers=3, **heads)
    grid, devices = Grid(tp, units), jax.devices()
    own = {"widest": units, "by_position": by_position}
    layouts = {width: Layout(config, width, tp, **own) for width in widths}
    models = {width: define(layout, formats_of("float32")) for width, layout in layouts.items()}
    mesh = joined_mesh([group_mesh(devices, grid, unit) for unit in grid.groups(1)])
    stored = load(models[1], layouts[1], mesh, RandomSource(config, 0), silent)
    device_pools, memories = DevicePools(), {}
    sizes = {
        width: PoolOptions(NUM_BLOCKS, layout.block_tokens(UNIT_BLOCK), 4, np.dtype(np.float32))
        for width, layout in layouts.items()
    }
    for group in all_groups(units, widths):
        weights = ModeWeights(models[group.width], layouts[group.width], "alias")
        mesh = group_mesh(devices, grid, group)
        memories[group] = GroupMemory(weights, mesh, device_pools)
        memories[group].fill(stored)
    with (
        mock.patch.object(moves, "POOL_SHARE", round(1 / share)),
        mock.patch.object(pool, "num_pools", lambda *_: num_pools),
    ):
        for group, memory in memories.items():
            memory.prepare(sizes[group.width], None)
        return Moved(grid, layouts, memories, DeviceMover(memories, sizes))


def random_crossing(rng: random.Random, fleet: Moved, pools: EchoPools) -> Crossing:
    """Blocks of some narrow groups in a wide one, targets among them that are sources, too.

    As in a hand-over, what a pair writes is read by itself or before, never after.
    """
    narrow, wide = sorted(rng.sample(sorted(fleet.layouts), 2))
    group = rng.choice(fleet.grid.groups(wide))
    several = pools.block_tokens(wide) // pools.block_tokens(narrow)
    ways, num_blocks = wide // narrow, pools.cells.shape[1]
    to_wide, pairs = rng.random() < 0.5, []
    wides = rng.sample(range(1, num_blocks), rng.randrange(1, 30))
    free = [rng.sample(range(1, num_blocks), num_blocks - 1) for _ in range(ways)]
    later: set[int] = set()  # what the pairs after this one read
    for number in wides:  # the last pair first
        place = rng.randrange(ways)
        usable = [each for each in free[place] if to_wide or each not in later]
        blocks = tuple(usable[: rng.randrange(1, several + 1)])
        if not blocks or (to_wide and number in later):
            continue
        free[place] = [each for each in free[place] if each not in blocks]
        later.update(blocks if to_wide else (number,))
        pairs.insert(0, (place, blocks, number))
    return Crossing(group, narrow, to_wide, pairs)


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_move_as_the_definition_of_the_layouts_has_it(shape):
    """Against NumPy, head by head; whatever the two widths, ragged ends and calls."""
    fleet, rng = make_fleet(*SHAPES[shape]), random.Random(3)
    widths = sorted(fleet.layouts)
    pools = EchoPools(fleet.layouts, fleet.grid, NUM_BLOCKS, UNIT_BLOCK)
    widest = [fleet.memories[group] for group in fleet.grid.groups(widths[-1])]
    head_dim = fleet.layouts[1].model.head_dim
    for number in range(16):
        crossing = random_crossing(rng, fleet, pools)
        pools.cells[:] = (
            np.random.default_rng(number).permutation(pools.cells.size).reshape(pools.cells.shape)
        )
        replicate_heads(pools, crossing)
        per_call = fleet.mover._exchanges[crossing.wide, crossing.narrow_width].per_call
        before = pools.cells.copy()
        for memory in widest:
            set_pools(memory, before, head_dim)
        EchoMover(pools, per_call).move(crossing)
        fleet.mover.move(crossing)
        for memory in widest:
            check_pools(memory, pools.cells, before, head_dim)


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_copied_in_the_pools_of_one_group_alone(shape):
    """More than one call of them, the last not full; what is written is not what is read."""
    fleet = make_fleet(*SHAPES[shape])
    group, other, head_dim = Group(2, 2), Group(0, 2), fleet.layouts[1].model.head_dim
    size = EchoPools(fleet.layouts, fleet.grid, NUM_BLOCKS, UNIT_BLOCK).cells.shape
    cells = np.random.default_rng(5).permutation(np.prod(size)).reshape(size)
    for each in (group, other):
        set_pools(fleet.memories[each], cells, head_dim)
    numbers = random.Random(5).sample(range(1, NUM_BLOCKS), 2 * 70)
    copies = list(zip(numbers[:70], numbers[70:], strict=True))
    assert len(copies) > fleet.mover._copies[group].per_call
    fleet.mover.compact(Copy(group, copies))
    check_pools(fleet.memories[other], cells, cells, head_dim)
    for device in fleet.grid.devices_of(group):
        cells[device, numbers[70:]] = cells[device, numbers[:70]]
    check_pools(fleet.memories[group], cells, cells, head_dim)


def test_groups_get_whole_pools_after_a_call_that_has_taken_those_of_a_wider_one():
    """As after an exchange that fails on the devices: what it was given is gone."""
    fleet = make_fleet(*SHAPES["4-heads-tp2"])
    wide, narrow = Group(0, 4), [Group(0, 2), Group(2, 2)]
    for layer in fleet.memories[wide].pools:
        for array in layer:
            array.delete()
    for group in narrow:
        size = fleet.layouts[2].block_tokens(UNIT_BLOCK)
        fleet.memories[group].allocate(PoolOptions(NUM_BLOCKS, size, 4, np.dtype(np.float32)))
    for group in (*narrow, wide):
        for layer in fleet.memories[group].pools:
            assert not any(np.asarray(array).any() for array in layer)


def replicate_heads(pools: EchoPools, crossing: Crossing) -> None:
    """Devices that keep the same head of a block keep the same."""
    ways = crossing.wide.width // crossing.narrow_width
    for place, blocks, wide in crossing.pairs:
        first = crossing.wide.first + unit_order(ways)[place] * crossing.narrow_width
        narrow = Group(first, crossing.narrow_width)
        sources = [(crossing.wide, wide)]
        if crossing.to_wide:
            sources = [(narrow, block) for block in blocks]
        for group, number in sources:
            pools.put(group, number, pools.whole(group, number))


def spread(cells: np.ndarray, layer: int, head_dim: int) -> np.ndarray:
    """What a pool of a layer would have in the place of cells."""
    return np.repeat(cells * 8.0 + layer, head_dim, axis=-1).astype(np.float32)


def numbers_of(memory) -> list[list[tuple[jax.Array, list[int]]]]:
    """Of each pool K and V, and which of the arrays of all layers are in them, K before V."""
    found, first = [], 0
    for pair in memory.pools:
        layers = range(first, first + pair[0].shape[0] // NUM_BLOCKS)
        found.append([(x, [2 * layer + i for layer in layers]) for i, x in enumerate(pair)])
        first = layers.stop
    return found


def set_pools(memory, cells: np.ndarray, head_dim: int) -> None:
    ids = [device.id for device in memory.mesh.devices.flat]

    def filled(array: jax.Array, numbers: list[int]) -> jax.Array:
        parts = [[spread(cells[i], number, head_dim) for i in ids] for number in numbers]
        whole = np.concatenate([np.concatenate(part, axis=1) for part in parts])
        return jax.device_put(whole, array.sharding)

    memory.pools = [tuple(filled(*each) for each in pair) for pair in numbers_of(memory)]


def check_pools(memory, cells: np.ndarray, before: np.ndarray, head_dim: int) -> None:
    for array, numbers in itertools.chain(*numbers_of(memory)):
        for shard in array.addressable_shards:
            layers = np.asarray(shard.data).reshape(len(numbers), NUM_BLOCKS, -1)
            for held, number in zip(layers, numbers, strict=True):
                want = cells[shard.device.id]
                want = spread(np.where(want < 0, before[shard.device.id], want), number, head_dim)
                known = cells[shard.device.id] >= 0
                known = np.repeat(known, head_dim, axis=-1)
                known[0] = False  # the null block takes what is padding
                np.testing.assert_array_equal(held[known], want[known])
