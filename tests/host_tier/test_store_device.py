"""What one layout has written to the host, any other reads: other heads, layers, devices."""

import random
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from shiftjax.arch.config import stages_of
from shiftjax.arch.presets import PRESETS
from shiftjax.core.tier import UnitRestore
from shiftjax.device import pool
from shiftjax.device.mesh import make_mesh, named, pool_spec
from shiftjax.device.pool import FlatPools, PoolOptions, abstract_pools
from shiftjax.host_tier import copies_device as host_tier
from shiftjax.host_tier.copies_device import HostTier
from shiftjax.host_tier.store_device import Extents, Row, Rows, Shard, piece, units_piece
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.positions import Positions

NUM_LAYERS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS, SIZE = 7, 2, 8, 12, 4
POOL = PoolOptions(NUM_BLOCKS, BLOCK_SIZE, 4, np.dtype(np.float32))
# pp, sp, tp: stages of uneven layers, heads that are padded (3) or replicated (3 and 4 on 8).
DEGREES = [(1, 1, 1), (1, 2, 2), (1, 2, 4), (2, 1, 2), (3, 1, 1), (4, 2, 1)]
SPLIT = [(1, 2, 2), (1, 2, 4), (4, 2, 1)]  # the same again, where devices may split positions
MOST_LAYERS = 3  # in a pool
UNTOUCHED = -1.0


class Stage(NamedTuple):
    """One stage of a group, and its way to the host."""

    mesh: Mesh
    layout: Layout
    tier: HostTier

    @property
    def layers(self) -> range:
        stage = self.layout.model.stage
        first = stage.first if stage else 0
        return range(first, first + self.layout.model.num_layers)

    def shards(self, whole: np.ndarray) -> np.ndarray:
        """Of `[layers, 2, blocks, heads, tokens, head_dim]` what each device has, devices third.

        Where devices split positions, each has one run of the tokens of a block.
        """
        layout = self.layout
        padding = layout.num_kv_heads - whole.shape[3]
        whole = np.pad(whole, [(0, 0)] * 3 + [(0, padding)] + [(0, 0)] * 2)
        own = BLOCK_SIZE // layout.position_ways
        held = []
        for device in range(layout.num_devices):
            mine = np.arange(BLOCK_SIZE) // own == device % layout.position_ways
            heads = layout.kv_heads_of(device)
            held.append(whole[self.layers][:, :, :, heads][..., mine, :])
        return np.stack(held, axis=2)

    def pools(self, shards: np.ndarray) -> FlatPools:
        """Shards as the devices have them."""
        flat = shards.reshape(*shards.shape[:4], -1).swapaxes(2, 3)
        flat = flat.reshape(*flat.shape[:3], -1)
        place = named(self.mesh, pool_spec())
        own = abstract_pools(self.mesh, self.layout, NUM_BLOCKS, BLOCK_SIZE, POOL.dtype)
        counts = [k.shape[0] // NUM_BLOCKS for k, _ in own]
        assert max(counts) <= MOST_LAYERS
        parts = np.split(flat, np.cumsum(counts)[:-1])
        pairs = ([part[:, i].reshape(-1, flat.shape[-1]) for i in range(2)] for part in parts)
        return [(jax.device_put(k, place), jax.device_put(v, place)) for k, v in pairs]

    def seen(self, pools: FlatPools, shape: tuple[int, ...]) -> np.ndarray:
        """Undo `pools`."""
        arrays = [[np.asarray(array) for array in pair] for pair in pools]
        parts = [[x.reshape(-1, NUM_BLOCKS, x.shape[1]) for x in pair] for pair in arrays]
        flat = np.concatenate([np.stack(pair, axis=1) for pair in parts])
        flat = flat.reshape(*flat.shape[:3], self.layout.num_devices, -1)
        return flat.swapaxes(2, 3).reshape(shape)


@cache
def groups_of(num_kv_heads: int) -> tuple[Extents, dict[tuple[int, ...], list[Stage]]]:
    """A store and groups of all degrees, which begin at other devices; a fourth 1: split ones."""
    model = replace(
        PRESETS["tiny"],
        num_layers=NUM_LAYERS,
        head_dim=HEAD_DIM,
        num_heads=3 * num_kv_heads,
        num_kv_heads=num_kv_heads,
    )
    extents: Extents = {}
    groups: dict[tuple[int, ...], list[Stage]] = {}
    split = [(*d, 1) for d in SPLIT if Layout(model, *d[1:], by_position=True).position_ways > 1]
    for number, (pp, sp, tp, *by_position) in enumerate(DEGREES + split):
        stages, devices = [], [*jax.devices()[number % 8 :], *jax.devices()[: number % 8]]
        for nth, of_stage in enumerate(stages_of(model, pp)):
            layout = Layout(of_stage, sp, tp, by_position=bool(by_position))
            mesh = make_mesh(devices[nth * sp * tp :], sp, tp)
            stages.append(Stage(mesh, layout, HostTier(mesh, layout, POOL, extents)))
        groups[pp, sp, tp, *by_position] = stages
    return extents, groups


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Extents of one size are enough here; of seven layers a pool holds three."""
    monkeypatch.setattr(host_tier, "EXTENT_SIZES", (SIZE,))

    def layers(num_layers: int, *_) -> int:
        return -(-num_layers // MOST_LAYERS)

    monkeypatch.setattr(pool, "num_pools", layers)


@pytest.mark.costs(9)
@pytest.mark.parametrize(("num_kv_heads", "num_split"), [(1, 3), (3, 1), (4, 1), (8, 0)])
def test_any_layout_reads_what_another_has_written(num_kv_heads, num_split):
    """Against NumPy, all pairs; one block of the extent is not wanted."""
    extents, groups = groups_of(num_kv_heads)
    assert len(groups) == len(DEGREES) + num_split
    rng = random.Random(num_kv_heads)
    shape = NUM_LAYERS, 2, NUM_BLOCKS, num_kv_heads, BLOCK_SIZE, HEAD_DIM
    for number, writer in enumerate(groups):
        given = np.random.default_rng(number).normal(size=shape).astype(np.float32)
        blocks = rng.sample(range(1, NUM_BLOCKS), SIZE)
        for stage in groups[writer]:
            stage.tier.offload(stage.pools(stage.shards(given)), number, blocks)
        for reader in groups:
            targets = rng.sample(range(1, NUM_BLOCKS), SIZE)
            targets[rng.randrange(SIZE)] = 0
            expected = np.full(shape, UNTOUCHED, np.float32)
            for block, target in zip(blocks, targets, strict=True):
                expected[:, :, target] = given[:, :, block]
            others = [block for block in range(NUM_BLOCKS) if block not in targets]
            for stage in groups[reader]:
                want = stage.shards(expected)
                empty = np.full_like(want, UNTOUCHED)
                want[:, :, :, others] = UNTOUCHED  # padded heads, too
                pools = stage.tier.restore(stage.pools(empty), number, targets)
                got = stage.seen(pools, want.shape)
                np.testing.assert_array_equal(got, want, f"{writer} to {reader}")
    extents.clear()


def test_a_extent_that_is_not_whole_is_not_read():
    """One stage of the writer is missing, or its copy has failed; no reader gets anything else."""
    extents, groups = groups_of(4)
    shape = NUM_LAYERS, 2, NUM_BLOCKS, 4, BLOCK_SIZE, HEAD_DIM
    first, second = groups[2, 1, 2]
    blocks = list(range(1, SIZE + 1))
    for number, stage in ((0, first), (1, first), (1, second)):
        stage.tier.offload(stage.pools(stage.shards(np.ones(shape, np.float32))), number, blocks)
    extents[1][1].array.delete()
    (whole,), parts = groups[1, 2, 2], groups[3, 1, 1]
    empty = [s.pools(s.shards(np.zeros(shape, np.float32))) for s in (whole, *parts)]
    with pytest.raises(KeyError, match="not all of an extent"):
        whole.tier.restore(empty[0], 0, blocks)
    parts[0].tier.restore(empty[1], 0, blocks)  # its layers are there
    with pytest.raises(KeyError, match="not all of an extent"):
        parts[2].tier.restore(empty[3], 0, blocks)
    for stage, pools in zip((whole, *parts[1:]), (empty[0], *empty[2:]), strict=True):
        with pytest.raises(RuntimeError, match="deleted"):
            stage.tier.restore(pools, 1, blocks)
    with pytest.raises(KeyError):
        whole.tier.restore(empty[0], 2, blocks)
    extents.clear()


STRIPE = 24
SPLITS = st.sampled_from([n for n in range(1, STRIPE + 1) if STRIPE % n == 0]).map(
    lambda ways: Positions(ways, STRIPE // ways)
)


@settings(max_examples=60, deadline=None)
@given(SPLITS, SPLITS, st.permutations(range(4)), st.integers(0, 1 << 30))
def test_any_split_of_positions_reads_any_other(theirs, ours, blocks, seed):
    """Also of heads that several devices have, and devices that come in any order."""
    rng = np.random.default_rng(seed)
    whole = rng.normal(size=(6, 2, len(blocks), STRIPE, 3))  # layers and entries, heads, blocks
    held = [Row(head, run) for head in range(2) for run in range(theirs.ways)]

    def of(row: Row, split: Positions) -> np.ndarray:
        own = whole[:, row.number, blocks, row.run * split.block :][..., : split.block, :]
        return own.reshape(6, 1, -1, 3)

    order = [held[i] for i in rng.permutation([*range(len(held)), rng.integers(len(held))])]
    shards = [Shard(of(row, theirs), range(3, 6), Rows((row,), theirs)) for row in order]
    for row in (Row(1, run) for run in range(ours.ways)):
        got = piece(shards, range(4, 6), Rows((row,), ours), 2)
        np.testing.assert_array_equal(got, of(row, ours)[2:])
    lost = Row(held[0].number, held[0].run * theirs.block // ours.block)
    lacks = [shard for shard in shards if shard.held.rows != (held[0],)]
    if lacks:
        with pytest.raises(KeyError, match="not all of an extent"):
            piece(lacks, range(4, 6), Rows((lost,), ours), 2)
    with pytest.raises(ValueError, match="Blocks of an extent have 24 tokens, not 48"):
        piece(shards, range(4, 6), Rows((Row(0),), Positions(2, STRIPE)), 2)


UNIT = 4  # tokens


def splits_of(stripe: int) -> list[Positions]:
    """As units, and what they split into, have them."""
    ways = [2**n for n in range(4) if stripe % 2**n == 0]
    return [Positions(each, stripe // each, each // over) for each in ways for over in (1, each)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_units_are_read_by_groups_whose_blocks_have_any_size(data):
    """Against the definition: what tokens of which head are where."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3))
    shards, wholes = {}, []  # by extent; units of each, `[6, 2 heads, UNIT, 3]`
    for number, several in enumerate(sizes):
        theirs = data.draw(st.sampled_from(splits_of(several * UNIT)))
        num_blocks = data.draw(st.integers(1, 3))
        whole = rng.normal(size=(6, 2, num_blocks, theirs.ways, theirs.block, 3))
        held = [Row(head, run) for head in range(2) for run in range(theirs.ways)]
        shards[number] = [
            Shard(
                whole[:, row.number, :, row.run].reshape(6, 1, -1, 3),
                range(3, 6),
                Rows((row,), theirs),
            )
            for row in (held[i] for i in rng.permutation(len(held)))
        ]
        tokens = whole.reshape(6, 2, -1, UNIT, 3)
        wholes += [((number, n), tokens[:, :, n]) for n in range(num_blocks * several)]
    start = data.draw(st.integers(0, len(wholes) - 1))
    some = wholes[start:] + wholes[: data.draw(st.integers(0, start))]
    several = data.draw(st.sampled_from([1, 2, 4]))
    ours = data.draw(st.sampled_from(splits_of(several * UNIT)))
    num_blocks = -(-len(some) // several)
    expected = np.zeros((6, 2, num_blocks * several * UNIT, 3))
    expected[:, :, : len(some) * UNIT] = np.concatenate([each for _, each in some], axis=2)
    by_run = expected.reshape(6, 2, num_blocks, ours.ways, ours.block, 3)
    for run in range(ours.ways):
        rows = Rows((Row(1, run), Row(0, run)), ours)
        got = units_piece(
            [unit for unit, _ in some], shards, UNIT, range(4, 6), rows, 2, num_blocks
        )
        want = by_run[2:, ::-1, :, run].reshape(4, 2, -1, 3)
        np.testing.assert_array_equal(got, want)


class Width(NamedTuple):
    """The groups of a fleet of one width, as one of them is."""

    mesh: Mesh
    layout: Layout
    size: int  # tokens of a block
    tier: HostTier

    def held(self, tokens: np.ndarray) -> np.ndarray:
        """Of `[layers, 2, heads, tokens, dim]` the blocks of each device, `[devices, ...]`."""
        positions = self.layout.positions(self.size) or Positions(1, self.size)
        blocks = tokens.reshape(*tokens.shape[:3], -1, self.size, HEAD_DIM).swapaxes(2, 3)
        owners = positions.owner(np.arange(self.size))
        return np.stack(
            [
                blocks[:, :, :, self.layout.kv_heads_of(place)][
                    ..., owners == place % positions.ways, :
                ].reshape(*blocks.shape[:3], -1)
                for place in range(self.layout.num_devices)
            ]
        )

    def pools(self, tokens: np.ndarray) -> FlatPools:
        """Of these tokens, in the blocks from 1 on; all else is untouched."""
        held = self.held(tokens)
        rows = np.full((*held.shape[:3], NUM_BLOCKS, held.shape[-1]), UNTOUCHED, np.float32)
        rows[:, :, :, 1 : 1 + held.shape[3]] = held
        flat = rows.transpose(1, 2, 3, 0, 4).reshape(2, 2, NUM_BLOCKS, -1)
        place = named(self.mesh, pool_spec())
        own = abstract_pools(self.mesh, self.layout, NUM_BLOCKS, self.size, POOL.dtype)
        ends = np.cumsum([k.shape[0] // NUM_BLOCKS for k, _ in own])
        return [
            tuple(jax.device_put(each[:, i].reshape(k.shape), place) for i in range(2))
            for each, (k, _) in zip(np.split(flat, ends[:-1]), own, strict=True)
        ]


@pytest.mark.parametrize("by_position", [False, True])
def test_groups_of_a_fleet_read_what_other_widths_have_written(by_position):
    """On devices, from and to every width: units of a extent, whose last block is not full."""
    model = replace(PRESETS["tiny"], num_layers=2, head_dim=HEAD_DIM, num_heads=8, num_kv_heads=2)
    extents: Extents = {}
    widths: list[Width] = []
    for width in (1, 2, 4):
        layout = Layout(model, width, 1, widest=4, by_position=by_position)
        mesh, size = make_mesh(jax.devices()[width:], width, 1), layout.block_tokens(UNIT)
        pool = PoolOptions(NUM_BLOCKS, size, 4, np.dtype(np.float32))
        widths.append(Width(mesh, layout, size, HostTier(mesh, layout, pool, extents)))
    assert [each.size for each in widths] == [4, 8, 16 if by_position else 8]
    given = np.random.default_rng(1).normal(size=(2, 2, 2, 64, HEAD_DIM)).astype(np.float32)
    for number, writer in enumerate(widths):
        source = writer.pools(given[:, :, :, : SIZE * writer.size])
        writer.tier.offload(source, number, range(1, 1 + SIZE))
        for reader in widths:
            num_units = min(SIZE * writer.size, SIZE * reader.size) // UNIT - 1
            units = [(number, 1 + n) for n in range(num_units)]
            num_blocks = -(-num_units * UNIT // reader.size)
            targets = [*range(1, 1 + num_blocks)] + [0] * (SIZE - num_blocks)
            wanted = np.zeros((2, 2, 2, num_blocks * reader.size, HEAD_DIM), np.float32)
            part = given[:, :, :, UNIT : (1 + num_units) * UNIT]
            wanted[:, :, :, : num_units * UNIT] = part
            whole = reader.pools(wanted)
            empty = jax.tree.map(
                lambda each: jax.device_put(np.full_like(each, UNTOUCHED), each.sharding), whole
            )
            restore = UnitRestore(units, targets, UNIT)
            got = jax.tree.leaves(reader.tier.restore_units(empty, restore))
            for pair in zip(got, jax.tree.leaves(whole), strict=True):
                arrays = (np.asarray(each).reshape(-1, NUM_BLOCKS, each.shape[-1]) for each in pair)
                have, expected = (each[:, 1:] for each in arrays)  # without the null block
                np.testing.assert_array_equal(have, expected)
