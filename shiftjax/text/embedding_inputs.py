"""Inputs of embeddings become token ids that fit the model. No JAX."""

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Encoding

from shiftjax.arch.pooling import Pooling
from shiftjax.core.errors import RequestError
from shiftjax.text.tokenizer import Tokenizer

Input = str | Sequence[int]  # a text, or its token ids, special ones included


class InputReader(NamedTuple):
    """Makes token ids of inputs; pure, and so for any thread."""

    tokenizer: Tokenizer | None
    pooling: Pooling
    vocab_size: int
    max_length: int  # tokens of a text, special ones included

    def read(
        self,
        inputs: Sequence[Input],
        prompt_name: str | None = None,
        truncate_to: int = 0,
        first: int = 0,
    ) -> list[list[int]]:
        """Return the token ids of every input; those over `truncate_to`, if it is not 0, are cut.

        `first` is the place of the first input among those of the caller, for messages.

        Raises:
            RequestError: an input or a prompt's name that cannot be used, named by its place.
        """
        prompt = self._prompt(prompt_name)
        texts = [prompt + each for each in inputs if isinstance(each, str)]
        encoded = iter(self._encode(texts))
        ids = [next(encoded) if isinstance(each, str) else list(each) for each in inputs]
        return [self._fit(place, each, truncate_to) for place, each in enumerate(ids, first)]

    def read_pairs(
        self, pairs: Sequence[tuple[str, str]], truncate_to: int = 0
    ) -> list[tuple[list[int], int]]:
        """Return the token ids of each pair, and where its second text begins.

        Those over `truncate_to`, if it is not 0, lose the end of the second text.

        Raises:
            RequestError: a pair that cannot be used, named by its place.
        """
        found = []
        for place, encoding in enumerate(self._encode_pairs(pairs)):
            ids = self._fit(place, encoding.ids, truncate_to)
            types = encoding.type_ids
            second = types.index(1) if 1 in types else len(types)
            found.append((ids, min(second, len(ids))))
        return found

    def _encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Encoding]:
        if self.tokenizer is None:
            raise RequestError(
                "This model has no tokenizer, and scores no pairs of texts.", "input"
            )
        try:
            for text in (text for pair in pairs for text in pair):
                text.encode()
        except UnicodeEncodeError as error:
            words = f"An input is not valid Unicode at character {error.start}: is it UTF-8?"
            raise RequestError(words, "input") from None
        return self.tokenizer.backend.encode_batch(list(pairs))

    def _prompt(self, name: str | None) -> str:
        try:
            return self.pooling.prompt(name)
        except KeyError:
            known = ", ".join(key for key, _ in self.pooling.prompts) or "none"
            words = f"prompt_name {name!r} is none of the model's prompts ({known})"
            raise RequestError(words, "prompt_name") from None

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        if self.tokenizer is None:
            raise RequestError("This model has no tokenizer: give token ids as the input.", "input")
        try:
            return self.tokenizer.encode_batch(texts)
        except UnicodeEncodeError as error:
            words = f"An input is not valid Unicode at character {error.start}: is it UTF-8?"
            raise RequestError(words, "input") from None

    def _fit(self, place: int, ids: list[int], truncate_to: int) -> list[int]:
        field = f"input[{place}]"
        if not ids:
            raise RequestError(f"{field} is empty: it needs at least one token", field)
        if not all(0 <= token < self.vocab_size for token in ids):
            words = f"{field} has token ids beyond the vocabulary of {self.vocab_size}"
            raise RequestError(words, field)
        if truncate_to and len(ids) > truncate_to:
            special = self.tokenizer.special_ids if self.tokenizer is not None else frozenset()
            ids = cut(ids, truncate_to, special)
        if len(ids) > self.max_length:
            words = f"{field} has {len(ids)} tokens; the model takes at most {self.max_length}"
            raise RequestError(words, field, "context_length_exceeded")
        return ids


def cut(ids: list[int], most: int, special_ids: frozenset[int]) -> list[int]:
    """Return at most `most` ids: what ends a text ([SEP]) stays, what stands before it goes."""
    end = next((i for i, token in enumerate(reversed(ids)) if token not in special_ids), 0)
    end = min(end, most)
    return ids[: most - end] + ids[len(ids) - end :]


def scored_inputs(
    reader: InputReader, inputs: Sequence[str | list[int] | tuple[str, str]], truncate_to: int = 0
) -> list[tuple[list[int], int | None]]:
    """Token ids of texts and pairs (tuples), in their order, and where a second text begins.

    Raises:
        RequestError: an input that cannot be used, named by its place among those of its kind.
    """
    texts = [each for each in inputs if not isinstance(each, tuple)]
    pairs = [each for each in inputs if isinstance(each, tuple)]
    of_texts = iter(reader.read(texts, truncate_to=truncate_to))
    of_pairs = iter(reader.read_pairs(pairs, truncate_to) if pairs else ())
    return [
        next(of_pairs) if isinstance(each, tuple) else (next(of_texts), None) for each in inputs
    ]
