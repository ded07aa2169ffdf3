"""Encoders: config.json is understood or refused, and sentence-transformers' files are read."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shiftjax.arch.pooling import Pooling
from shiftjax.arch.presets import PRESETS
from shiftjax.arch.weights import num_parameters
from shiftjax.weights.encoder_config import read_pooling
from shiftjax.weights.hf_config import parse_config, read_config, to_json
from shiftjax.weights.source import CheckpointError

DATA = Path(__file__).parent.parent / "data" / "encoders"
TINY = PRESETS["tiny-bert"]


def test_positions_of_roberta_begin_behind_the_padding():
    bert, roberta = (read_config(DATA / name) for name in ("bert", "xlm-roberta"))
    assert bert.encoder and roberta.encoder
    assert (bert.encoder.position_offset, bert.max_position_embeddings) == (0, 40)
    assert (roberta.encoder.position_offset, roberta.max_position_embeddings) == (2, 40)
    assert (bert.encoder.num_token_types, roberta.encoder.num_token_types) == (2, 1)
    assert num_parameters(bert) - num_parameters(roberta) == (2 - 1) * 24 - 2 * 24
    for config in (bert, roberta):
        assert parse_config(to_json(config, "float32"), config.name, "f") == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "gelu_new"}, "hidden_act must be gelu, found 'gelu_new'"),
        ({"position_embedding_type": "relative_key"}, "must be absolute, found 'relative_key'"),
        ({"is_decoder": True}, "is_decoder"),
        ({"num_attention_heads": 5}, "64 is no multiple of 5 heads"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be"),
        ({"quantization_config": {}}, "quantization_config"),
    ],
)
def test_what_is_not_computed_is_refused(change, words):
    with pytest.raises(CheckpointError, match=words):
        parse_config(to_json(TINY, "float32") | change, "x", "f")


def test_without_files_texts_are_averaged_and_may_be_as_long_as_the_model_takes(tmp_path):
    assert read_pooling(None, TINY) == read_pooling(tmp_path, TINY) == Pooling("mean", False, 64)


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
def test_pooling_is_what_the_files_say(tmp_path, pooling, kind):
    write(tmp_path, pooling, ("Transformer", "Pooling", "Normalize"))
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 32})
    assert read_pooling(tmp_path, TINY) == Pooling(kind, True, 32)
    shorter = replace(TINY, max_position_embeddings=16)
    assert read_pooling(tmp_path, shorter).max_length == 16


@pytest.mark.parametrize(
    ("pooling", "modules", "words"),
    [
        ({"pooling_mode_max_tokens": True}, ("Pooling",), "must have one of .* found"),
        ({"pooling_mode": ["cls"]}, ("Pooling",), "must have one of"),
        (
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            ("Pooling",),
            "found .*cls.*mean",
        ),
        ({"pooling_mode": "cls"}, ("Pooling", "Dense"), "Dense is not supported"),
    ],
)
def test_modules_that_are_not_computed_are_refused(tmp_path, pooling, modules, words):
    write(tmp_path, pooling, modules)
    with pytest.raises(CheckpointError, match=words):
        read_pooling(tmp_path, TINY)


def test_a_module_cannot_lead_out_of_its_directory(tmp_path):
    write_json(tmp_path / "modules.json", [{"type": "a.Pooling", "path": "../x"}])
    with pytest.raises(CheckpointError, match="leads out of the directory"):
        read_pooling(tmp_path, TINY)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"prompts": ["query"]}, "prompts must be an object of texts"),
        ({"prompts": {"q": 1}}, "prompts must be an object of texts"),
        ({"prompts": {"q": ""}, "default_prompt_name": "p"}, "one of the prompts, found 'p'"),
    ],
)
def test_prompts_that_are_none(tmp_path, data, words):
    write_json(tmp_path / "config_sentence_transformers.json", data)
    with pytest.raises(CheckpointError, match=words):
        read_pooling(tmp_path, TINY)


@pytest.mark.parametrize(
    ("data", "dimensions"),
    [
        ({}, ()),
        ({"is_matryoshka": True}, range(1, 65)),
        ({"is_matryoshka": True, "matryoshka_dimensions": [16, 64]}, (16, 64)),
        ({"matryoshka_dimensions": [32]}, (32,)),
    ],
)
def test_the_checkpoint_says_to_which_lengths_embeddings_may_be_cut(tmp_path, data, dimensions):
    write_json(tmp_path / "config.json", data)
    assert read_pooling(tmp_path, TINY).dimensions == dimensions


@pytest.mark.parametrize("wrong", [[16, 65], [0], ["16"], 16])
def test_a_length_beyond_the_embedding_is_no_length(tmp_path, wrong):
    write_json(tmp_path / "config.json", {"matryoshka_dimensions": wrong})
    with pytest.raises(CheckpointError, match="matryoshka_dimensions must be numbers up to 64"):
        read_pooling(tmp_path, TINY)


def write(directory: Path, pooling: dict, modules: tuple[str, ...]) -> None:
    write_json(directory / "pool" / "config.json", pooling)
    entries = [{"type": f"sentence_transformers.models.{m}", "path": "pool"} for m in modules]
    write_json(directory / "modules.json", entries)


def write_json(path: Path, values: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(values))
