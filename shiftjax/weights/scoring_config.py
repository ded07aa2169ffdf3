"""What a `config.json` says of a head that scores texts, as transformers and its users read it."""

from pathlib import Path
from typing import Any

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.pooling import Activation, Pooling
from shiftjax.weights.errors import CheckpointError
from shiftjax.weights.typed_fields import Fields, read_json

SCORES = "ForSequenceClassification"  # how the names of such classes end
# Of sentence-transformers, in `activation_fn` and `sbert_ce_default_activation_function`.
_FUNCTIONS: dict[str, Activation] = {
    "torch.nn.modules.linear.Identity": "none",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
}
_PROBLEMS: dict[str, Activation] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


def num_labels_of(fields: Fields) -> int:
    """The labels of a model with such a head; 0: it has none."""
    names = fields.data.get("architectures")
    has_head = isinstance(names, list) and bool(names) and str(names[0]).endswith(SCORES)
    return len(labels_of(fields)) if has_head else 0


def labels_json(config: ModelConfig) -> dict[str, Any]:
    """The labels as a `config.json` has them; they lose their names."""
    if not config.num_scores:
        return {}
    return {"id2label": {str(i): f"LABEL_{i}" for i in range(config.num_scores)}}


def labels_of(fields: Fields) -> tuple[str, ...]:
    """The labels in their order: `id2label`, or so many as `num_labels`, or two."""
    named = fields.data.get("id2label")
    if named is None:
        return tuple(f"LABEL_{i}" for i in range(fields.count("num_labels", 2)))
    expected = [str(i) for i in range(len(named))] if isinstance(named, dict) else []
    if not expected or {str(key) for key in named} != set(expected):
        fields.problem("id2label must name the labels 0, 1, 2 ...")
        return ("LABEL_0",)
    by_id = {str(key): str(label) for key, label in named.items()}
    return tuple(by_id[key] for key in expected)


def read_scoring(directory: Path | None, config: ModelConfig) -> Pooling:
    """How the scores of a model with such a head are made. Raises CheckpointError."""
    data = {} if directory is None else read_json(directory / "config.json")
    fields = Fields({"num_labels": config.num_scores} | data, "config.json")
    labels = labels_of(fields)
    fields.raise_problems()
    longest = config.max_position_embeddings
    return Pooling("scores", False, longest, labels=labels, activation=_activation(data, labels))


def _activation(data: dict[str, Any], labels: tuple[str, ...]) -> Activation:
    """As a file says, or else for one label a sigmoid, for several a softmax."""
    own = data.get("sentence_transformers")
    own = own.get("activation_fn") if isinstance(own, dict) else None
    name = own or data.get("sbert_ce_default_activation_function")
    if name is not None and name not in _FUNCTIONS:
        known = ", ".join(_FUNCTIONS)
        raise CheckpointError(f"config.json: the activation must be one of {known}, found {name!r}")
    if name is not None:
        return _FUNCTIONS[name]
    usual: Activation = "sigmoid" if len(labels) == 1 else "softmax"
    return usual if data.get("problem_type") is None else _PROBLEMS.get(data["problem_type"], usual)
