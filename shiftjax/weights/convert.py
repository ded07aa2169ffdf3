"""`shiftjax convert`: any checkpoint to a Hugging Face or an Orbax directory."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from shiftjax.arch.formats import DTYPES
from shiftjax.weights.checksums import write_checksums
from shiftjax.weights.huggingface import save_huggingface
from shiftjax.weights.locate import ModelLocation, open_source, resolve_model
from shiftjax.weights.source import CheckpointError, TensorSource, check_complete

Format = Literal["huggingface", "orbax"]
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    # of sentence-transformers, with the configurations in numbered folders
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)


def convert(
    source: str, destination: Path, format: Format = "huggingface", dtype: str | None = None
) -> Path:
    """Write the model `source` (as `resolve_model` takes it) to the directory `destination`.

    `destination` must be new or empty: it appears complete or not at all, by renaming a sibling.
    `dtype` None keeps what is stored, float32 for quantised tensors. SHA256SUMS is written too.
    Peak host memory: see `save_huggingface` (64 MiB pieces) and `save_orbax` (groups of 512 MiB).
    Raises CheckpointError for a source that is incomplete or not finite.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, found {dtype!r}")
    destination = Path(destination).resolve()
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise CheckpointError(f"{destination}: exists and is not an empty directory")
    location = resolve_model(source)
    tensors = open_source(location)
    check_complete(tensors)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with _atomic_directory(destination) as work:
            _write(location, tensors, work, format, dtype)
    except OSError as error:
        raise CheckpointError(f"{destination}: cannot be written: {error.strerror}") from error
    return destination


@contextmanager
def _atomic_directory(destination: Path) -> Iterator[Path]:
    """A sibling to write into; it becomes `destination` at the end, or vanishes on an error."""
    work = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        yield work
        work.chmod(0o755)  # mkdtemp makes it private; the result is an ordinary directory
        work.replace(destination)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _write(
    location: ModelLocation,
    source: TensorSource,
    directory: Path,
    format: Format,
    dtype: str | None,
) -> None:
    _write_tokenizer(location, directory)
    if format == "orbax":
        from shiftjax.weights.orbax import save_orbax

        save_orbax(source, directory, dtype)
    else:
        save_huggingface(source, directory, dtype)
    write_checksums(directory)


def _write_tokenizer(location: ModelLocation, directory: Path) -> None:
    """Copy the tokenizer's files, or rebuild them from a GGUF; some checkpoints have none."""
    if location.path is None:
        return
    if location.kind == "gguf":
        from shiftjax.text.tokenizer import load_tokenizer

        load_tokenizer(location.path).save(directory)
        return
    numbered = (path.relative_to(location.path) for path in location.path.glob("[0-9]_*/*.json"))
    for name in (*_COPIED, *numbered):
        if (location.path / name).is_file():
            (directory / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(location.path / name, directory / name)
