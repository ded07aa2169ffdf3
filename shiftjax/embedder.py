"""The Python API of embeddings: `Embedder` turns texts into them."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np

from shiftjax.arch.formats import formats_of
from shiftjax.arch.pooling import Pooling
from shiftjax.arch.rotary import served_within
from shiftjax.config import EngineConfig
from shiftjax.core.errors import RequestError
from shiftjax.device.compile_cache import use_compile_cache
from shiftjax.device.mesh import rows_mesh
from shiftjax.device.place import define, load
from shiftjax.device.programs import CompileCounter, Progress
from shiftjax.device.sizing import measure
from shiftjax.embed.embed_engine import EmbedEngine, Text
from shiftjax.embed.embed_settings import (
    check_embedding,
    embed_dtype,
    embed_shape,
    num_devices_of,
)
from shiftjax.embed.scores import activated
from shiftjax.embed.step_device import EmbedDeviceRunner, EmbedStep
from shiftjax.model_files import ModelFiles, open_files
from shiftjax.parallel.layout import Layout
from shiftjax.plugins import ALL, load_plugins
from shiftjax.settings import make_virtual_devices
from shiftjax.text.embedding_inputs import Input, InputReader, scored_inputs
from shiftjax.weights.source import TensorSource

BATCH = 1024  # texts that are tokenized at a time; a step or more is in flight meanwhile


class Embedder:
    """A model, loaded and compiled, that embeds texts: an encoder, or a decoder.

    Of a decoder an embedding is what its files say, else the last token's hidden state after the
    final norm, scaled to length 1. Keyword arguments are the settings of `shiftjax.config` that
    embedding has a use for: the model, its
    devices, the budgets of a step and the compilation cache. Every device holds the whole model;
    `dp * sp * tp`, or `devices`, says how many share the rows of a step (default: all there are).

        embedder = Embedder("minilm-l6")
        embedder.embed(["What is a mode?", "How a step splits its tokens."]).shape  # (2, 384)

    Raises:
        ConfigError: settings that cannot be used, or a model that cannot embed.
        CheckpointError, TokenizerError: the model cannot be found or read.
    """

    task = "embed"

    def __init__(
        self, model: str = "minilm-l6", *, progress: Progress | None = None, **options: Any
    ):
        load_plugins(options.get("plugins", ALL))
        self._start(EngineConfig.from_options(model=model, **options), progress or _silent)

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        progress: Progress | None = None,
        files: ModelFiles | None = None,
    ) -> "Embedder":
        """Build from a finished config, and from its files where they are open.

        `progress(task, done, total)` is called while it loads.
        """
        embedder = cls.__new__(cls)
        embedder._start(config, progress or _silent, files)
        return embedder

    def _start(
        self, config: EngineConfig, progress: Progress, files: ModelFiles | None = None
    ) -> None:
        make_virtual_devices(config)
        files = files or open_files(config, "embed")
        files.verify(progress)
        use_compile_cache(files.cache_dir)
        source, pooling = files.source, files.pooling
        assert pooling is not None
        self.name, self.model = config.model.model, source.config
        self.runner = _start_runner(config, source, pooling, progress)
        longest = self.runner.shape.widths[-1]
        self.reader = InputReader(files.tokenizer, pooling, source.config.vocab_size, longest)
        self.dtype = embed_dtype(config)
        self.num_devices = self.runner.num_devices
        self._engine = EmbedEngine(self.runner)
        self._num_texts = 0
        self._compiles = CompileCounter()
        self._compiles.start()

    def close(self) -> None:
        """Stop counting compilations; the rest is freed with the object."""
        self._compiles.stop()

    @property
    def num_compiles(self) -> int:
        """Programs compiled since the start was complete; more than 0 is a bug."""
        return self._compiles.count

    def stats(self) -> dict[str, Any]:
        """Counters of `embed` since the start; `fill` is the share of tokens that were no padding.

        A server's engines count for themselves.
        """
        stats = self._engine.stats
        fill = stats.num_tokens / max(1, stats.num_computed_tokens)
        return {
            "steps": stats.num_steps,
            "tokens": stats.num_tokens,
            "computed": stats.num_computed_tokens,
            "fill": fill,
            "compiles_after_warmup": self.num_compiles,
        }

    def embed(
        self,
        texts: Input | Sequence[Input],
        *,
        prompt_name: str | None = None,
        truncate: bool = False,
        progress: Progress | None = None,
        first: int = 0,
    ) -> np.ndarray:
        """Return the embeddings, float32 `[texts, hidden]`, in the order of the texts.

        `prompt_name` names a prompt of the model that is put before every text; `truncate` cuts
        texts that are too long, which are refused otherwise. Messages count texts from `first`.

        Raises:
            RequestError: a text or a prompt's name that cannot be used; a text whose step failed.
        """
        if self.reader.pooling.scores:
            raise RequestError(f"{self.name} scores texts: call score, it has no embeddings.")
        many = as_inputs(texts)
        keys, self._num_texts = self._num_texts, self._num_texts + len(many)
        most = self.reader.max_length if truncate else 0
        batches = (
            [
                Text(keys + start + place, ids)
                for place, ids in enumerate(
                    self.reader.read(many[start : start + BATCH], prompt_name, most, first + start)
                )
            ]
            for start in range(0, len(many), BATCH)
        )
        return self._gathered(batches, range(keys, keys + len(many)), progress)

    def score(
        self,
        texts: Sequence[str | tuple[str, str]],
        *,
        activate: bool = True,
        truncate: bool = True,
    ) -> np.ndarray:
        """Return the scores of texts, or of pairs of texts, float32 `[texts, labels]`.

        `activate`: with the model's activation (`reader.pooling.activation`), else the numbers of
        its head. `truncate` cuts what is too long, a pair at the end of its second text.

        Raises:
            RequestError: a model without a head that scores; a text that cannot be used.
        """
        pooling, many = self.reader.pooling, list(texts)
        if not pooling.scores:
            raise RequestError(f"{self.name} embeds texts: it has no head that scores them.")
        most = self.reader.max_length if truncate else 0
        ids = scored_inputs(self.reader, many, most)
        keys, self._num_texts = self._num_texts, self._num_texts + len(many)
        asked = [
            Text(keys + place, tokens, second_from=second)
            for place, (tokens, second) in enumerate(ids)
        ]
        batches = (asked[start : start + BATCH] for start in range(0, len(asked), BATCH))
        found = self._gathered(batches, range(keys, keys + len(many)))
        return activated(found, pooling.activation) if activate else found

    def prove(self) -> None:
        """Run a step. Raises RequestError if it fails."""
        key = self._num_texts
        self._num_texts += 1
        self._gathered(iter([[Text(key, [0])]]), range(key, key + 1))

    def _gathered(
        self, batches: Iterator[list[Text]], keys: range, progress: Progress | None = None
    ) -> np.ndarray:
        """The results of texts that have these keys, in their order."""
        found = np.zeros((len(keys), self.runner.shape.dim), np.float32)
        try:
            for done, (key, embedding) in enumerate(self._embed(batches), 1):
                found[key - keys.start] = embedding
                if progress is not None:
                    progress("embedding", done, len(keys))
        finally:
            for key in keys:  # those that an error has left
                self._engine.cancel(key)
        return found

    def _embed(self, batches: Iterator[list[Text]]) -> Iterator[tuple[int, np.ndarray]]:
        """Keep half a batch waiting, so that steps are full and the next texts are ready."""
        engine, batch = self._engine, next(batches, None)
        while batch is not None or engine.has_work():
            if batch is not None and engine.stats.num_waiting < BATCH // 2:
                for text in batch:
                    engine.add(text)
                batch = next(batches, None)
            for key, embedding, error, _ in engine.step(time.monotonic()):
                if embedding is None:
                    raise RequestError(error or "")
                yield cast(int, key), embedding


def _start_runner(
    config: EngineConfig, source: TensorSource, pooling: Pooling, progress: Progress
) -> EmbedDeviceRunner:
    """Place the weights on every device and compile the steps.

    Raises:
        ConfigError: what the options ask for does not fit the model or the machine.
        CheckpointError: the checkpoint is not what its config says.
    """
    model, memory = source.config, measure(jax.devices())
    check_embedding(config, model, memory)
    devices = jax.devices()[: num_devices_of(config, memory.num_devices)]
    shape = embed_shape(config, model, pooling.max_length, memory)
    mesh, layout = rows_mesh(devices), Layout(served_within(model, shape.widths[-1]), 1, 1)
    defined = define(layout, formats_of(embed_dtype(config)))
    leaves = load(defined, layout, mesh, source, progress)
    by_name = {weight.name: leaf for weight, leaf in zip(defined.declared, leaves, strict=True)}
    leaves = [
        leaf if w.tied_to is None else by_name[w.tied_to]
        for w, leaf in zip(defined.declared, leaves, strict=True)
    ]
    step = EmbedStep(defined, mesh, pooling)
    return EmbedDeviceRunner(step, cast(list[jax.Array], leaves), shape, progress)


def as_inputs(texts: Input | Sequence[Input]) -> list[Input]:
    """Return the inputs as a list; a single one may come without."""
    if isinstance(texts, str):
        return [texts]
    if texts and all(isinstance(item, int | np.integer) for item in texts):
        return [cast(Sequence[int], texts)]
    return list(cast(Sequence[Input], texts))


def _silent(task: str, done: int, total: int) -> None:
    """Show nothing."""
