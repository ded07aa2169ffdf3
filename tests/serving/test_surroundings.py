"""Faults of what surrounds a server process: network, disks, clock, memory, its supervisor."""

import json
import os
import resource
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import grpc
import httpx
import pytest
from engines import checkpoint
from kit import byte_tokenizer, metric_total, metric_values, running_server
from oracle import numpy_llama
from served import PROMPT, ROOT, SLOW, Served, in_background, serve

from serving.http import guard
from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc
from serving.serve import prove
from serving.start import StartError
from shiftjax.engine.engine import is_out_of_memory
from shiftjax.engine.runner import DeviceRunner
from shiftjax.llm import LLM

HERE = Path(__file__).parent
NUM_TOKENS = 12
SERVER, STRANGER = "10.9.0.1", "10.9.0.2"  # in network namespaces of their own
GIBIBYTE = 1 << 30
ONE_PROGRAM = ("--sp=1",)  # where nothing that was compiled can be kept


@cache
def has_namespaces() -> bool:
    """Whether this user may have namespaces for networks and mounts."""
    command = ["unshare", "-rnm", "sh", "-c", "ip link set lo up && mount -t tmpfs tmpfs /mnt"]
    if not all(shutil.which(name) for name in ("unshare", "nsenter", "ip")):
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def namespaces():
    if not has_namespaces():
        pytest.skip("needs unshare, nsenter, ip, and leave to make namespaces")


@pytest.fixture(scope="module")
def model():
    return checkpoint()


@pytest.fixture(scope="module")
def expected(model) -> list[int]:
    """What the prompt is continued with, by another implementation."""
    return numpy_llama.greedy(*model[1:], PROMPT, NUM_TOKENS)


@pytest.fixture
def descriptors():
    """As many of them for the test itself as it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def tokens(served: Served) -> list[int]:
    """The tokens that the server continues the prompt with."""
    answer = served.complete(max_tokens=NUM_TOKENS)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def inside(script: str, *, flags: str = "-rm") -> tuple[str, ...]:
    """A command that runs another in namespaces of its own, after a script."""
    return ("unshare", flags, "sh", "-euc", f'{script}\nexec "$@"', "sh")


def end_well(served: Served) -> str:
    """Ask for the end, which must be a good one; what the log says."""
    served.process.send_signal(signal.SIGTERM)
    code, _, err = served.end()
    assert code == 0, err
    return err


def wait_for_log(served: Served, *words: str) -> None:
    """Wait until the log has all words; the test fails if they do not come."""
    for _ in range(600):
        if all(word in served.texts()[1] for word in words):
            return
        time.sleep(0.1)
    raise AssertionError(f"no {words} in the log: {served.texts()[1]}")


# ---------------------------------------------------------------- network


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
    options = {"inside": inside("ip link set lo up", flags="-rn"), "uds": path}
    flags = ("--host=0.0.0.0", "--write-timeout=1")
    with (
        serve(model[0], cache_dir, *flags, fault=SLOW, **options) as served,
        bridge(served, path, "127.0.0.1", served.port),
    ):
        served.wait_for("/health/ready", 200)
        with stranger(served) as client:
            neighbour, answers = in_background(lambda: tokens(served))
            client.stdin.write("\n")
            client.stdin.flush()
            assert client.stdout.readline() == "running\n"
            script_in(served, f"nsenter --target {client.pid} --net ip link set plug down")
            client.kill()
            gone = ("gone-stream", "gone-plain", "gone-grpc")
            wait_for_log(served, *(f"id={name} reason=cancelled" for name in gone))
            neighbour.join()
        assert answers == [expected]
        assert tokens(served) == expected
        values = metric_values(served.client)
        for held in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert metric_total(values, f"shiftjax:{held}") == 0
        end_well(served)


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
        assert tokens(served) == expected
        sampling = pb.Sampling(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling)
        (output,) = pb_grpc.InferenceStub(channel).GenerateOnce(request).completions
        assert list(output.token_ids) == expected
        assert f"http://[::1]:{served.port}" in served.texts()[0]
        end_well(served)


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
        pairs = [in_background(lambda: tokens(served)) for _ in range(3 if is_enough else 1)]
        for thread, answers in pairs:
            thread.join()
            assert answers == [expected]
        for connection in many:
            connection.close()
        assert tokens(served) == expected
        end_well(served)


def test_a_body_that_comes_too_slowly(monkeypatch):
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.3)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n"
    with running_server(grpc=False) as server, server.client() as client:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(head + b'{"prompt": ')
            assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
            answer = b""
            while chunk := connection.recv(65536):  # ends: the rest of the body is not awaited
                answer += chunk
        assert answer.startswith(b"HTTP/1.1 408")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
        server.assert_quiescent()


# ---------------------------------------------------------------- disks


def test_disks_that_are_full(model, expected, namespaces, tmp_path):
    """The folders of programs and of profiles, and shared memory: serving goes on without."""
    full = tmp_path / "full"
    full.mkdir()
    token = tmp_path / "token"
    token.write_text("admin-token")
    script = (
        f"mount -t tmpfs -o size=100k,mode=700 tmpfs {full}\nmkdir -m 700 {full}/compiled\n"
        f"head -c 99k /dev/zero > {full}/ballast || true\n"
        "mount -t tmpfs -o size=4k tmpfs /dev/shm"
    )
    flags = (*ONE_PROGRAM, f"--profile-dir={full}", f"--admin-token-file={token}")
    metadata = (("authorization", "Bearer admin-token"),)
    with serve(
        model[0], full / "compiled", *flags, fault=SLOW, admin=True, inside=inside(script)
    ) as served:
        served.wait_for("/health/ready", 200)
        assert "No space left on device" in served.texts()[1]  # a warning about the cache
        neighbour, answers = in_background(lambda: tokens(served))
        with grpc.insecure_channel(f"127.0.0.1:{served.admin_port}") as channel:
            admin = pb_grpc.AdminStub(channel)
            for name in ("one", "two"):  # after the first failure a second is no other
                with pytest.raises(grpc.RpcError) as caught:
                    admin.StartProfile(pb.StartProfileRequest(name=name), metadata=metadata)
                    admin.StopProfile(pb.StopProfileRequest(), metadata=metadata)
                assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert "cannot be written" in caught.value.details()
        neighbour.join()
        assert answers == [expected]
        assert "Traceback" not in end_well(served)


def test_a_system_that_is_read_only(model, expected, namespaces, tmp_path):
    """No home, no shared memory, and the cache where it is by default."""
    nowhere = {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "home" / "cache")}
    script = "mount -o remount,ro,bind /\nmount -t tmpfs -o ro tmpfs /dev/shm"
    options = {"inside": inside(script), "environ": nowhere}
    with serve(model[0], tmp_path, *ONE_PROGRAM, "--cache-dir=auto", **options) as served:
        served.wait_for("/health/ready", 200)
        assert tokens(served) == expected
        err = end_well(served)
        assert "cannot be made: Read-only file system; every start compiles anew" in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("drains", [True, False])
def test_a_log_that_finds_no_room(model, cache_dir, expected, drains):
    """Nor do the addresses on stdout; what the exit code says is true all the same."""
    into = ("sh", "-c", 'exec "$@" >/dev/full 2>/dev/full', "sh")
    with serve(model[0], cache_dir, fault=SLOW, inside=into) as served:
        served.wait_for("/health/ready", 200)
        assert tokens(served) == expected
        if not drains:  # the second signal ends at once, while the first waits for this
            unfinished, _ = in_background(lambda: served.complete(max_tokens=50))
            wait_until_running(served)
            served.process.send_signal(signal.SIGTERM)
            served.wait_for("/health/ready", 503)
        served.process.send_signal(signal.SIGTERM)
        assert served.end()[0] == (0 if drains else 128 + signal.SIGTERM)
        if not drains:
            unfinished.join()


def wait_until_running(served: Served) -> None:
    while metric_total(metric_values(served.client), "shiftjax:num_requests_running") == 0:
        time.sleep(0.05)


def test_a_batch_whose_disk_fills_up_is_resumed(model, cache_dir, namespaces, tmp_path):
    """What is written is whole lines; with more room the rest follows, none twice."""
    names = [f"n{number}" for number in range(12)]
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    lines = [json.dumps({"id": name, "logprobs": 20} | body) + "\n" for name in names]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    disk, first, second = (tmp_path / name for name in ("disk", "first", "second"))
    disk.mkdir()
    flags = "--sp=2 --tp=1 --dtype=float32 --max-model-len=64 --block-size=4 --num-blocks=64"
    flags += f" --max-num-seqs=4 --max-num-batched-tokens=16 --token-buckets=16 --model={model[0]}"
    flags += f" --cache-dir={cache_dir} --output={disk}/out.jsonl"
    batch = f"{shlex.quote(sys.executable)} -m serving.cli batch {tmp_path}/in.jsonl {flags}"
    script = f"""mount -t tmpfs -o size=100k tmpfs {disk}
        code=0; {batch} || code=$?
        cp {disk}/out.jsonl {first}; echo $code
        mount -o remount,size=4m {disk}
        {batch} --resume
        cp {disk}/out.jsonl {second}"""
    environ = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    run = subprocess.run(
        ["unshare", "-rm", "sh", "-euc", script],
        check=False,
        **{"cwd": ROOT, "env": environ, "capture_output": True, "text": True},
    )
    assert (run.returncode, run.stdout) == (0, "1\n"), run.stderr
    assert "No space left on device; --resume continues" in run.stderr
    begun, done = first.read_bytes(), second.read_bytes()
    assert begun
    assert begun.endswith(b"\n")
    assert done.startswith(begun)
    assert len(done) > len(begun)
    records = [json.loads(line) for line in done.splitlines()]
    assert [record["custom_id"] for record in records] == names
    assert all(record["error"] is None for record in records)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", b'{"version": "1.0"', "damaged or not a tokenizer"),
        ("chat_template.jinja", b"{% for m in messages %}", "chat template is wrong at line 1"),
    ],
)
def test_a_tokenizer_that_is_damaged(model, cache_dir, tmp_path, name, content, words):
    """The server does not start, and says so in a line of its own."""
    directory = tmp_path / "model"
    shutil.copytree(model[0], directory)
    byte_tokenizer().save(directory)
    (directory / name).write_bytes(content)
    with serve(directory, cache_dir) as served:
        code, out, err = served.end()
        assert (code, out) == (3, ""), err
        assert words in err.splitlines()[-1]
        assert "Traceback" not in err


# ---------------------------------------------------------------- clock, memory, process


@pytest.fixture(scope="module")
def clock(tmp_path_factory) -> Path:
    """A library that shifts the wall clock of the process that it is loaded into."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("clock") / "clock.so"
    source = str(HERE / "jumping_clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), source], check=True)
    return library


def test_a_wall_clock_that_jumps(model, cache_dir, expected, clock, tmp_path):
    """By a day, both ways, while requests run: deadlines, tokens and progress do not depend."""
    offset = tmp_path / "offset"
    offset.write_bytes(struct.pack("l", 0))
    environ = {"LD_PRELOAD": str(clock), "CLOCK_OFFSET": str(offset)}
    flags = ("--stall-timeout=20", "--watchdog-timeout=40")
    with serve(model[0], cache_dir, *flags, fault=SLOW, environ=environ) as served:
        served.wait_for("/health/ready", 200)
        for seconds in (86400, -86400):
            started = [in_background(lambda: tokens(served)) for _ in range(2)]
            started.append(in_background(lambda: stream_tokens(served, seconds=60)))
            wait_until_running(served)
            with offset.open("r+b") as file:
                file.write(struct.pack("l", seconds))
            assert served.status("/health/progress") == 200
            for thread, answers in started:
                thread.join()
                assert answers == [expected]
            with pytest.raises(AssertionError, match="deadline"):
                stream_tokens(served, seconds=1)
            jumped = served.complete(max_tokens=1).json()["created"] - time.time()
            assert abs(jumped - seconds) < 3600
        end_well(served)


def stream_tokens(served: Served, seconds: int) -> list[int]:
    """The tokens of a stream with a deadline, which must be met."""
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    headers = {"x-request-timeout": str(seconds)}
    answer = served.client.post("/v1/completions", json=body, headers=headers)
    *chunks, done = [line for line in answer.text.split("\n\n") if line]
    assert done == "data: [DONE]"
    assert '"error"' not in chunks[-1], chunks[-1]
    events = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
    choices = [event["choices"][0] for event in events if event["choices"]]
    return [token for choice in choices for token in choice["token_ids"]]


def test_a_stop_that_is_longer_than_the_watchdog_waits(model, cache_dir, expected):
    """SIGSTOP: time in which nothing could run is no step that hangs."""
    flags = ("--watchdog-timeout=1", "--stall-timeout=0.5")
    with serve(model[0], cache_dir, *flags, fault=SLOW) as served:
        served.wait_for("/health/ready", 200)
        pairs = [in_background(lambda: tokens(served)) for _ in range(3)]
        wait_until_running(served)
        served.process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        served.process.send_signal(signal.SIGCONT)
        for thread, answers in pairs:
            thread.join()
            assert answers == [expected]
        served.wait_for("/health/progress", 200)
        end_well(served)


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs prlimit of util-linux")
@pytest.mark.parametrize(
    ("name", "limit", "code", "words"),
    [
        (None, GIBIBYTE, 2, "the address space is limited to 1024 MiB"),
        ("random:llama-3.1-8b", 5 * GIBIBYTE // 2, 1, "not enough memory to load the model"),
    ],
)
def test_too_little_memory_to_start(model, cache_dir, name, limit, code, words):
    with serve(name or model[0], cache_dir, **{"as": limit}) as served:
        ended, out, err = served.end()
        assert (ended, out) == (code, ""), err
        assert words in err.splitlines()[-1]
        assert "Traceback" not in err


def test_a_first_step_that_fails_is_no_start(model, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("INTERNAL: Error dispatching computation: Out of memory allocating 8.")

    monkeypatch.setattr(DeviceRunner, "fetch", fail)
    options = {"max_model_len": 64, "block_size": 4, "num_blocks": 40, "token_buckets": (16,)}
    options |= {"max_num_seqs": 2, "max_num_batched_tokens": 16, "cache_dir": "none"}
    with pytest.raises(StartError, match="the first step failed"):
        prove(LLM(str(model[0]), sp=1, tp=1, **options))


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes."), True),
        (
            RuntimeError("INTERNAL: Error dispatching computation: Out of memory allocating 8."),
            True,
        ),
        (RuntimeError("INTERNAL: Error dispatching computation: another reason"), False),
    ],
)
def test_what_is_a_want_of_memory(error, is_memory):
    """In the words of JAX on a GPU and on a CPU."""
    assert is_out_of_memory(error) == is_memory


def test_memory_that_runs_out_while_serving(model, cache_dir, expected):
    """Every request is answered or cut off. The server lives, or leaves its stack behind."""
    with serve(model[0], cache_dir) as served:
        served.wait_for("/health/ready", 200)
        pid, free = served.process.pid, resource.RLIM_INFINITY
        status = Path(f"/proc/{pid}/status").read_text()
        size = next(int(line.split()[1]) << 10 for line in status.splitlines() if "VmSize" in line)
        resource.prlimit(pid, resource.RLIMIT_AS, (size - (200 << 20), free))
        pairs = [in_background(lambda: fill(served.port)) for _ in range(16)]
        for thread, _ in pairs:
            thread.join(60)
            assert not thread.is_alive()
        if served.process.poll() is None:
            resource.prlimit(pid, resource.RLIMIT_AS, (free, free))
            assert tokens(served) == expected
            end_well(served)
        else:  # a library that takes a failed allocation for memory
            code, _, err = served.end()
            assert code in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS), err
            assert "most recent call first" in err


def fill(port: int) -> bytes:
    """Send a large body and read the answer, if there is one."""
    body = b'{"prompt": "' + b"x" * 8_000_000 + b'"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(head % len(body) + body)
            return connection.recv(65536)
    except ConnectionError:
        return b""


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux")
def test_a_supervisor_starts_a_killed_server_again(model, cache_dir, expected):
    """The same address, the programs of the cache, the same tokens; and an end that is an end."""
    loop = 'for attempt in 1 2 3; do setpriv --pdeathsig KILL "$@" && exit 0; done; exit 1'
    with serve(model[0], cache_dir, fault=SLOW, inside=("sh", "-c", loop, "sh")) as served:
        served.wait_for("/health/ready", 200)
        pairs = [in_background(lambda: served.complete(max_tokens=50)) for _ in range(3)]
        wait_until_running(served)
        before = len(list(cache_dir.iterdir()))
        os.kill(server_pids(served)[-1], signal.SIGKILL)
        for thread, answers in pairs:
            thread.join()
            assert isinstance(answers[0], httpx.TransportError)
        served.wait_for("/health/ready", 200)
        assert tokens(served) == expected
        assert len(list(cache_dir.iterdir())) == before
        assert len(server_pids(served)) == 2
        os.kill(server_pids(served)[-1], signal.SIGTERM)
        assert served.end()[0] == 0


def server_pids(served: Served) -> list[int]:
    """Of the servers that have started, by the log."""
    lines = served.texts()[1].splitlines()
    return [int(line.split("[")[1][:-1]) for line in lines if "Started server process" in line]
