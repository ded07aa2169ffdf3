"""The tokenizer inside a GGUF file, rebuilt from its metadata as a `tokenizers.Tokenizer`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from shiftjax.text.errors import TokenizerError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
_SPACE = "\u2581"  # SentencePiece's visible space

# Regular expressions with which the original tokenizers cut text into words before merging.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = _QWEN2.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")


@dataclass(frozen=True)
class _PreTokenizer:
    """How one value of `tokenizer.ggml.pre` cuts text; the splits apply one after the other."""

    splits: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token itself is taken whole
    add_bos: bool = False  # where the file does not say
    nfc: bool = False


_DIGITS_THEN_GPT2 = _PreTokenizer((r"\p{N}", _GPT2))
_LLAMA_BPE = _PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "olmo", "exaone4"), _PreTokenizer((_GPT2,))),
    **dict.fromkeys(("dbrx", "glm4", "chatglm-bpe", "smaug-bpe"), _PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _PreTokenizer((_O200K,))),
    "seed-coder": _PreTokenizer((_SEED,)),
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "command-r": _DIGITS_THEN_GPT2,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "falcon3": _LLAMA_BPE,
    "qwen2": _PreTokenizer((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": _PreTokenizer((_QWEN2,), nfc=True),
    "tekken": _PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    # llama.cpp's own choice for files that name nothing better
    "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Rebuild the tokenizer; `metadata` is that of `shiftjax.gguf_header.read_header`.

    `tokenizer.ggml.model` is `gpt2` (byte-level BPE) or `llama` (SentencePiece BPE with byte
    fallback); others, and unknown pre-tokenizers, raise `TokenizerError`.
    """
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if kind not in builders:
        raise TokenizerError(
            f"The GGUF's tokenizer model is {kind!r}; supported are {', '.join(builders)}."
        )
    vocab = _vocab(metadata)
    backend, adds_bos = builders[kind](metadata, vocab)
    tokens = list(vocab)
    _add_special_tokens(backend, metadata, tokens)
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", adds_bos)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    backend.post_processor = surround_with(
        _token_named(metadata, "bos", tokens) if add_bos else None,
        _token_named(metadata, "eos", tokens) if add_eos else None,
    )
    return backend


def surround_with(
    bos: tuple[str, int] | None, eos: tuple[str, int] | None
) -> processors.TemplateProcessing:
    """Return the post-processor that puts `bos` before and `eos` after the text, where given."""
    single = [*([bos[0]] if bos else []), "$A", *([eos[0]] if eos else [])]
    pair = [*single, *([bos[0]] if bos else []), "$B", *([eos[0]] if eos else [])]
    special = {token: (token, token_id) for token, token_id in filter(None, (bos, eos))}
    return processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=list(special.values())
    )


def _vocab(metadata: Mapping[str, Any]) -> dict[str, int]:
    tokens = _require(metadata, "tokens")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise TokenizerError(
            f"The GGUF's vocabulary is damaged: {len(tokens)} tokens, {len(vocab)} different ones."
        )
    return vocab


def _require(metadata: Mapping[str, Any], name: str) -> Any:
    key = f"tokenizer.ggml.{name}"
    if key not in metadata:
        raise TokenizerError(f"The GGUF has no {key!r}: its tokenizer cannot be rebuilt.")
    return metadata[key]


def _byte_level_bpe(metadata: Mapping[str, Any], vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    """GPT-2's BPE over bytes; returns the tokenizer and whether its family starts with BOS."""
    name = _require(metadata, "pre")
    if name not in _PRE_TOKENIZERS:
        raise TokenizerError(
            f"The GGUF's pre-tokenizer {name!r} is unknown; known are "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}."
        )
    pre = _PRE_TOKENIZERS[name]
    merges = [_pair(merge) for merge in _require(metadata, "merges")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in pre.splits]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    return backend, pre.add_bos


def _pair(merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not (left and separator and right):
        raise TokenizerError(f"The GGUF's merge {merge!r} is not two tokens and a space.")
    return left, right


def _sentencepiece_bpe(
    metadata: Mapping[str, Any], vocab: dict[str, int]
) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE, whose merges are implied by the scores; its family starts with BOS."""
    scores = _require(metadata, "scores")
    if len(scores) != len(vocab):
        raise TokenizerError(f"The GGUF has {len(vocab)} tokens but {len(scores)} scores.")
    tokens = list(vocab)
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    model = models.BPE(
        vocab=vocab,
        merges=_merges_from_scores(vocab, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    spaces = [normalizers.Replace(" ", _SPACE)]
    undo_spaces = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces = [normalizers.Prepend(_SPACE), *spaces]
        undo_spaces = [*undo_spaces, decoders.Strip(" ", 1, 0)]
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(undo_spaces)
    return backend, True


def _merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token out of two tokens, best score first.

    SentencePiece joins the neighbours whose union scores best; BPE joins the pair of lowest rank.
    Ranked by the union's score, the two choose alike (equal scores go by token id).
    """
    ranked = sorted(vocab.items(), key=lambda item: (-scores[item[1]], item[1]))
    return [
        (token[:cut], token[cut:])
        for token, _ in ranked
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]


def _add_special_tokens(backend: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    """Mark control tokens, and those that the file names as BOS, EOS and so on, as special."""
    types = metadata.get("tokenizer.ggml.token_type", [])
    special = {i for i, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)}
    special |= set(special_ids(metadata, "bos", "eos", "eot", "eom"))
    user_defined = {i for i, kind in enumerate(types) if kind == _USER_DEFINED} - special
    backend.add_special_tokens(_added(tokens, special, special=True))
    backend.add_tokens(_added(tokens, user_defined, special=False))


def _added(tokens: list[str], ids: Iterable[int], *, special: bool) -> list[AddedToken]:
    return [AddedToken(tokens[i], special=special, normalized=False) for i in sorted(ids)]


def special_ids(metadata: Mapping[str, Any], *names: str) -> tuple[int, ...]:
    """Return the ids that the file gives for `names` (bos, eos, eot ...), in order, once each."""
    ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names)
    num_tokens = len(metadata["tokenizer.ggml.tokens"])
    known = [token_id for token_id in ids if token_id is not None]
    if any(not 0 <= token_id < num_tokens for token_id in known):
        raise TokenizerError(f"The GGUF's special ids {known} are not all below {num_tokens}.")
    return tuple(dict.fromkeys(known))


def _token_named(
    metadata: Mapping[str, Any], name: str, tokens: list[str]
) -> tuple[str, int] | None:
    ids = special_ids(metadata, name)
    return (tokens[ids[0]], ids[0]) if ids else None
