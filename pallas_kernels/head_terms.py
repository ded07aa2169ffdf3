"""Heads on their way from a product to attention: what `rope_write` is given. No Mosaic."""

from typing import Any, NamedTuple

from jaxtyping import Shaped


class Projected(NamedTuple):
    """What a product with q, k and v has given: of each, or of all, joined in this order.

    `[tokens, channels]`; parts of the contraction are float32 `[parts, channels, rows]`, or
    `[parts, tokens, channels]`, joined, to be added up and rounded. There may be more channels and
    rows than are wanted.
    """

    values: tuple[Shaped[Any, "..."], ...]
    turned: bool = False  # channels come before rows

    @property
    def is_split(self) -> bool:
        """Whether parts are to be added up."""
        return len(self.values[0].shape) == 3


class Given(NamedTuple):
    """What is done to heads; None: it is not."""

    rope: tuple[Any, Any] | None = None  # cosines and sines, float32 `[tokens, half]`
    biases: tuple[Any, ...] | None = None  # of q, k and v, `[channels]`
    norms: tuple[Any, Any] | None = None  # weights of q and k, `[head_dim]`
