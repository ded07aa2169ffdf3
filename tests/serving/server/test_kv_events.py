"""KV events over real sockets: a subscriber has the index, whatever it has missed."""

import socket
import threading
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit import (
    COMPLETION,
    make_engine,
    metric_total,
    metric_values,
    run_command,
    running_server,
)
from kv_kit import FREE, MILLISECONDS, Subscriber, truth

from serving.server import kv_events
from serving.server.kv_events import KvEvents, open_kv_events
from serving.server.options import ServerOptions
from shiftjax.config import EngineConfig
from shiftjax.core.cache_events import CacheFeed
from shiftjax.core.engine import Engine
from shiftjax.core.request import Request, SamplingParams
from shiftjax.options import ConfigError


@contextmanager
def sender():
    events = KvEvents(FREE, "kv@pod@model", FREE)
    subscriber = Subscriber(events.address)
    try:
        yield events, subscriber
    finally:
        events.close()
        subscriber.socket.close(0)


class Counting(CacheFeed):
    """Knows the number of the last message."""

    last = -1

    def take(self):
        batches, tells_all = super().take()
        Counting.last += len(batches)
        return batches, tells_all


@pytest.fixture(scope="module")
def sent():
    """A sender and a subscriber that is connected."""
    Counting.last = -1
    with sender() as (events, subscriber):
        feed = Counting([make_engine().lanes[0].scheduler.tables.device])
        while subscriber.last < 0:  # whoever comes late misses something
            feed.tell_all()
            events.send_from(feed)
            subscriber.hear(50)
        yield events, subscriber


commands = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 3), st.integers(1, 30), st.booleans()),
        st.tuples(st.sampled_from(["flush", "fail", "abort"])),
        st.tuples(st.just("step"), st.integers(1, 9)),
    ),
    min_size=4,
    max_size=24,
)


@settings(
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(commands)
def test_a_subscriber_has_the_index_after_every_command(sent, script):
    events, subscriber = sent
    engine = make_engine(num_blocks=16, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=48)
    feed = Counting([engine.lanes[0].scheduler.tables.device])
    subscriber.gaps.clear()
    for number, (command, *rest) in enumerate(script):
        if command == "add":
            stem, length, is_salted = rest
            salt = "secret" if is_salted else None
            prompt = [stem + 1] * length + [number]
            sampling = SamplingParams(max_tokens=12)
            engine.add_request(
                Request(f"r{number}", prompt, sampling, float(number), 0, None, salt)
            )
        elif command == "flush":
            engine.flush_prefix_cache()
        elif command == "fail":
            engine.lanes[0].runner.faults = [RuntimeError("told")]
        elif command == "abort":
            for name in [*engine.lanes[0].scheduler.requests][:1]:
                engine.abort(name)
        for _ in range(rest[0] if command == "step" else 1):
            engine.step(float(number))
        engine.check()
        events.send_from(feed)
        subscriber.hear_until(lambda: subscriber.last == Counting.last)
        assert subscriber.index == truth(engine)
    assert not subscriber.gaps


def ask(client, prompt: list[int], **more) -> None:
    body = {"model": "echo", "prompt": prompt, "max_tokens": 1} | more
    assert client.post(COMPLETION, json=body).status_code == 200


@contextmanager
def told_server():
    events = KvEvents(FREE, "kv@pod@echo", FREE)
    with running_server(make_engine(), kv_events=events) as server, server.client() as client:
        yield events, server, client


@contextmanager
def subscribed(events: KvEvents):
    subscriber = Subscriber(events.address)
    try:
        yield subscriber
    finally:
        subscriber.socket.close(0)


@contextmanager
def told_once(events: KvEvents):
    """A subscriber for whom the engine has been asked for all that it has, before what follows."""
    asked, ask_engine = threading.Event(), events.ask

    def ask_and_note() -> None:
        ask_engine()
        asked.set()

    events.ask = ask_and_note
    with subscribed(events) as subscriber:
        assert asked.wait(MILLISECONDS / 1000)
        yield subscriber


def test_a_router_knows_what_a_server_has_cached(monkeypatch):
    monkeypatch.setattr(kv_events, "TELL_ALL_SECONDS", 0.0)
    prompt, other = list(range(40)), list(range(40, 80))
    with told_server() as (events, server, client):
        ask(client, prompt)
        with subscribed(events) as late:  # and is told all
            late.hear_until(lambda: late.prefix(prompt) == 10)
            ask(client, other)
            ask(client, [1] * 40, cache_salt="secret")
            late.hear_until(lambda: late.prefix(other) == 10)
            assert late.prefix([1] * 40) == 0
            values = metric_values(client)
            assert metric_total(values, "shiftjax:kv_event_batches_total", outcome="sent") >= 3
            assert metric_total(values, "shiftjax:kv_event_batches_total", outcome="dropped") == 0
            server.on_loop(server.engine.call(Engine.flush_prefix_cache))
            late.hear_until(lambda: not late.index)


def test_a_gap_is_filled_by_a_replay(monkeypatch):
    """The index is told once, to the first subscriber, however slow the machine is."""
    monkeypatch.setattr(kv_events, "TELL_ALL_SECONDS", 3600.0)
    prompts = [[number] * 12 for number in range(1, 6)]
    with told_server() as (events, _, client), told_once(events) as there:
        for prompt in prompts:
            ask(client, prompt)
        there.hear_until(lambda: all(there.prefix(each) == 3 for each in prompts))
        with subscribed(events) as missed, subscribed(events) as half:
            numbers = missed.replay(events.replay_address, 0)
            assert numbers == list(range(numbers[0], there.last + 1))
            assert missed.index == there.index
            assert half.replay(events.replay_address, there.last - 1) == numbers[-2:]
            assert half.prefix(prompts[-1]) == 3 and half.prefix(prompts[0]) == 0
            assert missed.replay(events.replay_address, there.last + 1) == []
        assert events.counts["replays"] == 3


def test_what_is_asked_too_late_is_told_anew(monkeypatch):
    monkeypatch.setattr(kv_events, "TELL_ALL_SECONDS", 0.0)
    monkeypatch.setattr(kv_events, "MOST_KEPT_BATCHES", 2)
    with told_server() as (events, _, client), subscribed(events) as there:
        there.hear_until(lambda: there.last >= 0)
        for number in range(1, 6):
            ask(client, [number] * 12)
        there.hear_until(lambda: there.prefix([5] * 12) == 3)
        there.index.clear()  # as if it had missed most of it
        assert len(there.replay(events.replay_address, 0)) == 2
        there.hear_until(lambda: all(there.prefix([number] * 12) == 3 for number in range(1, 6)))


def test_what_finds_no_room_is_counted_and_told_later(monkeypatch):
    monkeypatch.setattr(kv_events, "TELL_ALL_SECONDS", 0.0)
    engine = make_engine()
    blocks = engine.lanes[0].scheduler.tables.device
    feed = CacheFeed([blocks])
    with sender() as (events, subscriber):
        events.ask = feed.tell_all
        while subscriber.last < 0:
            feed.tell_all()
            events.send_from(feed)
            subscriber.hear(50)
        monkeypatch.setattr(kv_events, "MOST_QUEUED", 0)
        blocks.register(blocks.allocate(), b"12345678", [1] * 4)
        events.send_from(feed)
        assert events.counts["dropped"] > 0
        monkeypatch.setattr(kv_events, "MOST_QUEUED", 10)
        events.send_from(feed)
        subscriber.hear_until(lambda: subscriber.prefix([1] * 4) == 1)


def test_several_groups_are_told_apart(monkeypatch):
    groups = [make_engine().lanes[0].scheduler.tables.device for _ in range(2)]
    feed = CacheFeed(groups)
    with sender() as (events, subscriber):
        while subscriber.ranks != {0, 1}:  # each is cleared first
            feed.tell_all()
            events.send_from(feed)
            subscriber.hear(50)
        for number, blocks in enumerate(groups):
            subscriber.ranks.clear()
            blocks.register(blocks.allocate(), bytes([number] * 8), [number] * 4)
            events.send_from(feed)
            subscriber.hear_until(lambda tokens=[number] * 4: subscriber.prefix(tokens) == 1)
            assert number in subscriber.ranks


def test_an_address_may_be_of_ip_version_6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no ::1: {error}")
    events = KvEvents("tcp://[::1]:*", "topic")
    assert events.address.startswith("tcp://[::1]:")
    events.close()


def test_settings_make_the_topic_and_the_address(monkeypatch):
    config = EngineConfig.from_options(model="random:tiny")
    assert open_kv_events(ServerOptions(), config) is None
    options = ServerOptions(kv_events="zmq", kv_events_endpoint=FREE, served_model_name="a, b")
    events = open_kv_events(options, config)
    assert events is not None
    try:
        assert events.topic == f"kv@{socket.gethostname()}@a"
        assert events.address.startswith("tcp://127.0.0.1:")
        with pytest.raises(ConfigError, match=r"kv_events_endpoint = .* cannot be used"):
            KvEvents(events.address, "topic")
    finally:
        events.close()
    assert kv_events.DEFAULT_ENDPOINT.startswith("tcp://127.0.0.1:")


def test_a_server_and_its_check_refuse_what_could_not_be_told(monkeypatch, capsys):
    for command in ("check", "serve"):
        argv = [command, "random:tiny", "--kv-events", "zmq", "--devices", "1"]
        code, _, errors = run_command(capsys, *argv, "--no-enable-prefix-caching")
        assert code == 2 and "nothing to tell without prefix_caching" in errors[0], errors
        with monkeypatch.context() as without:
            without.setattr(kv_events, "find_spec", lambda name: None)
            code, _, errors = run_command(capsys, *argv)
        assert code == 2 and "needs pyzmq: pip install 'shiftjax[events]'" in errors[0], errors
