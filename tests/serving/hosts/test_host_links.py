"""Leader and followers over loopback: who may join, what they tell, and how a loss is noticed."""

import queue
import socket
import threading
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

import grpc
import pytest
from certificates import NEEDS_OPENSSL, make_authority, make_own
from served import free_port

from serving.hosts import follower, leader
from serving.hosts.follower import FollowerHosts
from serving.hosts.leader import LeaderHosts
from serving.hosts.terms import Terms, differences
from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc
from serving.run.hosts import channel_credentials
from serving.server.options import ServerOptions
from serving.server.tls import Certificates
from shiftjax.hosts.calls import LostHostError
from shiftjax.options import ConfigError

FACTS = {"jax": "0.12.0", "checkpoint": "ab12", "sp": "4"}
WAIT = 20  # seconds, for what comes at once


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Words every tenth of a second."""
    monkeypatch.setattr(leader, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(follower, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(follower, "JOIN_SECONDS", WAIT)


def terms_of(rank: int, num: int = 2, port: int = 0, **fields) -> Terms:
    address = f"127.0.0.1:{port or free_port()}"
    return replace(Terms(rank, num, address, "secret", FACTS), **fields)


class Joined:
    """A leader and its followers, all in this process."""

    def __init__(self, num: int = 2, port: int = 0, credentials=(None, None), **fields):
        """Followers connect to `port`, if it is another one."""
        terms = terms_of(0, num, **fields)
        self.lost: queue.Queue[tuple[int, LostHostError]] = queue.Queue()
        self.leader = LeaderHosts(terms, lambda error: self.lost.put((0, error)))
        self.leader.start(credentials[0])
        self.at = f"127.0.0.1:{port}" if port else terms.address
        self.followers = [
            FollowerHosts(
                replace(terms, rank=rank, address=self.at),
                lambda error, rank=rank: self.lost.put((rank, error)),
            )
            for rank in range(1, num)
        ]
        threads = [
            threading.Thread(target=each.connect, args=credentials[1:]) for each in self.followers
        ]
        for thread in threads:
            thread.start()
        self.leader.gather(WAIT)
        for thread in threads:
            thread.join(WAIT)

    def close(self) -> None:
        self.leader._is_closing = True
        self.leader._server.stop(0)


@contextmanager
def joined(num: int = 2, **fields):
    with closing(Joined(num, **fields)) as hosts:
        yield hosts


def in_thread(function, *arguments) -> queue.Queue:
    answers: queue.Queue = queue.Queue()

    def run() -> None:
        try:
            answers.put(function(*arguments))
        except (LostHostError, ConfigError) as error:
            answers.put(error)

    threading.Thread(target=run, daemon=True).start()
    return answers


def test_calls_come_in_order_and_the_end_is_a_good_one():
    with joined(3) as hosts:
        for number in range(1, 50):
            hosts.leader.send(number, b"%d" % number)
        for each in hosts.followers:
            calls = each.calls()
            assert [next(calls) for _ in range(49)] == [b"%d" % n for n in range(1, 50)]
            assert next(calls) is None  # a pause
            each.done(49)
        wait_until(lambda: {peer.done for peer in hosts.leader._peers.values()} == {49})
        ends = [in_thread(list, each.calls()) for each in hosts.followers]
        closes = in_thread(hosts.leader.close)
        assert [end.get(timeout=WAIT) for end in ends] == [[], []]
        for each in hosts.followers:
            each.close()
        closes.get(timeout=WAIT)
        assert hosts.lost.empty()


@NEEDS_OPENSSL
@pytest.mark.parametrize("authorities", [{}, {"ssl_ca_certs": "ca.pem"}], ids=["own", "mutual"])
def test_hosts_may_speak_tls(authorities, tmp_path, monkeypatch):
    """With a certificate that all have, or of an authority that both sides ask for."""
    make_authority(tmp_path)
    make_own(tmp_path)
    names = {"ssl_certfile": "own.pem", "ssl_keyfile": "own.key"}
    if authorities:
        names = {"ssl_certfile": "server.pem", "ssl_keyfile": "server.key"} | authorities
    options = ServerOptions(**{name: str(tmp_path / file) for name, file in names.items()})
    both = Certificates(options).credentials, channel_credentials(options)
    with joined(credentials=both) as hosts:
        hosts.leader.send(1, b"secret")
        assert next(hosts.followers[0].calls()) == b"secret"
        monkeypatch.setattr(follower, "JOIN_SECONDS", 0.5)
        plain = FollowerHosts(hosts.followers[0].terms, lambda _: None)
        with pytest.raises(LostHostError, match="nobody listens"):
            plain.connect()


def test_all_hosts_hear_the_least_of_each_number():
    with joined(3) as hosts:
        answers = [
            in_thread(each.least, "to count", (10 - rank, rank))
            for rank, each in enumerate(hosts.followers)
        ]
        assert hosts.leader.least("to count", (9, 5)) == [9, 0]
        assert [each.get(timeout=WAIT) for each in answers] == [[9, 0], [9, 0]]


def test_who_is_elsewhere_in_the_start_is_no_part_of_it():
    with joined() as hosts:
        in_thread(hosts.followers[0].least, "to count", (1, 2, 3))
        with pytest.raises(LostHostError, match="different points"):
            hosts.leader.least("to start", ())


def test_differences_are_said_by_name():
    theirs = FACTS | {"jax": "0.11.2", "more": "1"}
    words = differences(3, theirs, FACTS)
    assert words is not None and "jax is '0.11.2' on host 3 and '0.12.0' on host 0" in words
    assert "more is '1' on host 3 and None on host 0" in words
    assert differences(3, dict(FACTS), FACTS) is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"facts": FACTS | {"jax": "0.11.2"}}, "jax is '0.11.2' on host 1"),
        ({"facts": FACTS | {"checkpoint": "cd34"}}, "checkpoint is 'cd34' on host 1"),
        ({"rank": 2}, "host_rank = 2 is none of hosts = 2"),
    ],
)
def test_a_host_that_differs_is_refused_on_both_sides_and_may_come_again(fields, words, caplog):
    with gathering() as (terms, hosts, gathered):
        other = FollowerHosts(replace(terms, **({"rank": 1} | fields)))
        with pytest.raises(ConfigError) as caught:
            other.connect()
        assert words in str(caught.value)
        assert words in caplog.text and "waiting on" in caplog.text
        assert gathered.empty()
        FollowerHosts(replace(terms, rank=1)).connect()
        assert gathered.get(timeout=WAIT) is None
        assert hosts._lost is None


@contextmanager
def gathering(num: int = 2):
    """(terms, a leader that waits, what its wait comes to)"""
    terms = terms_of(0, num)
    hosts = LeaderHosts(terms)
    hosts.start()
    try:
        yield terms, hosts, in_thread(hosts.gather, WAIT)
    finally:
        hosts._is_closing = True
        hosts._server.stop(0)


def test_a_wait_in_vain_tells_of_the_last_refusal():
    with gathering() as (terms, hosts, _):
        facts = FACTS | {"sp": "2"}
        with pytest.raises(ConfigError):
            FollowerHosts(replace(terms, rank=1, facts=facts)).connect()
        with pytest.raises(LostHostError, match=r"hosts \[1\] .* refused: .*sp is '2' on host 1"):
            hosts.gather(0.1)


def call_with(terms: Terms, messages) -> grpc.Call:
    """The call of a peer with the right secret, that says `messages`."""
    stub = pb_grpc.HostsStub(grpc.insecure_channel(terms.address))
    return stub.Follow(messages, metadata=(("authorization", f"Bearer {terms.secret}"),))


@pytest.mark.parametrize(
    "messages",
    [[], [pb.FollowerMessage(progress=pb.Progress(calls=1))], None],
    ids=["ends", "other", "silent"],
)
def test_a_peer_that_does_not_say_who_it_is_is_refused(messages, monkeypatch, caplog):
    """Without a traceback, and a silent one does not keep a thread for ever."""
    monkeypatch.setattr(leader, "HELLO_SECONDS", 0.2)
    says_nothing: queue.Queue = queue.Queue()
    with gathering() as (terms, _, gathered):
        silence = iter(says_nothing.get, None)
        with pytest.raises(grpc.RpcError) as caught:
            next(call_with(terms, silence if messages is None else iter(messages)))
        says_nothing.put(None)
        expected = {"FAILED_PRECONDITION"} if messages is not None else {"CANCELLED"}
        assert {caught.value.code().name} == expected
        wait_until(lambda: "does not say which host it is" in caplog.text)
        FollowerHosts(replace(terms, rank=1)).connect()
        assert gathered.get(timeout=WAIT) is None
    assert "Traceback" not in caplog.text and "Exception" not in caplog.text


def test_a_host_that_ends_before_all_have_come_may_come_again():
    with gathering(3) as (terms, hosts, gathered):
        one, two = (FollowerHosts(replace(terms, rank=rank)) for rank in (1, 2))
        connects = in_thread(one.connect)
        wait_until(lambda: 1 in hosts._peers)
        one.close()
        wait_until(lambda: not hosts._peers)
        assert gathered.empty() and connects.empty()
        again = FollowerHosts(replace(terms, rank=1))
        answers = in_thread(again.connect), in_thread(two.connect)
        assert gathered.get(timeout=WAIT) is None
        assert [each.get(timeout=WAIT) for each in answers] == [None, None]


def wait_until(condition) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_another_secret_is_refused_and_changes_nothing():
    terms = terms_of(0)
    hosts = LeaderHosts(terms)
    hosts.start()
    with ExitStack() as ends:
        ends.callback(hosts._server.stop, 0)
        with pytest.raises(ConfigError, match="secret is another one"):
            FollowerHosts(replace(terms, rank=1, secret="guess")).connect()
        assert not hosts._peers and hosts._refusal is None


def test_hosts_that_do_not_come_are_named():
    hosts = LeaderHosts(terms_of(0, 3))
    hosts.start()
    with pytest.raises(LostHostError, match=r"hosts \[1, 2\] have not come"):
        hosts.gather(0.1)
    hosts._server.stop(0)


# ------------------------------------------------------------------ losses


def test_an_error_on_a_follower_is_the_end_of_all():
    with joined() as hosts:
        hosts.followers[0].fail(RuntimeError("RESOURCE_EXHAUSTED: no room"))
        heard = dict(hosts.lost.get(timeout=WAIT) for _ in range(2))
        assert "host 1 failed: RuntimeError: RESOURCE_EXHAUSTED: no room" in str(heard[0])
        assert "no room" in str(heard[1])
        with pytest.raises(LostHostError, match="no room"):
            hosts.leader.send(1, b"more")
        with pytest.raises(LostHostError, match="no room"):
            next(hosts.followers[0].calls())


def test_a_step_that_fails_on_the_leader_is_the_end_of_all(monkeypatch):
    monkeypatch.setattr(leader, "EXPLAIN_SECONDS", 0.1)
    with joined() as hosts:
        error = hosts.leader.explain(RuntimeError("no room"))
        assert "a step of all hosts failed on host 0: no room" in str(error)
        assert {rank for rank, _ in (hosts.lost.get(timeout=WAIT) for _ in range(2))} == {0, 1}


def test_a_follower_that_does_no_step_is_lost():
    with joined(stuck_limit=0.3) as hosts:
        time.sleep(0.5)  # without calls it may rest
        assert hosts.lost.empty()
        hosts.leader.send(1, b"a step")
        rank, error = hosts.lost.get(timeout=WAIT)
        assert (rank, "no step" in str(error)) == (0, True)


def test_a_network_that_splits_ends_both_sides():
    """Nothing comes through any more, and no connection ends."""
    listener = socket.create_server(("127.0.0.1", 0))
    is_open = threading.Event()
    is_open.set()

    def carry(one: socket.socket, other: socket.socket) -> None:
        while is_open.is_set():
            try:
                other.sendall(one.recv(65536))
            except TimeoutError:
                continue
            except OSError:
                return

    def relay(port: int) -> None:
        near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", port))
        for pair in ((near, far), (far, near)):
            pair[0].settimeout(0.05)
            threading.Thread(target=carry, args=pair, daemon=True).start()
        held.extend((near, far))

    held: list[socket.socket] = [listener]
    port = free_port()
    threading.Thread(target=relay, args=(port,), daemon=True).start()
    fields = {"address": f"127.0.0.1:{port}", "limit": 0.5, "stuck_limit": 60}
    with joined(port=listener.getsockname()[1], **fields) as hosts:
        hosts.leader.send(1, b"the first step")
        next(hosts.followers[0].calls())
        hosts.followers[0].done(1)
        time.sleep(0.7)
        assert hosts.lost.empty()
        is_open.clear()
        heard = dict(hosts.lost.get(timeout=WAIT) for _ in range(2))
        assert "host 1 has been silent" in str(heard[0])
        assert "the leader has been silent" in str(heard[1])
    for each in held:
        each.close()
