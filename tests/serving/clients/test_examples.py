"""The examples run as they stand, against servers and models of this machine."""

import runpy
from pathlib import Path

from embed_server import embed_server
from kit import make_drafting_engine, running_server

from shiftjax import Embedder

EXAMPLES = Path(__file__).parents[3] / "examples"


def run(name: str, *args: str, **options) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](*args, **options)


def test_a_predicted_output(capsys):
    with running_server(make_drafting_engine(speculation="suffix")) as server:
        run("predicted_output", f"{server.url}/v1")
    assert "of the prediction" in capsys.readouterr().out


def test_embeddings(capsys):
    embedder = Embedder("minilm-l6", devices=1, max_num_batched_tokens=256, cache_dir="none")
    with embed_server(embedder.runner, embedder.reader) as server:
        run("embeddings", f"{server.url}/v1")
    first, *_ = capsys.readouterr().out.splitlines()
    assert "loaves" in first
