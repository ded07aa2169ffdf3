"""The administrator's listener: its own token, load, aborts, drain."""

import threading

import grpc
import jax
import pytest
from kit import running_server

from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc

TOKEN = (("authorization", "Bearer admin-token"),)


@pytest.fixture(scope="module")
def token_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("admin") / "token"
    path.write_text("admin-token\n")
    return str(path)


@pytest.fixture
def server(token_file):
    with running_server(
        keys=("user-key",), admin_port=0, admin_token_file=token_file, drain_seconds=0.5
    ) as running:
        yield running
        running.runner.gate.set()
        running.assert_quiescent()


@pytest.fixture
def admin(server):
    with grpc.insecure_channel(server.server.admin.address) as channel:
        yield pb_grpc.AdminStub(channel)


def code_of(call, *arguments, **options) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **options)
    return caught.value.code()


def test_only_the_administrator_comes_in(server, admin):
    user = (("authorization", "Bearer user-key"),)
    for metadata in ((), user):
        code = code_of(admin.GetLoad, pb.GetLoadRequest(), metadata=metadata)
        assert code is grpc.StatusCode.UNAUTHENTICATED
    assert admin.GetLoad(pb.GetLoadRequest(), metadata=TOKEN).num_running == 0
    info = admin.GetServer(pb.GetServerRequest(), metadata=TOKEN)
    assert info.ready
    assert list(info.models) == ["echo", "echo-alias"]
    assert not info.HasField("fleet")


def test_aborts(server, admin):
    server.runner.gate.clear()
    with grpc.insecure_channel(server.server.grpc.address) as channel:
        stub = pb_grpc.InferenceStub(channel)
        user = (("authorization", "Bearer user-key"),)
        running = stub.Generate(pb.GenerateRequest(text="x", request_id="runs"), metadata=user)
        next(running)
        request = pb.AbortRequest(request_ids=["runs", "unknown"])
        statuses = admin.Abort(request, metadata=TOKEN).statuses
        assert statuses["runs"] == pb.ABORT_STATUS_ABORTED
        assert statuses["unknown"] == pb.ABORT_STATUS_NOT_FOUND
        assert code_of(lambda: list(running)) is grpc.StatusCode.ABORTED
        server.runner.gate.set()
    statuses = admin.Abort(pb.AbortRequest(request_ids=["runs"]), metadata=TOKEN).statuses
    assert statuses["runs"] == pb.ABORT_STATUS_ALREADY_FINISHED
    for names in ([], ["a", "a"], [""], ["x" * 1000], ["a\nb"]):
        code = code_of(admin.Abort, pb.AbortRequest(request_ids=names), metadata=TOKEN)
        assert code is grpc.StatusCode.INVALID_ARGUMENT


def test_the_load_is_watched(server, admin):
    watch = admin.WatchLoad(pb.WatchLoadRequest(interval_seconds=0.1), metadata=TOKEN)
    assert next(watch).accepted == 0
    with server.client() as client:
        headers = {"authorization": "Bearer user-key"}
        client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    server.assert_quiescent()
    next(watch)
    load = next(watch)
    assert (load.accepted, load.finished) == (1, 1)
    assert sum(load.steps_by_mode.values()) > 0
    watch.cancel()
    wrong = pb.WatchLoadRequest(interval_seconds=float("nan"))
    code = code_of(lambda: list(admin.WatchLoad(wrong, metadata=TOKEN)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT


def test_the_prefix_cache_is_flushed(server, admin):
    headers = {"authorization": "Bearer user-key"}

    def cached() -> int:
        with server.client(headers=headers) as client:
            usage = client.post("/v1/completions", json={"prompt": "x" * 40}).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 0
    admin.FlushPrefixCache(pb.FlushPrefixCacheRequest(), metadata=TOKEN)
    assert cached() == 0


def test_a_command_that_nobody_waits_for_is_not_run(server, admin, caplog):
    """The step is over only when the call has given up."""
    server.runner.gate.clear()
    headers = {"authorization": "Bearer user-key"}

    def complete() -> None:
        with server.client(headers=headers) as client:
            client.post("/v1/completions", json={"prompt": "x" * 40})

    thread = threading.Thread(target=complete)
    thread.start()
    server.wait_until(lambda: server.runner.is_held)
    flush = pb.FlushPrefixCacheRequest()
    code = code_of(admin.FlushPrefixCache, flush, metadata=TOKEN, timeout=0.3)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    server.runner.gate.set()
    thread.join()
    admin.FlushPrefixCache(flush, metadata=TOKEN)  # the engine obeys as before
    assert "failed" not in caplog.text


def test_profiles(token_file, tmp_path):
    """One at a time; a name that could not be used stays free."""
    options = {"admin_port": 0, "admin_token_file": token_file, "profile_dir": str(tmp_path)}
    with (
        running_server(**options) as server,
        grpc.insecure_channel(server.server.admin.address) as channel,
    ):
        stub = pb_grpc.AdminStub(channel)
        start, stop = pb.StartProfileRequest(name="one"), pb.StopProfileRequest()
        jax.profiler.start_trace(tmp_path / "other")
        busy = code_of(stub.StartProfile, start, metadata=TOKEN)
        jax.profiler.stop_trace()
        stub.StartProfile(start, metadata=TOKEN)
        again = code_of(stub.StartProfile, pb.StartProfileRequest(name="two"), metadata=TOKEN)
        stub.StopProfile(stop, metadata=TOKEN)
        not_running = code_of(stub.StopProfile, stop, metadata=TOKEN)
        same = code_of(stub.StartProfile, start, metadata=TOKEN)
    assert {busy, again, not_running, same} == {grpc.StatusCode.FAILED_PRECONDITION}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "other"]


def test_profiles_are_off_by_default(server, admin):
    request = pb.StartProfileRequest(name="../x")
    code = code_of(admin.StartProfile, request, metadata=TOKEN)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    code = code_of(admin.StartProfile, pb.StartProfileRequest(name="x"), metadata=TOKEN)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
