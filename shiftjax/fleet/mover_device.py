"""KV blocks change their layout: running sequences move between groups of different widths.

A device of a wide group has some of the rows that it has in a narrower one, of more tokens. So the
`ways` devices that hold the same narrow rows between them exchange what each has too much: one
all-to-all for all layers and entries that look alike (`CacheSpec.alike`), in place in the pools,
which are donated. In the order of places of the wide group these devices are neighbours
(`parallel/grid.py`).

Where there are no more rows to split they keep copies; or they split positions, and blocks go to
each in turn, whole ones: to the t-th of `turns` those whose number is t with its digits reversed
(`parallel/positions.py`). With two rows and four devices that exchange, narrow blocks 0 to 3:

    device 0: row 0 of 0, 1    device 1: row 0 of 2, 3    device 2: row 1 of 0, 1    device 3: ...

Bytes that a device sends in a call: `per_call` blocks, less the part that it keeps, 1 / ways.
Blocks are numbers in an int32 vector, padded with the null block, so any sequences of all groups
travel together, and nothing is compiled for them.

They are few because they bound the temporaries, so calls are many where blocks are large. Calls
are turns of a loop in one program: to dispatch a program with the pools of all layers on all
devices takes the host as long as many calls take the devices.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from shiftjax.arch.cache import Entry, LayerCache, layers_of_pools
from shiftjax.device.group_memory import GroupMemory
from shiftjax.device.mesh import exchange_mesh, exchange_spec, named, replicated_spec
from shiftjax.device.pool import (
    FlatPools,
    PoolOptions,
    abstract_pools,
    read_blocks,
    write_blocks,
)
from shiftjax.device.programs import COMPILE_THREADS
from shiftjax.device.retarget import load_on
from shiftjax.fleet.handover import Copy, Crossing, Pair, calls
from shiftjax.fleet.move_costs import MOST_CALLS, blocks_per_call
from shiftjax.parallel.grid import Device, Group
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.positions import reversed_digits

logger = logging.getLogger(__name__)
Options = Mapping[str, str]  # of the compiler
NO_OPTIONS: Options = MappingProxyType({})


class Shapes(NamedTuple):
    """How a block of a device looks in a narrow and in a wide layout of the same bytes."""

    narrow: tuple[LayerCache, ...]
    wide: tuple[LayerCache, ...]
    narrow_tokens: int  # that a device has of a block
    wide_tokens: int
    ways: int  # devices that exchange, narrow groups in the wide one
    turns: int  # of these, devices that split the positions of a narrow one; 1: they do not

    @classmethod
    def of(cls, narrow: Layout, wide: Layout, narrow_tokens: int) -> "Shapes":
        """From the layouts and the tokens of a narrow block."""
        ways, tokens = wide.sp // narrow.sp, wide.block_tokens(narrow_tokens, narrow)
        own = narrow_tokens // narrow.position_ways, tokens // wide.position_ways
        turns = wide.position_ways // narrow.position_ways
        return cls(narrow.caches, wide.caches, *own, ways, turns)

    @property
    def parts(self) -> int:
        """Devices that split the rows of a narrow one; narrow blocks in a run of a wide one."""
        return self.wide_tokens // self.narrow_tokens

    @property
    def blocks(self) -> int:
        """Narrow blocks that hold the tokens of a wide one."""
        return self.turns * self.parts

    @property
    def copies(self) -> int:
        """Devices that keep the same of a wide block."""
        return self.ways // self.blocks

    @property
    def order(self) -> np.ndarray:
        """By turn, which of the runs of narrow blocks a device gets; and by run, whose turn."""
        return np.array([reversed_digits(turn, self.turns) for turn in range(self.turns)])

    def exchanged(
        self,
        kept: Sequence[Array],
        num_pools: int,
        exchange: Callable[[Array, Entry, Entry], Array],
    ) -> list[Array]:
        """Return what `exchange` makes of the arrays of `read_blocks`: of those alike in one call.

        It is given these one after the other, and their entry in the narrow and the wide layout.
        """
        made, held = list(kept), [c for c, _ in layers_of_pools(self.narrow, num_pools)]
        owners = [(cache.heads, i) for cache in held for i, _ in enumerate(cache.spec.entries)]
        for narrow, wide in zip(self.narrow, self.wide, strict=True):
            for alike in narrow.spec.alike:
                wanted = [(narrow.heads, each) for each in alike]
                places = [i for i, owner in enumerate(owners) if owner in wanted]
                some = [kept[i] for i in places]
                entries = (cache.spec.entries[alike[0]] for cache in (narrow, wide))
                got = exchange(jnp.concatenate(some), *entries)
                ends = list(itertools.accumulate(map(len, some[:-1])))
                for i, part in zip(places, jnp.split(got, ends), strict=True):
                    made[i] = part
        return made


def widen(
    shapes: Shapes,
    pools: FlatPools,
    sources: Int[Array, "ways per_call blocks"],
    targets: Int[Array, "ways per_call"],
) -> FlatPools:
    """On one device: give away narrow blocks of its group, and keep wide blocks of every group."""
    me, (ways, per_call) = jax.lax.axis_index("exchange"), targets.shape

    def exchange(own: Array, narrow: Entry, wide: Entry) -> Array:
        num, parts, turns = len(own), shapes.parts, shapes.turns
        shape = num, per_call, turns, parts, narrow.rows, shapes.narrow_tokens, narrow.width
        # Rows first, then whose turn it is, and blocks of a run next to tokens.
        split = own.reshape(shape).transpose(4, 2, 0, 1, 3, 5, 6)
        size = num, per_call, shapes.wide_tokens, wide.width
        split = split.reshape(parts, wide.rows, turns, *size).swapaxes(1, 2)
        if turns > 1:
            split = split[:, shapes.order]
        split = split.reshape(parts * turns, wide.rows, *size)
        split = jnp.repeat(split, shapes.copies, axis=0)  # each part for those that have it
        got = jax.lax.all_to_all(split, "exchange", 0, 0)  # of every group its per_call
        return got.transpose(2, 0, 3, 1, 4, 5).reshape(num, ways * per_call, -1)

    kept = read_blocks(pools, shapes.narrow, sources[me])
    made = shapes.exchanged(kept, len(pools), exchange)
    return write_blocks(pools, shapes.narrow, targets.reshape(-1), made)


def narrow(
    shapes: Shapes,
    pools: FlatPools,
    sources: Int[Array, "ways per_call"],
    targets: Int[Array, "ways per_call blocks"],
) -> FlatPools:
    """On one device: undo `widen`; of rows that several devices keep the first one's are taken."""
    me, (ways, per_call) = jax.lax.axis_index("exchange"), sources.shape

    def exchange(own: Array, narrow: Entry, wide: Entry) -> Array:
        num, parts, turns = len(own), shapes.parts, shapes.turns
        own = own.reshape(num, ways, per_call, wide.rows, shapes.wide_tokens, wide.width)
        got = jax.lax.all_to_all(own.transpose(1, 3, 0, 2, 4, 5), "exchange", 0, 0)
        size = num, per_call, parts, shapes.narrow_tokens, narrow.width
        got = got[:: shapes.copies].reshape(parts, turns, wide.rows, *size)
        if turns > 1:
            got = got[:, shapes.order]
        got = got.swapaxes(1, 2).reshape(narrow.rows, turns, *size).transpose(2, 3, 1, 4, 0, 5, 6)
        return got.reshape(num, per_call * shapes.blocks, -1)

    made = shapes.exchanged(read_blocks(pools, shapes.narrow, sources), len(pools), exchange)
    return write_blocks(pools, shapes.narrow, targets[me].reshape(-1), made)


type Call = Callable[..., FlatPools]  # pools, numbers of blocks -> pools


def in_turns(call: Call) -> Call:
    """Return a function of pools, a count, and the numbers of up to `MOST_CALLS` calls."""

    def calls(pools: FlatPools, count: Int[Array, ""], *numbers: Array) -> FlatPools:
        def turn(i: Int[Array, ""], pools: FlatPools) -> FlatPools:
            return call(pools, *(each[i] for each in numbers))

        return jax.lax.fori_loop(0, count, turn, pools)

    return calls


class Exchange(NamedTuple):
    """The two compiled directions of a pair of widths, for one wide group."""

    shapes: Shapes
    per_call: int  # wide blocks of each narrow group in a call
    to_wide: jax.stages.Compiled
    to_narrow: jax.stages.Compiled


def compile_exchange(
    mesh: Mesh,
    narrow_layout: Layout,
    wide_layout: Layout,
    narrow_pool: PoolOptions,
    options: Options = NO_OPTIONS,
) -> Exchange:
    """Compile the exchange between a wide group, by its mesh, and groups of another layout."""
    size = narrow_pool.block_size
    shapes = Shapes.of(narrow_layout, wide_layout, size)
    sizes = narrow_pool.num_blocks, wide_layout.block_tokens(size, narrow_layout)
    pools = abstract_pools(mesh, wide_layout, *sizes, narrow_pool.dtype)
    per_call = blocks_per_call(narrow_pool.num_blocks, shapes.ways)
    exchange, spec = exchange_mesh(mesh, shapes.ways), exchange_spec()

    def compiled(function: Any, *sizes: tuple[int, ...]) -> jax.stages.Compiled:
        mapped = jax.shard_map(
            in_turns(functools.partial(function, shapes)),
            mesh=exchange,
            in_specs=(spec, *[replicated_spec()] * 3),
            out_specs=spec,
            check_vma=False,
        )
        return _compiled(mapped, pools, mesh, options, *sizes)

    one = MOST_CALLS, shapes.ways, per_call
    many = *one, shapes.blocks
    return Exchange(shapes, per_call, compiled(widen, many, one), compiled(narrow, one, many))


class Copies(NamedTuple):
    """The compiled copy of blocks inside the pools of one group."""

    per_call: int  # blocks that a call copies
    step: jax.stages.Compiled


def _compiled(
    function: Any, pools: Any, mesh: Mesh, options: Options, *sizes: tuple[int, ...]
) -> jax.stages.Compiled:
    """Compile a function of pools, donated, a count, and numbers of these shapes."""
    everywhere = named(mesh, replicated_spec())
    numbers = [jax.ShapeDtypeStruct(s, jnp.int32, sharding=everywhere) for s in ((), *sizes)]
    stays = jax.tree.map(lambda pool: pool.sharding, pools)
    step = jax.jit(function, donate_argnums=0, out_shardings=stays)
    return step.lower(pools, *numbers).compile(compiler_options=dict(options))


def compile_copies(
    mesh: Mesh, layout: Layout, pool: PoolOptions, options: Options = NO_OPTIONS
) -> Copies:
    """Compile the copy of blocks in place, for a group by its mesh.

    All blocks of a call are read before any is written.
    """
    sizes = pool.num_blocks, pool.block_size
    abstract = abstract_pools(mesh, layout, *sizes, pool.dtype)
    per_call = blocks_per_call(pool.num_blocks, 1)

    def copies(pools: FlatPools, numbers: Int[Array, "per_call 2"]) -> FlatPools:
        kept = read_blocks(pools, layout.caches, numbers[:, 0])
        return write_blocks(pools, layout.caches, numbers[:, 1], kept)

    return Copies(
        per_call, _compiled(in_turns(copies), abstract, mesh, options, (MOST_CALLS, per_call, 2))
    )


def load_programs[Made: Exchange | Copies](
    made: Made, devices: Sequence[Device], others: Sequence[Device]
) -> Made:
    """Return the programs of one group for another one. Raises where that cannot be done."""
    programs = {
        name: load_on(program, devices, others)
        for name, program in made._asdict().items()
        if isinstance(program, jax.stages.Compiled)
    }
    return made._replace(**programs)


class DeviceMover:
    """Moves blocks between the groups of a fleet; see `fleet.handover.Mover`."""

    def __init__(
        self,
        memories: Mapping[Group, GroupMemory],
        pools: Mapping[int, PoolOptions],
        options: Options = NO_OPTIONS,
    ):
        self._memories = memories
        self._exchanges, self._copies = _compile_all(memories, pools, options)

    def move(self, crossing: Crossing) -> None:
        """Dispatch what a crossing says; nothing is awaited."""
        memory = self._memories[crossing.wide]
        exchange = self._exchanges[crossing.wide, crossing.narrow_width]
        step = exchange.to_wide if crossing.to_wide else exchange.to_narrow
        made = calls(crossing.pairs, exchange.shapes.ways, exchange.per_call)
        for some in itertools.batched(made, MOST_CALLS):
            many, one = _numbers(exchange, some)
            numbers = (many, one) if crossing.to_wide else (one, many)
            numbers = jax.device_put((np.int32(len(some)), *numbers), memory.everywhere)
            memory.pools = step(memory.pools, *numbers)

    def compact(self, copy: Copy) -> None:
        """Dispatch copies inside the pools of a group."""
        memory, copies = self._memories[copy.group], self._copies[copy.group]
        for part in itertools.batched(copy.blocks, MOST_CALLS * copies.per_call):
            numbers = np.zeros((MOST_CALLS * copies.per_call, 2), np.int32)
            numbers[: len(part)] = part
            count = np.int32(-(-len(part) // copies.per_call))
            numbers = count, numbers.reshape(MOST_CALLS, copies.per_call, 2)
            memory.pools = copies.step(memory.pools, *jax.device_put(numbers, memory.everywhere))


def _numbers(
    exchange: Exchange, calls: Sequence[Sequence[Sequence[Pair]]]
) -> tuple[np.ndarray, np.ndarray]:
    """The block numbers of some calls: narrow ones `[calls, ways, per_call, blocks]`, wide ones."""
    shapes, per_call = exchange.shapes, exchange.per_call
    one = np.zeros((MOST_CALLS, shapes.ways, per_call), np.int32)
    many = np.zeros((*one.shape, shapes.blocks), np.int32)
    for number, call in enumerate(calls):
        for place, pairs in enumerate(call):
            for nth, (_, blocks, wide) in enumerate(pairs):
                many[number, place, nth, : len(blocks)] = blocks
                one[number, place, nth] = wide
    return many, one


def _compile_all(
    memories: Mapping[Group, GroupMemory], pools: Mapping[int, PoolOptions], options: Options
) -> tuple[dict[tuple[Group, int], Exchange], dict[Group, Copies]]:
    """Every pair of widths and every width: compiled for its first group, loaded on the others."""
    groups = {width: [group for group in memories if group.width == width] for width in pools}
    pairs = [(wide, narrow) for wide in pools for narrow in pools if narrow < wide]

    def exchange(group: Group, narrow: int) -> Exchange:
        layout, memory = memories[groups[narrow][0]].layout, memories[group]
        return compile_exchange(memory.mesh, layout, memory.layout, pools[narrow], options)

    def copies(group: Group) -> Copies:
        memory = memories[group]
        return compile_copies(memory.mesh, memory.layout, pools[group.width], options)

    with ThreadPoolExecutor(COMPILE_THREADS) as threads:
        exchanges = {pair: threads.submit(exchange, groups[pair[0]][0], pair[1]) for pair in pairs}
        copied = {width: threads.submit(copies, groups[width][0]) for width in pools}
    found: dict[tuple[Group, int], Exchange] = {}
    for (wide, narrow), job in exchanges.items():
        make = functools.partial(exchange, narrow=narrow)
        made = _on_all(job.result(), groups[wide], memories, pools[wide], make)
        found |= {(group, narrow): each for group, each in made.items()}
    found_copies: dict[Group, Copies] = {}
    for width, job in copied.items():
        found_copies |= _on_all(job.result(), groups[width], memories, pools[width], copies)
    return found, found_copies


def _on_all[Made: Exchange | Copies](
    made: Made,
    groups: Sequence[Group],
    memories: Mapping[Group, GroupMemory],
    pool: PoolOptions,
    make: Callable[[Group], Made],
) -> dict[Group, Made]:
    """What was made for the first group for all of them: loaded, or made where that fails."""
    found = {groups[0]: made}
    devices = list(memories[groups[0]].mesh.devices.flat)
    for group in groups[1:]:
        memory = memories[group]
        try:
            loaded = load_programs(made, devices, list(memory.mesh.devices.flat))
            _try_out(memory, loaded, pool)
            found[group] = loaded
        except Exception as error:
            logger.info("a move is compiled for other devices, not loaded: %s", error)
            found[group] = make(group)
    return found


def _try_out(memory: GroupMemory, made: Exchange | Copies, pool: PoolOptions) -> None:
    """Move the null block to itself. Raises what makes it fail; pools are then empty ones."""
    try:
        if isinstance(made, Copies):
            none = np.zeros((MOST_CALLS, made.per_call, 2), np.int32)
            numbers = jax.device_put((np.int32(1), none), memory.everywhere)
            memory.pools = made.step(memory.pools, *numbers)
        else:
            numbers = np.int32(1), *_numbers(made, [])
            count, many, one = jax.device_put(numbers, memory.everywhere)
            memory.pools = made.to_wide(memory.pools, count, many, one)
            memory.pools = made.to_narrow(memory.pools, count, one, many)
        jax.block_until_ready(memory.pools)
    except Exception:
        memory.allocate(pool)
        raise
