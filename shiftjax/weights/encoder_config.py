"""`config.json` of BERT-like encoders to ModelConfig and back; how their texts are pooled."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shiftjax.arch.config import Encoder, ModelConfig
from shiftjax.arch.pooling import Pooling, PoolingKind
from shiftjax.weights.errors import CheckpointError
from shiftjax.weights.scoring_config import SCORES, labels_json, num_labels_of, read_scoring
from shiftjax.weights.typed_fields import Fields, read_json

ENCODERS = {"bert": "BertModel", "roberta": "RobertaModel", "xlm-roberta": "XLMRobertaModel"}
_SPECIAL_IDS = ("bos_token_id", "eos_token_id")
# What sentence-transformers calls them, in 1_Pooling/config.json and in `pooling_mode`.
_POOLING: dict[str, PoolingKind] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
    "lasttoken": "last",
}


def parse_encoder(fields: Fields, name: str, architecture: str) -> ModelConfig:
    """Turn the contents of an encoder's `config.json` into a ModelConfig.

    Raises CheckpointError with one line per problem.
    """
    data = fields.data
    if data.get("hidden_act", "gelu") != "gelu":
        fields.problem(f"hidden_act must be gelu, found {data['hidden_act']!r}")
    if data.get("position_embedding_type", "absolute") not in (None, "absolute"):
        kind = data["position_embedding_type"]
        fields.problem(f"position_embedding_type must be absolute, found {kind!r}")
    if fields.flag("is_decoder") or fields.flag("add_cross_attention"):
        fields.problem("is_decoder and add_cross_attention must be false for embeddings")
    if fields.has("quantization_config"):
        fields.problem("quantization_config is not supported; use the unquantised checkpoint")
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if hidden % heads:
        fields.problem(f"hidden_size {hidden} is no multiple of {heads} heads")
    offset = 0 if architecture == "bert" else 1 + fields.count("pad_token_id", 1, minimum=0)
    positions = fields.count("max_position_embeddings", minimum=1 + offset)
    special = [fields.token_ids(each) for each in _SPECIAL_IDS]
    config = ModelConfig(
        name=name,
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=positions - offset,
        bos_token_id=special[0][0] if special[0] else None,
        eos_token_ids=special[1],
        encoder=Encoder(
            num_token_types=fields.count("type_vocab_size"),
            position_offset=offset,
            layer_norm_eps=fields.positive("layer_norm_eps"),
            num_labels=num_labels_of(fields),
        ),
    )
    fields.raise_problems()
    return config


def encoder_to_json(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Contents of a `config.json` from which `parse_encoder` makes the same ModelConfig.

    Raises CheckpointError for a combination that Hugging Face's model types cannot say.
    """
    encoder = config.encoder
    assert encoder is not None
    name = ENCODERS[config.architecture]
    if encoder.num_labels:
        name = name.removesuffix("Model") + SCORES
    data = {
        "architectures": [name],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "max_position_embeddings": config.max_position_embeddings + encoder.position_offset,
        "type_vocab_size": encoder.num_token_types,
        "layer_norm_eps": encoder.layer_norm_eps,
        "hidden_act": "gelu",
        "pad_token_id": max(0, encoder.position_offset - 1),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "torch_dtype": dtype,
    }
    data |= labels_json(config)
    fields = Fields(data, "config.json")
    if parse_encoder(fields, config.name, config.architecture) != config:
        raise CheckpointError(f"{config.name}: no config.json of {config.architecture} can say it")
    return data


def read_pooling(directory: Path | None, config: ModelConfig) -> Pooling:
    """How a directory of sentence-transformers says that texts become embeddings.

    Without its files (`modules.json` and what that names) it is the mean, not normalised, as that
    library does it; of a decoder, whose first tokens have seen nothing, the last to length 1.
    Raises CheckpointError for modules that are not computed here.
    """
    kind: PoolingKind = "mean"
    normalize = False
    modules = _modules(directory) if directory else []
    if config.encoder is None and not modules:
        kind, normalize = "last", True
    if config.num_scores:
        return read_scoring(directory, config)
    if directory is None:
        return Pooling(kind, normalize, config.max_position_embeddings)
    for module, path in modules:
        name = module.rpartition(".")[2]
        if name == "Pooling":
            kind = _pooling_kind(directory / path / "config.json")
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            raise CheckpointError(f"{directory / 'modules.json'}: {name} is not supported")
    prompts, default = _prompts(directory / "config_sentence_transformers.json")
    most = _max_length(directory / "sentence_bert_config.json")
    longest = min(config.max_position_embeddings, most or config.max_position_embeddings)
    dimensions = _dimensions(directory / "config.json", config.hidden_size)
    return Pooling(kind, normalize, longest, tuple(prompts.items()), default, dimensions)


def _dimensions(path: Path, hidden_size: int) -> Sequence[int]:
    """`matryoshka_dimensions` of a config.json; all lengths where it has `is_matryoshka` alone."""
    if not path.is_file():
        return ()
    fields = Fields(read_json(path), str(path))
    found = fields.data.get("matryoshka_dimensions")
    if found is None:
        return range(1, hidden_size + 1) if fields.flag("is_matryoshka") else ()
    is_list = isinstance(found, list) and all(type(each) is int for each in found)
    if not is_list or not all(0 < each <= hidden_size for each in found):
        fields.problem(f"matryoshka_dimensions must be numbers up to {hidden_size}: {found!r}")
    fields.raise_problems()
    return tuple(found)


def _modules(directory: Path) -> list[tuple[str, str]]:
    """(type, path) of every module, in their order; none without a modules.json."""
    path = directory / "modules.json"
    if not path.is_file():
        return []
    entries = read_json(path, list)
    if not all(isinstance(entry, dict) for entry in entries):
        raise CheckpointError(f"{path}: must be a list of objects")
    found = [(str(entry.get("type", "")), str(entry.get("path", ""))) for entry in entries]
    for _, place in found:
        if Path(place).is_absolute() or ".." in Path(place).parts:
            raise CheckpointError(f"{path}: {place!r} leads out of the directory")
    return found


def _pooling_kind(path: Path) -> PoolingKind:
    data = read_json(path)
    flags = [name for name in data if name.startswith("pooling_mode_") and data[name] is True]
    wanted = [data["pooling_mode"]] if data.get("pooling_mode") is not None else flags
    kinds: list[PoolingKind] = [
        _POOLING[name] for name in wanted if isinstance(name, str) and name in _POOLING
    ]
    if len(kinds) != 1 or len(wanted) != 1:
        known = ", ".join(_POOLING)
        raise CheckpointError(f"{path}: must have one of {known}, found {wanted}")
    return kinds[0]


def _prompts(path: Path) -> tuple[dict[str, str], str | None]:
    """Texts that are put before an input, by name, and the name of the one that always is."""
    if not path.is_file():
        return {}, None
    fields = Fields(read_json(path), str(path))
    prompts, default = fields.data.get("prompts") or {}, fields.data.get("default_prompt_name")
    is_text = isinstance(prompts, dict) and all(isinstance(each, str) for each in prompts.values())
    if not is_text:
        fields.problem("prompts must be an object of texts")
    elif default is not None and default not in prompts:
        fields.problem(f"default_prompt_name must be one of the prompts, found {default!r}")
    fields.raise_problems()
    return prompts, default


def _max_length(path: Path) -> int | None:
    if not path.is_file():
        return None
    fields = Fields(read_json(path), str(path))
    most = fields.count("max_seq_length") if fields.has("max_seq_length") else None
    fields.raise_problems()
    return most
