"""`shiftjax serve` as a process: start, signals, drain, exit codes. A tiny model, slowed down."""

import shutil
import signal
import socket
import time
from collections import Counter

import grpc
import httpx
import pytest
from engines import checkpoint
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kit import EOS, VOCAB_SIZE, byte_tokenizer, events, metric_total, metric_values
from oracle import numpy_llama
from served import PROMPT, SLOW, Served, in_background, serve

from serving.run.faults import EXIT_CODE
from serving.run.serve import drafts_line
from shiftjax.drafts.speculation import DraftStats

SERVING = health_pb2.HealthCheckResponse.SERVING
PHASES = ["open", "import JAX", "weights", "compile", "warm up", "first step"]
START_SECONDS = "shiftjax:start_phase_seconds"
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.costs(25)
def test_the_life_of_a_server(model, cache_dir):
    """Starting is not ready; SIGTERM drains: what runs finishes, what comes is refused."""
    directory, config, tensors = model
    with serve(directory, cache_dir, fault=SLOW) as served:
        served.wait_for("/health/live", 200)
        assert served.status("/health/ready") == 503
        early = served.complete(max_tokens=2)
        assert (early.status_code, early.headers["retry-after"]) == (503, "5")
        phases = phases_of(served)
        assert "compile" in phases
        assert phases == [phase for phase in PHASES if phase in phases]
        log = served.texts()[1]
        assert [log.index(f"started: {phase}, ") for phase in PHASES]
        assert "ready after" in log
        reason = "the kernels are for GPUs, not for cpu"
        assert served.client.get("/health").json()["attention"] == {"xla": reason}
        values = metric_values(served.client).items()
        spent = [dict(at)["phase"] for (key, at), _ in values if key == START_SECONDS]
        assert spent == PHASES
        (labels,) = [dict(at) for (key, at), _ in values if key == "shiftjax:attention_backend"]
        assert (labels["name"], labels["reason"]) == ("xla", reason)
        assert f"attention: xla ({reason})" in served.texts()[1]
        expected = numpy_llama.greedy(config, tensors, PROMPT, 10)
        with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
            request = health_pb2.HealthCheckRequest(service="shiftjax.v1.Inference")
            watch = health_pb2_grpc.HealthStub(channel).Watch(request)
            assert next(watch).status == SERVING
            thread, answers = in_background(lambda: served.complete(max_tokens=10))
            served.wait_for("/health/progress", 200)
            served.wait_until_running()
            served.process.send_signal(signal.SIGTERM)
            assert next(watch).status == NOT_SERVING
            served.wait_for("/health/ready", 503)
            assert served.status("/health/live") == 200
            late = served.complete(max_tokens=2)
            assert (late.status_code, late.headers["retry-after"]) == (503, "5")
            assert late.json()["error"]["code"] == "server_draining"
            thread.join()
        (choice,) = answers[0].json()["choices"]
        assert choice["token_ids"] == expected
        code, out, err = served.end()
        assert code == 0, err
        assert f"HTTP   http://127.0.0.1:{served.port} " in out
        assert f"page   http://127.0.0.1:{served.port}/\n" in out
        assert f"127.0.0.1:{served.grpc_port}" in out
        assert "Traceback" not in err


def phases_of(served: Served) -> list[str]:
    """Wait until requests are taken; the phases of the start that were seen until then."""
    seen: list[str] = []
    while (answer := served.client.get("/health")).status_code == 503:
        assert answer.headers["retry-after"] == "5"
        start, message = answer.json().get("start"), answer.json()["error"]["message"]
        if start is not None and start["phase"] not in seen[-1:]:
            assert start["phase"] in message
            seen.append(start["phase"])
        time.sleep(0.02)
    return seen


@pytest.mark.thorough
def test_of_jax_a_log_has_what_is_wrong_alone(cache_dir):
    """Not that there is no TPU: JAX looks for every backend that it knows.

    Without PYTHONPATH, which may name a plugin of GPUs: one that does not start is an error.
    """
    environ = {"JAX_PLATFORMS": "", "PYTHONPATH": ""}
    flags = ("--max-model-len=1024", "--num-blocks=1024")
    with serve("random:tiny", cache_dir, *flags, environ=environ) as served:
        code, _, err = served.end()
        assert (code, "jax._src" in err) == (2, False)
        assert "max_model_len = 1024 is beyond" in err.splitlines()[-1]


@pytest.mark.thorough
def test_what_does_not_finish_in_time_says_so(model, cache_dir):
    with serve(model[0], cache_dir, "--shutdown-timeout=0.5", fault=SLOW) as served:
        served.wait_for("/health/ready", 200)
        thread, answers = in_background(lambda: served.complete(max_tokens=50, stream=True))
        served.wait_until_running()
        served.process.send_signal(signal.SIGTERM)
        thread.join()
        *chunks, last = events(answers[0].text)
        assert chunks
        assert last["error"]["code"] == "server_draining"
        assert served.end()[0] == 0


@pytest.mark.thorough
def test_the_second_signal_ends_at_once(model, cache_dir):
    with serve(model[0], cache_dir, fault=SLOW) as served:
        served.wait_for("/health/ready", 200)
        thread, answers = in_background(lambda: served.complete(max_tokens=50))
        served.wait_until_running()
        served.process.send_signal(signal.SIGTERM)
        served.wait_for("/health/ready", 503)
        served.process.send_signal(signal.SIGTERM)
        assert served.end()[0] == 128 + signal.SIGTERM
        thread.join()
        assert isinstance(answers[0], httpx.TransportError)


@pytest.mark.thorough
def test_requests_are_taken_until_the_delay_of_the_drain_is_over(model, cache_dir):
    """The second signal skips the delay, and the third ends at once."""
    with serve(model[0], cache_dir, "--drain-delay=3600", fault=SLOW) as served:
        served.wait_for("/health/ready", 200)
        served.process.send_signal(signal.SIGINT)
        served.wait_for("/health/ready", 503)
        assert served.client.get("/ping").json()["error"]["code"] == "server_draining"
        assert served.complete(max_tokens=1).status_code == 200
        thread, answers = in_background(lambda: served.complete(max_tokens=50))
        served.wait_until_running()
        served.process.send_signal(signal.SIGINT)
        assert any(served.complete(max_tokens=1).status_code == 503 for _ in range(50))
        served.process.send_signal(signal.SIGINT)
        assert served.end()[0] == 128 + signal.SIGINT
        thread.join()
        assert isinstance(answers[0], httpx.TransportError)


@pytest.mark.thorough
def test_a_signal_while_loading(model, cache_dir):
    with serve(model[0], cache_dir) as served:
        served.wait_for("/health/live", 200)
        served.process.send_signal(signal.SIGTERM)
        assert served.end()[0] == 128 + signal.SIGTERM


@pytest.mark.thorough
@pytest.mark.parametrize("point", ["dispatch", "schedule", "commit"])
def test_a_step_that_hangs_ends_the_process(model, cache_dir, point):
    flags = ("--watchdog-timeout=1.0", "--stall-timeout=0.3")
    with serve(model[0], cache_dir, *flags, fault=f"{point}:hang:8") as served:
        served.wait_for("/health/ready", 200)
        thread, answers = in_background(lambda: served.complete(max_tokens=50))
        served.wait_for("/health/progress", 503)
        thread.join()
        code, _, err = served.end()
        assert code == 75
        assert "most recent call first" in err  # of every thread, also of the one that hangs:
        assert "engine_thread.py" in err
        assert isinstance(answers[0], httpx.TransportError) or answers[0].status_code == 503


@pytest.mark.thorough
@pytest.mark.parametrize(("fault", "code"), [("loading:raise:1", 1), ("drain:raise:1", 1)])
def test_faults_at_the_start_and_at_the_end(model, cache_dir, fault, code):
    with serve(model[0], cache_dir, fault=fault) as served:
        if fault.startswith("drain"):
            served.wait_for("/health/ready", 200)
            served.process.send_signal(signal.SIGTERM)
        assert served.end()[0] == code


@pytest.mark.thorough
@pytest.mark.parametrize("point", ["dispatch:exit:8", "write:exit:1", "grammar:exit:1"])
def test_a_process_that_ends_in_mid_work_ends_nothing_well(cache_dir, tmp_path, point):
    """On the engine's thread, the event loop's and one for grammars."""
    directory = tmp_path / "model"
    shutil.copytree(checkpoint(vocab_size=VOCAB_SIZE, eos_token_id=EOS)[0], directory)
    byte_tokenizer().save(directory)
    with serve(directory, cache_dir, fault=point) as served:
        served.wait_for("/health/ready", 200)
        body = {"structured_outputs": {"choice": ["a" * 30]}, "ignore_eos": False}
        pairs = [in_background(lambda: served.complete(max_tokens=30, **body)) for _ in range(3)]
        for thread, answers in pairs:
            thread.join()
            assert isinstance(answers[0], httpx.TransportError)
        assert served.end()[0] == EXIT_CODE


@pytest.mark.thorough
def test_a_signal_while_the_loader_hangs(model, cache_dir):
    with serve(model[0], cache_dir, fault="loading:hang:1") as served:
        served.wait_for("/health/live", 200)
        assert served.status("/health/ready") == 503
        served.process.send_signal(signal.SIGTERM)
        assert served.end()[0] == 128 + signal.SIGTERM


def test_the_addresses_are_taken(model, cache_dir):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        for flag in ("--port", "--grpc-port"):
            with serve(model[0], cache_dir, f"{flag}={port}") as served:
                code, _, err = served.end()
                assert code == 2
                assert f"port {port}" in err.splitlines()[-1]


def test_a_model_that_is_not_there(tmp_path, cache_dir):
    with serve(tmp_path / "absent", cache_dir) as served:
        code, out, err = served.end()
        assert code == 3
        assert "absent" in err.splitlines()[-1]
        assert out == ""


def test_a_fault_needs_permission(model, cache_dir, monkeypatch):
    monkeypatch.setenv("SHIFTJAX_FAULT", "fetch:raise:1")
    with serve(model[0], cache_dir) as served:
        code, _, err = served.end()
        assert code == 2
        assert "SHIFTJAX_TESTING=1" in err


@pytest.mark.thorough
def test_a_server_that_drafts_says_the_same(model, cache_dir, expected):
    """Later answers are copied from the first, which the corpus has, whatever steps take here."""
    drafts = '{"method": "suffix", "disable_by_batch_size": 64}'  # whatever steps take
    with serve(model[0], cache_dir, f"--speculative-config={drafts}") as served:
        served.wait_for("/health/ready", 200)
        for _ in range(3):
            assert served.tokens() == expected
        values = metric_values(served.client)
        accepted = metric_total(values, "shiftjax:spec_decode_num_accepted_tokens_total")
        assert accepted >= len(expected)
        assert metric_total(values, "shiftjax:recompiles_after_warmup_total") == 0
        assert "Traceback" not in served.end_well()


def test_the_line_about_drafts_is_of_the_time_between_two_looks():
    before = DraftStats(10, Counter({0: 10}), Counter({("suffix", "accepted"): 10}))
    before.seconds.observe(1.0)
    assert drafts_line(before, before, 10.0) is None
    tokens = Counter({("suffix", "accepted"): 40, ("suffix", "rejected"): 30})
    now = DraftStats(20, Counter({0: 20, 1: 20}), tokens, seconds=before.seconds.copy())
    now.seconds.observe(0.5)
    assert drafts_line(before, now, 10.0) == (
        "drafts: 4.00 tokens per drafted step of a sequence, 50% of guesses accepted, "
        "5.0% of the time spent guessing"
    )
