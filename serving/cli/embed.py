"""What `shiftjax embed` does: a file of texts in, a matrix of embeddings out."""

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from serving.run.progress import print_table, shown_progress
from serving.run.start import open_embedder
from shiftjax.config import EngineConfig
from shiftjax.core.request import SamplingParams
from shiftjax.options import ConfigError

if TYPE_CHECKING:
    from shiftjax.embedder import Embedder

BATCH = 1 << 14  # texts whose embeddings are written at a time


def run_embed(arguments: argparse.Namespace, config: EngineConfig, sampling: SamplingParams) -> int:
    """Embed every line of a file; the output appears when it is whole."""
    texts = read_texts(arguments.input)
    output: Path = arguments.output
    if output.suffix != ".npy":
        raise ConfigError([f"{output}: the output is a NumPy file, and its name ends in .npy"])
    embedder = open_embedder(config, arguments.server)
    start, partial = time.monotonic(), output.with_suffix(".npy.part")
    try:
        _write(embedder, texts, partial, arguments)
        os.replace(partial, output)
    finally:
        partial.unlink(missing_ok=True)
    seconds, stats = time.monotonic() - start, embedder.stats()
    rates = {"texts/s": len(texts) / seconds, "tokens/s": stats["tokens"] / seconds}
    print_table("embeddings", {"texts": len(texts), "seconds": seconds} | stats | rates)
    return 0


def _write(
    embedder: "Embedder", texts: list[str], path: Path, arguments: argparse.Namespace
) -> None:
    shape = (len(texts), embedder.model.hidden_size)
    with shown_progress() as progress, path.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(texts), BATCH):
            found = embedder.embed(
                texts[start : start + BATCH],
                prompt_name=arguments.prompt_name,
                truncate=arguments.truncate,
                progress=_shifted(progress, start, len(texts)),
                first=start,
            )
            file.write(found.astype("<f4", copy=False).tobytes())


def _shifted(progress: Any, start: int, total: int) -> Any:
    """Progress of a batch as progress of all."""
    return lambda task, done, _: progress(task, start + done, total)


def read_texts(path: Path) -> list[str]:
    """A text for each line; of a .jsonl file a JSON string, or the `text` or `input` of an object.

    Raises ConfigError, with a line for each of the first problems.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from None
    lines = lines[:-1] if lines[-1] == "" else lines
    if path.suffix != ".jsonl":
        return lines
    texts, problems = [], []
    for number, line in enumerate(lines, 1):
        text = _text_of(line)
        texts.append(text or "")
        if text is None:
            words = "must be a JSON string, or an object with a string `text` or `input`"
            problems.append(f"{path}, line {number}: {words}")
    if problems:
        raise ConfigError(problems[:10])
    return texts


def _text_of(line: str) -> str | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        value = value.get("text", value.get("input"))
    return value if isinstance(value, str) else None
