"""Fixtures that many tests of the server share, and the way to the load scripts' parts."""

import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import kept
import pytest
from engines import checkpoint
from kit import running_server
from oracle import numpy_llama

from serving.proto import shiftjax_pb2_grpc as pb_grpc
from shiftjax.config import SETTINGS

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from background import Background
from served import NUM_TOKENS, PROMPT


@pytest.fixture(autouse=True)
def no_settings_around(monkeypatch):
    for name in SETTINGS:
        monkeypatch.delenv(f"SHIFTJAX_{name.upper()}", raising=False)


# ---------------------------------------------------------------- a server over an echo engine


@pytest.fixture(scope="module")
def server():
    """A module that needs another one has a fixture of this name; those below work with both."""
    with running_server() as running:
        yield running


@pytest.fixture
def client(server):
    """Afterwards nothing may be held, and the next test finds quick steps."""
    with server.client() as client:
        yield client
    server.let_go()
    server.assert_quiescent()


@pytest.fixture
def stub(server):
    with grpc.insecure_channel(server.server.grpc.address) as channel:
        yield pb_grpc.InferenceStub(channel)


@pytest.fixture(scope="module")
def background(server):
    return Background(server)


@pytest.fixture
def load(server, client, background):
    """A mixed load meanwhile, none of whose requests may notice."""
    server.runner.step_seconds = 0.005
    with background.load():
        server.wait_until(lambda: server.num_running() >= 2)
        yield


# ---------------------------------------------------------------- processes over a tiny model


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    """One compilation cache for all of them: the first process fills it."""
    directory = tmp_path_factory.mktemp("compiled")
    directory.chmod(0o700)
    with kept.lent("served", directory):
        yield directory


@pytest.fixture(scope="session")
def model():
    """Directory, config and tensors."""
    return checkpoint()


@pytest.fixture(scope="session")
def expected(model) -> list[int]:
    """What `PROMPT` is continued with, by another implementation."""
    return numpy_llama.greedy(*model[1:], PROMPT, NUM_TOKENS)


@pytest.fixture(scope="session")
def namespaces():
    """Leave to have namespaces for networks and mounts."""
    command = ["unshare", "-rnm", "sh", "-c", "ip link set lo up && mount -t tmpfs tmpfs /mnt"]
    has_tools = all(shutil.which(name) for name in ("unshare", "nsenter", "ip"))
    if not has_tools or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs unshare, nsenter, ip, and leave to make namespaces")
