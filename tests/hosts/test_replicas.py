"""Hosts with groups of their own go and come back while they serve: nobody loses a token."""

import random
from itertools import count

import pytest
from echo_kit import (
    HOST_BLOCK_BYTES,
    AuditedRunner,
    Listener,
    make_engine,
    make_request,
    runner_of,
)
from fleet_kit import assert_as_alone, random_requests
from hypothesis import given
from hypothesis import strategies as st

from shiftjax.core.tier import Offload, Restore, UnitRestore
from shiftjax.host_tier.extents import HostBlocks, HostMemory
from shiftjax.hosts.replicas import (
    Call,
    HostGoneError,
    HostGroups,
    Moves,
    ReplicaState,
    decode,
    encode,
    metrics,
)
from shiftjax.parallel.grid import Group


class Link:
    """The other hosts: which are here, and how often each has come."""

    def __init__(self, num: int):
        self.num, self.comings = num, count(1)
        self.here = {rank: next(self.comings) for rank in range(1, num)}

    def generation(self, rank: int) -> int:
        return self.here.get(rank, 0)

    def lose(self, rank: int) -> None:
        self.here.pop(rank, None)

    def come(self, rank: int) -> None:
        self.here[rank] = next(self.comings)


class Away(AuditedRunner):
    """A runner on another host, whose memory is empty when it comes."""

    def __init__(self, config, link: Link, rank: int, host: dict):
        super().__init__(config, host)
        self.link, self.rank = link, rank
        self.begun = link.generation(rank)

    def begin(self) -> None:
        super().reset()
        self.host.clear()
        self.begun = self.link.generation(self.rank)

    def run(self, plan, mode, previous_handle):
        if self.link.generation(self.rank) != self.begun:
            raise HostGoneError(f"host {self.rank} is gone")
        return super().run(plan, mode, previous_handle)

    def fetch(self, handle):
        if self.link.generation(self.rank) != self.begun:
            raise HostGoneError(f"host {self.rank} is gone")
        return super().fetch(handle)


def engine_of(num_hosts: int, per_host: int, num_host_blocks: int = 0, **options):
    """Every host has as many groups, and its own host memory."""
    engine = make_engine(dp=num_hosts * per_host, num_host_blocks=num_host_blocks, **options)
    link, host_of = Link(num_hosts), {}
    for rank in range(num_hosts):
        memory, extents = HostMemory(num_host_blocks * HOST_BLOCK_BYTES), {}
        for place in range(rank * per_host, (rank + 1) * per_host):
            lane = engine.lanes[place]
            lane.group, config = Group(place, 1), lane.scheduler.config
            lane.runner = AuditedRunner(config, extents)
            if rank:
                lane.runner, host_of[lane.group] = Away(config, link, rank, extents), rank
            if num_host_blocks:
                sizes = config.block_size, HOST_BLOCK_BYTES
                lane.scheduler.tables.tier = HostBlocks(memory, *sizes)
    engine.topology = HostGroups(engine.lanes, host_of, link)
    return engine, link


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("seed", range(12))
def test_hosts_that_go_and_come_back_cost_nobody_a_token(seed, preemption):
    rng = random.Random(seed)
    engine, link = engine_of(
        rng.choice([2, 3]),
        rng.choice([1, 2]),
        num_host_blocks=rng.choice([0, 20, 60]) if preemption == "recompute" else 40,
        num_blocks=rng.choice([16, 30, 64]),
        preemption=preemption,
        overlap=rng.random() < 0.7,
        watermark=0.0,
    )
    requests, listener, waiting = random_requests(rng, 24), Listener(), []
    waiting = list(requests)
    aborted = {str(rng.randrange(24)) for _ in range(2)}
    for turn in range(3000):
        if waiting and rng.random() < 0.3:
            engine.add_request(waiting.pop(0))
        if rng.random() < 0.08:
            rank = rng.randrange(1, link.num)
            rng.choice([link.lose, link.come])(rank)
        if aborted and rng.random() < 0.02:
            listener.hear(engine.abort(aborted.pop()))
        listener.hear(engine.step(float(turn)))
        engine.check()
        if not waiting and not engine.has_work():
            break
    assert not waiting and not engine.has_work()
    assert listener.ended == {request.request_id for request in requests}
    assert_as_alone(engine, requests, listener)
    assert (engine.stats().num_running, engine.stats().kv_usage) == (0, 0.0)
    for lane in engine.lanes:
        if isinstance(lane.scheduler.tables.tier, HostBlocks):
            memory = lane.scheduler.tables.tier.memory
            assert memory.num_used_bytes == memory.num_idle_bytes
            known = {extent.number for extent in memory.extents}
            gone = {*memory.given, *memory.dropped}
            is_here = lane.state == "open"
            assert known == (set(lane.runner.host) - gone if is_here else set())
    state = engine.stats().find(ReplicaState)
    assert state.here == 1 + len(link.here) and state.num_lost > 0
    told = {metric.name: metric for metric in metrics(state)}
    assert set(told) == {"hosts", "hosts_lost", "lost_host_sequences"}


def test_requests_of_a_lost_host_go_on_elsewhere_and_new_ones_come_back_to_it():
    engine, link = engine_of(2, 1)
    listener = Listener()
    requests = [
        make_request(str(n), [n, 3, 5, 7, 9], float(n), max_tokens=20, ignore_eos=True)
        for n in range(4)
    ]
    for request in requests:
        engine.add_request(request)
    for turn in range(5):
        listener.hear(engine.step(float(turn)))
    first, second = engine.lanes
    assert first.scheduler.requests and second.scheduler.requests
    heard = {key: len(outcome.token_ids) for key, outcome in listener.outcomes.items()}
    assert min(heard.values()) > 0
    link.lose(1)
    listener.hear(engine.step(5.0))
    assert len(first.scheduler.requests) == 4 and not second.scheduler.requests
    assert second.state == "idle"
    state = engine.stats().find(ReplicaState)
    assert (state.here, state.num_lost, state.num_recomputed) == (1, 1, 2)
    link.come(1)
    for number in range(4, 8):
        request = make_request(str(number), [number] * 9, 6.0, max_tokens=4, ignore_eos=True)
        engine.add_request(request)
        requests.append(request)
    num_plans = len(runner_of(engine, 1).plans)
    while engine.has_work():
        listener.hear(engine.step(7.0))
        engine.check()
    assert len(runner_of(engine, 1).plans) > num_plans
    assert_as_alone(engine, requests, listener)


def test_a_step_that_fails_on_a_host_that_is_here_ends_its_requests_alone():
    engine, _ = engine_of(2, 1)
    listener = Listener()
    requests = [make_request(str(n), [n] * 5, 0.0, max_tokens=9) for n in range(4)]
    for request in requests:
        engine.add_request(request)
    runner_of(engine, 1).faults = {2: "fetch"}
    while engine.has_work():
        listener.hear(engine.step(1.0))
        engine.check()
    failed = frozenset(runner_of(engine, 1).failed_requests)
    assert 0 < len(failed) < 4
    assert {outcome.last.finish_reason for outcome in listener.outcomes.values()} >= {"error"}
    assert_as_alone(engine, requests, listener, but=failed)


numbers = st.integers(0, 1 << 20)
lists = st.lists(numbers, max_size=3)
moves = st.builds(
    Moves,
    lists,
    st.lists(st.builds(Offload, numbers, lists), max_size=2),
    st.lists(st.builds(Restore, numbers, lists), max_size=2),
    lists,
    st.lists(
        st.builds(UnitRestore, st.lists(st.tuples(numbers, numbers)), lists, numbers), max_size=2
    ),
)
calls = st.builds(
    Call,
    group=numbers,
    number=st.integers(0, 1 << 60),
    moves=st.none() | moves,
    step=st.binary(max_size=40),
    num_rows=numbers,
    wants_top=st.booleans(),
    num_guesses=numbers,
    num_seqs=numbers,
    num_tokens=numbers,
    resets=st.just(False),
)


@given(calls)
def test_a_call_survives_its_journey(call):
    assert decode(encode(call)) == call
    reset = Call(call.group, call.number, resets=True)
    assert decode(encode(reset)) == reset


@given(st.binary(max_size=80))
def test_what_is_no_call_is_refused(data):
    try:
        assert isinstance(decode(data), Call)
    except ValueError as error:
        assert "no call" in str(error)
