"""Checkpoints of speculators, as Arctic Inference has them, beside those of their targets.

A directory with `config.json` and safetensors. Files say the same in several ways:
widths are a number, a list or text ("4096", or "4096.4096" of two layers, which are not supported),
names may begin with "speculator.", and tied weights may be written once or as often as they are
used.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shiftjax.arch.config import ModelConfig, Speculator
from shiftjax.arch.weights import LSTM_GATES, SPECULATOR, expected_tensors
from shiftjax.options import ConfigError
from shiftjax.weights.hf_config import class_of
from shiftjax.weights.huggingface import SINGLE_FILE, read_headers
from shiftjax.weights.safetensors_file import read_range, write_file
from shiftjax.weights.source import (
    CheckpointError,
    TensorInfo,
    TensorSource,
    bounds,
    differences,
    row_ranges,
)
from shiftjax.weights.typed_fields import Fields, read_json

MLP, LSTM = "ArcticMLPSpeculatorPreTrainedModel", "ArcticLSTMSpeculatorPreTrainedModel"
# By `method`, the last two may be MLPs of another form too, which are not supported.
_METHODS = {MLP: "sum_rnn", LSTM: "sum_lstm", "MLPVariantSpeculatorPreTrainedModel": "sum_lstm"}
_HEAD = f"{SPECULATOR}head."


class Stored(NamedTuple):
    """A tensor of a speculator's file, by the name that it has there."""

    name: str
    info: TensorInfo

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return the elements at `index`, a slice for each dimension."""
        return read_range(self.name, self.info, index)


class SpeculatorSource:
    """A TensorSource: the target's tensors, and the speculator's with "speculator." before them.

    Of the heads it has the rows that are used: the first `draft_vocab`.
    """

    def __init__(self, target: TensorSource, speculator: Speculator, stored: Mapping[str, Stored]):
        self.location = target.location
        self.config = replace(target.config, speculator=speculator)
        self._target, self._stored = target, stored
        own = {
            name: stored[name].info._replace(shape=shape)
            for name, shape in _expected(self.config).items()
        }
        self.tensors: Mapping[str, TensorInfo] = {**target.tensors, **own}

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """See `TensorSource.read`."""
        if name not in self._stored:
            return self._target.read(name, index)
        return self._stored[name].read(bounds(self.tensors[name], index))


def with_speculator(
    target: TensorSource, directory: Path, draft_vocab: int | None = None
) -> TensorSource:
    """Return a source that has a speculator beside its target.

    `draft_vocab` is how many token ids are drafted, the first ones; None: as many as the speculator
    was trained for, where it says so, else all. Copies of tied weights are read and compared, in
    pieces of 64 MiB; else headers alone are read.

    Raises:
        CheckpointError: the directory holds no speculator, not this target's or one that is not
            supported; tensors are missing, unknown, of another shape, or copies that are none.
        ConfigError: `draft_vocab` is not within what the speculator was trained for.
    """
    speculator = _read_config(directory / "config.json", target.config)
    config = replace(target.config, speculator=replace(speculator, draft_vocab=None))
    stored = _read_headers(directory)
    expected, copies = _expected(config), _copies(speculator)
    copies = {copy: name for copy, name in copies.items() if copy in stored}
    shapes = expected | {copy: expected[name] for copy, name in copies.items()}
    infos = {name: tensor.info for name, tensor in stored.items()}
    problems = list(differences(infos, shapes, str(directory), "this speculator"))
    if problems:
        raise CheckpointError(*problems)
    for copy, name in copies.items():
        _check_copy(stored[copy], stored[name])
    most = speculator.draft_vocab or config.vocab_size
    if draft_vocab is not None and not 0 < draft_vocab <= most:
        raise ConfigError([f"draft_vocab must be between 1 and {most}, got {draft_vocab}"])
    speculator = replace(speculator, draft_vocab=draft_vocab or speculator.draft_vocab)
    return SpeculatorSource(target, speculator, stored)


def save_speculator(
    config: ModelConfig, tensors: Mapping[str, np.ndarray], directory: Path, base_architecture: str
) -> None:
    """Write a speculator to a directory that is there, so that Arctic Inference loads it too.

    `config` is the target's, with its speculator; `tensors` have Arctic's names without prefix,
    each tied one once. A head of `draft_vocab` rows is filled up with copies of its first row,
    which never win an argmax. `base_architecture` is the target's, as `LlamaForCausalLM`.

    Raises:
        CheckpointError: `tensors` are not those of the speculator.
    """
    speculator = config.speculator
    assert speculator is not None
    file = str(directory / SINGLE_FILE)
    given = {f"{SPECULATOR}{name}": x for name, x in tensors.items()}
    infos = {name: TensorInfo(x.shape, x.dtype, file) for name, x in given.items()}
    problems = list(differences(infos, _expected(config), str(directory), "this speculator"))
    if problems:
        raise CheckpointError(*problems)
    if speculator.method == "lstm":  # whose embeddings Arctic wants to find four times
        copies = {copy: name for copy, name in _copies(speculator).items() if "_emb." in copy}
        given |= {copy: given[name] for copy, name in copies.items()}
    whole = expected_tensors(replace(config, speculator=replace(speculator, draft_vocab=None)))
    written = {
        name.removeprefix(SPECULATOR): _filled(x, whole.get(name, x.shape)[0])
        for name, x in given.items()
    }
    infos = {name: TensorInfo(x.shape, x.dtype, file) for name, x in written.items()}
    data = _to_json(config, speculator, base_architecture, str(infos["head.0.weight"].dtype))
    (directory / "config.json").write_text(json.dumps(data, indent=2) + "\n")
    write_file(directory / SINGLE_FILE, infos, lambda name: [written[name]])


def _expected(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes = expected_tensors(config)
    return {name: shape for name, shape in shapes.items() if name.startswith(SPECULATOR)}


def _copies(speculator: Speculator) -> dict[str, str]:
    """Tensors that may be written although they are tied, and what each is a copy of."""
    num, copies = speculator.num_predict, {}
    if speculator.method == "lstm" and speculator.tie_lstm_embs:
        copies = {
            f"{gate}_emb.0.weight": f"{LSTM_GATES[0]}_emb.0.weight" for gate in LSTM_GATES[1:]
        }
    if speculator.method == "mlp" and speculator.tie_weights:
        shared = ("emb.{}.weight", "ln.{}.weight", "ln.{}.bias")
        copies = {name.format(i): name.format(0) for i in range(1, num) for name in shared}
        copies |= {f"proj.{i}.weight": "proj.1.weight" for i in range(2, num)}
    if speculator.tie_weights:
        copies |= {f"head.{i}.weight": "head.0.weight" for i in range(1, num)}
    return {f"{SPECULATOR}{copy}": f"{SPECULATOR}{name}" for copy, name in copies.items()}


def _read_headers(directory: Path) -> dict[str, Stored]:
    """The tensors by their names with the prefix, whether they have it in their files or not."""
    header = read_headers(directory)
    stored = {
        f"{SPECULATOR}{name.removeprefix(SPECULATOR)}": Stored(name, info)
        for name, info in header.items()
    }
    if len(stored) < len(header):
        raise CheckpointError(
            f"{directory}: holds a tensor with and without {SPECULATOR!r} before it"
        )
    return stored


def _check_copy(copy: Stored, original: Stored) -> None:
    for rows in row_ranges(copy.info):
        if not np.array_equal(copy.read(rows), original.read(rows)):
            raise CheckpointError(
                f"{copy.info.file}: tensor {copy.name}: expected a copy of {original.name} because "
                f"the configuration ties them, found other values in rows {rows[0].start} to "
                f"{rows[0].stop}"
            )


def _filled(x: np.ndarray, num_rows: int) -> np.ndarray:
    """Return `x` padded to `num_rows` rows with copies of its first row."""
    return np.concatenate([x, np.broadcast_to(x[:1], (num_rows - len(x), *x.shape[1:]))])


def _read_config(path: Path, target: ModelConfig) -> Speculator:
    """Turn a speculator's `config.json` into what drafts for `target`.

    `num_lookahead_tokens`, how many drafts another engine would make, is checked and not used: at
    most `n_predict` are made, by what the engine's settings say.
    """
    fields = Fields(read_json(path), str(path))
    architectures = fields.data.get("architectures")
    kind = architectures[0] if isinstance(architectures, list) and architectures else None
    if kind not in _METHODS:
        known = ", ".join(_METHODS)
        raise CheckpointError(
            f"{path}: is no speculator: architectures must be one of {known}, found {architectures}"
        )
    if target.encoder is not None:
        raise CheckpointError(f"{path}: {target.name} is an encoder: there is nothing to draft")
    method = fields.data.get("method") or "sum_rnn"
    if method != _METHODS[kind]:
        fields.problem(f"method of an {kind} must be {_METHODS[kind]}, found {method!r}")
    num_predict, is_tied = fields.count("n_predict"), fields.flag("tie_weights")
    fields.count("num_lookahead_tokens", num_predict)
    if kind == MLP:
        hidden = _width(fields, "emb_dim")
        inner = _width(fields, "inner_dim") if fields.data.get("inner_dim") != 0 else hidden
        if is_tied and num_predict == 1:
            fields.problem("tie_weights needs n_predict of at least 2")
    else:
        hidden, inner = fields.count("input_hidden_dim"), _width(fields, "inner_dim")
        for name in ("emb_dim", "proj_dim"):
            if _width(fields, name) != inner:
                fields.problem(f"{name} must equal inner_dim, found {fields.data.get(name)!r}")
        if not is_tied:
            fields.problem("tie_weights must be true for an LSTM")
    _check_target(fields, hidden, target)
    vocab = target.vocab_size
    trained = fields.count("draft_vocab") if fields.has("draft_vocab") else None
    if trained is not None and trained > vocab:
        fields.problem(f"draft_vocab {trained} is more than the vocabulary of {vocab}")
    fields.raise_problems()
    return Speculator(
        method="mlp" if kind == MLP else "lstm",
        num_predict=num_predict,
        inner_dim=inner,
        tie_weights=is_tied,
        tie_lstm_embs=fields.flag("tie_lstm_embs"),
        scale_input=fields.flag("scale_input"),
        draft_vocab=trained,
    )


def _width(fields: Fields, name: str) -> int:
    """A width that is a number, text, or a list; of one layer."""
    value = fields.data.get(name)
    parts = value.split(".") if isinstance(value, str) else value
    parts = parts if isinstance(parts, list) else [parts]
    if len(parts) > 1:
        fields.problem(f"{name} must be one width, found {value!r}: more layers are not supported")
    part = parts[0] if parts else None
    number = int(part) if isinstance(part, str) and part.isdecimal() else part
    one = Fields({name: number}, fields.file)
    one.problems = fields.problems
    return one.count(name)


def _check_target(fields: Fields, hidden: int, target: ModelConfig) -> None:
    """Whether the speculator was made for a model like this."""
    vocab, bases = fields.count("vocab_size"), fields.data.get("base_model_archs")
    if vocab != target.vocab_size:
        fields.problem(f"vocab_size {vocab} is not the {target.vocab_size} of {target.name}")
    if hidden != target.hidden_size:
        fields.problem(
            f"drafts from hidden states of {hidden}, and those of {target.name} have "
            f"{target.hidden_size}"
        )
    architecture = class_of(target.architecture)
    if bases is not None and architecture not in (bases if isinstance(bases, list) else [bases]):
        fields.problem(f"base_model_archs must name {architecture}, found {bases}")


def _to_json(
    config: ModelConfig, speculator: Speculator, base_architecture: str, dtype: str
) -> dict[str, Any]:
    """Contents of a `config.json` from which `_read_config` makes the same speculator."""
    is_lstm, inner = speculator.method == "lstm", speculator.inner_dim
    kind = LSTM if is_lstm else MLP
    if is_lstm:
        width = str(inner)  # Arctic splits it at dots
        widths = {"inner_dim": width, "proj_dim": width, "emb_dim": width}
        widths |= {"input_hidden_dim": config.hidden_size}
    else:
        widths = {"inner_dim": inner, "emb_dim": config.hidden_size}
    return {
        "architectures": [kind],
        "model_type": "mlp_speculator",
        "method": _METHODS[kind],
        "base_model_archs": [base_architecture],
        "vocab_size": config.vocab_size,
        "n_predict": speculator.num_predict,
        "num_lookahead_tokens": speculator.num_predict,
        **widths,
        "tie_weights": speculator.tie_weights,
        "tie_lstm_embs": is_lstm and speculator.tie_lstm_embs,
        "scale_input": speculator.scale_input,
        "draft_vocab": speculator.draft_vocab,
        "torch_dtype": dtype,
    }
