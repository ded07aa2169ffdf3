"""How an encoder's hidden states become the embedding of a text. No JAX."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PoolingKind = Literal["mean", "cls", "last"]


@dataclass(frozen=True)
class Pooling:
    """What sentence-transformers' files say beside a checkpoint."""

    kind: PoolingKind  # over the tokens of a text, in float32
    normalize: bool  # to length 1
    max_length: int  # tokens of a text, special ones included
    prompts: tuple[tuple[str, str], ...] = ()  # (name, text that is put before an input)
    default_prompt: str | None = None  # name of the prompt of inputs that name none
    dimensions: Sequence[int] = ()  # lengths to which embeddings may be cut (matryoshka)

    def prompt(self, name: str | None) -> str:
        """Return the text before an input. Raises KeyError for a name that is not known."""
        name = name if name is not None else self.default_prompt
        return "" if name is None else dict(self.prompts)[name]
