"""Text to token ids and back, for Hugging Face directories and GGUF files."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from shiftjax.gguf_header import GgufError, read_header
from shiftjax.text.errors import TokenizerError
from shiftjax.text.gguf_vocab import special_ids, surround_with, tokenizer_from_gguf
from shiftjax.text.token_bytes import TokenBytes, token_bytes

__all__ = ["Tokenizer", "TokenizerError", "load_tokenizer"]


class Tokenizer:
    """A `tokenizers.Tokenizer` (`backend`) with the model's special tokens and chat template.

    `special_ids` are the ids that `decode` skips. `vocab_size` is one more than the largest id;
    a model's logits may be padded beyond it. Truncation and padding set in the file are switched
    off: a prompt is never cut silently.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self.backend = backend
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.chat_template = chat_template

    @property
    def bos_token(self) -> str | None:
        """The text of the BOS token, as chat templates want it."""
        return None if self.bos_token_id is None else self.backend.id_to_token(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        """The text of the first EOS token, as chat templates want it."""
        return self.backend.id_to_token(self.eos_token_ids[0]) if self.eos_token_ids else None

    @cached_property
    def token_bytes(self) -> TokenBytes | None:
        """What every token adds to the text; None if the decoder does not work by token."""
        return token_bytes(self.backend, self.vocab_size)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`; special tokens written out in it become their ids.

        `add_special_tokens` adds what the model's own configuration adds (BOS, often nothing).
        Raises `ValueError` for text that is not valid Unicode (a lone surrogate).
        """
        text.encode()
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the ids of every text, computed in parallel."""
        for text in texts:
            text.encode()
        encodings = self.backend.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; ill-formed UTF-8 becomes U+FFFD, unknown ids add nothing."""
        if self.token_bytes is None:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        skipped = self.special_ids if skip_special_tokens else frozenset()
        pieces = [self.token_bytes.piece(i) for i in ids if i not in skipped]
        start = next((index for index, piece in enumerate(pieces) if piece), 0)
        pieces[start : start + 1] = [self.token_bytes.first(p) for p in pieces[start : start + 1]]
        return b"".join(pieces).decode("utf-8", "replace")

    def save(self, directory: str | Path) -> None:
        """Write a Hugging Face tokenizer into `directory`, replacing the files of these names.

        tokenizer.json, tokenizer_config.json (with the chat template), generation_config.json
        (the EOS ids, of which the tokenizer's configuration can name only one).
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(directory / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "clean_up_tokenization_spaces": False,
            "chat_template": self.chat_template,
        }
        generation = {
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids) or None,
        }
        for name, values in (("tokenizer_config", config), ("generation_config", generation)):
            kept = {key: value for key, value in values.items() if value is not None}
            text = json.dumps(kept, indent=2, ensure_ascii=False)
            (directory / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def load_tokenizer(location: str | Path) -> Tokenizer:
    """Load from a Hugging Face directory (tokenizer.json and its configuration) or a GGUF file.

    Raises `TokenizerError`, one sentence, for anything missing, damaged or unsupported.
    """
    path = Path(location)
    if path.is_dir():
        return _load_directory(path)
    if not path.exists():
        raise TokenizerError(f"No tokenizer at {path}: there is no such directory or file.")
    if path.name == "tokenizer.json":
        return _load_directory(path.parent)
    return _load_gguf(path)


def _load_gguf(path: Path) -> Tokenizer:
    try:
        metadata = read_header(path).metadata
    except GgufError as error:
        raise TokenizerError("; ".join(error.problems)) from error
    try:
        backend = tokenizer_from_gguf(metadata)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise TokenizerError(f"{path}: its tokenizer is damaged: {error}.") from error
    bos = special_ids(metadata, "bos")
    return Tokenizer(
        backend,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=special_ids(metadata, "eos", "eot", "eom"),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _load_directory(directory: Path) -> Tokenizer:
    backend = _load_backend(directory / "tokenizer.json")
    config = _read_json(directory / "special_tokens_map.json")
    config |= _read_json(directory / "tokenizer_config.json")
    model = _read_json(directory / "config.json") | _read_json(directory / "generation_config.json")
    bos = _named_id(backend, config, "bos_token", directory)
    eos = _named_id(backend, config, "eos_token", directory)
    bos_ids = [*_as_ids(bos), *_as_ids(model.get("bos_token_id"))]
    eos_ids = [*_as_ids(eos), *_as_ids(model.get("eos_token_id"))]
    if any(config.get(name) is not None for name in ("add_bos_token", "add_eos_token")):
        backend.post_processor = surround_with(
            _surrounding(backend, bos) if config.get("add_bos_token") else None,
            _surrounding(backend, eos) if config.get("add_eos_token") else None,
        )
    return Tokenizer(
        backend,
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=tuple(dict.fromkeys(eos_ids)),
        chat_template=_chat_template(directory, config),
    )


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        hint = " (a tokenizer.model alone must be converted first)"
        raise TokenizerError(
            f"{path} is missing{hint if path.with_name('tokenizer.model').is_file() else ''}."
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise TokenizerError(f"{path} is damaged or not a tokenizer: {error}.") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise TokenizerError(f"{path} is damaged: {error}.") from error
    if not isinstance(values, dict):
        raise TokenizerError(f"{path} must hold a JSON object, not {type(values).__name__}.")
    return values


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} is damaged or cannot be read: {error}.") from error


def _named_id(
    backend: tokenizers.Tokenizer, config: dict[str, Any], name: str, directory: Path
) -> int | None:
    """Return the id of a token that the configuration names (as text, or as an object)."""
    value = config.get(name)
    token = value.get("content") if isinstance(value, dict) else value
    if token is None:
        return None
    token_id = backend.token_to_id(token) if isinstance(token, str) else None
    if token_id is None:
        raise TokenizerError(f"{directory}: {name} {token!r} is not a token of tokenizer.json.")
    return token_id


def _surrounding(backend: tokenizers.Tokenizer, token_id: int | None) -> tuple[str, int] | None:
    token = None if token_id is None else backend.id_to_token(token_id)
    return (token, token_id) if token is not None and token_id is not None else None


def _as_ids(value: Any) -> list[int]:
    """Return the ids of a configuration's value: none, one or several."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token_id) is not int for token_id in ids):
        raise TokenizerError(f"The model's configuration gives {value!r} as a token id.")
    return ids


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    """Return the default chat template: chat_template.jinja, else the configuration's."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return _read_text(file)
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
        if template is None:
            raise TokenizerError(f"{directory}: none of the chat templates is named 'default'.")
    if template is not None and not isinstance(template, str):
        raise TokenizerError(f"{directory}: the chat template is no text.")
    return template
