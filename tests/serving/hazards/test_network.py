"""What a network does to a server process: pulled cables, no IPv4, a thousand connections."""

import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from kit import metric_total, metric_values
from served import NUM_TOKENS, PROMPT, ROOT, SLOW, Served, in_background, inside, serve

from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc

pytestmark = pytest.mark.thorough

HERE = Path(__file__).parents[1]
SERVER, STRANGER = "10.9.0.1", "10.9.0.2"  # in network namespaces of their own


@pytest.fixture
def descriptors():
    """As many of them for the test itself as it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def enter(served: Served, *command: str, **options) -> subprocess.Popen[str]:
    """Run a command in the network of a server that has one of its own."""
    ours = os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{served.process.pid}/ns/net") == ours:  # `unshare` has yet to run
        time.sleep(0.01)
    there = [f"--target={served.process.pid}", "--user", "--net", "--preserve-credentials"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(["nsenter", *there, *command], env=environ, text=True, **options)


def script_in(served: Served, script: str) -> None:
    """Run a script in the network of a server to its end."""
    assert enter(served, "sh", "-euc", script).wait() == 0


@contextmanager
def bridge(served: Served, path: Path, host: str, port: int):
    """A UNIX socket through which the server's port can be reached from here."""
    command = (sys.executable, str(HERE / "bridge.py"), str(path), host, str(port))
    with enter(served, *command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == "listening\n"
            yield
        finally:
            process.kill()


@contextmanager
def stranger(served: Served):
    """A client in a third network, joined to the server's by a cable; it begins when told to."""
    client = (sys.executable, str(HERE / "vanishing_client.py"))
    addresses = (f"{SERVER}:{served.port}", f"{SERVER}:{served.grpc_port}")
    wait = 'ip link set lo up; echo; read go; exec "$@"'
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    apart = ("unshare", "-n", "sh", "-euc", wait, "sh", *client, *addresses)
    with enter(served, *apart, **pipes) as process:
        process.stdout.readline()
        there = ("nsenter", f"--target={process.pid}", "--net")
        script_in(
            served,
            f"ip link add cable type veth peer name plug netns {process.pid}\n"
            f"ip addr add {SERVER}/24 dev cable; ip link set cable up\n{' '.join(there)} sh -euc "
            f"'ip addr add {STRANGER}/24 dev plug; ip link set plug up'",
        )
        # The network stays when the client has gone, or the server would hear of it.
        with enter(served, *there, "sleep", "600") as keeper:
            try:
                yield process
            finally:
                process.kill()
                keeper.kill()


def test_a_client_that_vanishes_without_a_word(model, cache_dir, expected, namespaces, tmp_path):
    """The cable is pulled, the client killed: nothing says so. Its requests end all the same."""
    path = tmp_path / "http"
    before = "from serving.server import write_limit\nwrite_limit.WRITE_SECONDS = 1.0"
    inside_network = inside("ip link set lo up", flags="-rn")
    options = {"inside": inside_network, "uds": path, "before": before}
    with (
        serve(model[0], cache_dir, "--host=0.0.0.0", fault=SLOW, **options) as served,
        bridge(served, path, "127.0.0.1", served.port),
    ):
        served.wait_for("/health/ready", 200)
        with stranger(served) as client:
            neighbour, answers = in_background(served.tokens)
            client.stdin.write("\n")
            client.stdin.flush()
            assert client.stdout.readline() == "running\n"
            script_in(served, f"nsenter --target {client.pid} --net ip link set plug down")
            client.kill()
            gone = ("gone-stream", "gone-plain", "gone-grpc")
            served.wait_for_log(*(f"id={name} reason=cancelled" for name in gone))
            neighbour.join()
        assert answers == [expected]
        assert served.tokens() == expected
        values = metric_values(served.client)
        for held in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert metric_total(values, f"shiftjax:{held}") == 0
        served.end_well()


def test_a_network_without_ipv4(model, cache_dir, expected, namespaces, tmp_path):
    """IPv6 alone: the default address is refused in words, ::1 serves both protocols."""
    network = inside("ip link set lo up; ip addr del 127.0.0.1/8 dev lo", flags="-rn")
    with serve(model[0], cache_dir, inside=network) as served:
        code, _, err = served.end()
        assert code == 2
        assert err.splitlines()[-1].startswith("shiftjax: cannot listen on 127.0.0.1")
    http, rpc = tmp_path / "http", tmp_path / "rpc"
    with (
        serve(model[0], cache_dir, "--host=::1", inside=network, uds=http) as served,
        bridge(served, http, "::1", served.port),
        bridge(served, rpc, "::1", served.grpc_port),
        grpc.insecure_channel(f"unix:{rpc}") as channel,
    ):
        served.wait_for("/health/ready", 200)
        assert served.tokens() == expected
        sampling = pb.Sampling(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling)
        (output,) = pb_grpc.InferenceStub(channel).GenerateOnce(request).completions
        assert list(output.token_ids) == expected
        assert f"http://[::1]:{served.port}" in served.texts()[0]
        served.end_well()


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs prlimit of util-linux")
@pytest.mark.parametrize(
    ("hard_limit", "flooded"), [(4096, "port"), (256, "port"), (256, "grpc_port")]
)
def test_a_thousand_idle_connections(model, cache_dir, expected, descriptors, hard_limit, flooded):
    """Descriptors do for all of them, or there are too few: then who is in is served."""
    is_enough = hard_limit > 1000
    with serve(model[0], cache_dir, fault=SLOW, nofile=f"256:{hard_limit}") as served:
        served.wait_for("/health/ready", 200)  # over a connection that is kept
        address = ("127.0.0.1", getattr(served, flooded))
        many = [socket.create_connection(address, timeout=30) for _ in range(1000)]
        if is_enough:
            for connection in many[::2]:
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: ")
        elif flooded == "port":
            assert many[-1].recv(65536).startswith(b"HTTP/1.1 429")
        pairs = [in_background(served.tokens) for _ in range(3 if is_enough else 1)]
        for thread, answers in pairs:
            thread.join()
            assert answers == [expected]
        for connection in many:
            connection.close()
        assert served.tokens() == expected
        served.end_well()
