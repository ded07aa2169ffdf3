"""What adapters cost: tokens a CPU second of many streams with some adapters, beside none.

    python scripts/bench.py lora [--adapters 0 1 8 32] [--peer-python PEERS/bin/python]

Each number of adapters is a process of its own that loads once, with as many slots; only one is
active, and rounds interleave them. Stream i has adapter i modulo their number. Adapters are random,
of all matrices of attention and MLPs. CPU seconds are of all threads. PEERS is an environment with
torch, transformers and peft: static batches of the model with one adapter, not merged, and without.
With another environment, of xllamacpp, llama.cpp serves the same streams, with one and without.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from cases.workers import OURS, Worker

PROMPT = 32  # tokens
TARGETS = tuple(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
OPTIONS = {
    "--model": ("smollm2-135m", "a directory or an alias"),
    "--adapters": [0, 1, 8, 32],
    "--rank": 16,
    "--streams": 32,
    "--tokens": (33, "of each stream"),
    "--rounds": 5,
    "--dtype": "float32",
    "--peer-python": (Path, "Python with torch, transformers and peft"),
    "--llama-python": (Path, "Python with xllamacpp; the model must be a GGUF file"),
}
Row = dict[str, Any]


def make_adapter(
    directory: Path, tensors: dict[str, tuple[int, ...]], rank: int, seed: int, size: float = 0.02
) -> str:
    """Write an adapter of matrices of these shapes `[out, in]`; returns its directory."""
    from safetensors.numpy import save_file

    rng, path = np.random.default_rng(seed), directory / f"a{seed}"
    path.mkdir()
    factors = {}
    for name, (outputs, inputs) in tensors.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = size * rng.standard_normal(shape)
            factors[f"{module}.lora_{part}.weight"] = values.astype(np.float32)
    save_file(factors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*TARGETS]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)


def start_workers(arguments: argparse.Namespace, folder: Path) -> list[Worker]:
    """Return the engines' processes, loaded; the model and the adapters are put in a folder."""
    from shiftjax.weights.convert import convert
    from shiftjax.weights.locate import open_source, resolve_model

    model = str(folder / "model")  # a directory that all can read
    convert(arguments.model, Path(model), dtype=arguments.dtype)
    shapes = {
        name: info.shape
        for name, info in open_source(resolve_model(model)).tensors.items()
        if name.removesuffix(".weight").endswith(TARGETS)
    }
    most = max(arguments.adapters)
    paths = [make_adapter(folder, shapes, arguments.rank, seed) for seed in range(max(1, most))]
    size = arguments.streams
    options = {"dtype": arguments.dtype, "max_num_seqs": size, "max_num_batched_tokens": 1024}
    options |= {"max_model_len": 2 * (PROMPT + arguments.tokens), "token_buckets": [size, 1024]}
    workers = []
    for count in arguments.adapters:
        own = dict(options)
        if count:
            modules = ",".join(f"a{number}={paths[number]}" for number in range(count))
            own |= {"enable_lora": True, "lora_modules": modules, "max_loras": count}
            own["max_lora_rank"] = arguments.rank
        command = [sys.executable, "shiftjax_worker.py", model]
        command += ["--options", json.dumps(own), "--adapters", count]
        workers.append(Worker(OURS, command, folder / f"{count}.log"))
        workers[-1].name = f"{count} adapters"
    for adapter in ("", paths[0]) if arguments.peer_python else ():
        command = [arguments.peer_python, "transformers_worker.py", model]
        command += ["--dtype", arguments.dtype, "--adapter", adapter]
        name = "peft, 1 adapter" if adapter else "transformers"
        workers.append(Worker(name, command, folder / "peer.log"))
    return workers + llama_workers(arguments, folder, model, paths[0])


def llama_workers(
    arguments: argparse.Namespace, folder: Path, model: str, adapter: str
) -> list[Worker]:
    """Return llama.cpp with the same model, without and with an adapter, if it was asked for."""
    if not arguments.llama_python:
        return []
    from gguf import GGUFReader
    from peers.prepare import write_adapter, write_gguf

    from shiftjax.weights.locate import resolve_model

    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    source, gguf = GGUFReader(str(resolve_model(arguments.model).path)), folder / "model.gguf"
    write_gguf(source, gguf, wide=arguments.dtype == "float32")
    write_adapter(Path(adapter), folder / "adapter.gguf", heads)
    length, workers = 2 * (PROMPT + arguments.tokens), []
    for name, path in (("llama.cpp", ""), ("llama.cpp, 1 adapter", folder / "adapter.gguf")):
        command = [arguments.llama_python, "xllamacpp_worker.py", gguf, "--adapter", path]
        command += ["--slots", arguments.streams, "--max-model-len", length]
        workers.append(Worker(name, command, folder / f"{name}.log"))
    return workers


def measure(arguments: argparse.Namespace) -> Generator[Row, None, Row]:
    """Yield rounds; return medians, and ratios within rounds over the engine without adapters."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="shiftjax-lora-") as folder:
        for row in _rows_of(arguments, start_workers(arguments, Path(folder))):
            yield row
            rows += [row] if row["round"] >= 0 else []
    names = dict.fromkeys(row["engine"] for row in rows)
    return {name: _summed(rows, name, baseline_of(name)) for name in names}


def _rows_of(arguments: argparse.Namespace, workers: list[Worker]) -> Iterator[Row]:
    """Yield a row for each engine and round, the engines in turn; -1 is the round that warms up."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, 5000, (arguments.streams, PROMPT)).tolist()
    for number in range(-1, arguments.rounds):
        turn = number % len(workers)
        for worker in workers[turn:] + workers[:turn]:
            first = worker.generate(prompts, [1] * len(prompts))["cpu_seconds"]
            whole = worker.generate(prompts, [arguments.tokens] * len(prompts))["cpu_seconds"]
            decoded = len(prompts) * (arguments.tokens - 1)
            row = {"round": number, "engine": worker.name}
            row["prefill"] = round(len(prompts) * PROMPT / first, 1)
            row["decode"] = round(decoded / max(1e-9, whole - first), 1)
            row["all"] = round(len(prompts) * arguments.tokens / whole, 1)
            yield row
    for worker in workers:
        worker.close()


def baseline_of(name: str) -> str:
    """Return the engine without adapters that one is compared with."""
    if name.startswith("llama.cpp"):
        return "llama.cpp"
    return "transformers" if name in ("transformers", "peft, 1 adapter") else "0 adapters"


def _summed(rows: list[Row], engine: str, baseline: str) -> Row:
    own, plain = ([row for row in rows if row["engine"] == name] for name in (engine, baseline))
    result: Row = {}
    for what in ("prefill", "decode", "all"):
        result[what] = statistics.median(row[what] for row in own)
        ratios = [a[what] / b[what] for a, b in zip(own, plain, strict=True)]
        result[f"{what} of none"] = round(statistics.median(ratios), 3)
    return result
