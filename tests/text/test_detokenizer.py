"""Streamed text equals the text decoded at once; stop strings equal a search of the whole text."""

import codecs
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from shiftjax.text.detokenizer import IncrementalDetokenizer, StopChecker
from shiftjax.text.token_bytes import byte_alphabet
from shiftjax.text.tokenizer import Tokenizer, TokenizerError

MULTI_BYTE = "🚀👩‍💻🇫🇷 日本語 e\u0301 ñ Привет مرحبا \x00\ufffd\ufeff"
TEXTS = st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from(MULTI_BYTE)))


def ids_of(vocab_size: int) -> st.SearchStrategy[list[int]]:
    """Any ids: special ones, parts of characters, and some beyond the vocabulary."""
    return st.lists(st.one_of(st.integers(0, 300), st.integers(0, vocab_size + 2)), max_size=40)


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool, **options: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip, **options)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@settings(deadline=None, max_examples=300)
@given(data=st.data(), skip=st.booleans())
def test_streaming_equals_decoding_byte_level(
    smollm2: Tokenizer, byte_level: Tokenizer, data: st.DataObject, skip: bool
):
    for tokenizer in (smollm2, byte_level):
        ids = data.draw(ids_of(tokenizer.vocab_size))
        library = tokenizer.backend.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip) == library
        assert "".join(stream(tokenizer, ids, skip)) == library


@settings(deadline=None, max_examples=300)
@given(data=st.data(), skip=st.booleans(), prefix=st.booleans())
def test_streaming_equals_decoding_byte_fallback(
    sentencepiece: dict[bool, Tokenizer], data: st.DataObject, skip: bool, prefix: bool
):
    tokenizer = sentencepiece[prefix]
    ids = data.draw(ids_of(tokenizer.vocab_size))
    text = tokenizer.decode(ids, skip)
    assert "".join(stream(tokenizer, ids, skip)) == text
    if "\ufffd" not in text:  # ill-formed runs are kept better than by the library
        assert text == tokenizer.backend.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(text=TEXTS)
@example(text=MULTI_BYTE)
@example(text="  two spaces first")
def test_text_survives_encoding_and_streaming(
    byte_level: Tokenizer, sentencepiece: dict[bool, Tokenizer], text: str
):
    for tokenizer in (byte_level, *sentencepiece.values()):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        pieces = stream(tokenizer, ids, skip=False)
        assert "".join(pieces) == text
        assert pieces[-1] == ""  # nothing complete is held back


def byte_ids(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    characters = {byte: character for character, byte in byte_alphabet().items()}
    vocab = tokenizer.backend.get_vocab()
    return [vocab[characters[byte]] for byte in raw]


def test_when_characters_come_out(byte_level: Tokenizer):
    rocket = "🚀".encode()
    assert stream(byte_level, byte_ids(byte_level, rocket), True) == ["", "", "", "🚀", ""]
    cut_off = byte_ids(byte_level, rocket[:2] + b"a" + rocket[:3])
    assert stream(byte_level, cut_off, True) == ["", "", "\ufffda", "", "", "", "\ufffd"]
    never = byte_ids(byte_level, b"\xff\x80\xc3\x28")
    assert stream(byte_level, never, True) == ["\ufffd", "\ufffd", "", "\ufffd(", ""]


def test_a_skipped_token_does_not_break_a_character(byte_level: Tokenizer):
    first, *rest = byte_ids(byte_level, "é".encode())
    assert stream(byte_level, [first, 1, *rest], True) == ["", "", "é", ""]
    assert stream(byte_level, [first, 1, *rest], False) == ["", "\ufffd</s>", "\ufffd", ""]


def test_valid_characters_of_an_ill_formed_run_stay(sentencepiece: dict[bool, Tokenizer]):
    tokenizer = sentencepiece[True]
    vocab = tokenizer.backend.get_vocab()
    run = [vocab[f"<0x{byte:02X}>"] for byte in "你".encode() + b"\xff"]
    assert stream(tokenizer, run, True) == ["", "", "你", "\ufffd", ""]
    assert tokenizer.decode(run) == "你\ufffd"
    assert tokenizer.backend.decode(run) == "\ufffd" * 4


def test_the_first_space(sentencepiece: dict[bool, Tokenizer]):
    ids = sentencepiece[True].encode("the cat", add_special_tokens=False)
    for tokenizer, text in ((sentencepiece[True], "the cat"), (sentencepiece[False], " the cat")):
        assert "".join(stream(tokenizer, ids, True)) == tokenizer.decode(ids) == text
        assert "".join(stream(tokenizer, ids, True, continues_prompt=True)) == " the cat"


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 6)), scheme=st.sampled_from(["always", "first", "never"]))
def test_metaspace(ids: list[int], scheme: str):
    vocab = {"\u2581": 0, "\u2581a": 1, "b\u2581": 2, "\u2581\u2581": 3, "é": 4, "\u2581c\u2581": 5}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer = Tokenizer(backend)
    assert "".join(stream(tokenizer, ids, True)) == backend.decode(ids) == tokenizer.decode(ids)


def test_decoders_that_look_back_are_refused():
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    for decoder in (None, decoders.WordPiece(), decoders.BPEDecoder(), decoders.CTC()):
        if decoder is not None:
            backend.decoder = decoder
        with pytest.raises(TokenizerError, match="does not work token by token"):
            IncrementalDetokenizer(Tokenizer(backend))


@given(raw=st.binary(max_size=12), cuts=st.lists(st.integers(0, 12)))
def test_utf8_in_parts_is_utf8(raw: bytes, cuts: list[int]):
    """The standard library's promise that the detokenizer stands on."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    parts = [decoder.decode(raw[a:b]) for a, b in pairwise(edges)]
    assert "".join(parts) + decoder.decode(b"", final=True) == raw.decode("utf-8", "replace")


# Stop strings


def search(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    """Grow the text by one character until a stop string ends it; the longest one counts."""
    for end in range(len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            found = max(ending, key=len)
            return text[: end if include else end - len(found)], found
    return text, None


@settings(max_examples=500)
@given(
    text=st.text("abé"),
    stop=st.lists(st.text("abé", min_size=1, max_size=4), max_size=4),
    cuts=st.lists(st.integers(0, 20)),
    include=st.booleans(),
)
@example(text="abcd", stop=["abcd", "bc"], cuts=[], include=False)
def test_any_split_finds_what_a_search_finds(
    text: str, stop: list[str], cuts: list[int], include: bool
):
    checker = StopChecker(stop, include_stop_str_in_output=include)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown, matched = "", None
    for start, end in pairwise(edges):
        emitted, matched = checker.push(text[start:end])
        shown += emitted
        expected_end = len(search(text[:end], stop, include)[0])
        assert text[:expected_end].startswith(shown)  # nothing shown is ever taken back
    shown += checker.flush()
    assert (shown, matched) == search(text, stop, include)


def test_only_what_may_become_a_stop_string_is_held():
    checker = StopChecker(["END", "\n\n"])
    assert checker.push("an E") == ("an ", None)
    assert checker.push("N") == ("", None)
    assert checker.push("A\n") == ("ENA", None)
    assert checker.push("x\n") == ("\nx", None)
    assert checker.flush() == "\n"
    assert checker.flush() == ""


def test_after_a_match_nothing_comes():
    checker = StopChecker(["b"])
    assert checker.push("abab") == ("a", "b")
    assert checker.push("more") == ("", "b")
    assert checker.flush() == ""


def test_without_stop_strings_nothing_is_held():
    assert StopChecker().push("text") == ("text", None)


@pytest.mark.parametrize("stop", ["END", [""], ["a", None], [1]])
def test_stop_strings_are_checked(stop: list[str]):
    with pytest.raises(ValueError, match="list of strings that are not empty"):
        StopChecker(stop)
