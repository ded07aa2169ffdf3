"""Defaults of sampling against transformers' `generate` (tests/oracle/make_generation.py)."""

import json
import logging
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from shiftjax import LLM, SamplingParams
from shiftjax.options import ConfigError
from shiftjax.text.generation_config import sampling_defaults, with_defaults

DATA = Path(__file__).parent / "data"
TOLD = json.loads((DATA / "generation.json").read_text("utf-8"))
ONE_WAY = [case for case in TOLD["cases"] if case["token_ids"]]
DRAWN = [case for case in TOLD["cases"] if case["first"]]
NUM_DRAWS = 2048  # of one token; a share of them is off by 0.011 in one deviation
OPTIONS = {
    "devices": 1,
    "max_model_len": 64,
    "dtype": "float32",
    "max_num_seqs": 32,
    "max_num_batched_tokens": 64,
    "token_buckets": [64],
}


def written(directory: Path, **fields) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(fields), "utf-8")
    return directory


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "qwen3"
    shutil.copytree(DATA / "parity" / "qwen3", folder)
    written(folder, **DRAWN[0]["file"])
    llm = LLM(str(folder), **OPTIONS)
    yield llm
    llm.close()


def first_tokens(llm: LLM, sampling: SamplingParams) -> Counter[int]:
    """What comes first in many draws of the prompt."""
    one = replace(sampling, n=128, max_tokens=1, ignore_eos=True)
    many = [replace(one, seed=seed) for seed in range(NUM_DRAWS // one.n)]
    prompt = {"prompt_token_ids": TOLD["prompt_token_ids"]}
    outputs = llm.generate([prompt] * len(many), many)
    return Counter(each.token_ids[0] for output in outputs for each in output.outputs)


def assert_drawn_as(drawn: Counter[int], first: list) -> None:
    expected = {token: share for token, share in first}
    assert drawn.keys() <= expected.keys()
    off = sum(abs(drawn[token] / NUM_DRAWS - share) for token, share in expected.items()) / 2
    assert off < 0.05  # of two samples of 20 tokens that are alike; 0.2 without top_p


@pytest.mark.costs(25)
def test_a_model_is_sampled_as_its_file_says_where_nothing_is_asked(llm):
    sampling = llm.default_sampling_params
    assert sampling == SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=12)
    assert_drawn_as(first_tokens(llm, sampling), DRAWN[0]["first"])
    (output,) = llm.generate({"prompt_token_ids": TOLD["prompt_token_ids"]})
    assert len(output.outputs[0].token_ids) == 12


@pytest.mark.costs(10)
@pytest.mark.parametrize("case", DRAWN[1:], ids=lambda case: str(case["file"]))
def test_draws_are_as_transformers_makes_them(llm, case, tmp_path):
    defaults = sampling_defaults("auto", None, written(tmp_path, **case["file"]))
    assert_drawn_as(first_tokens(llm, SamplingParams(**defaults)), case["first"])


@pytest.mark.parametrize("case", ONE_WAY, ids=lambda case: str(case["file"]))
def test_tokens_are_those_of_transformers(llm, case, tmp_path):
    defaults = sampling_defaults("auto", None, written(tmp_path, **case["file"]))
    sampling = replace(SamplingParams(**defaults), ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": TOLD["prompt_token_ids"]}, sampling)
    assert list(output.outputs[0].token_ids) == case["token_ids"]


def test_sources(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    written(tmp_path, temperature=0.6, top_k=20, top_p=1.0)
    written(other, temperature=0.7)
    assert sampling_defaults("auto", None, tmp_path) == {"temperature": 0.6, "top_k": 20}
    assert sampling_defaults("none", None, tmp_path) == {}
    assert sampling_defaults(str(other), None, tmp_path) == {"temperature": 0.7}
    assert sampling_defaults("auto", None, None) == {}
    assert sampling_defaults("auto", None, tmp_path / "none") == {}
    over = '{"temperature": 0.3, "min_p": 0.1}'
    assert sampling_defaults("none", over, tmp_path) == {"temperature": 0.3, "min_p": 0.1}
    assert sampling_defaults("auto", over, tmp_path)["top_k"] == 20


def test_requests_come_before_defaults():
    asked = SamplingParams(temperature=1.0, max_tokens=None)
    found = with_defaults(asked, {"temperature"}, {"temperature": 0.6, "top_k": 20})
    assert (found.temperature, found.top_k, found.max_tokens) == (1.0, 20, None)
    # Of a completion, which has a limit of its own, and of a chat, which has none.
    assert with_defaults(SamplingParams(), set(), {"max_tokens": 99}).max_tokens == 16
    assert with_defaults(asked, {"max_tokens"}, {"max_tokens": 99}).max_tokens == 99


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"temperature": -1}', "generation_config.json: temperature must be between 0 and 100"),
        ('{"top_k": "many"}', "generation_config.json: top_k must be an integer"),
        ("[]", "must be a JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(tmp_path, text, words):
    (tmp_path / "generation_config.json").write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=words):
        sampling_defaults("auto", None, tmp_path)
    with pytest.raises(ConfigError):
        sampling_defaults("none", text, None)


def test_a_field_without_effect_is_refused_where_it_is_a_setting(tmp_path):
    with pytest.raises(ConfigError, match="unknown field 'temprature'; did you mean temperature"):
        sampling_defaults("auto", '{"temprature": 0.5, "top_k": 3}', tmp_path)
    assert sampling_defaults("none", '{"do_sample": false}', None) == {"temperature": 0.0}


def test_a_directory_without_the_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="generation_config must be auto, none or a directory"):
        sampling_defaults(str(tmp_path), None, None)


def test_the_log_says_what_is_taken_and_what_is_not(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    written(tmp_path, temperature=0.6, top_k=20, num_beams=4, min_length=0, typical_p=1.0)
    sampling_defaults("auto", None, tmp_path)
    taken, left = (record.message for record in caplog.records)
    assert "temperature 0.6, top_k 20" in taken and left.endswith("num_beams have no effect here")
