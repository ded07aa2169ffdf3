"""What every token adds to the text, as bytes: the one table that all decoding reads."""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

import tokenizers

_SPACE = "\u2581"  # SentencePiece's visible space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class TokenBytes:
    """The bytes of every token id, and what the text's first token loses at its start.

    The text of a sequence is the UTF-8 reading of its tokens' bytes, one U+FFFD for every
    ill-formed part. So a text only ever grows at its end, which is what streaming needs.
    (`tokenizers` itself replaces a whole run of byte-fallback tokens if any byte in it is
    ill-formed, and so takes back characters that had been complete.)
    """

    pieces: tuple[bytes, ...]  # indexed by token id; b"" for an id without a token
    trim: Literal["nothing", "one space", "all spaces"] = "nothing"

    def piece(self, token_id: int) -> bytes:
        """Return the token's bytes; an id above the vocabulary (padded logits) has none."""
        if token_id < 0:
            raise ValueError(f"Token id {token_id} is negative.")
        return self.pieces[token_id] if token_id < len(self.pieces) else b""

    def first(self, piece: bytes) -> bytes:
        """Return `piece` as it stands at the start of a text."""
        match self.trim:
            case "one space":
                return piece.removeprefix(b" ")
            case "all spaces":
                return piece.replace(b" ", b"")
            case _:
                return piece


def token_bytes(backend: tokenizers.Tokenizer, num_ids: int) -> TokenBytes | None:
    """Build the table of a tokenizer; None if its decoder does not work token by token.

    Supported decoders: byte-level; SentencePiece's byte fallback; metaspace.
    """
    steps = _decoder_steps(backend)
    kinds = [step["type"] for step in steps]
    tokens = [backend.id_to_token(i) or "" for i in range(num_ids)]
    if kinds == ["ByteLevel"]:
        alphabet = byte_alphabet()
        return TokenBytes(tuple(_byte_level_piece(token, alphabet) for token in tokens))
    if kinds == ["Metaspace"] and steps[0]["replacement"] == _SPACE:
        pieces = tuple(token.replace(_SPACE, " ").encode() for token in tokens)
        trims = steps[0]["prepend_scheme"] != "never"
        return TokenBytes(pieces, "all spaces" if trims else "nothing")
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _restores_spaces(steps[0]):
        pieces = tuple(_byte_fallback_piece(token) for token in tokens)
        if kinds[3:] == []:
            return TokenBytes(pieces)
        if steps[3:] == [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
            return TokenBytes(pieces, "one space")
    return None


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """Return the decoder's settings, a sequence as its parts."""
    if backend.decoder is None:
        return []
    settings = json.loads(backend.decoder.__getstate__())
    return settings["decoders"] if settings["type"] == "Sequence" else [settings]


def _restores_spaces(step: dict[str, Any]) -> bool:
    return step["pattern"] == {"String": _SPACE} and step["content"] == " "


def _byte_fallback_piece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()


def _byte_level_piece(token: str, alphabet: dict[str, int]) -> bytes:
    """An added token may hold characters outside the alphabet: it stands for itself."""
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode()


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable character for every byte, as a map back to the byte.

    Printable bytes stand for themselves; the others take the code points from 256 up, in order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }
