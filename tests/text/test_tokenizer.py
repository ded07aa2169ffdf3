"""Tokenizing equals transformers and llama.cpp; files that are wrong end in one sentence."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import models
from vocab_files import read_data, write_vocab_gguf

from shiftjax.gguf_header import read_header
from shiftjax.text.gguf_vocab import tokenizer_from_gguf
from shiftjax.text.tokenizer import Tokenizer, TokenizerError, load_tokenizer

CASES = read_data("smollm2_greedy.json")["cases"]
PRE_TOKENIZERS = read_data("llama_cpp_pre_tokenizers.json")
SENTENCEPIECE = read_data("llama_cpp_sentencepiece.json")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_goldens_of_transformers(smollm2: Tokenizer, case: dict):
    ids = smollm2.encode(case["text"], add_special_tokens=case["kind"] == "raw")
    assert ids == case["prompt_ids"]
    assert smollm2.decode(ids, skip_special_tokens=False) == case["text"]
    text = smollm2.decode(case["generated_ids"], skip_special_tokens=False)
    assert text == case["generated_text"]


def test_smollm2_facts(smollm2: Tokenizer):
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token_id, smollm2.bos_token) == (1, "<|im_start|>")
    assert (smollm2.eos_token_ids, smollm2.eos_token) == ((2,), "<|im_end|>")
    assert smollm2.special_ids == frozenset(range(17))
    assert "<|im_start|>" in (smollm2.chat_template or "")
    assert smollm2.decode([504, 2, 3575]) == smollm2.decode([504, 3575]) == "The capital"


def test_a_batch_is_its_texts(smollm2: Tokenizer):
    texts = [case["text"] for case in CASES]
    assert smollm2.encode_batch(texts) == [smollm2.encode(text) for text in texts]


def test_text_that_is_not_unicode_is_refused(smollm2: Tokenizer):
    for encode in (smollm2.encode, lambda text: smollm2.encode_batch([text])):
        with pytest.raises(ValueError, match="surrogates not allowed"):
            encode("half of an emoji \ud83d")


def test_ids_outside_the_vocabulary(smollm2: Tokenizer):
    assert smollm2.decode([504, 49152, 10**9, 3575]) == "The capital"
    with pytest.raises(ValueError, match="-1 is negative"):
        smollm2.decode([-1])


@pytest.mark.parametrize("name", PRE_TOKENIZERS["ids"])
def test_pre_tokenizers_of_llama_cpp(smollm2_gguf: Path, name: str):
    metadata = read_header(smollm2_gguf).metadata | {"tokenizer.ggml.pre": name}
    del metadata["tokenizer.ggml.add_bos_token"]
    backend = tokenizer_from_gguf(metadata)
    for text, ids in zip(PRE_TOKENIZERS["texts"], PRE_TOKENIZERS["ids"][name], strict=True):
        assert backend.encode(text).ids == ids


def test_llama_takes_a_word_that_is_a_token_whole(tmp_path: Path):
    lists = {"tokens": ["a", "b", "c", "ab", "abc"], "merges": ["a b"], "token_type": [1] * 5}
    for name, ids in (("llama-bpe", [4]), ("tekken", [4]), ("gpt-2", [3, 2])):
        path = write_vocab_gguf(tmp_path / f"{name}.gguf", "gpt2", lists, pre=name)
        assert load_tokenizer(path).encode("abc") == ids


def test_qwen2_composes_characters(smollm2_gguf: Path):
    metadata = read_header(smollm2_gguf).metadata
    qwen2 = tokenizer_from_gguf(metadata | {"tokenizer.ggml.pre": "qwen2"})
    smollm = tokenizer_from_gguf(metadata)
    assert qwen2.encode("e\u0301").ids == qwen2.encode("é").ids
    assert smollm.encode("e\u0301").ids != smollm.encode("é").ids


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_of_llama_cpp(sentencepiece: dict[bool, Tokenizer], prefix: bool):
    tokenizer = sentencepiece[prefix]
    golden = SENTENCEPIECE["ids"][str(prefix)]
    for text, ids in zip(SENTENCEPIECE["texts"], golden, strict=True):
        assert tokenizer.encode(text) == ids
        if "<" not in text:
            assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("adds", [True, False])
def test_add_bos_token_is_honoured(smollm2_gguf: Path, adds: bool):
    metadata = read_header(smollm2_gguf).metadata | {"tokenizer.ggml.add_bos_token": adds}
    backend = tokenizer_from_gguf(metadata)
    assert backend.encode("Hello").ids == [1, 19556][not adds :]
    assert backend.encode("Hello", add_special_tokens=False).ids == [19556]


# Hugging Face directories


@pytest.fixture
def saved(byte_level: Tokenizer, tmp_path: Path) -> Path:
    byte_level.save(tmp_path)
    return tmp_path


def edit_json(path: Path, **changes: object) -> None:
    values = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(values | changes), encoding="utf-8")


def test_saving_and_loading_changes_nothing(smollm2: Tokenizer, tmp_path: Path):
    Tokenizer(
        smollm2.backend, bos_token_id=1, eos_token_ids=[2, 0], chat_template="{{ 'é' }}"
    ).save(tmp_path / "new" / "folder")
    loaded = load_tokenizer(tmp_path / "new" / "folder")
    assert (loaded.bos_token_id, loaded.eos_token_ids) == (1, (2, 0))
    assert loaded.chat_template == "{{ 'é' }}"
    assert loaded.special_ids == smollm2.special_ids
    for case in CASES:
        assert loaded.encode(case["text"]) == smollm2.encode(case["text"])
        ids = case["generated_ids"]
        assert loaded.decode(ids) == smollm2.decode(ids)


def test_eos_ids_come_from_every_configuration(saved: Path):
    edit_json(saved / "generation_config.json", eos_token_id=[5, 1, 7])
    assert load_tokenizer(saved).eos_token_ids == (1, 5, 7)
    (saved / "generation_config.json").unlink()
    edit_json(saved / "config.json", eos_token_id=9, bos_token_id=3)
    assert load_tokenizer(saved).eos_token_ids == (1, 9)
    assert load_tokenizer(saved).bos_token_id == 0


def test_special_tokens_may_be_objects_in_their_own_file(saved: Path):
    (saved / "tokenizer_config.json").unlink()
    (saved / "generation_config.json").unlink()
    edit_json(saved / "special_tokens_map.json", bos_token={"content": "<s>"}, eos_token="</s>")
    tokenizer = load_tokenizer(saved)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (1,))


def test_a_directory_adds_bos_where_it_says_so(saved: Path):
    plain = load_tokenizer(saved).encode("the cat")
    edit_json(saved / "tokenizer_config.json", add_bos_token=True, add_eos_token=True)
    assert load_tokenizer(saved).encode("the cat") == [0, *plain, 1]
    edit_json(saved / "tokenizer_config.json", add_bos_token=False, add_eos_token=False)
    assert load_tokenizer(saved).encode("the cat") == plain


def test_prompts_are_neither_cut_nor_padded(saved: Path, byte_level: Tokenizer):
    backend = tokenizers.Tokenizer.from_file(str(saved / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=400)
    backend.save(str(saved / "tokenizer.json"))
    text = "the cat sat on the mat. " * 10
    assert load_tokenizer(saved).encode(text) == byte_level.encode(text)


def test_where_the_chat_template_comes_from(saved: Path):
    assert load_tokenizer(saved).chat_template is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    edit_json(saved / "tokenizer_config.json", chat_template=named)
    assert load_tokenizer(saved).chat_template == "D"
    edit_json(saved / "tokenizer_config.json", chat_template=named[:1])
    with pytest.raises(TokenizerError, match="named 'default'"):
        load_tokenizer(saved)
    edit_json(saved / "tokenizer_config.json", chat_template=5)
    with pytest.raises(TokenizerError, match="is no text"):
        load_tokenizer(saved)
    (saved / "chat_template.jinja").write_text("J", encoding="utf-8")
    assert load_tokenizer(saved).chat_template == "J"
    (saved / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match="damaged or cannot be read"):
        load_tokenizer(saved)


# Files that are wrong


def assert_refused(location: Path, match: str) -> None:
    with pytest.raises(TokenizerError, match=match) as caught:
        load_tokenizer(location)
    assert "\n" not in str(caught.value)


def test_missing_and_damaged_directories(saved: Path):
    assert_refused(saved / "nowhere", "no such directory or file")
    tokenizer = (saved / "tokenizer.json").read_text(encoding="utf-8")
    (saved / "tokenizer.json").write_text(tokenizer[: len(tokenizer) // 2], encoding="utf-8")
    assert_refused(saved, "damaged or not a tokenizer")
    (saved / "tokenizer.json").unlink()
    assert_refused(saved, r"tokenizer\.json is missing")
    (saved / "tokenizer.model").touch()
    assert_refused(saved, "must be converted")


def test_damaged_configurations(saved: Path):
    edit_json(saved / "tokenizer_config.json", eos_token="<nope>")
    assert_refused(saved, "eos_token '<nope>' is not a token")
    for broken, match in (("{", "damaged"), ("[]", "must hold a JSON object, not list")):
        (saved / "tokenizer_config.json").write_text(broken, encoding="utf-8")
        assert_refused(saved, match)
    (saved / "tokenizer_config.json").write_bytes(b"\xff\xfe{")
    assert_refused(saved, "damaged")
    (saved / "tokenizer_config.json").unlink()
    edit_json(saved / "config.json", eos_token_id="2")
    (saved / "generation_config.json").unlink()
    assert_refused(saved, "gives '2' as a token id")


BPE = {"tokens": ["a", "b", "ab"], "merges": ["a b"], "token_type": [1, 1, 1]}


@pytest.mark.parametrize(
    ("model", "lists", "scalars", "match"),
    [
        ("bert", BPE, {}, "tokenizer model is 'bert'; supported are gpt2, llama"),
        ("gpt2", BPE, {"pre": "klingon"}, "pre-tokenizer 'klingon' is unknown"),
        ("gpt2", BPE, {}, "no 'tokenizer.ggml.pre'"),
        ("gpt2", {"tokens": ["a"]}, {"pre": "gpt-2"}, "no 'tokenizer.ggml.merges'"),
        ("gpt2", BPE | {"merges": ["ab"]}, {"pre": "gpt-2"}, "merge 'ab' is not two tokens"),
        ("gpt2", BPE | {"merges": ["a c"]}, {"pre": "gpt-2"}, "its tokenizer is damaged"),
        ("gpt2", BPE | {"tokens": ["a", "b", "a"]}, {"pre": "gpt-2"}, "3 tokens, 2 different"),
        ("gpt2", BPE, {"pre": "gpt-2", "eos_token_id": 3}, "not all below 3"),
        ("llama", BPE, {}, "no 'tokenizer.ggml.scores'"),
        ("llama", BPE | {"scores": [0.5]}, {}, "3 tokens but 1 scores"),
    ],
)
def test_ggufs_that_are_wrong(tmp_path: Path, model: str, lists: dict, scalars: dict, match: str):
    assert_refused(write_vocab_gguf(tmp_path / "wrong.gguf", model, lists, **scalars), match)


def test_not_a_gguf(tmp_path: Path):
    path = tmp_path / "file"
    path.touch()
    assert_refused(path, "expected a GGUF file, found 0 bytes")
    path.write_bytes(b"PK\x03\x04 something else")
    assert_refused(path, "expected a GGUF file, found b'PK")
    path.write_bytes(b"GGUF\x01\x00\x00\x00" + bytes(64))
    assert_refused(path, "expected GGUF version 2 or 3 .*, found 1")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_gguf_cut_anywhere_or_with_any_byte_wrong(tmp_path: Path, data: st.DataObject):
    whole = write_vocab_gguf(tmp_path / "whole.gguf", "gpt2", BPE, pre="gpt-2").read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 4))])
    assert_refused(broken, "truncated|expected a GGUF file, found 0 bytes")
    place = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.binary(min_size=1, max_size=1))
    broken.write_bytes(whole[:place] + byte + whole[place + 1 :])
    try:
        load_tokenizer(broken)
    except TokenizerError as error:
        assert "\n" not in str(error)


def test_metadata_of_every_type(tmp_path: Path):
    lists = {"tokens": ["é", ""], "scores": [0.5, -1.0], "token_type": [1, -3]}
    path = write_vocab_gguf(tmp_path / "a.gguf", "gpt2", lists, pre="日本", flag=True, number=7)
    metadata = read_header(path).metadata
    assert metadata.pop("general.architecture") == "llama"
    expected = {"model": "gpt2", **lists, "pre": "日本", "flag": True, "number": 7}
    assert metadata == {f"tokenizer.ggml.{name}": value for name, value in expected.items()}


def test_a_decoder_of_another_kind_decodes_through_the_library():
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "un": 1, "##able": 2}))  # type: ignore[reportCallIssue]
    backend.decoder = tokenizers.decoders.WordPiece()
    tokenizer = Tokenizer(backend)
    assert tokenizer.token_bytes is None
    assert tokenizer.decode([1, 2, 1]) == "unable un"
