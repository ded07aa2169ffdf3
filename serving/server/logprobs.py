"""Log-probabilities as the JSON of OpenAI's and vLLM's answers. Pure functions of what came."""

from typing import Any

from shiftjax.core.request import TokenLogprobs
from shiftjax.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no infinity

Json = dict[str, Any]


def finite(logprob: float) -> float:
    """Return `logprob`, at least `LEAST_LOGPROB`: JSON has no infinities."""
    return max(logprob, LEAST_LOGPROB)


class LogprobWriter:
    """Writes the tokens that a `TokenLogprobs` has ids of; with `as_ids` as `token_id:ID`."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool | None = False):
        self._tokenizer, self._as_ids = tokenizer, bool(as_ids)

    def of_chat(self, entry: TokenLogprobs) -> Json:
        """As chats and responses have it: the token, and the most likely ones."""
        pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
        top = [self._token(token_id, logprob) for token_id, logprob in pairs]
        return self._token(entry.token_id, entry.logprob) | {"top_logprobs": top}

    def top_by_text(self, entry: TokenLogprobs) -> dict[str, float]:
        """By text; where tokens have the same, the most likely one counts."""
        top: dict[str, float] = {}
        pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
        for token_id, logprob in (*pairs, (entry.token_id, entry.logprob)):
            top.setdefault(self.text(token_id), finite(logprob))
        return top

    def by_id(self, entry: TokenLogprobs) -> dict[str, Json]:
        """By token id, as vLLM writes `prompt_logprobs`."""
        ranks = {token_id: rank for rank, token_id in enumerate(entry.top_ids, start=1)}
        pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
        return {
            str(token_id): {
                "logprob": finite(logprob),
                "rank": ranks.get(token_id),  # None: behind those that were asked for
                "decoded_token": _text(self._bytes(token_id)),
            }
            for token_id, logprob in (*pairs, (entry.token_id, entry.logprob))
        }

    def text(self, token_id: int) -> str:
        """The text of a token, or its id; what is no whole character is replaced."""
        return f"token_id:{token_id}" if self._as_ids else _text(self._bytes(token_id))

    def _token(self, token_id: int, logprob: float) -> Json:
        data = self._bytes(token_id)
        return {"token": self.text(token_id), "logprob": finite(logprob), "bytes": list(data)}

    def _bytes(self, token_id: int) -> bytes:
        pieces = self._tokenizer.token_bytes if self._tokenizer is not None else None
        return f"token_id:{token_id}".encode() if pieces is None else pieces.piece(token_id)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
