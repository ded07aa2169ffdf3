"""Checkpoints of speculators: what is read of them, every refusal, and what is written."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import assert_ranges, edit_json
from oracle import numpy_speculator
from oracle.numpy_speculator import EXAMPLES
from safetensors.numpy import load_file, save_file

from shiftjax.arch.config import Speculator
from shiftjax.arch.presets import PRESETS
from shiftjax.arch.weights import weights_of
from shiftjax.options import ConfigError
from shiftjax.weights.hf_config import to_json
from shiftjax.weights.random import RandomSource
from shiftjax.weights.source import CheckpointError, check_complete
from shiftjax.weights.speculator_checkpoints import save_speculator, with_speculator

TARGET = RandomSource(PRESETS["tiny"])  # 256 token ids, hidden states of 64
# What may be written although it is tied: by the name of an example, a copy and its original.
COPIES = {
    "mlp tied": [("proj.2.weight", "proj.1.weight"), ("ln.1.bias", "ln.0.bias")],
    "lstm tied": [
        ("input_emb.0.weight", "forget_emb.0.weight"),
        ("head.2.weight", "head.0.weight"),
    ],
}


def tensors_of(name: str) -> dict[str, np.ndarray]:
    return numpy_speculator.random_tensors(EXAMPLES[name], seed=1)


def write(directory: Path, name: str = "lstm tied", **changes: object) -> Path:
    """An example; a field of `config.json` that is set to `...` is removed."""
    numpy_speculator.save(directory, EXAMPLES[name], tensors_of(name))
    edit_json(directory / "config.json", **changes)
    return directory


def rewrite(directory: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("prefix", ["", "speculator."])
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_source_has_the_target_and_the_speculator(tmp_path, name, prefix):
    tensors = tensors_of(name)
    numpy_speculator.save(tmp_path, EXAMPLES[name], tensors, prefix)
    source = with_speculator(TARGET, tmp_path)
    check_complete(source)
    assert set(source.tensors) == {*TARGET.tensors, *(f"speculator.{each}" for each in tensors)}
    for each, expected in tensors.items():
        np.testing.assert_array_equal(source.read(f"speculator.{each}"), expected)
    norm = "model.norm.weight"
    np.testing.assert_array_equal(source.read(norm), TARGET.read(norm))
    assert source.config == replace(TARGET.config, speculator=source.config.speculator)
    assert source.config.speculator == Speculator(
        method="lstm" if name.startswith("lstm") else "mlp",
        num_predict=3,
        inner_dim=EXAMPLES[name]["inner_dim"],
        tie_weights=EXAMPLES[name]["tie_weights"],
        tie_lstm_embs=EXAMPLES[name]["tie_lstm_embs"],
        scale_input=EXAMPLES[name]["scale_input"],
    )


def test_of_the_head_the_rows_that_are_drafted_are_read(tmp_path):
    source = with_speculator(TARGET, write(tmp_path), draft_vocab=100)
    check_complete(source)
    head, whole = "speculator.head.0.weight", tensors_of("lstm tied")["head.0.weight"]
    assert source.tensors[head].shape == (100, 72)
    np.testing.assert_array_equal(source.read(head), whole[:100])
    with pytest.raises(ValueError, match="no range of a dimension of 100"):
        source.read(head, (slice(0, 101),))
    assert_ranges(source)


@pytest.mark.parametrize("width", ["72", [72], ["72"]])
def test_widths_are_numbers_lists_and_text(tmp_path, width):
    write(tmp_path, inner_dim=width, emb_dim=width, proj_dim=width)
    check_complete(with_speculator(TARGET, tmp_path))


def test_an_inner_dim_of_0_is_the_width_of_the_target(tmp_path):
    assert with_speculator(TARGET, write(tmp_path, "mlp", inner_dim=0)).config.speculator == (
        with_speculator(TARGET, write(tmp_path, "mlp")).config.speculator
    )


@pytest.mark.parametrize("name", COPIES)
def test_tied_weights_may_be_written_as_often_as_they_are_used(tmp_path, name):
    tensors = tensors_of(name)
    copies = {copy: tensors[original] for copy, original in COPIES[name]}
    numpy_speculator.save(tmp_path, EXAMPLES[name], tensors | copies)
    source = with_speculator(TARGET, tmp_path)
    check_complete(source)
    assert not {f"speculator.{copy}" for copy in copies} & set(source.tensors)
    for copy, original in COPIES[name]:
        other = copies[copy].copy()
        other.flat[-1] += 1
        numpy_speculator.save(tmp_path, EXAMPLES[name], tensors | copies | {copy: other})
        with pytest.raises(CheckpointError, match=f"{copy}: expected a copy of .*{original}"):
            with_speculator(TARGET, tmp_path)


# The example, what is changed in its config.json, and what is said of it.
REFUSED = {
    "vocabulary": ("mlp", {"vocab_size": 300}, "vocab_size 300 is not the 256 of tiny"),
    "hidden size, MLP": ("mlp", {"emb_dim": 96}, "hidden states of 96, and those of tiny have 64"),
    "hidden size, LSTM": ("lstm", {"input_hidden_dim": 96}, "hidden states of 96, and those of"),
    "another model": (
        "mlp",
        {"base_model_archs": ["Qwen2ForCausalLM"]},
        r"must name LlamaForCausalLM, found \['Qwen2ForCausalLM'\]",
    ),
    "layers": ("lstm", {"inner_dim": "40.40"}, "inner_dim must be one width, found '40.40'"),
    "list of layers": ("mlp", {"inner_dim": [64, 64]}, "more layers are not supported"),
    "no width": ("mlp", {"inner_dim": "wide"}, "inner_dim must be a whole number .* found 'wide'"),
    "empty list": ("mlp", {"inner_dim": []}, "inner_dim is missing"),
    "embedding": ("lstm", {"emb_dim": 64}, "emb_dim must equal inner_dim, found 64"),
    "projection": ("lstm", {"proj_dim": 64}, "proj_dim must equal inner_dim, found 64"),
    "untied LSTM": ("lstm", {"tie_weights": False}, "tie_weights must be true for an LSTM"),
    "tied to nothing": ("mlp tied", {"n_predict": 1}, "tie_weights needs n_predict of at least 2"),
    "MLP by an LSTM's name": ("lstm", {"method": "sum_rnn"}, "must be sum_lstm, found 'sum_rnn'"),
    "LSTM by an MLP's name": ("mlp", {"method": "sum_lstm"}, "must be sum_rnn, found 'sum_lstm'"),
    "no n_predict": ("mlp", {"n_predict": ...}, "n_predict is missing"),
    "lookahead": ("mlp", {"num_lookahead_tokens": 0}, "num_lookahead_tokens must be a whole"),
    "no kind": ("mlp", {"architectures": ...}, "is no speculator: .*, found None"),
    "trained beyond": ("mlp", {"draft_vocab": 300}, "draft_vocab 300 is more than the vocab.* 256"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path, case):
    name, changes, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        with_speculator(TARGET, write(tmp_path, name, **changes))
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(f"{tmp_path / 'config.json'}: ")


def test_every_problem_of_a_config_is_named_at_once(tmp_path):
    write(tmp_path, vocab_size=300, tie_weights=False, proj_dim=64)
    with pytest.raises(CheckpointError) as caught:
        with_speculator(TARGET, tmp_path)
    assert len(caught.value.problems) == 3


def test_a_target_is_no_speculator(tmp_path):
    write(tmp_path)
    edit_json(tmp_path / "config.json", **to_json(TARGET.config, "float32"))
    with pytest.raises(CheckpointError, match=r"is no speculator: .* \['LlamaForCausalLM'\]"):
        with_speculator(TARGET, tmp_path)


def test_an_encoder_has_no_speculator(tmp_path):
    with pytest.raises(CheckpointError, match="tiny-bert is an encoder: there is nothing to draft"):
        with_speculator(RandomSource(PRESETS["tiny-bert"]), write(tmp_path))


def test_missing_unknown_and_misshapen_tensors_are_named_at_once(tmp_path):
    write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["speculator.state_ln.0.bias"]
    tensors["speculator.forget_proj.2.weight"] = np.ones((72, 72), np.float32)
    tensors["speculator.cell_ln.0.bias"] = np.ones(71, np.float32)
    rewrite(tmp_path, tensors)
    with pytest.raises(CheckpointError) as caught:
        with_speculator(TARGET, tmp_path)
    missing, unknown, shape = caught.value.problems
    file = tmp_path / "model.safetensors"
    name = "speculator.state_ln.0.bias"
    assert missing == f"{tmp_path}: tensor {name}: expected shape [72], found nothing"
    assert unknown == (
        f"{file}: tensor speculator.forget_proj.2.weight: expected no such tensor in this "
        "speculator, found shape [72, 72]"
    )
    assert shape == f"{file}: tensor speculator.cell_ln.0.bias: expected shape [72], found [71]"


def test_a_tensor_with_and_without_the_prefix_is_refused(tmp_path):
    write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, tensors | {"head.0.weight": tensors["speculator.head.0.weight"]})
    with pytest.raises(CheckpointError, match=r"with and without 'speculator\.'"):
        with_speculator(TARGET, tmp_path)


@pytest.mark.parametrize(("name", "copy"), [("mlp", "head.3"), ("lstm tied", "head.3")])
def test_weights_of_more_drafts_than_there_are_are_unknown(tmp_path, name, copy):
    tensors = tensors_of(name)
    more = {f"{copy}.weight": tensors["head.0.weight"]}
    numpy_speculator.save(tmp_path, EXAMPLES[name], tensors | more)
    with pytest.raises(CheckpointError, match=rf"speculator\.{copy}\.weight: expected no such"):
        with_speculator(TARGET, tmp_path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_file_that_is_not_there_is_named(tmp_path, file):
    (write(tmp_path) / file).unlink()
    with pytest.raises(CheckpointError, match=file):
        with_speculator(TARGET, tmp_path)


@pytest.mark.parametrize("draft_vocab", [0, -1, 257])
def test_ids_that_the_head_does_not_have_are_refused(tmp_path, draft_vocab):
    with pytest.raises(ConfigError, match=f"between 1 and 256, got {draft_vocab}"):
        with_speculator(TARGET, write(tmp_path), draft_vocab)


# ----------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_written_is_read_again(tmp_path, name):
    read = with_speculator(TARGET, write(tmp_path, name))
    again = tmp_path / "again"
    again.mkdir()
    save_speculator(read.config, tensors_of(name), again, "LlamaForCausalLM")
    source = with_speculator(TARGET, again)
    assert source.config == read.config
    check_complete(source)
    for weight in weights_of(source.config):
        for each in weight.tensors:
            np.testing.assert_array_equal(source.read(each), read.read(each))


def test_the_embedding_is_written_for_every_gate_and_names_have_no_prefix(tmp_path):
    """As Arctic Inference reads them: it takes the copies out of the file, by these names."""
    config = with_speculator(TARGET, write(tmp_path)).config
    save_speculator(config, tensors_of("lstm tied"), tmp_path, "LlamaForCausalLM")
    written = load_file(tmp_path / "model.safetensors")
    assert not any(name.startswith("speculator.") for name in written)
    for gate in ("forget", "input", "output", "cell"):
        embedding = tensors_of("lstm tied")["forget_emb.0.weight"]
        np.testing.assert_array_equal(written[f"{gate}_emb.0.weight"], embedding)


def test_a_head_of_few_ids_is_filled_with_what_never_wins(tmp_path):
    config = with_speculator(TARGET, write(tmp_path), draft_vocab=100).config
    tensors = tensors_of("lstm tied")
    head = -np.abs(tensors["head.0.weight"][:100])  # so that zeros would win
    save_speculator(config, tensors | {"head.0.weight": head}, tmp_path, "LlamaForCausalLM")
    source = with_speculator(TARGET, tmp_path)
    assert source.config == config
    whole = load_file(tmp_path / "model.safetensors")["head.0.weight"]
    assert whole.shape == (256, 72)
    np.testing.assert_array_equal(whole[:100], head)
    for state in np.random.default_rng(0).random((50, 72)):
        assert (whole @ state).argmax() == (head @ state).argmax()
    with pytest.raises(ConfigError, match="draft_vocab must be between 1 and 100, got 101"):
        with_speculator(TARGET, tmp_path, 101)


def test_tensors_of_another_speculator_are_not_written(tmp_path):
    config = with_speculator(TARGET, write(tmp_path)).config
    with pytest.raises(CheckpointError, match=r"emb\.0\.weight: expected no such tensor"):
        save_speculator(config, tensors_of("mlp"), tmp_path / "new", "LlamaForCausalLM")
    assert not (tmp_path / "new").exists()
