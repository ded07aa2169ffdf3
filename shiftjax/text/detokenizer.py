"""Text as it is generated: token by token, byte for byte, and up to a stop string."""

import codecs
from collections.abc import Sequence

from shiftjax.text.errors import TokenizerError
from shiftjax.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns one sequence's tokens into text at constant cost per token.

    All pushes and the finish, joined, equal `tokenizer.decode` of all ids. A character is held
    back until its last byte has come; U+FFFD appears for bytes that cannot complete any more.
    `continues_prompt` keeps the space with which SentencePiece models begin a word: right when
    the text is put behind its prompt, where `decode` of the output alone would lose it.
    `visible` are ids of special tokens that are text nevertheless.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        *,
        continues_prompt: bool = False,
        visible: frozenset[int] = frozenset(),
    ) -> None:
        if tokenizer.token_bytes is None:
            raise TokenizerError(
                "This tokenizer's decoder does not work token by token, so its text cannot be "
                "streamed; byte-level, byte-fallback and metaspace decoders can."
            )
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids - visible if skip_special_tokens else frozenset()
        self._at_start = not continues_prompt
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` makes final, often one token's, sometimes none."""
        if token_id in self._skipped:
            return ""
        piece = self._token_bytes.piece(token_id)
        if self._at_start and piece:
            piece = self._token_bytes.first(piece)
            self._at_start = False
        return self._utf8.decode(piece)

    def finish(self) -> str:
        """Return what is left: U+FFFD if the last character never completed."""
        return self._utf8.decode(b"", final=True)


class StopChecker:
    """Finds the first stop string in text that comes in parts, whatever the parts are.

    First is the one whose end comes first (the longest, if several end there). The text is cut
    where it starts; with `include_stop_str_in_output`, where it ends. No character of a stop
    string is emitted before it is clear that the string does not come:

        stop "END"    push "an E" -> "an "    push "N" -> ""    push "A" -> "ENA"
    """

    def __init__(self, stop: Sequence[str] = (), include_stop_str_in_output: bool = False) -> None:
        if isinstance(stop, str) or any(not isinstance(text, str) or not text for text in stop):
            raise ValueError(f"stop must be a list of strings that are not empty, not {stop!r}.")
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._include = include_stop_str_in_output
        self._held = ""  # the longest end of the text that begins a stop string
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be shown now, and the stop string found, if any.

        After a match, text is dropped and the same stop string is returned.
        """
        if self._matched is not None:
            return "", self._matched
        pending = self._held + text
        match = self._first_match(pending)
        if match is None:
            cut = len(pending) - self._num_held(pending)
            self._held = pending[cut:]
            return pending[:cut], None
        start, self._matched = match
        self._held = ""
        return pending[: start + len(self._matched) * self._include], self._matched

    def flush(self) -> str:
        """Return the text still held back: no stop string comes any more."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """Return (start, stop string) of the match with the first end."""
        starts = ((text.find(stop), stop) for stop in self._stop)
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        return min(found)[1:] if found else None

    def _num_held(self, text: str) -> int:
        """Return the length of the longest end of `text` with which a stop string begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            ending = text[len(text) - length :]
            if any(stop.startswith(ending) for stop in self._stop):
                return length
        return 0
