"""Hints keep prefixes for a time, within a bound; they change no output and preempt nobody."""

from dataclasses import replace

import pytest
from disk_kit import with_disk
from echo_kit import generate, make_engine, make_request, reference
from hypothesis import event, given, settings
from hypothesis import strategies as st
from spent import examples
from traffic_kit import FAST, Client, check_tokens, play, traffic

from shiftjax.core.kept_blocks import CacheHints, KeptBlocks, KeptStats

STEMS = [[stem] * 5 + list(range(12)) + [stem] * 7 for stem in range(6)]  # 24 tokens


@st.composite
def hints(draw):
    return CacheHints(
        keep_seconds=draw(st.sampled_from([0.0, 3.0, 1e9])),
        session=draw(st.sampled_from([None, "a", "b"])),
        releases=draw(st.booleans()),
        is_alone=draw(st.integers(0, 4)) == 0,
    )


@settings(FAST, max_examples=examples(150))
@given(st.data(), traffic(least=4))
def test_hints_change_no_token(data, clients):
    engine = make_engine(
        dp=data.draw(st.integers(1, 2)),
        overlap=data.draw(st.booleans()),
        block_size=data.draw(st.sampled_from([1, 4])),
        num_blocks=data.draw(st.integers(49, 70)),
        num_host_blocks=data.draw(st.sampled_from([0, 30])),
        prefix_caching=True,
        max_num_batched_tokens=16,
        kept_share=data.draw(st.sampled_from([0.1, 0.5, 0.9])),
    )
    given = [data.draw(hints()) for _ in clients]
    alone = {c.request.request_id for c, h in zip(clients, given, strict=True) if h.is_alone}
    hinted = [
        Client(replace(client.request, hints=hint), client.arrival_step, client.cancel_step)
        for client, hint in zip(clients, given, strict=True)
    ]
    accepted, listener = play(engine, hinted)
    for name in alone & listener.ended:
        ends = [o.last for (request, _), o in listener.outcomes.items() if request == name]
        assert all(e.finish_reason in ("stop", "abort") and not e.token_ids for e in ends)
    rest = [client for client in accepted if client.request.request_id not in alone]
    check_tokens(engine, rest, listener, errors=set())
    kept = engine.stats().find(KeptStats)
    event(f"kept: {kept.num_kept > 0}")
    assert kept.num_kept <= kept.most_kept


def ask(engine, stem: int, name: str, now: float = 0.0, **hint) -> int:
    """Serve a prompt alone; returns how many of its tokens were cached."""
    request = make_request(name, STEMS[stem], now, max_tokens=2, seed=1)
    engine.step(now)
    outcome = generate(engine, replace(request, hints=CacheHints(**hint)))[name, 0]
    assert outcome.token_ids == reference(engine, request, 0, 0)[0]
    return outcome.last.metrics.num_cached_tokens


def tight(share: float = 0.5):
    """Room for two stems and a bit; half of it may be kept."""
    return make_engine(num_blocks=15, kept_share=share, watermark=0.0)


@pytest.mark.parametrize(("seconds", "num_cached"), [(0.0, 0), (1e6, 12)])
def test_what_is_kept_outlives_what_came_later(seconds, num_cached):
    """A request keeps half of what may be kept: of 7 blocks 3."""
    engine = tight()
    ask(engine, 0, "kept", keep_seconds=seconds)
    for stem in (1, 2, 3):
        ask(engine, stem, f"r{stem}")
    assert ask(engine, 0, "again") == num_cached
    assert (engine.stats().find(KeptStats).num_refused > 0) == bool(seconds)


def test_no_client_takes_more_than_may_be_kept():
    engine = tight()
    for stem in range(6):
        ask(engine, stem, f"r{stem}", keep_seconds=1e6)
        kept = engine.stats().find(KeptStats)
        assert kept.num_kept <= kept.most_kept == 7
    engine.check()
    request = make_request("long", list(range(12)) * 3, max_tokens=12, seed=1)  # 12 of 14 blocks
    assert generate(engine, request)["long", 0].last.metrics.num_preemptions == 0


def test_what_has_expired_goes_like_others():
    blocks = KeptBlocks(9, 4, 0.5)
    table = [blocks.allocate() for _ in range(4)]
    for number, block in enumerate(table):
        blocks.register(
            block, bytes([number]), [number] * 4, bytes([number - 1]) if number else None
        )
    blocks.release(table)
    blocks.keep(table[:2], 10.0, "a")
    assert blocks.num_free_blocks == 8 and blocks.revivable == [*table[:1:-1], *table[1::-1]]
    blocks.expire(9.9)
    assert next(blocks.states()).num_kept == 2
    blocks.expire(10.0)
    assert next(blocks.states()).num_kept == 0
    assert [blocks.allocate() for _ in range(8)][4:] == table[::-1]  # as without hints
    blocks.check([[*range(1, 9)]])


def test_a_session_releases_what_it_keeps_alone():
    engine = tight(0.9)
    ask(engine, 0, "keep", keep_seconds=1e6, session="a")
    ask(engine, 0, "other", session="b", releases=True)
    ask(engine, 0, "nobody", releases=True)
    assert engine.stats().find(KeptStats).num_kept > 0
    assert ask(engine, 0, "mine", session="a", releases=True) == 20
    assert engine.stats().find(KeptStats).num_kept == 0
    assert ask(engine, 0, "gone") == 0


def test_a_release_leaves_what_was_cached_before():
    engine = tight()
    ask(engine, 0, "first")
    request = make_request("longer", [*STEMS[0], *range(8)], max_tokens=2, seed=1)
    generate(engine, replace(request, hints=CacheHints(releases=True)))
    assert ask(engine, 0, "again") == 20
    outcome = generate(engine, replace(request, request_id="longer again"))["longer again", 0]
    assert outcome.last.metrics.num_cached_tokens < 28


def test_a_prefetch_brings_a_prefix_from_afar_and_generates_nothing(tmp_path):
    tiers = {"block_size": 4, "num_blocks": 9, "num_host_blocks": 13, "kept_share": 0.5}
    engine, disk = with_disk(tmp_path, **tiers)
    for stem in range(6):
        ask(engine, stem, f"a{stem}")
    disk.settle()
    before = disk.told().num_read_bytes
    request = replace(
        make_request("early", STEMS[0], max_tokens=1), hints=CacheHints(is_alone=True)
    )
    outcome = generate(engine, request)["early", 0]
    assert outcome.last.finish_reason == "stop" and not outcome.token_ids
    disk.settle()
    assert disk.told().num_read_bytes > before
    disk.read = None  # nothing needs to be read any more
    assert ask(engine, 0, "then") == 20
