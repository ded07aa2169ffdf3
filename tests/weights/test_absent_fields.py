"""A file without a field means what transformers makes of it (tests/oracle/make_removals.py)."""

import json
from pathlib import Path

import pytest

from shiftjax.arch.traits import DECODERS
from shiftjax.weights.encoder_config import ENCODERS
from shiftjax.weights.hf_config import parse_config, to_json
from shiftjax.weights.hf_defaults import FILE, defaults_of
from shiftjax.weights.source import CheckpointError

DATA = json.loads((Path(__file__).parent.parent / "data" / "removals.json").read_text())
NOT_IN_TRANSFORMERS = {"llama_swiftkv", "kimi_k2"}
# transformers refuses these files, though nothing is missing: a head has its own width, and the
# factor of yarn follows from two contexts.
READ_ALL_THE_SAME = ("hidden_size", "num_attention_heads", ".factor", ".partial_rotary_factor")


def read(data: dict, name: str):
    """The configuration; None where it is refused."""
    try:
        return parse_config(data, name, "config.json")
    except CheckpointError:
        return None


def without(data: dict, path: str) -> dict:
    """A file without one field, which may be one of an object in it."""
    name, _, inner = path.partition(".")
    rest = {key: value for key, value in data.items() if key != name}
    return rest | {name: without(data[name], inner)} if inner else rest


@pytest.mark.parametrize("name", DATA)
def test_every_field_that_is_left_out_is_what_transformers_makes_of_it(name):
    row = DATA[name]
    assert read(row["config"], name) == read(row["whole"], name) is not None
    for field, changes in row["without"].items():
        found = read(without(row["config"], field), name)
        if isinstance(changes, str):
            assert found is None or field.endswith(READ_ALL_THE_SAME), (field, changes)
        else:
            assert found == read(row["whole"] | changes, name), field
    for field, changes in row["null"].items():
        found = read(row["config"] | {field: None}, name)
        assert found == read(row["whole"] | changes, name), f"{field} is null"


@pytest.mark.parametrize("name", DATA)
def test_what_is_written_is_read_as_the_same(name):
    config = parse_config(DATA[name]["config"], name, "config.json")
    written = json.loads(json.dumps(to_json(config, "float32")))
    assert parse_config(written, name, "config.json") == config


def test_the_facts_are_of_every_family():
    types = {row["config"]["model_type"] for row in DATA.values()}
    assert types == (DECODERS.keys() | ENCODERS.keys()) - NOT_IN_TRANSFORMERS
    assert all(defaults_of(name) != defaults_of("llama") for name in types - {"llama"})
    assert defaults_of("llama_swiftkv") == defaults_of("llama"), FILE
