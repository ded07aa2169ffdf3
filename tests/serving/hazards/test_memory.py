"""Too little memory: before the start, in the first step, and while serving."""

import resource
import shutil
import signal
import socket
from pathlib import Path

import httpx
import pytest
from served import in_background, serve

from serving.run.serve import prove
from serving.run.start import StartError
from shiftjax.core.errors import is_out_of_memory
from shiftjax.device.runner import DeviceRunner
from shiftjax.llm import LLM

GIBIBYTE = 1 << 30


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


@pytest.mark.thorough
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
        try:
            resource.prlimit(pid, resource.RLIMIT_AS, (free, free))
            tokens = served.tokens()
        except (httpx.TransportError, ProcessLookupError):
            tokens = None
        if tokens is not None:
            assert tokens == expected
            served.end_well()
        else:  # a library that takes a failed allocation for memory
            code, _, err = served.end()
            assert code in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS), err
            assert "most recent call first" in err
