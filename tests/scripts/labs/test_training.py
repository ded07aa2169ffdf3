"""The scripts that fit parts of models, on tiny ones."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts" / "labs"))

import train_speculator  # noqa: E402
from draft_lstm import (  # noqa: E402
    DRAFTS,
    Weights,
    acceptance,
    greedy_drafts,
    initial_weights,
)
from forward_pass import final_states, head_name, hidden_states, read_params  # noqa: E402
from target_features import Features  # noqa: E402
from train_speculator import Training, train  # noqa: E402

from shiftjax.arch.presets import PRESETS  # noqa: E402
from shiftjax.text.tokenizer import load_tokenizer  # noqa: E402
from shiftjax.weights.huggingface import HuggingFaceSource, save_huggingface  # noqa: E402
from shiftjax.weights.locate import resolve_model  # noqa: E402
from shiftjax.weights.random import RandomSource  # noqa: E402
from shiftjax.weights.speculator_checkpoints import with_speculator  # noqa: E402

pytestmark = pytest.mark.thorough
PARITY = ROOT / "tests" / "data" / "parity"
TOLERANCE = 500 * np.finfo(np.float32).eps  # as in tests/models/test_parity.py
VOCAB = 16  # of texts that count


def test_texts_of_a_batch_are_computed_each_for_itself():
    """A shorter text, padded, beside a longer one, against transformers."""
    expected = np.load(PARITY / "llama" / "expected.npz")
    texts = [expected[f"token_ids_{i}"] for i in range(2)]
    ids = np.zeros((2, max(map(len, texts))), np.int32)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    source = HuggingFaceSource(PARITY / "llama")
    params, config = read_params(source), source.config
    states = list(hidden_states(params, config, jnp.asarray(ids)))
    logits = final_states(params, config, jnp.asarray(ids)) @ params[head_name(config)].T
    for i, text in enumerate(texts):
        wanted = [*expected[f"hidden_states_{i}"][:-1], expected[f"logits_{i}"]]
        for got, want in zip([*states, logits], wanted, strict=True):
            of_text = np.asarray(got).reshape(*ids.shape, -1)[i, : len(text)]
            assert np.abs(of_text - want).max() < TOLERANCE * np.abs(want).max()


# ---------------------------------------------------------------- drafting and training


def counting(num_texts: int = 8, rows: int = 12) -> Features:
    """Texts of a target that counts modulo VOCAB; its hidden states are the numbers so far."""
    rng = np.random.default_rng(0)
    number = (rng.integers(VOCAB, size=(num_texts, 1)) + np.arange(rows)).reshape(-1) % VOCAB
    left = np.tile(np.arange(rows)[::-1], num_texts).astype(np.int32)
    choice = ((number + 1) % VOCAB).astype(np.int32)
    following = np.where(left > 0, choice, -1).astype(np.int32)
    return Features(np.eye(VOCAB, dtype=np.float16)[number], following, choice, left)


TABLE = np.eye(VOCAB, dtype=np.float32)
HEAD = np.roll(TABLE, 1, axis=0)  # of that target


def kept(weights: Weights) -> list[float]:
    return acceptance(counting(), partial(greedy_drafts, weights, jnp.asarray(TABLE)))


def counter() -> Weights:
    """Drafts the number after the one given, by gates that open for its embedding alone."""
    one, zero = jnp.ones(VOCAB), jnp.zeros(VOCAB)
    blind = jnp.zeros((VOCAB, 4, VOCAB))
    norms = (one, zero, one, zero)
    return Weights((blind, blind), norms, 4 * jnp.asarray(TABLE), jnp.asarray(HEAD))


def test_an_oracle_is_always_accepted():
    assert kept(counter()) == [1.0] * DRAFTS


def test_a_draft_counts_only_where_those_before_it_are_right():
    """The second is right in one of two texts, the third in both."""
    features = counting(num_texts=2)
    features.hidden[: len(features.left) // 2] = 0

    def draft(hidden: np.ndarray, following: np.ndarray) -> np.ndarray:
        ids = (following[:, None] + [1, 2, 3]) % VOCAB
        ids[:, 1] += hidden.any(axis=1)
        return ids

    assert acceptance(features, draft) == [1.0, 0.5, 0.5]


def test_before_training_drafts_are_the_targets_words_for_a_guessed_state():
    """Here regression finds the state exactly: it is the embedding of the token."""
    assert kept(initial_weights(counting(), TABLE, HEAD)) == [1.0] * DRAFTS


def test_training_learns_to_count():
    """From a head that knows nothing: loss and acceptance must mean the same tokens."""
    head = np.random.default_rng(0).standard_normal((VOCAB, VOCAB)).astype(np.float32)
    begun = initial_weights(counting(), TABLE, head)
    assert kept(begun)[0] < 0.5
    settings = Training(epochs=30, batch_size=16, learning_rate=0.02)
    (_, first), *_, (weights, last) = train(counting(), TABLE, 20 * HEAD, begun, settings)
    assert (last < 0.3 * first).all()
    assert kept(weights)[-1] > 0.9


# ---------------------------------------------------------------- the whole script


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny random model with a real tokenizer and its chat template."""
    directory, location = tmp_path_factory.mktemp("model"), resolve_model("smollm2-135m").path
    assert location is not None
    tokenizer = load_tokenizer(location)
    sizes = {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": 1024}
    config = replace(PRESETS["tiny"], eos_token_ids=(2,), **sizes)
    save_huggingface(RandomSource(config, seed=3), directory)
    tokenizer.save(directory)
    return directory


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory) -> tuple[list[str], dict, Path]:
    """The command, its report, and where it wrote."""
    work, prompts = tmp_path_factory.mktemp("work"), model / "prompts.jsonl"
    rows = [{"question": "How many?"}, {"turns": ["Who?", "Why?"]}, {"question": "One and one?"}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [f"--model={model}", f"--work={work}", f"--output={work / 'out'}"]
    command += [f"--prompts={prompts}", f"--test={prompts}", "--test-stride=2", "--invented=3"]
    command += ["--max-tokens=8", "--epochs=2", "--batch=8", "--draft-vocab=4096"]
    with pytest.MonkeyPatch.context() as patch:  # as short as the others
        patch.setattr(train_speculator, "TEST_TOKENS", 16)
        return command, train_speculator.main(command), work


def test_every_phase_leaves_what_the_next_one_needs(trained):
    command, report, work = trained
    texts = [json.loads(line) for line in (work / "train.jsonl").read_text().splitlines()]
    assert len(texts) == 6  # three prompts and three invented
    assert len((work / "test.jsonl").read_text().splitlines()) == 2
    assert report["train_tokens"] == sum(len(text["output"]) for text in texts)
    assert set(report["seconds"]) >= {"texts", "train features", "test features"}
    again = train_speculator.main(command)
    assert set(again["seconds"]) == {"training", "evaluation"}
    assert again["acceptance"] == report["acceptance"]


def test_features_are_what_the_target_computed_along_its_texts(trained, model):
    """Greedy texts are the target's choices, but where bfloat16 rounds in another order."""
    work = trained[2]
    features = Features.load(work / "test.npz")
    follows = features.left > 0
    assert np.mean(features.choice[follows] == features.following[follows]) > 0.8
    assert (features.following == -1).sum() == 2
    source = HuggingFaceSource(model)
    (text, *_) = (json.loads(line) for line in (work / "test.jsonl").read_text().splitlines())
    states = final_states(
        read_params(source), source.config, jnp.asarray([text["prompt"] + text["output"]])
    )
    wanted = np.asarray(states)[len(text["prompt"]) - 1 :]
    assert np.abs(features.hidden[: len(wanted)] - wanted).max() < 0.05 * np.abs(wanted).max()
    assert features.left[0] == len(text["output"])


def test_what_is_written_is_a_speculator_of_the_target(trained, model):
    source = with_speculator(HuggingFaceSource(model), trained[2] / "out")
    speculator = source.config.speculator
    assert speculator is not None
    assert (speculator.method, speculator.num_predict, speculator.draft_vocab) == ("lstm", 3, 4096)
    assert np.isfinite(source.read("speculator.head.0.weight").astype(np.float32)).all()
