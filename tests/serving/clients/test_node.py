"""Another implementation of gRPC, that of Node, talks to the server."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from kit import running_server

HERE = Path(__file__).parent / "node"
PROTO = Path(__file__).parents[3] / "serving/proto/shiftjax.proto"
NODE = shutil.which("node")


def run_node(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], "NODE_PATH": os.environ.get("NODE_PATH", "")}
    command = [str(NODE), *arguments]
    return subprocess.run(
        command, cwd=HERE, env=environ, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_a_stream_and_a_result():
    if run_node("-e", "require.resolve('@grpc/grpc-js')").returncode:
        pytest.skip("needs: npm install in tests/serving/clients/node")
    with running_server() as server, server.client() as client:
        run = run_node("client.js", server.server.grpc.address, str(PROTO), "é日本")
        assert run.returncode == 0, run.stderr
        result = json.loads(run.stdout)
        body = {"prompt": "é日本", "max_tokens": 30, "seed": 3, "ignore_eos": True}
        (choice,) = client.post("/v1/completions", json=body).json()["choices"]
        server.assert_quiescent()
    assert result["text"] == result["once"] == choice["text"]
    assert result["kinds"] == ["accepted", "delta", "finished", "usage"]
    assert result["reason"] == "FINISH_REASON_LENGTH"
    assert result["code"] == "INVALID_ARGUMENT"
