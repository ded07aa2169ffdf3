"""`shiftjax embed`: a matrix of the lines of a file, in their order, whole or not at all."""

import json

import numpy as np
import pytest
from kit import run_command

from shiftjax import Embedder

FLAGS = ("--devices=1", "--cache-dir=none", "--max-num-batched-tokens=256")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random model with a tokenizer of single letters."""
    from kit import byte_tokenizer

    from shiftjax.weights.convert import convert

    directory = tmp_path_factory.mktemp("encoder")
    convert("random:tiny-bert", directory, "huggingface")
    byte_tokenizer().backend.save(str(directory / "tokenizer.json"))
    return str(directory)


@pytest.mark.parametrize("name", ["texts.txt", "texts.jsonl"])
def test_a_line_is_a_row(model, name, tmp_path, capsys):
    texts = ["a mode", "shift", "", "base and é"] * 3
    texts = [text or "empty" for text in texts]
    lines = texts
    if name.endswith(".jsonl"):
        forms = (lambda t: t, lambda t: {"text": t}, lambda t: {"input": t, "id": 1})
        lines = [json.dumps(forms[i % 3](text)) for i, text in enumerate(texts)]
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    output = tmp_path / "out.npy"
    flags = (f"--model={model}", *FLAGS)
    code, _, err = run_command(capsys, "embed", str(tmp_path / name), str(output), *flags)
    assert code == 0, err
    assert any("texts/s" in line for line in err)
    embedder = Embedder(model, devices=1, cache_dir="none", max_num_batched_tokens=256)
    found = np.load(output)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, embedder.embed(texts), atol=1e-6)


def test_a_text_that_is_too_long_is_named_and_no_file_is_left(model, tmp_path, capsys):
    (tmp_path / "texts.txt").write_text("a\n" + "x" * 65 + "\n")
    words = ["embed", str(tmp_path / "texts.txt"), str(tmp_path / "out.npy"), f"--model={model}"]
    code, _, err = run_command(capsys, *words, *FLAGS)
    assert code == 2
    assert "input[1] has 65 tokens; the model takes at most 64" in err[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["texts.txt"]
    assert run_command(capsys, *words, *FLAGS, "--truncate")[0] == 0
    assert np.load(tmp_path / "out.npy").shape == (2, 64)


@pytest.mark.parametrize(
    ("name", "text", "output", "words"),
    [
        ("a.jsonl", '"a"\n{"x": 1}\n', "b.npy", "a.jsonl, line 2: must be a JSON string"),
        ("a.jsonl", "nothing\n", "b.npy", "a.jsonl, line 1: must be"),
        ("a.txt", "a", "b.txt", "its name ends in .npy"),
    ],
)
def test_files_that_cannot_be_used(name, text, output, words, tmp_path, capsys):
    (tmp_path / name).write_text(text)
    code, _, err = run_command(capsys, "embed", str(tmp_path / name), str(tmp_path / output))
    assert code == 2
    assert words in err[0]


def test_a_decoder_that_shall_generate_embeds_nothing(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("a")
    files = str(tmp_path / "a.txt"), str(tmp_path / "b.npy")
    code, _, err = run_command(capsys, "embed", *files, "--model=random:tiny", "--task", "generate")
    assert code == 2
    assert "task = generate: tiny is asked to embed texts" in err[0]
