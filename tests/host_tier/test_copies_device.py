"""The host tier through real devices: what comes back is what went, to the bit and to the byte."""

import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import checkpoint, make, run, tokens
from oracle import numpy_llama

from shiftjax.arch.presets import PRESETS
from shiftjax.build import Built
from shiftjax.core.request import SamplingParams
from shiftjax.device.mesh import make_mesh, named, pool_spec
from shiftjax.device.pool import FlatPools, PoolOptions
from shiftjax.device.programs import CompileCounter
from shiftjax.host_tier.copies_device import HostTier
from shiftjax.host_tier.extents import EXTENT_SIZES, MOST_IN_FLIGHT
from shiftjax.host_tier.host_stats import HostStats
from shiftjax.host_tier.store_device import Extents
from shiftjax.parallel.layout import Layout

PROMPTS = [[(7 * i + 31 * stem) % 190 + 3 for i in range(60)] for stem in range(6)]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize("size", EXTENT_SIZES)
def test_blocks_come_back_to_the_bit_wherever_they_are_put(size):
    mesh, rng, num_blocks = make_mesh(jax.devices()[:4], 2, 2), np.random.default_rng(0), 40
    given = rng.normal(size=(3, 2, num_blocks, 48)).astype(np.float32)  # layers, K and V

    def pools():
        place = named(mesh, pool_spec())
        k, v = (given[:, i].reshape(-1, given.shape[-1]) for i in range(2))  # of all layers
        return [(jax.device_put(k, place), jax.device_put(v, place))]

    extents = {}
    model = replace(PRESETS["tiny"], num_layers=3, num_heads=4, num_kv_heads=4, head_dim=3)
    sizes = PoolOptions(num_blocks, 4, 4, np.dtype(np.float32))
    tier = HostTier(mesh, Layout(model, 2, 2), sizes, extents)
    blocks = rng.permutation(np.arange(1, num_blocks))[:size].tolist()
    targets = rng.permutation(np.arange(1, num_blocks))[:size].tolist()
    tier.offload(pools(), 7, blocks)
    (part,) = extents[7]
    assert part.array.sharding.memory_kind == "pinned_host"
    assert part.array.nbytes == size * 3 * 2 * 48 * 4
    ((k, v),) = tier.restore(pools(), 7, targets)
    got = np.stack([np.asarray(x).reshape(3, num_blocks, -1) for x in (k, v)], axis=1)
    expected = given.copy()
    expected[:, :, targets] = given[:, :, blocks]
    np.testing.assert_array_equal(got, expected)
    tier.drop([7, 8])
    assert not extents
    with pytest.raises(KeyError):
        tier.restore(pools(), 7, targets)


def test_a_trial_of_the_copies_writes_to_the_null_block_only():
    tier, pools = small_tier()
    before = np.array(pools)
    tried = np.array(tier.try_out(pools))
    np.testing.assert_array_equal(tried, before)
    assert tier._extents == {} and not tier._in_flight


def small_tier() -> tuple[HostTier, FlatPools]:
    """One layer on one device: 9 blocks, which hold their numbers."""
    mesh = make_mesh(jax.devices()[:1], 1, 1)
    given = np.repeat(np.arange(9, dtype=np.float32)[:, None], 4, axis=1)
    pools = [tuple(jax.device_put(given, named(mesh, pool_spec())) for _ in "kv")]
    model = replace(PRESETS["tiny"], num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2)
    sizes = PoolOptions(9, 2, 4, np.dtype(np.float32), MOST_IN_FLIGHT)
    return HostTier(mesh, Layout(model, 1, 1), sizes, {}), pools


def test_few_copies_hold_memory_at_a_time():
    tier, pools = small_tier()
    for number in range(3 * MOST_IN_FLIGHT):
        tier.offload(pools, number, [1])
        pools = tier.restore(pools, number, [2])
        assert len(tier._in_flight) <= MOST_IN_FLIGHT


def test_what_is_prefetched_travels_once_and_goes_when_nobody_wants_it(monkeypatch):
    tier, pools = small_tier()
    fetched, fetch = [], HostTier._fetch
    monkeypatch.setattr(HostTier, "_fetch", lambda *given: fetched.append(1) or fetch(*given))
    for number in (1, 2, 3):
        tier.offload(pools, number, [number])
    tier.prefetch([1, 2])
    tier.prefetch([2, 3])
    assert (len(fetched), [*tier._ahead]) == (3, [2, 3])
    pools = tier.restore(pools, 3, [5])
    pools = tier.restore(pools, 1, [6])
    assert (len(fetched), [*tier._ahead]) == (4, [2])
    assert np.asarray(pools[0][0])[:, 0].tolist() == [0, 1, 2, 3, 4, 3, 1, 7, 8]
    tier._extents[1][0].array.delete()
    tier.prefetch([1, 4])  # neither can be had: that is for a restore to say
    assert not tier._ahead
    with pytest.raises(RuntimeError, match="deleted"):
        tier.restore(pools, 1, [6])


def test_a_step_is_dispatched_while_copies_to_the_host_are_on_their_way():
    """Nothing between an offload and the steps after it waits for the copy."""
    tier, pools = small_tier()
    gate = threading.Event()

    def wait(pool):
        assert gate.wait(60)
        return pool

    @jax.jit
    def work(pool):  # what has inputs that are there, and ends, is not dispatched but run
        square = jnp.tile(pool, (64, 64))
        square = jax.lax.fori_loop(0, 500, lambda _, x: x @ (x.T @ x) * 1e-9, square)
        return pool + 0 * square[0, 0]

    @jax.jit
    def pause(pool):
        return jax.pure_callback(wait, jax.ShapeDtypeStruct(pool.shape, pool.dtype), pool)

    step = jax.jit(lambda pools: jax.tree.map(lambda pool: pool + 10, pools))
    (k, v), *_ = pools
    gate.set()
    jax.block_until_ready(step([(pause(work(k)), v)]))  # all is compiled
    gate.clear()
    later = step([(pause(work(k)), v)])  # the step before, which has not ended
    tier.offload(later, 1, [1])
    copy, later = tier._extents[1][0].array, step(later)
    tier.prefetch([1])
    later = step(tier.restore(later, 1, [2]))
    is_under_way = not copy.is_ready() and not later[0][0].is_ready()
    gate.set()
    assert is_under_way
    assert np.asarray(later[0][0])[:4, 0].tolist() == [30, 31, 21, 33]


@pytest.fixture(scope="module")
def built() -> Built:
    """Two groups whose pools hold two prompts each; the host has room for two and a bit."""
    directory, *_ = checkpoint()
    return make(
        directory, 2, 1, dp=2, max_model_len=100, num_blocks=31, max_num_seqs=2, host_memory="220kB"
    )


def serve(built: Built, *pairs: tuple[int, int]) -> list[int]:
    """Serve pairs of prompts, one in each group, and compare with the oracle: cached tokens."""
    _, config, tensors = checkpoint()
    cached = []
    for pair in pairs:
        events = run(built.engine, [PROMPTS[stem] for stem in pair], [GREEDY] * 2)
        for place, stem in enumerate(pair):
            assert tokens(events[place, 0]) == numpy_llama.greedy(config, tensors, PROMPTS[stem], 4)
            cached.append(events[place, 0][-1].metrics.num_cached_tokens)
    return cached


def extents_of(built: Built) -> Extents:
    tiers = (runner.memory.host for runner in built.runners)
    (extents,) = {id(tier._extents): tier._extents for tier in tiers}.values()
    return extents


@pytest.mark.costs(12)
def test_tokens_of_restored_prefixes_are_those_of_computed_ones(built):
    counter = CompileCounter()
    counter.start()
    assert serve(built, (0, 1), (2, 3), (4, 5)) == [0] * 6
    assert serve(built, (1, 0)) == [56, 56]  # each from what the other group has written
    assert sum(serve(built, (3, 2), (5, 4), (0, 1), (4, 2), (1, 3))) > 0
    counter.stop()
    stats, memory = built.engine.stats(), built.engine.lanes[0].scheduler.tables.tier.memory
    assert (counter.count, stats.num_failed_steps) == (0, 0)
    assert stats.find(HostStats).num_hit_tokens >= 112
    alive = {extent.number for extent in memory.extents}
    held = {n: sum(part.array.nbytes for part in parts) for n, parts in extents_of(built).items()}
    assert sum(held[number] for number in alive) == memory.num_used_bytes
    assert sum(held.values()) <= memory.num_bytes == 220_000
    assert stats.find(HostStats).num_offloaded_bytes > memory.num_bytes


def test_a_copy_that_is_lost_ends_the_requests_and_nothing_else(built):
    built.engine.flush_prefix_cache()
    serve(built, (0, 1), (2, 3), (4, 5))
    for (part,) in extents_of(built).values():
        part.array.delete()
    events = run(built.engine, [PROMPTS[1], PROMPTS[0]], [GREEDY] * 2)
    assert [each[-1].error_code for each in events.values()] == ["step_failed"] * 2
    assert built.engine.stats().find(HostStats).num_used_bytes == 0
    assert serve(built, (0, 1), (2, 3), (4, 5), (1, 0))[-2:] == [56, 56]
