"""Disks that are full, read-only or damaged under a server, a batch, the log and the caches."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from kit import byte_tokenizer
from served import PROMPT, ROOT, SLOW, in_background, inside, serve

from serving.cli.main import main
from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc

pytestmark = pytest.mark.thorough

ONE_PROGRAM = ("--sp=1",)  # where nothing that was compiled can be kept


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
        neighbour, answers = in_background(served.tokens)
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
        assert "Traceback" not in served.end_well()


def test_a_system_that_is_read_only(model, expected, namespaces, tmp_path):
    """No home, no shared memory, and the cache where it is by default."""
    nowhere = {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "home" / "cache")}
    script = "mount -o remount,ro,bind /\nmount -t tmpfs -o ro tmpfs /dev/shm"
    options = {"inside": inside(script), "environ": nowhere}
    with serve(model[0], tmp_path, *ONE_PROGRAM, "--cache-dir=auto", **options) as served:
        served.wait_for("/health/ready", 200)
        assert served.tokens() == expected
        err = served.end_well()
        assert "cannot be made: Read-only file system; every start compiles anew" in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("drains", [True, False])
def test_a_log_that_finds_no_room(model, cache_dir, expected, drains):
    """Nor do the addresses on stdout; what the exit code says is true all the same."""
    into = ("sh", "-c", 'exec "$@" >/dev/full 2>/dev/full', "sh")
    with serve(model[0], cache_dir, fault=SLOW, inside=into) as served:
        served.wait_for("/health/ready", 200)
        assert served.tokens() == expected
        if not drains:  # the second signal ends at once, while the first waits for this
            unfinished, _ = in_background(lambda: served.complete(max_tokens=50))
            served.wait_until_running()
            served.process.send_signal(signal.SIGTERM)
            served.wait_for("/health/ready", 503)
        served.process.send_signal(signal.SIGTERM)
        assert served.end()[0] == (0 if drains else 128 + signal.SIGTERM)
        if not drains:
            unfinished.join()


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
    batch = f"{shlex.quote(sys.executable)} -m serving.cli.main batch {tmp_path}/in.jsonl {flags}"
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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_a_batch(model, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    body = {"prompt": PROMPT, "max_tokens": 4}
    source.write_text("".join(json.dumps(body) + "\n" for _ in range(3)))
    flags = ["--model", str(model[0]), "--sp=1", "--tp=1", "--num-blocks=40", "--max-num-seqs=2"]
    flags += ["--max-model-len=64", "--max-num-batched-tokens=16", "--token-buckets=16"]
    flags += ["--cache-dir=none"]
    assert main(["batch", str(source), *flags, "--output=/dev/full"]) == 1
    assert "No space left" in capsys.readouterr().err
