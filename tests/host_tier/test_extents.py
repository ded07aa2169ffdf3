"""Prefixes that the device gives up are found on the host, within a budget, and never half-written.

The runner keeps in every block the tokens whose KV would be there, on the host too, and looks at
what each step attends to: a stale, lost or unwritten extent fails at the step that would read it.
"""

import pytest
from echo_kit import (
    HOST_BLOCK_BYTES,
    Listener,
    generate,
    make_engine,
    make_request,
    reference,
    run_to_end,
    runner_of,
)
from hypothesis import event, given, settings
from hypothesis import strategies as st
from spent import examples
from traffic_kit import FAST, Client, check_tokens, play

from shiftjax.core.blocks import CachedPrefix
from shiftjax.core.tier import Restore, UnitRestore
from shiftjax.core.topology import Topology
from shiftjax.host_tier.extents import HostBlocks, HostMemory, extent_sizes
from shiftjax.host_tier.host_stats import HostStats

STEMS = [[stem] * 5 + list(range(12)) + [stem] * 7 for stem in range(6)]  # 24 tokens


@st.composite
def repeated(draw):
    """Requests that come again and again with the same few beginnings, one after the other."""
    clients = []
    for number in range(draw(st.integers(6, 14))):
        prompt = draw(st.sampled_from(STEMS))[: draw(st.sampled_from([24, 24, 13]))]
        prompt = prompt + draw(st.lists(st.integers(0, 12), max_size=3))
        request = make_request(f"r{number}", prompt, float(2 * number), max_tokens=6, seed=number)
        clients.append(Client(request, 2 * number, None))
    return clients


@st.composite
def tight_engines(draw):
    """Both tiers are too small for all stems; on the device two sequences or three fit."""
    return make_engine(
        dp=draw(st.integers(1, 2)),
        overlap=draw(st.booleans()),
        block_size=2,
        num_blocks=draw(st.integers(19, 36)),
        num_host_blocks=draw(st.sampled_from([3, 20, 40, 90])),
        preemption=draw(st.sampled_from(["swap", "recompute"])),
        max_num_batched_tokens=draw(st.sampled_from([8, 40])),
        watermark=0.0,
    )


@settings(FAST, max_examples=examples(150))
@given(
    tight_engines(),
    repeated(),
    st.dictionaries(st.integers(0, 40), st.sampled_from(["run", "fetch"]), max_size=2),
)
def test_eviction_on_both_levels_changes_no_token(engine, clients, faults):
    runners = [runner_of(engine, group) for group in range(len(engine.lanes))]
    for runner in runners:
        runner.faults = dict(faults)
    accepted, listener = play(engine, clients, extra_steps=2000)
    failed = set().union(*(runner.failed_requests for runner in runners))
    check_tokens(engine, accepted, listener, errors=failed)
    host = engine.stats().find(HostStats)
    memory = engine.lanes[0].scheduler.tables.tier.memory
    event(f"hits: {host.num_hit_tokens > 0}")
    event(f"evicted there: {host.num_offloaded_bytes > memory.num_used_bytes}")
    event(f"prefetched: {host.num_prefetch_hits > 0}")
    event(f"swapped: {engine.stats().num_preemptions['swap'] > 0}")
    assert host.num_hit_tokens <= host.num_query_tokens
    assert host.num_used_bytes <= host.num_bytes
    assert host.num_prefetch_hits <= host.num_prefetches


def ask(engine, stem: int, name: str) -> int:
    """Serve a prompt alone; returns how many of its tokens were cached."""
    request = make_request(name, STEMS[stem], max_tokens=2, seed=1)
    outcome = generate(engine, request)[name, 0]
    assert outcome.token_ids == reference(engine, request, 0, 0)[0]
    return outcome.last.metrics.num_cached_tokens


def tiers(num_host_blocks: int, **options):
    """On the device fits one stem, 6 blocks of 4 tokens, and what it generates."""
    return make_engine(num_blocks=9, num_host_blocks=num_host_blocks, **options)


def test_a_prefix_that_fell_out_of_the_device_is_restored():
    engine = tiers(40)
    assert [ask(engine, stem, f"a{stem}") for stem in range(4)] == [0] * 4
    assert [ask(engine, stem, f"b{stem}") for stem in range(4)] == [20] * 4  # never the last token
    stats = engine.stats()
    assert stats.num_prefix_hit_tokens == 80
    assert 0 < stats.find(HostStats).num_hit_tokens <= 80
    assert (
        stats.find(HostStats).num_restored_bytes
        == stats.find(HostStats).num_hit_tokens // 4 * HOST_BLOCK_BYTES
    )
    assert ask(tiers(0), 0, "a") == 0


def test_a_full_host_gives_up_what_was_used_longest_ago():
    for order, num_cached in (((0, 1, 2, 3, 4), 0), ((0, 1, 2, 0, 3), 20)):
        engine = tiers(13)  # two stems and a block
        for number, stem in enumerate(order):
            ask(engine, stem, f"a{number}")
        assert ask(engine, 0, "again") == num_cached


def test_a_flush_empties_both_tiers():
    engine = tiers(40)
    for stem in range(4):
        ask(engine, stem, f"a{stem}")
    engine.flush_prefix_cache()
    assert engine.stats().find(HostStats).num_used_bytes == 0
    assert ask(engine, 0, "b") == 0


def test_groups_find_what_others_wrote_and_lose_what_no_step_has_proven():
    engine = tiers(60, dp=3, overlap=False)
    first, second, third = lanes = engine.lanes
    every = engine.topology

    def ask_of(lane, stem, name):
        """All other lanes are idle, so the fullest is chosen by hand."""
        engine.lanes, engine.topology = [lane], Topology([lane])
        try:
            return ask(engine, stem, name)
        finally:
            engine.lanes, engine.topology = lanes, every

    for stem in range(3):
        ask_of(first, stem, f"a{stem}")
    assert ask_of(second, 0, "b") == 20
    memory = first.scheduler.tables.tier.memory
    proven = {extent.number for extent in memory.extents}
    engine.lanes, engine.topology = [first], Topology([first])
    listener = Listener()
    engine.add_request(make_request("fails", [9] * 29, max_tokens=1))
    runner_of(engine).faults = {len(runner_of(engine).plans): "fetch"}
    run_to_end(engine, listener)
    assert listener.outcomes["fails", 0].last.finish_reason == "error"
    assert runner_of(engine).plans[-1].offloads  # of the last stem
    assert {extent.number for extent in memory.extents} == proven
    engine.lanes, engine.topology = lanes, every
    assert ask_of(third, 0, "c") == 20


def blocks_of(num_blocks: int) -> HostBlocks:
    return HostBlocks(HostMemory(num_blocks * 10), 4, 10)


def prefix(number: int) -> CachedPrefix:
    return CachedPrefix(number.to_bytes(16), [number] * 4)


def test_extents_are_few_and_full():
    assert list(extent_sizes(188)) == [32] * 5 + [8] * 3 + [1] * 4
    assert list(extent_sizes(0)) == []


def test_where_not_all_fit_the_beginnings_of_prefixes_are_kept():
    host = blocks_of(3)
    host.save([(number, prefix(number)) for number in range(1, 6)])  # tails first
    assert [prefix(n).block_hash in {key[1] for key in host.memory.index} for n in range(6)] == [
        *[False] * 3,
        *[True] * 3,
    ]
    host.memory.check()


def test_a_swapped_sequence_keeps_its_bytes_whatever_else_needs_them():
    host = blocks_of(4)
    places = host.swap_out([1, 2, 3], [None, prefix(2), None])
    assert host.swap_out([4, 5], [None, None]) is None
    host.save([(6, prefix(6)), (7, prefix(7))])
    assert {place.extent for place in places} <= host.memory.extents
    host.release(places)
    host.memory.check()
    assert host.memory.num_used_bytes == 20  # what a hash finds: the second block, and one saved
    with pytest.raises(RuntimeError, match="more often"):
        host.memory.unpin(host.memory.index[4, prefix(2).block_hash].extent)


def test_what_no_step_copies_is_not_there():
    host = blocks_of(8)
    host.swap_out([1], [prefix(1)])
    assert not any(host.finish(is_planned=False))
    assert not host.memory.index and host.memory.num_used_bytes == 0


def test_others_find_a_extent_when_the_step_that_came_with_its_copy_has_ended():
    """Whatever their layouts; who wrote it, and reads it in order, finds it at once."""
    writer = blocks_of(8)
    reader, hashes = HostBlocks(writer.memory, 4, 30), [prefix(1).block_hash]
    writer.save([(1, prefix(1))])
    moves = writer.finish(is_planned=True)
    for is_proven in (False, True):
        for host in (writer, reader):
            is_found = is_proven or host is writer
            assert len(host.match(hashes, [1] * 8, 0, 1)) == is_found
            assert len(host.extents_of(hashes)) == is_found
        if not is_proven:
            writer.prove(moves.offloads)


def test_what_is_gone_is_not_prefetched():
    host = blocks_of(8)
    places = host.swap_out([1], [None])
    assert host.swap_out([2], [None]) is not None
    host.memory.drop(places[0].extent)
    extents = sorted(host.memory.extents | {places[0].extent}, key=lambda extent: extent.number)
    assert host.finish(is_planned=True, wanted=extents).prefetches == [1]


def test_equal_hashes_of_other_tokens_are_a_miss():
    host = blocks_of(8)
    host.save([(1, prefix(1))])
    assert len(host.match([prefix(1).block_hash], [1] * 8, 0, 1)) == 1
    assert host.match([prefix(1).block_hash], [2] * 8, 0, 1) == []
    other = HostBlocks(host.memory, 8, 10)
    assert other.match([prefix(1).block_hash], [1] * 8, 0, 1) == []


def test_a_beginning_is_shared_with_who_keeps_it_when_its_copy_is_sure():
    host, beginning = blocks_of(12), [prefix(1), prefix(2)]
    other = HostBlocks(host.memory, 4, 10)
    first = host.swap_out([1, 2], beginning)
    second = host.swap_out([1, 2, 3], [*beginning, None])  # its own copy is made before
    assert second[:2] == first
    apart = other.swap_out([5, 6], beginning)
    assert not {place.extent for place in apart} & {place.extent for place in first}
    host.prove(host.finish(is_planned=True).offloads)
    assert other.swap_out([7, 8], beginning) == first
    assert host.memory.num_used_bytes == 50
    for places in (first, second, first, apart):
        host.release(places)
    host.memory.check()
    assert host.memory.num_used_bytes == 20  # found by hash; nobody needs it, so nobody shares it
    again = other.swap_out([7, 8], beginning)
    assert again[0].extent is not first[0].extent


def whole(*numbers: int) -> CachedPrefix:
    """A block of several units, as a wide group has it."""
    units = [prefix(number) for number in numbers]
    tokens = [token for unit in units for token in unit.tokens]
    hashes = [unit.block_hash for unit in units]
    return CachedPrefix(hashes[-1], tokens, hashes=hashes)


def test_groups_whose_blocks_differ_in_size_read_each_others_units():
    narrow = blocks_of(64)
    wide = HostBlocks(narrow.memory, 16, 40, hash_size=4)
    hashes = [prefix(number).block_hash for number in range(12)]
    tokens = [token for number in range(12) for token in prefix(number).tokens]
    wide.save([(5, whole(0, 1, 2, 3))])
    narrow.save([(20 + number, prefix(number)) for number in range(2, 12)])
    for host in (wide, narrow):
        host.prove(host.finish(is_planned=True).offloads)
    assert narrow.memory.num_used_bytes == 40 + 80  # units 2 and 3 were there
    found = wide.match(hashes, tokens, 0, 3)
    assert [place.unit for place in found] == [0, 1, 2, 3, *range(8)]
    assert wide.match(hashes[:11], tokens, 0, 3) == found[:8]  # no whole block follows
    assert wide.extents_of(hashes) == [found[0].extent]  # the other one is put together
    wide.restore(found, [7, 8, 9])
    moves = wide.finish(is_planned=True, wanted=[found[4].extent])
    first, second = found[0].extent.number, found[4].extent.number
    assert moves.restores == [Restore(first, [7])] and moves.prefetches == []
    assert moves.unit_restores == [
        UnitRestore([(second, n + 4 * block) for n in range(4)], [8 + block], 4)
        for block in range(2)
    ]
    found = narrow.match(hashes, tokens, 1, 9)
    narrow.restore(found, list(range(1, 9)))
    moves = narrow.finish(is_planned=True)
    assert moves.unit_restores == [UnitRestore([(first, n)], [n], 4) for n in (1, 2, 3)]
    assert moves.restores == [Restore(second, [4, 5, 6, 7, 8, 0, 0, 0])]
    narrow.memory.check()


def test_what_a_sequence_has_swapped_out_is_put_together_for_any_size_of_blocks():
    wide = HostBlocks(HostMemory(1000), 16, 40, hash_size=4)
    narrow = HostBlocks(wide.memory, 4, 10)
    places = wide.swap_out([3, 4], [whole(0, 1, 2, 3), None])  # 22 tokens are computed
    moves = wide.finish(is_planned=True)
    wide.prove(moves.offloads)
    narrow.restore(places, list(range(1, 7)))
    first, second = moves.offloads
    units = [(first.extent, n) for n in range(4)] + [(second.extent, n) for n in range(2)]
    found = narrow.finish(is_planned=True).unit_restores
    assert found == [UnitRestore([unit], [n], 4) for n, unit in enumerate(units, 1)]
    narrow.release(places)
    places = narrow.swap_out(list(range(1, 7)), [prefix(20 + n) for n in range(6)])
    narrow.prove(narrow.finish(is_planned=True).offloads)
    wide.restore(places, [8, 9])
    units = [(place.extent.number, 0) for place in places]
    found = wide.finish(is_planned=True).unit_restores
    assert found == [UnitRestore(units[:4], [8], 4), UnitRestore(units[4:], [9], 4)]
