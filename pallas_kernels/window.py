"""How far back tokens see, where that is not all of their context. No JAX.

window 4      a token sees four at most, itself included          position 6 sees 3 4 5 6
Chunk(4)      contexts are cut into parts of four; it sees its    position 6 sees     4 5 6
              own part, up to itself (Llama 4)
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Chunk:
    """A window whose start jumps: the multiples of `tokens` are where one begins."""

    tokens: int

    def __post_init__(self) -> None:
        """Raise ValueError for chunks of no tokens."""
        if self.tokens < 1:
            raise ValueError(f"chunks of {self.tokens} tokens: there must be one at least")


type Window = int | Chunk


def first_seen(
    position: Any, window: Window | None, rest: Callable[[Any, Any], Any] = operator.mod
) -> Any:
    """Return the first position that a token at `position` sees; below 0 where that is all.

    Of a number or an array. `rest` is what gives remainders of such arrays.
    """
    if window is None:
        return 0 * position
    if isinstance(window, Chunk):
        return position - rest(position, window.tokens)
    return position - window + 1


def tokens_of(window: Window | None) -> int:
    """Return the most tokens that a token sees; 0: there is no window."""
    return window.tokens if isinstance(window, Chunk) else window or 0


def wrong_window(window: Window | None) -> str | None:
    """Return what is wrong with a window; None: nothing."""
    if window is None or tokens_of(window) >= 1:
        return None
    return f"window {window} is not positive; None is no window"
