"""Whoever applies the events of prefix caches has the index that the groups themselves have."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from echo_kit import Listener, make_engine, make_request, run_to_end, runner_of
from fleet_kit import make_fleet, random_arrangement, random_requests
from hypothesis import given, settings
from hypothesis import strategies as st
from spent import examples
from traffic_kit import FAST, Client, engines, traffic

from shiftjax.core.cache_events import Batch, CacheFeed, Cleared, Removed, Stored
from shiftjax.core.engine import Engine
from shiftjax.fleet.fleet_policy import Wish
from shiftjax.fleet.regrouping import Fleet
from shiftjax.fleet.shared_blocks import SharedBlocks

Index = dict[bytes, tuple[list[int], bytes | None]]  # tokens and parent, by hash


@dataclass
class Subscriber:
    """An index for each group, out of nothing but events, each of which must make sense."""

    indexes: dict[int | None, Index] = field(default_factory=dict)
    told: set[bytes] = field(default_factory=set)  # ever

    def hear(self, batches: list[Batch]) -> None:
        for batch in batches:
            index = self.indexes.setdefault(batch.rank, {})
            for event in batch.events:
                self.apply(index, event)

    def apply(self, index: Index, event) -> None:
        if isinstance(event, Cleared):
            index.clear()
        elif isinstance(event, Removed):
            for block_hash in event.hashes:
                del index[block_hash]
        else:
            assert isinstance(event, Stored)
            assert len(event.token_ids) == len(event.hashes) * event.block_size
            assert event.parent is None or event.parent in self.told
            parent = event.parent
            for number, block_hash in enumerate(event.hashes):
                assert block_hash not in index
                begin = number * event.block_size
                index[block_hash] = event.token_ids[begin : begin + event.block_size], parent
                parent = block_hash
                self.told.add(block_hash)


def truth(engine: Engine, salted: set[bytes] | None = None) -> dict[int | None, Index]:
    """What the groups find by hash; `salted` gets those of secret blocks."""
    found: dict[int | None, Index] = {}
    for number, lane in enumerate(engine.lanes):
        blocks = lane.scheduler.tables.device
        contents = [blocks.contents_of(block) for block in blocks._index.values()]
        rank = number if len(engine.lanes) > 1 else None
        found[rank] = {
            each.block_hash: (each.tokens, each.parent)
            for each in contents
            if each is not None and not each.is_private
        }
        if salted is not None:
            salted |= blocks._index.keys() - found[rank].keys()
    return found


def feed_of(engine: Engine) -> CacheFeed:
    return CacheFeed([lane.scheduler.tables.device for lane in engine.lanes])


def heard_all(subscriber: Subscriber, feed: CacheFeed, engine: Engine, salted=None) -> None:
    """What one more turn tells brings a subscriber to where the groups are."""
    subscriber.hear(feed.take()[0])
    assert subscriber.indexes == truth(engine, salted)


def play(
    engine: Engine,
    clients: list[Client],
    flushes: set[int],
    misses: set[int],
    wishes: Mapping[int, Wish] = MappingProxyType({}),
) -> None:
    """Serve, and compare after every command.

    At `flushes` the caches are emptied, before `misses` somebody has missed what came before, and
    before `wishes` the policy of a fleet wants other groups.
    """
    feed, subscriber, salted = feed_of(engine), Subscriber(), set()
    listener = Listener()
    heard_all(subscriber, feed, engine, salted)
    for step in range(400):
        for client in clients:
            if client.arrival_step == step:
                engine.add_request(client.request)
            if client.cancel_step == step:
                listener.hear(engine.abort(client.request.request_id))
                heard_all(subscriber, feed, engine, salted)
        if step in flushes:
            engine.flush_prefix_cache()
            heard_all(subscriber, feed, engine, salted)
        if step in wishes:
            engine.topology.find(Fleet).policy.wishes = [wishes[step]]
        if step in misses:
            feed.tell_all()
        listener.hear(engine.step(float(step)))
        heard_all(subscriber, feed, engine, salted)
        if step > 46 and not engine.has_work():
            break
    assert not engine.has_work()
    assert not salted & subscriber.told


steps = st.sets(st.integers(0, 40), max_size=3)


@settings(FAST, max_examples=examples(120))
@given(engines(2, 1, (1, 2)), traffic(), steps, steps, st.sets(st.integers(0, 30), max_size=2))
def test_events_rebuild_the_index_under_any_traffic(engine, clients, flushes, misses, faults):
    clients = [each for each in clients if fits(engine, each)]
    for number in range(len(engine.lanes)):
        runner_of(engine, number).faults |= dict.fromkeys(faults, "fetch")
    play(engine, clients, flushes, misses)


def fits(engine: Engine, client: Client) -> bool:
    request = client.request
    longest = engine.limits.max_length(len(request.prompt_token_ids), request.sampling.max_tokens)
    return longest <= engine.limits.num_kv_tokens


def test_events_follow_blocks_through_changes_of_groups():
    num_moved = num_copied = 0
    for seed in range(12):
        rng = random.Random(seed)
        engine = make_fleet(num_blocks=rng.choice([30, 60]))
        requests = random_requests(rng, 10, cache_salt=rng.choice([None, None, "s"]))
        clients = [Client(each, rng.randrange(12), None) for each in requests]
        kinds = ["move", "move", "hard", "soft"]
        wishes = {
            step: Wish(random_arrangement(rng), "told", rng.choice(kinds))
            for step in range(0, 60, 3)
        }
        play(engine, [each for each in clients if fits(engine, each)], set(), {20}, wishes)
        assert engine.topology.find(Fleet) is not None
        num_moved += engine.topology.find(Fleet).stats.num_moved_sequences
        num_copied += engine.topology.find(Fleet).stats.num_compacted_blocks
    assert num_moved > 20 and num_copied


def test_all_groups_are_told_anew_where_one_is_cleared():
    engine = make_engine(dp=2)
    feed = feed_of(engine)
    for number in range(4):
        engine.add_request(make_request(f"r{number}", [number + 1] * 12, max_tokens=2))
    run_to_end(engine, Listener())
    feed.take()
    engine.lanes[0].scheduler.tables.clear_cache()
    batches, tells_all = feed.take()
    assert tells_all
    assert [(batch.rank, type(batch.events[0])) for batch in batches] == [
        (0, Cleared),
        (1, Cleared),
        (1, Stored),
    ]
    assert feed.take() == ([], False)


def test_a_chain_is_one_event_and_so_is_what_goes_with_it():
    engine = make_engine(num_blocks=8)
    feed = feed_of(engine)
    feed.take()
    engine.add_request(make_request("a", list(range(1, 13)), max_tokens=1))
    run_to_end(engine, Listener())
    ((batch,), _) = feed.take()
    (stored,) = batch.events
    assert isinstance(stored, Stored)
    assert (stored.parent, stored.token_ids, stored.block_size) == (None, [*range(1, 13)], 4)
    engine.add_request(make_request("b", [5] * 24, max_tokens=1))
    run_to_end(engine, Listener())
    ((batch,), _) = feed.take()
    assert [type(event) for event in batch.events] == [Removed, Stored]


def test_a_block_whose_parent_is_lost_is_not_entered():
    engine = make_engine()
    blocks = engine.lanes[0].scheduler.tables.device
    parent, child = blocks.allocate(), blocks.allocate()
    blocks.register(child, b"child", [2] * 4, b"parent")
    assert not blocks.is_indexed(b"child")
    blocks.register(parent, b"parent", [1] * 4)
    blocks.register(child, b"child", [2] * 4, b"parent")
    assert blocks.is_indexed(b"child")


def test_copies_inside_a_pool_are_nothing_to_tell():
    blocks = SharedBlocks(8, 4, from_top=False)
    feed = CacheFeed([blocks])
    block = blocks.allocate()
    blocks.register(block, b"hash", [1] * 4)
    feed.take()
    blocks.replace(block, 5)
    assert feed.take() == ([], False)
    assert blocks.is_indexed(b"hash")


def test_all_is_told_with_parents_first():
    engine = make_engine(num_blocks=3)
    blocks = engine.lanes[0].scheduler.tables.device
    feed = feed_of(engine)
    parent, child = blocks.allocate(), blocks.allocate()
    blocks.register(parent, b"parent", [1] * 4)
    blocks.register(child, b"child", [2] * 4, b"parent")
    blocks.release([parent])
    assert blocks.allocate() == parent  # which is evicted, and comes again after its child
    blocks.register(parent, b"parent", [1] * 4)
    ((cleared, told), tells_all) = feed.take()
    assert tells_all and isinstance(cleared.events[0], Cleared)
    assert told.events == [Stored([b"parent", b"child"], None, [1] * 4 + [2] * 4, 4)]
