"""Caches that are no keys and values go through all that holds, moves and counts caches."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from shiftjax.arch.cache import CacheSpec, Entry
from shiftjax.arch.config import ModelConfig, stages_of
from shiftjax.arch.formats import formats_of
from shiftjax.arch.presets import PRESETS
from shiftjax.costs.collectives import layer_collectives
from shiftjax.costs.kernel_costs import KernelCosts
from shiftjax.costs.machine_files import load_machine
from shiftjax.costs.memory import kv_token_bytes
from shiftjax.device import pool
from shiftjax.device.mesh import make_mesh
from shiftjax.device.pool import FlatPools, PoolOptions, abstract_pools, as_stored, in_shape
from shiftjax.fleet.move_costs import MOST_CALLS
from shiftjax.fleet.mover_device import compile_exchange
from shiftjax.host_tier import copies_device
from shiftjax.host_tier.copies_device import HostTier
from shiftjax.parallel.layout import Layout

LAYERS, BLOCKS, BLOCK_SIZE = 3, 12, 4
FORMATS = formats_of("bfloat16")
POOL = PoolOptions(BLOCKS, BLOCK_SIZE, 4, np.dtype("bfloat16"))
SPECS = {
    "one": CacheSpec((Entry("latent", 1, 6),)),
    "several": CacheSpec(
        (
            Entry("latent", 1, 6),
            Entry("scale", 1, 2, format="float32"),
            Entry("index", 3, 5),
            Entry("index scale", 1, 2, format="float32"),
        )
    ),
}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Extents of one size, and a pool of two layers beside one of one."""
    monkeypatch.setattr(copies_device, "EXTENT_SIZES", (2,))
    monkeypatch.setattr(pool, "num_pools", lambda *_: 2)


@pytest.fixture(params=SPECS)
def model(request) -> ModelConfig:
    class Latents(ModelConfig):
        cache = SPECS[request.param]

    tiny = PRESETS["tiny"]
    fields = {field.name: getattr(tiny, field.name) for field in dataclasses.fields(tiny)}
    return Latents(**fields | {"num_layers": LAYERS})


def fill(layout: Layout, mesh: jax.sharding.Mesh, seed: int) -> FlatPools:
    """Pools of random numbers."""
    rng = np.random.default_rng(seed)

    def draw(array: jax.ShapeDtypeStruct) -> Any:
        return jax.device_put(rng.normal(size=array.shape).astype(array.dtype), array.sharding)

    return jax.tree.map(draw, abstract_pools(mesh, layout, BLOCKS, BLOCK_SIZE, POOL.dtype))


def of_device(pools: FlatPools, layout: Layout, place: int) -> list[np.ndarray]:
    """What a device has of each entry, `[layers, blocks, numbers]`."""
    parts = [
        [
            np.split(np.asarray(array), layout.num_devices, axis=1)[place].reshape(
                -1, BLOCKS, BLOCK_SIZE * entry.numbers
            )
            for array, entry in zip(pair, layout.cache.entries, strict=True)
        ]
        for pair in pools
    ]
    return [np.concatenate(entry) for entry in zip(*parts, strict=True)]


def test_every_device_counts_all_of_what_is_not_split(model):
    each = {1: 6 * 2, 4: 6 * 2 + 2 * 4 + 15 * 2 + 2 * 4}[len(model.cache.entries)]
    for degrees in ((1, 1), (2, 4), (8, 1)):
        layout = Layout(model, *degrees)
        assert kv_token_bytes(layout, FORMATS) == LAYERS * each
        assert layout.block_tokens(BLOCK_SIZE) == BLOCK_SIZE
        mesh = make_mesh(jax.devices(), *degrees)
        pools = abstract_pools(mesh, layout, BLOCKS, BLOCK_SIZE, POOL.dtype)
        num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pools))
        assert num_bytes == layout.num_devices * BLOCKS * BLOCK_SIZE * LAYERS * each


def test_costs_are_those_of_what_is_cached(model):
    layout = Layout(model, 2, 2)
    kernels = KernelCosts(load_machine("h100x8"), FORMATS)
    heads = kernels.attention(2, 8, Layout(PRESETS["tiny"], 1, 1).cache)  # 4 of 8 numbers
    own = kernels.attention(2, 8, layout.cache)
    each = layout.cache.num_bytes(FORMATS)
    assert own.read / heads.read == pytest.approx(each / (2 * 4 * 8 * 2))
    moved = layer_collectives(layout, layout.base, 10, 2)
    exchanges = [move.num_bytes for move in moved if move.kind == "all-to-all"]
    assert exchanges == [10 * (2 * 8 + layout.cache.numbers) * 2, 10 * 2 * 8 * 2]


def test_a_step_sees_each_entry_in_its_shape(model):
    layout = Layout(model, 1, 1)
    pools = fill(layout, make_mesh(jax.devices(), 1, 1), 0)
    shaped = in_shape(pools, layout, BLOCK_SIZE)
    sizes = [(entry.rows, BLOCK_SIZE, entry.width) for entry in model.cache.entries]
    assert [[array.shape for array in each] for each in shaped] == [
        [(count * BLOCKS, *size) for size in sizes] for count in (2, 1)
    ]
    jax.tree.map(np.testing.assert_array_equal, as_stored(shaped), pools)


def test_any_layout_reads_from_the_host_what_another_has_written(model):
    extents = {}
    written = [[] for _ in model.cache.entries]
    for first, stage in enumerate(stages_of(model, 2)):
        layout, mesh = Layout(stage, 1, 2), make_mesh(jax.devices()[2 * first :], 1, 2)
        pools = fill(layout, mesh, first)
        pools = jax.tree.map(lambda x: jax.device_put(_first_twice(x), x.sharding), pools)
        HostTier(mesh, layout, POOL, extents).offload(pools, 0, [3, 7])
        for entry, values in zip(written, of_device(pools, layout, 0), strict=True):
            entry.append(values[:, [3, 7]])
    layout, mesh = Layout(model, 2, 2), make_mesh(jax.devices(), 2, 2)
    pools = fill(layout, mesh, 9)
    before = [of_device(pools, layout, place) for place in range(4)]
    pools = HostTier(mesh, layout, POOL, extents).restore(pools, 0, [5, 2])
    for place in range(4):
        found = of_device(pools, layout, place)
        for values, kept, expected in zip(found, before[place], written, strict=True):
            kept[:, [5, 2]] = np.concatenate(expected)
            np.testing.assert_array_equal(values, kept)


def _first_twice(array: jax.Array) -> np.ndarray:
    """The same numbers on both devices: each has all rows."""
    half = np.asarray(array)[:, : array.shape[1] // 2]
    return np.concatenate([half, half], axis=1)


def test_blocks_move_between_groups_of_two_widths(model):
    """Of two narrow groups, a block each, to the wide one and back to other blocks."""
    narrow, wide = Layout(model, 1, 2, 2), Layout(model, 2, 2, 2)
    mesh = make_mesh(jax.devices(), 2, 2)
    exchange = compile_exchange(mesh, narrow, wide, POOL)
    assert (exchange.per_call, exchange.shapes.blocks, exchange.shapes.ways) == (1, 1, 2)

    def numbers(*blocks: int) -> np.ndarray:
        found = np.zeros((MOST_CALLS, 2, 1), np.int32)
        found[0, :, 0] = blocks
        return found

    pools = fill(wide, mesh, 4)
    before = [of_device(pools, wide, place) for place in range(4)]
    pools = exchange.to_wide(pools, np.int32(1), numbers(3, 4)[..., None], numbers(5, 6))
    pools = exchange.to_narrow(pools, np.int32(1), numbers(5, 6), numbers(7, 8)[..., None])
    for place, own in enumerate(before):
        unit, me = place // 2 * 2, place % 2  # neighbours are of two narrow groups
        for nth, values in enumerate(of_device(pools, wide, place)):
            own[nth][:, 5], own[nth][:, 6] = before_of(before, unit, nth)
            own[nth][:, 7 + me] = own[nth][:, 5 + me]
            np.testing.assert_array_equal(values, own[nth])


def before_of(before: list[list[np.ndarray]], unit: int, nth: int) -> tuple[np.ndarray, np.ndarray]:
    """What the two narrow groups had in the blocks that move."""
    return before[unit][nth][:, 3].copy(), before[unit + 1][nth][:, 4].copy()
