"""The wheel in an environment of its own, run outside the repository."""

import json
import os
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from wheel_kit import ROOT, build_wheel, known_files

pytestmark = pytest.mark.thorough
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "shiftjax", "serving", "pallas_kernels")
PLAN = ("plan", "--model", "llama-70b", "--dtype", "fp8", "--machine", "h200x8")


class Installed:
    """An environment with the wheel, and a folder to run it in."""

    def __init__(self, root: Path, *pip: str):
        self.bin, self.cwd = root / "venv/bin", root / "elsewhere"
        self.cwd.mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / "venv"], check=True)
        self.install(*pip)

    def install(self, *pip: str) -> None:
        command = [sys.executable, "-m", "pip", "--quiet", "--python", self.bin / "python"]
        environ = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        subprocess.run([*command, "install", *pip], check=True, env=environ)

    def start(self, *command: str) -> subprocess.Popen[str]:
        kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        words = [str(self.bin / command[0]), *command[1:]]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            words, cwd=self.cwd, env=kept, stdout=pipe, stderr=subprocess.STDOUT, text=True
        )

    def run(self, *command: str, code: int = 0) -> str:
        process = self.start(*command)
        text, _ = process.communicate(timeout=300)
        assert process.returncode == code, text
        return text

    def check_simulated_server(self) -> None:
        """It answers, and the page has its parts."""
        port = free_port()
        flags = ["--simulate=h200x8", f"--port={port}", f"--grpc-port={free_port()}"]
        process = self.start("shiftjax", "serve", "llama-70b", *flags)
        base = f"http://127.0.0.1:{port}"
        try:
            with httpx.Client(base_url=base, timeout=30, trust_env=False) as client:
                _wait_until_ready(client, process)
                body = {"prompt": "Hello", "max_tokens": 2}
                assert client.post("/v1/completions", json=body).status_code == 200
                parts = [path.name for path in (ROOT / "serving/ui").iterdir()]
                for path in ("", *(f"/{name}" for name in parts if name != "index.html")):
                    assert client.get(f"/ui{path}").status_code == 200, path
        finally:
            process.terminate()
            text, _ = process.communicate(timeout=60)
        assert process.returncode == 0, text


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _wait_until_ready(client: httpx.Client, process: subprocess.Popen[str]) -> None:
    for _ in range(300):
        assert process.poll() is None, process.communicate()[0]
        try:
            if client.get("/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError("not ready after 30 s")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    places = {name: Path(name) for name in known_files(*SOURCES)}
    return build_wheel(tmp_path_factory.mktemp("wheel"), places)


@pytest.fixture(scope="module")
def installed(tmp_path_factory, wheel) -> Iterator[Installed]:
    """The wheel alone, which finds other packages where these tests do."""
    root = tmp_path_factory.mktemp("installed")
    one = Installed(root, "--no-deps", "--no-index", str(wheel))
    site = one.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    Path(site.strip(), "others.pth").write_text(sysconfig.get_path("purelib"))
    yield one


def test_it_is_the_wheel_that_runs(installed):
    code = "import shiftjax, serving, pallas_kernels as k; print(shiftjax.__file__)"
    assert str(installed.bin.parent) in installed.run("python", "-c", code)


def test_the_program_and_the_module_are_one(installed):
    for words in (["--version"], ["version"], ["serve", "--help"], [*PLAN]):
        program = installed.run("shiftjax", *words)
        assert program == installed.run("python", "-m", "shiftjax", *words)
        assert program
    assert "shiftjax: unknown" in installed.run("python", "-m", "shiftjax", "nonsense", code=2)


def test_a_plan_and_a_server_find_their_files(installed):
    assert "recommended: --sp" in installed.run("shiftjax", *PLAN)
    installed.check_simulated_server()
    checked = installed.run("shiftjax", "check", "random:tiny", "--devices=8", "--sp=4", "--tp=2")
    assert "sp" in checked


def test_tokens_are_generated_by_the_module(installed):
    line = {"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}
    (installed.cwd / "lines.jsonl").write_text(json.dumps(line))
    flags = ["--model=random:tiny", "--dtype=float32", "--num-blocks=32"]
    flags += ["--devices=1", "--max-model-len=64", "--max-num-seqs=2", "--token-buckets=16"]
    flags += ["--max-num-batched-tokens=16", "--output=records.jsonl"]
    installed.run("python", "-m", "shiftjax", "batch", "lines.jsonl", *flags)
    record = json.loads((installed.cwd / "records.jsonl").read_text())
    assert record["response"]["body"]["usage"]["completion_tokens"] == 2


def test_an_empty_environment_gets_all_it_needs(tmp_path, wheel):
    """From an index: first without the extra that servers need, which says so."""
    one = Installed(tmp_path, str(wheel))
    assert "recommended: --sp" in one.run("shiftjax", *PLAN)
    hint = one.run("shiftjax", "serve", "llama-70b", "--simulate", "h200x8", code=2)
    assert "pip install 'shiftjax[serving]'" in hint
    one.install(f"{wheel}[serving]")
    one.check_simulated_server()
