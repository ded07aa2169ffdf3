"""How an encoder's hidden states become the embedding, or the scores, of a text. No JAX."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PoolingKind = Literal["mean", "cls", "last", "scores"]
Activation = Literal["none", "sigmoid", "softmax"]


@dataclass(frozen=True)
class Pooling:
    """What sentence-transformers' files say beside a checkpoint."""

    kind: PoolingKind  # over the tokens of a text, in float32; scores: a head's, of its first token
    normalize: bool  # to length 1
    max_length: int  # tokens of a text, special ones included
    prompts: tuple[tuple[str, str], ...] = ()  # (name, text that is put before an input)
    default_prompt: str | None = None  # name of the prompt of inputs that name none
    dimensions: Sequence[int] = ()  # lengths to which embeddings may be cut (matryoshka)
    labels: tuple[str, ...] = ()  # of the scores, one each
    activation: Activation = "none"  # what makes scores of the head's numbers

    @property
    def scores(self) -> bool:
        """Whether texts, and pairs of them, get scores instead of embeddings."""
        return self.kind == "scores"

    def prompt(self, name: str | None) -> str:
        """Return the text before an input. Raises KeyError for a name that is not known."""
        name = name if name is not None else self.default_prompt
        return "" if name is None else dict(self.prompts)[name]
