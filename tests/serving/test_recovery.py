"""Server processes that are killed, stopped and starved; answers that find no room on the disk."""

import json
import os
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import grpc
import httpx
import pytest
from engines import checkpoint
from served import PROMPT, SLOW, Served, in_background, serve

from serving.cli import main
from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc

BODY = {"prompt": PROMPT, "max_tokens": 50, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model():
    return checkpoint()


def stream_until_it_breaks(served: Served) -> tuple[bytes, bool]:
    """(what came, whether the connection broke) of a streamed completion."""
    received = b""
    try:
        with served.client.stream(
            "POST", "/v1/completions", json=BODY | {"stream": True}
        ) as answer:
            for chunk in answer.iter_raw():
                received += chunk
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
            thread, answers = in_background(lambda: stream_until_it_breaks(served))
            time.sleep(1.0)
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
        again.process.send_signal(signal.SIGTERM)
        assert again.end()[0] == 0
    assert not list(cache_dir.glob("*.tmp*"))


def test_a_stopped_process_goes_on_where_it_was(model, cache_dir):
    with serve(model[0], cache_dir, "--stall-timeout=0.3", fault=SLOW) as served:
        served.wait_for("/health/ready", 200)
        alone = served.complete(max_tokens=10).json()["choices"]
        thread, answers = in_background(lambda: served.complete(max_tokens=10))
        time.sleep(0.5)
        served.process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        served.process.send_signal(signal.SIGCONT)
        thread.join()
        assert answers[0].json()["choices"] == alone
        served.wait_for("/health/progress", 200)
        served.process.send_signal(signal.SIGTERM)
        assert served.end()[0] == 0


def test_a_broken_compilation_cache_is_compiled_again(model, cache_dir, tmp_path):
    if not any(cache_dir.iterdir()):  # no test before this one has filled it
        with serve(model[0], cache_dir) as served:
            served.wait_for("/health/ready", 200)
    broken = tmp_path / "cache"
    shutil.copytree(cache_dir, broken)
    entries = [path for path in broken.rglob("*") if path.is_file()]
    assert entries
    for path in entries:
        path.write_bytes(b"nonsense")
    with serve(model[0], broken) as served:
        served.wait_for("/health/ready", 200)
        assert served.complete(max_tokens=3).status_code == 200


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs prlimit of util-linux")
def test_few_file_descriptors(model, cache_dir):
    """More clients than descriptors: some wait, the server lives, and serves when they are gone."""
    with serve(model[0], cache_dir, nofile=96) as served:
        served.wait_for("/health/ready", 200)
        kept = []
        for _ in range(150):
            connection = socket.socket()
            connection.settimeout(0.2)
            kept.append(connection)
            try:
                connection.connect(("127.0.0.1", served.port))
            except OSError:
                break
        for connection in kept:
            connection.close()
        for _ in range(100):
            if served.status("/health/ready") == 200:
                break
            time.sleep(0.1)
        assert served.complete(max_tokens=3).status_code == 200
        served.process.send_signal(signal.SIGTERM)
        assert served.end()[0] == 0


def test_an_interrupt_ends_like_a_termination(model, cache_dir):
    """Ctrl-C in front of an idle server: it drains, says so and ends with 0."""
    with serve(model[0], cache_dir) as served:
        served.wait_for("/health/ready", 200)
        served.process.send_signal(signal.SIGINT)
        code, _, err = served.end()
        assert (code, "Traceback" in err) == (0, False)


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
            time.sleep(0.5)
            assert admin.Drain(pb.DrainRequest(), metadata=metadata).num_unfinished == 1
            assert admin.GetServer(pb.GetServerRequest(), metadata=metadata).draining
            assert admin.Drain(pb.DrainRequest(), metadata=metadata).num_unfinished == 1
            assert admin.GetLoad(pb.GetLoadRequest(), metadata=metadata).num_running == 1
        thread.join()
        assert answers[0].status_code == 200
        assert served.end()[0] == 0


def code_of(call, request, metadata) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, metadata=metadata)
    return caught.value.code()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_a_batch_which_can_be_resumed(tmp_path, capsys):
    directory, _, _ = checkpoint()
    source = tmp_path / "in.jsonl"
    body = {"prompt": PROMPT, "max_tokens": 4}
    source.write_text("".join(json.dumps(body) + "\n" for _ in range(3)))
    flags = ["--model", str(directory), "--sp=1", "--tp=1", "--num-blocks=40", "--max-num-seqs=2"]
    flags += ["--max-model-len=64", "--max-num-batched-tokens=16", "--token-buckets=16"]
    flags += ["--cache-dir=none"]
    assert main(["batch", str(source), *flags, "--output=/dev/full"]) == 1
    assert "No space left" in capsys.readouterr().err
    assert os.path.getsize(source) > 0
    assert threading.active_count() < 20
