"""What can be known and refused before a device is asked: a model's files, the cache. No JAX.

An Orbax checkpoint is the exception: only its own library, which imports JAX, reads its headers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shiftjax.arch.pooling import Pooling
from shiftjax.config import EngineConfig
from shiftjax.deploy.tasks import Task, task_of
from shiftjax.settings import compile_cache_dir
from shiftjax.text.generation_config import sampling_defaults
from shiftjax.text.tokenizer import Tokenizer, load_tokenizer
from shiftjax.weights.checksums import Progress, verify_checksums
from shiftjax.weights.encoder_config import read_pooling
from shiftjax.weights.locate import ModelLocation, hub_of, open_source, resolve_model
from shiftjax.weights.source import TensorSource, check_complete


class ModelFiles(NamedTuple):
    """A model whose headers are read and complete; no tensor is."""

    location: ModelLocation
    source: TensorSource
    task: Task
    tokenizer: Tokenizer | None  # None: the model takes and gives token ids
    pooling: Pooling | None  # of what embeds
    cache_dir: Path | None  # of compiled programs; None: there is no cache
    defaults: Mapping[str, Any]  # of sampling, by field of SamplingParams

    def verify(self, progress: Progress | None = None) -> None:
        """Compare the files with the SHA256SUMS beside them, if any. Raises CheckpointError."""
        if self.location.path is not None and self.location.kind != "random":
            verify_checksums(self.location.path, progress)


def open_files(config: EngineConfig, task: Task | None = None) -> ModelFiles:
    """Find and open what `config` names; `task`: the one it is for, by default its own.

    Raises:
        ConfigError: a task that the model cannot do, a cache that cannot be used.
        CheckpointError, TokenizerError: the model cannot be found or read.
    """
    cache_dir = compile_cache_dir(config)
    hub = hub_of(config.model)
    location = resolve_model(config.model.model, hub)
    chosen = config.model.generation_config, config.model.override_generation_config
    defaults = sampling_defaults(*chosen, location.directory)
    seed, drafts = config.model.seed, config.drafts
    source = open_source(location, seed=seed, drafts=drafts, folder=hub.folder)
    check_complete(source)
    task = task or task_of(config, source.config)
    embeds = task == "embed"
    pooling = read_pooling(location.directory, source.config) if embeds else None
    tokenizer = _open_tokenizer(config, location)
    return ModelFiles(location, source, task, tokenizer, pooling, cache_dir, defaults)


def _open_tokenizer(config: EngineConfig, location: ModelLocation) -> Tokenizer | None:
    path = Path(config.model.tokenizer) if config.model.tokenizer else location.path
    if path is None:
        return None
    if path.is_dir() and not config.model.tokenizer and not (path / "tokenizer.json").exists():
        return None
    return load_tokenizer(path)
