"""Server processes that are killed, stopped or interrupted, and clocks that jump."""

import os
import shutil
import signal
import struct
import subprocess
import threading
import time
from pathlib import Path

import grpc
import httpx
import pytest
from kit import events
from served import NUM_TOKENS, PROMPT, SLOW, Served, in_background, serve

from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc

pytestmark = pytest.mark.thorough

BODY = {"prompt": PROMPT, "max_tokens": 50, "temperature": 0, "ignore_eos": True}


def stream_until_it_breaks(served: Served, has_begun: threading.Event) -> tuple[bytes, bool]:
    """(what came, whether the connection broke) of a streamed completion."""
    received = b""
    try:
        with served.client.stream(
            "POST", "/v1/completions", json=BODY | {"stream": True}
        ) as answer:
            for chunk in answer.iter_raw():
                received += chunk
                has_begun.set()
    except httpx.TransportError:
        return received, True
    return received, False


def test_a_killed_server_never_ends_a_stream_well_and_can_start_again(model, cache_dir):
    with serve(model[0], cache_dir, fault=SLOW) as served:
        served.wait_for("/health/ready", 200)
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=PROMPT),
            sampling=pb.Sampling(max_tokens=50, ignore_eos=True),
        )
        with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
            call = pb_grpc.InferenceStub(channel).Generate(request)
            next(call)
            has_begun = threading.Event()
            thread, answers = in_background(lambda: stream_until_it_breaks(served, has_begun))
            assert has_begun.wait(60)
            served.process.kill()
            thread.join()
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        received, is_broken = answers[0]
        assert is_broken
        assert b"data: {" in received
        assert b"[DONE]" not in received
    with serve(model[0], cache_dir, port=served.port) as again:
        again.wait_for("/health/ready", 200)
        assert again.complete(max_tokens=3).status_code == 200
        again.end_well()
    assert not list(cache_dir.glob("*.tmp*"))


def server_pids(served: Served) -> list[int]:
    """Of the servers that have started, by the log."""
    lines = served.texts()[1].splitlines()
    return [int(line.split("[")[1][:-1]) for line in lines if "Started server process" in line]


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux")
def test_a_supervisor_starts_a_killed_server_again(model, cache_dir, expected):
    """The same address, the programs of the cache, the same tokens; and an end that is an end."""
    loop = 'for attempt in 1 2 3; do setpriv --pdeathsig KILL "$@" && exit 0; done; exit 1'
    with serve(model[0], cache_dir, fault=SLOW, inside=("sh", "-c", loop, "sh")) as served:
        served.wait_for("/health/ready", 200)
        pairs = [in_background(lambda: served.complete(max_tokens=50)) for _ in range(3)]
        served.wait_until_running()
        before = len(list(cache_dir.iterdir()))
        os.kill(server_pids(served)[-1], signal.SIGKILL)
        for thread, answers in pairs:
            thread.join()
            assert isinstance(answers[0], httpx.TransportError)
        served.wait_for("/health/ready", 200)
        assert served.tokens() == expected
        assert len(list(cache_dir.iterdir())) == before
        assert len(server_pids(served)) == 2
        os.kill(server_pids(served)[-1], signal.SIGTERM)
        assert served.end()[0] == 0


def test_a_stop_that_is_longer_than_the_watchdog_waits(model, cache_dir, expected):
    """SIGSTOP: time in which nothing could run is no step that hangs."""
    flags = ("--watchdog-timeout=1", "--stall-timeout=0.5")
    with serve(model[0], cache_dir, *flags, fault=SLOW) as served:
        served.wait_for("/health/ready", 200)
        pairs = [in_background(served.tokens) for _ in range(3)]
        served.wait_until_running()
        served.process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        served.process.send_signal(signal.SIGCONT)
        for thread, answers in pairs:
            thread.join()
            assert answers == [expected]
        served.wait_for("/health/progress", 200)
        served.end_well()


def test_an_interrupt_ends_like_a_termination(model, cache_dir):
    """Ctrl-C in front of an idle server: it drains, says so and ends with 0."""
    with serve(model[0], cache_dir) as served:
        served.wait_for("/health/ready", 200)
        served.process.send_signal(signal.SIGINT)
        code, _, err = served.end()
        assert (code, "Traceback" in err) == (0, False)


@pytest.fixture(scope="module")
def clock(tmp_path_factory) -> Path:
    """A library that shifts the wall clock of the process that it is loaded into."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("clock") / "clock.so"
    source = str(Path(__file__).parents[1] / "jumping_clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), source], check=True)
    return library


def stream_tokens(served: Served, seconds: int) -> list[int]:
    """The tokens of a stream with a deadline, which must be met."""
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    headers = {"x-request-timeout": str(seconds)}
    answer = served.client.post("/v1/completions", json=body, headers=headers)
    objects = events(answer.text)
    assert "error" not in objects[-1], objects[-1]
    choices = [each["choices"][0] for each in objects if each["choices"]]
    return [token for choice in choices for token in choice["token_ids"]]


def test_a_wall_clock_that_jumps(model, cache_dir, expected, clock, tmp_path):
    """By a day, both ways, while requests run: deadlines, tokens and progress do not depend."""
    offset = tmp_path / "offset"
    offset.write_bytes(struct.pack("l", 0))
    environ = {"LD_PRELOAD": str(clock), "CLOCK_OFFSET": str(offset)}
    flags = ("--stall-timeout=20", "--watchdog-timeout=40")
    with serve(model[0], cache_dir, *flags, fault=SLOW, environ=environ) as served:
        served.wait_for("/health/ready", 200)
        for seconds in (86400, -86400):
            started = [in_background(served.tokens) for _ in range(2)]
            started.append(in_background(lambda: stream_tokens(served, seconds=60)))
            served.wait_until_running()
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
        served.end_well()


def code_of(call, request, metadata) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, metadata=metadata)
    return caught.value.code()


def test_a_storm_of_scrapes_changes_nothing(model, cache_dir, tmp_path):
    """Also the administrator's calls while the server drains, and profiles twice."""
    token = tmp_path / "token"
    token.write_text("admin-token")
    profiles = tmp_path / "profiles"
    flags = (f"--admin-token-file={token}", f"--profile-dir={profiles}")
    metadata = (("authorization", "Bearer admin-token"),)
    with serve(model[0], cache_dir, *flags, fault=SLOW, admin=True) as served:
        served.wait_for("/health/ready", 200)
        alone = served.complete(max_tokens=8).json()["choices"]
        thread, answers = in_background(lambda: served.complete(max_tokens=8))
        statuses = [served.status("/metrics") for _ in range(150)]
        assert set(statuses) == {200}
        with grpc.insecure_channel(f"127.0.0.1:{served.admin_port}") as channel:
            admin = pb_grpc.AdminStub(channel)
            start = pb.StartProfileRequest(name="one")
            admin.StartProfile(start, metadata=metadata)
            for call, request in (
                (admin.StartProfile, pb.StartProfileRequest(name="two")),
                (admin.StartProfile, start),
            ):
                assert code_of(call, request, metadata) is grpc.StatusCode.FAILED_PRECONDITION
            admin.StopProfile(pb.StopProfileRequest(), metadata=metadata)
            code = code_of(admin.StopProfile, pb.StopProfileRequest(), metadata)
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            thread.join()
            assert answers[0].json()["choices"] == alone
            assert list((profiles / "one").rglob("*.xplane.pb"))
            thread, answers = in_background(lambda: served.complete(max_tokens=20))
            served.wait_until_running()
            assert admin.Drain(pb.DrainRequest(), metadata=metadata).num_unfinished == 1
            assert admin.GetServer(pb.GetServerRequest(), metadata=metadata).draining
            assert admin.Drain(pb.DrainRequest(), metadata=metadata).num_unfinished == 1
            assert admin.GetLoad(pb.GetLoadRequest(), metadata=metadata).num_running == 1
        thread.join()
        assert answers[0].status_code == 200
        assert served.end()[0] == 0
