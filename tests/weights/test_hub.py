"""The real client against a hub of this test: revisions, folders, a configuration by itself."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from oracle import numpy_llama

MAIN, OLD = "a" * 40, "b" * 40
REVISIONS = {"main": MAIN, MAIN: MAIN, "v1": OLD, OLD: OLD}


class Hub(BaseHTTPRequestHandler):
    """What the client asks: which files a revision has, and the files."""

    files: dict[str, dict[str, bytes]]  # of each commit
    asked: list[str]

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[0] == "api":
            commit = REVISIONS.get(parts[5] if len(parts) > 5 else "main")
            files = self.files.get(commit or "", {})
            told = {
                "id": "org/sample",
                "sha": commit,
                "siblings": [{"rfilename": n} for n in files],
            }
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": "0"}
                for name, data in files.items()
            ]
            found = json.dumps(tree if "tree" in parts else told).encode() if commit else None
            kind = "application/json"
        else:
            commit = REVISIONS.get(parts[3])
            found = self.files.get(commit or "", {}).get(parts[4])
            kind = "application/octet-stream"
            if with_body:
                self.asked.append(parts[4])
        self.send_response(200 if found is not None else 404)
        if found is None:
            self.send_header("X-Error-Code", "RevisionNotFound")
        body = found or b"{}"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit or MAIN)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    numpy_llama.random_checkpoint(folder, seed=1)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    old = json.loads(files["config.json"]) | {"max_position_embeddings": 77}
    older = files | {"config.json": json.dumps(old).encode()}
    kind = type("OfTest", (Hub,), {"files": {MAIN: files, OLD: older}, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", kind.asked
    server.shutdown()
    thread.join()
    server.server_close()


def run(endpoint: str, home: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-m", "serving.cli.main", *argv]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_a_revision_of_a_hub_model_is_opened_in_the_folder_that_is_named(hub, tmp_path):
    endpoint, asked = hub
    folder = tmp_path / "kept"
    flags = ("--revision", "v1", "--download-dir", str(folder))
    done = run(endpoint, tmp_path / "home", "check", "org/sample", *flags)
    assert done.returncode == 0, done.stderr
    snapshot = folder / "models--org--sample" / "snapshots" / OLD
    assert json.loads((snapshot / "config.json").read_text())["max_position_embeddings"] == 77
    assert "model.safetensors" in asked and not (tmp_path / "home" / "hub").exists()
    done = run(endpoint, tmp_path / "home", "check", "org/sample", "--revision", "v9")
    assert done.returncode == 3 and "no such revision" in done.stderr


def test_plan_reads_the_configuration_alone(hub, tmp_path):
    endpoint, asked = hub
    done = run(endpoint, tmp_path, "plan", "--model", "org/sample", "--machine", "h100x8")
    assert done.returncode == 0, done.stderr
    assert "sample" in done.stdout and asked == ["config.json"]


def test_plan_reads_the_revision_of_its_settings(hub, tmp_path):
    endpoint, asked = hub
    settings = tmp_path / "config.yaml"
    settings.write_text("model: org/sample\nrevision: v1\nmax_model_len: 90\n", "utf-8")
    done = run(endpoint, tmp_path, "plan", "--config", str(settings), "--machine", "h100x8")
    assert done.returncode == 2 and "77" in done.stderr and asked == ["config.json"]
    settings.write_text("model: llama-8b\nrevision: v1\n", "utf-8")
    done = run(endpoint, tmp_path, "plan", "--config", str(settings), "--machine", "h100x8")
    assert done.returncode == 2 and "revision = v1 is of hub ids" in done.stderr


def test_the_doctor_opens_the_revision_that_is_named(hub, tmp_path):
    endpoint, _ = hub
    flags = ("--revision", "v9", "--download-dir", str(tmp_path / "kept"))
    done = run(endpoint, tmp_path, "doctor", "org/sample", *flags)
    assert done.returncode == 3 and "no such revision" in done.stderr


def test_a_revision_of_a_directory_is_refused(tmp_path):
    numpy_llama.random_checkpoint(tmp_path, seed=1)
    done = run("http://127.0.0.1:9", tmp_path, "check", str(tmp_path), "--revision", "v1")
    assert done.returncode == 3 and "revision = v1 is of hub ids" in done.stderr
