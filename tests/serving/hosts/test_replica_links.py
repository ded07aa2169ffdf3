"""Hosts with groups of their own, over loopback: each goes and comes back without the others."""

import queue
import time
from dataclasses import replace

import pytest
from test_host_links import WAIT, in_thread, quick, terms_of

from serving.hosts.follower import FollowerHosts
from serving.hosts.replicas import ReplicaHosts
from shiftjax.hosts.calls import LostHostError
from shiftjax.hosts.replicas import HostGoneError, Replicas
from shiftjax.options import ConfigError

__all__ = ["quick"]  # of this module, too
DIGEST = [77, -77]


def until(condition) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Started:
    """A leader with as many followers that have agreed and begun."""

    def __init__(self, num: int):
        self.terms = terms_of(0, num)
        self.ends: queue.Queue[LostHostError] = queue.Queue()
        self.leader = ReplicaHosts(self.terms, self.ends.put)
        self.leader.start()
        self.heard: dict[int, list[bytes]] = {rank: [] for rank in range(1, num)}
        self.gone: dict[int, int] = dict.fromkeys(self.heard, 0)
        for rank in self.heard:
            lose = lambda rank=rank: self.gone.__setitem__(rank, self.gone[rank] + 1)  # noqa: E731
            self.leader.listen(rank, self.heard[rank].append, lose)
        self.followers = {rank: self.follow(rank) for rank in self.heard}
        connects = [in_thread(each.connect) for each in self.followers.values()]
        self.leader.gather(WAIT)
        for each in connects:
            assert each.get(timeout=WAIT) is None
        for values in ([500, 400], DIGEST, []):
            told = [in_thread(each.least, "", values) for each in self.followers.values()]
            assert self.leader.least("", values) == values
            assert [each.get(timeout=WAIT) for each in told] == [values] * len(told)

    def follow(self, rank: int) -> FollowerHosts:
        return FollowerHosts(replace(self.terms, rank=rank))

    def close(self) -> None:
        self.leader._is_closing = True
        self.leader._server.stop(0)


@pytest.fixture
def started():
    hosts = Started(3)
    yield hosts
    hosts.close()


def test_each_host_does_its_own_calls_and_one_that_goes_takes_nobody_along(started):
    leader, followers = started.leader, started.followers
    assert isinstance(leader, Replicas)
    assert [leader.generation(rank) for rank in (1, 2)] == [0, 0]
    leader.begin()
    assert [leader.generation(rank) for rank in (1, 2)] == [1, 1]
    for rank in (1, 2):
        leader.call(rank, b"for %d" % rank)
        assert next(followers[rank].calls()) == b"for %d" % rank
        followers[rank].answer(b"from %d" % rank)
    until(lambda: started.heard == {1: [b"from 1"], 2: [b"from 2"]})
    followers[1].close()
    until(lambda: started.gone == {1: 1, 2: 0})
    assert [leader.generation(rank) for rank in (1, 2)] == [0, 1]
    with pytest.raises(HostGoneError, match="host 1 is gone"):
        leader.call(1, b"more")
    leader.call(2, b"more")
    assert next(followers[2].calls()) == b"more"
    assert started.ends.empty()


def test_a_host_comes_back_if_it_has_what_all_have_agreed_on(started):
    leader = started.leader
    leader.begin()
    started.followers[1].close()
    until(lambda: started.gone[1] == 1)
    again = started.follow(1)
    again.connect()
    assert again.least("memory", [100, 90]) == [500, 400]  # less, which may suffice
    assert leader.generation(1) == 0
    assert again.least("digest", DIGEST) == DIGEST
    assert again.least("started", []) == []
    until(lambda: leader.generation(1) == 2)
    leader.call(1, b"anew")
    assert next(again.calls()) == b"anew"
    # One that comes while the old one is still thought to be here takes its place.
    third = started.follow(1)
    third.connect()
    until(lambda: started.gone[1] == 2)
    assert third.least("memory", [500, 400]) == [500, 400]
    with pytest.raises(LostHostError, match="taken for lost"):
        third.least("digest", [78, -78])
    assert leader.generation(1) == 0 and started.ends.empty()


def test_one_that_is_none_of_them_takes_nobody_s_place(started):
    leader = started.leader
    leader.begin()
    other = replace(started.terms, rank=1, facts={**started.terms.facts, "sp": "8"})
    with pytest.raises(ConfigError, match="sp is '8' on host 1"):
        FollowerHosts(other).connect()
    assert leader.generation(1) == 1 and started.gone[1] == 0
    leader.call(1, b"on")
    assert next(started.followers[1].calls()) == b"on"


def test_before_the_start_is_over_a_host_that_goes_ends_it(started):
    started.followers[2].close()
    assert "host 2 has gone" in str(started.ends.get(timeout=WAIT))
