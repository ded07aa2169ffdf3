"""Heads that score texts and pairs, against transformers (tests/oracle/make_scores.py)."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from shiftjax import Embedder
from shiftjax.core.errors import RequestError
from shiftjax.embed.scores import activated
from shiftjax.weights.encoder_config import read_pooling
from shiftjax.weights.hf_config import parse_config, read_config, to_json
from shiftjax.weights.source import CheckpointError

DATA = Path(__file__).parent.parent / "data" / "encoders"
NAMES = ("bert-scores", "xlm-roberta-scores", "qwen3-scores")
OPTIONS = {"devices": 1, "cache_dir": "none", "max_num_batched_tokens": 80}


@pytest.fixture(scope="module", params=NAMES)
def case(request):
    """An embedder, and what transformers says of texts and pairs."""
    embedder = Embedder(str(DATA / request.param), **OPTIONS)
    cases = json.loads((DATA / request.param / "scores.json").read_text())["cases"]
    yield embedder, cases
    embedder.close()


def inputs_of(cases: list[dict]) -> list:
    return [
        each["input"] if isinstance(each["input"], str) else tuple(each["input"]) for each in cases
    ]


def test_scores_equal_transformers(case):
    embedder, cases = case
    wanted = np.array([each["logits"] for each in cases], np.float32)
    together = embedder.score(inputs_of(cases), activate=False)
    np.testing.assert_allclose(together, wanted, rtol=2e-5, atol=2e-6)
    alone = [embedder.score([each], activate=False)[0] for each in inputs_of(cases)]
    np.testing.assert_allclose(alone, wanted, rtol=2e-5, atol=2e-6)
    assert embedder.num_compiles == 0


def test_tokens_and_types_are_those_of_the_tokenizer(case):
    embedder, cases = case
    pairs = [tuple(each["input"]) for each in cases if not isinstance(each["input"], str)]
    wanted = [each for each in cases if not isinstance(each["input"], str)]
    for (ids, second), each in zip(embedder.reader.read_pairs(pairs), wanted, strict=True):
        assert ids == each["token_ids"]
        types = [int(place >= second) for place in range(len(ids))]
        assert types == each["type_ids"]


def test_a_long_pair_loses_the_end_of_its_second_text(case):
    embedder, _ = case
    short = embedder.reader.read_pairs([("query", "mode base a")])[0]
    cut = embedder.reader.read_pairs([("query", "mode base a ways step")], len(short[0]))[0]
    assert cut == short
    with pytest.raises(RequestError, match=r"input\[1\] has \d+ tokens; .* at most (40|64)"):
        embedder.score([("a", "a"), ("a", "mode " * 99)], truncate=False)
    assert np.isfinite(embedder.score([("a", "mode " * 99)])).all()


def test_the_second_text_is_told_from_the_first():
    embedder = Embedder(str(DATA / "bert-scores"), **OPTIONS)
    one, other = embedder.score([("query", "document"), ("document", "query")])
    assert one != other
    first = embedder.score(["query document"])
    assert first != one


def test_scores_are_activated(case):
    embedder, cases = case
    logits = embedder.score(inputs_of(cases), activate=False)
    scores = embedder.score(inputs_of(cases))
    if embedder.reader.pooling.activation == "sigmoid":
        np.testing.assert_allclose(scores, 1 / (1 + np.exp(-logits)), rtol=1e-6)
    else:
        shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        np.testing.assert_allclose(scores, shares, rtol=1e-6)
    assert np.array_equal(activated(logits, "none"), logits)
    assert activated(np.array([[-1e4, 1e4]]), "sigmoid").tolist() == [[0.0, 1.0]]


def test_each_does_its_own():
    with pytest.raises(RequestError, match="scores texts: call score"):
        Embedder(str(DATA / "bert-scores"), **OPTIONS).embed(["a"])
    with pytest.raises(RequestError, match="no head that scores"):
        Embedder("random:tiny-bert", **OPTIONS).score(["a"])


@pytest.mark.parametrize("name", NAMES)
def test_a_config_with_a_head_is_written_and_read(name):
    config = read_config(DATA / name)
    assert config.num_scores == {"xlm-roberta-scores": 3}.get(name, 1)
    assert parse_config(to_json(config, "float32"), config.name, "f") == config


@pytest.mark.parametrize(
    ("change", "activation"),
    [
        ({}, "sigmoid"),
        ({"problem_type": "regression"}, "none"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "single_label_classification"}, "softmax"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "none"),
        (
            {
                "sentence_transformers": {
                    "activation_fn": "torch.nn.modules.activation.Sigmoid",
                },
                "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
            },
            "sigmoid",
        ),
        ({"sbert_ce_default_activation_function": "os.system"}, None),
    ],
)
def test_the_activation_is_what_the_file_says(tmp_path, change, activation):
    directory = shutil.copytree(DATA / "bert-scores", tmp_path / "model")
    data = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(data | change))
    config = read_config(directory)
    if activation is None:
        with pytest.raises(CheckpointError, match=r"must be one of .* found 'os.system'"):
            read_pooling(directory, config)
        return
    pooling = read_pooling(directory, config)
    assert (pooling.activation, pooling.labels) == (activation, ("LABEL_0",))


def test_labels_have_their_names():
    directory = DATA / "xlm-roberta-scores"
    pooling = read_pooling(directory, read_config(directory))
    assert pooling.labels == ("contradiction", "entailment", "neutral")
    assert (pooling.kind, pooling.max_length, pooling.activation) == ("scores", 40, "softmax")


def test_labels_must_be_counted():
    config = json.loads((DATA / "xlm-roberta-scores" / "config.json").read_text())
    with pytest.raises(CheckpointError, match="id2label must name"):
        parse_config(config | {"id2label": {"1": "x"}}, "x", "f")
