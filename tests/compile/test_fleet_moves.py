"""Moves between the groups of a fleet, compiled for 8 H200s on a machine that has none.

Nothing of a move is as large as a pool: running sequences change hands in the memory that they
have, and what a call needs besides is bounded by its blocks, however many calls are turns of one
program, which is one launch by the host.
"""

import itertools
from dataclasses import replace
from typing import NamedTuple

import aot
import jax
import pytest
from hlo import collectives, entry, instructions, shape_bytes

from serving.bench.thunks import dumped_thunks, top_level
from shiftjax.arch.formats import formats_of
from shiftjax.costs.memory import kv_token_bytes
from shiftjax.device.gpu_options import ONE_GRAPH
from shiftjax.device.mesh import group_mesh
from shiftjax.device.pool import FlatPools, abstract_pools
from shiftjax.fleet.mover_device import compile_copies, compile_exchange
from shiftjax.parallel.arrangements import possible_widths
from shiftjax.parallel.grid import Grid, Group, Mode

aot.require()
pytestmark = pytest.mark.thorough

from steps import (  # noqa: E402
    BLOCK_SIZE,
    FLEETS,
    Case,
    chip_devices,
    device_bytes,
    llama_70b,
)

POOL_SHARE = 256  # of a pool a call moves one part
FREE = ("parameter", "tuple", "get-tuple-element", "bitcast")
MOST_COPIES = 2.5  # of temporaries: what goes, what comes, and the numbers of blocks


class Pair(NamedTuple):
    """A narrow and a wide group of a fleet."""

    units: int
    tp: int
    narrow: int
    wide: int
    splits: bool = False  # positions of 2 KV heads

    def case(self, width: int) -> Case:
        model = replace(llama_70b(2), num_kv_heads=2) if self.splits else None
        own = {"units": self.units, "model": model, "by_position": self.splits}
        return Case(width, self.tp, Mode(width, 1), **own)

    def mesh(self, devices: list) -> jax.sharding.Mesh:
        """Of the wide group; the last one of its width: no layout may depend on which it is."""
        group = Group(self.units - self.wide, self.wide)
        return group_mesh(devices, Grid(self.tp, self.units), group)


PAIRS = [
    Pair(*fleet, *widths)
    for fleet in FLEETS
    for widths in itertools.combinations(possible_widths(fleet[0]), 2)
]
PAIRS += [Pair(8, 1, *widths, splits=True) for widths in ((1, 8), (2, 8), (1, 2))]


@pytest.fixture(scope="module")
def devices() -> list:
    return chip_devices()


def assert_in_place(step: jax.stages.Compiled, mesh: jax.sharding.Mesh, case: Case) -> None:
    """Every pool is written where it is, once in a turn, and nothing else is as large as one."""
    blocks = case.pool.num_blocks, case.pool.block_size
    pools: FlatPools = abstract_pools(mesh, case.layout, *blocks, case.pool.dtype)
    text, pool = step.as_text(), device_bytes(pools[0][0])
    assert step.memory_analysis().alias_size_in_bytes == device_bytes(pools)
    assert text.splitlines()[0].count("may-alias") == 2 * len(pools)
    large = [one for one in instructions(text) if shape_bytes(one.shape) >= pool]
    kinds = sorted(one.opcode for one in large if one.opcode not in FREE)
    writes = 2 * len(pools)
    assert kinds == ["fusion"] * writes + ["scatter"] * writes + ["while"]
    assert sum("calls=%fused_scatter" in one.rest for one in large) == writes
    assert sum(one.opcode == "while" for one in entry(text)) == 1


@pytest.mark.parametrize(
    "pair", PAIRS, ids="{0.units}x{0.tp}-{0.narrow}-{0.wide}-{0.splits}".format
)
def test_blocks_are_exchanged_in_place_by_one_all_to_all_of_their_bytes(pair, devices):
    """In both directions: a device gets its part of every group, and nothing more."""
    narrow, wide, mesh = pair.case(pair.narrow), pair.case(pair.wide), pair.mesh(devices)
    pool = narrow.pool
    with dumped_thunks() as (dump, thunks):
        exchange = compile_exchange(mesh, narrow.layout, wide.layout, pool, ONE_GRAPH | dump)
        assert top_level(thunks()) == ["CommandBuffer"]
    block = BLOCK_SIZE * kv_token_bytes(pair.case(1).layout, formats_of("bfloat16"))
    ways = pair.wide // pair.narrow
    one = ways * exchange.per_call * block
    assert ways * exchange.per_call == pool.num_blocks // POOL_SHARE > 0
    for step in (exchange.to_wide, exchange.to_narrow):
        assert collectives(step.as_text()) == {("all-to-all", one): 1}
        assert step.memory_analysis().temp_size_in_bytes <= MOST_COPIES * one
        assert_in_place(step, mesh, wide)


@pytest.mark.parametrize(
    ("fleet", "width"), [(fleet, width) for fleet in FLEETS for width in (1, fleet[0])]
)
def test_blocks_are_copied_in_their_pool_without_another_one(fleet, width, devices):
    pair = Pair(*fleet, width, width)
    case, mesh = pair.case(width), pair.mesh(devices)
    with dumped_thunks() as (dump, thunks):
        copies = compile_copies(mesh, case.layout, case.pool, ONE_GRAPH | dump)
        assert top_level(thunks()) == ["CommandBuffer"]
    assert collectives(copies.step.as_text()) == {}
    one = (
        copies.per_call * case.pool.block_size * kv_token_bytes(case.layout, formats_of("bfloat16"))
    )
    assert copies.step.memory_analysis().temp_size_in_bytes <= MOST_COPIES * one
    assert_in_place(copies.step, mesh, case)
