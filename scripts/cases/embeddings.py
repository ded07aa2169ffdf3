"""Embed the same texts here and with other engines: CPU seconds per token, and likeness.

    python scripts/bench.py embeddings [--reference PYTHON] [--onnx PYTHON] [--rounds 3]

--reference is an interpreter with sentence-transformers, --onnx one with ONNX Runtime (see
peers/onnx_encoder.py). Contenders take turns, each in a process of its own on one core, and only
CPU time of the embedding itself counts: on a machine with other load that is what stays
comparable. What it should show: products with weights are nearly all of the work (2 * 10.6 million
operations a token for MiniLM-L6), so tokens that are computed for nothing, padding, decide.
`computed` counts them; packed rows have some 10%, batches of 32 as they come some 75%.

Texts are made of words of the license, with lengths as in a collection of passages:
log-normal, median 30 words. A row is a contender.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
NUM_TEXTS, MEDIAN_WORDS, SIGMA, MOST_WORDS = 500, 30, 0.8, 180
BATCH = 32


def make_texts() -> list[str]:
    """The texts, the same every time."""
    chance = random.Random(11)
    words = [word for word in (ROOT / "LICENSE").read_text().split() if word.isalpha()]
    sizes = (MEDIAN_WORDS * chance.lognormvariate(0, SIGMA) for _ in range(NUM_TEXTS))
    return [" ".join(chance.choices(words, k=min(MOST_WORDS, 1 + int(n)))) for n in sizes]


def run_ours(texts: list[str], dtype: str) -> tuple[np.ndarray, dict]:
    """Embed in packed rows."""
    from shiftjax import Embedder

    embedder = Embedder("minilm-l6", dtype=dtype, cache_dir="none", devices=1)
    embedder.embed(texts[:BATCH], truncate=True)
    before, start = embedder.stats(), time.process_time()
    found = embedder.embed(texts, truncate=True)
    seconds, after = time.process_time() - start, embedder.stats()
    counts = {name: after[name] - before[name] for name in ("tokens", "computed")}
    return found, counts | {"cpu_seconds": seconds}


def run_padded(
    texts: list[str], is_sorted: bool, encode: Callable, embed: Callable
) -> tuple[np.ndarray, dict]:
    """Embed in padded batches, sorted by length or as given, on one thread."""
    embed(encode(texts[:BATCH]))
    start = time.process_time()
    items = encode(texts)
    lengths = [len(item) for item in items]
    order = np.argsort(lengths)[::-1] if is_sorted else np.arange(len(items))
    batches = [order[first : first + BATCH] for first in range(0, len(items), BATCH)]
    found = np.zeros((len(items), 384), np.float32)
    for places in batches:
        found[places] = embed([items[place] for place in places])
    seconds = time.process_time() - start
    computed = sum(len(places) * max(lengths[place] for place in places) for places in batches)
    return found, {"tokens": sum(lengths), "computed": computed, "cpu_seconds": seconds}


def run_reference(texts: list[str], is_sorted: bool) -> tuple[np.ndarray, dict]:
    """Embed with sentence-transformers."""
    import torch  # pyright: ignore[reportMissingImports]
    from sentence_transformers import (  # pyright: ignore[reportMissingImports]
        SentenceTransformer,
    )

    torch.set_num_threads(1)
    model = SentenceTransformer(os.environ["MINILM"], device="cpu")

    def embed(some: list[list[int]]) -> np.ndarray:
        padded = model.tokenizer.pad({"input_ids": some}, return_tensors="pt")
        with torch.inference_mode():
            return model(dict(padded))["sentence_embedding"].numpy()

    def encode(texts: list[str]) -> list[list[int]]:
        return model.tokenizer(texts, truncation=True, max_length=256)["input_ids"]

    return run_padded(texts, is_sorted, encode, embed)


def run_onnx(texts: list[str], is_sorted: bool) -> tuple[np.ndarray, dict]:
    """Embed with ONNX Runtime."""
    from peers import onnx_encoder

    return run_padded(texts, is_sorted, *onnx_encoder.encoder(Path(os.environ["MINILM"])))


CONTENDERS = {f"packed {t}": partial(run_ours, dtype=t) for t in ("float32", "bfloat16")}
for _name, _run in (("onnxruntime", run_onnx), ("sentence-transformers", run_reference)):
    for _order in ("sorted", "as they come"):
        CONTENDERS[f"{_name}, {_order}"] = partial(_run, is_sorted=_order == "sorted")


def run_alone(name: str, python: str, folder: Path) -> tuple[np.ndarray, dict]:
    """Run one contender in a process of its own, whose Python may not have what we import."""
    found, path = folder / "found.npy", f"{ROOT / 'scripts'}:{ROOT}"
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    command = [python, __file__, name, str(found)]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return np.load(found), json.loads(done.stdout.splitlines()[-1])


OPTIONS = {
    "--reference": (str, "a Python with sentence-transformers"),
    "--onnx": (str, "a Python with ONNX Runtime"),
    "--rounds": 3,
}


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each contender, after rounds in which they took turns."""
    from shiftjax.weights.locate import resolve_model

    os.environ["MINILM"] = str(resolve_model("minilm-l6").path)
    engines = {"packed": sys.executable, "onnxruntime": args.onnx}
    engines["sentence-transformers"] = args.reference
    pythons = {name: engines[name.split(",")[0].split(" ")[0]] for name in CONTENDERS}
    pythons = {name: python for name, python in pythons.items() if python}
    runs: dict[str, list[dict]] = {name: [] for name in pythons}
    embeddings: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            for name, python in pythons.items():
                embeddings[name], numbers = run_alone(name, python, Path(folder))
                runs[name].append(numbers)
    baseline = list(embeddings.values())[-1]
    for name, numbers in runs.items():
        seconds = statistics.median(each["cpu_seconds"] for each in numbers)
        one = numbers[0]
        yield {
            "contender": name,
            "texts": NUM_TEXTS,
            "tokens": one["tokens"],
            "fill": round(one["tokens"] / one["computed"], 3),
            "tokens_per_cpu_second": round(one["tokens"] / seconds),
            "rounds": [round(one["tokens"] / each["cpu_seconds"]) for each in numbers],
            "least_cosine": float((embeddings[name] * baseline).sum(1).min()),
        }


if __name__ == "__main__":  # a contender and where its embeddings go
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    embedded, counted = CONTENDERS[sys.argv[1]](make_texts())
    np.save(sys.argv[2], embedded)
    print(json.dumps(counted))
