"""How far back a token sees, by the definition of both kinds of windows."""

import numpy as np
import pytest

from pallas_kernels.window import Chunk, first_seen, tokens_of, wrong_window


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_the_first_that_is_seen(tokens):
    positions = np.arange(200)
    for window, sees in (
        (None, lambda key, query: True),
        (tokens, lambda key, query: query - key < tokens),
        (Chunk(tokens), lambda key, query: key // tokens == query // tokens),
    ):
        wanted = [min(key for key in range(p + 1) if sees(key, p)) for p in positions]
        assert np.maximum(first_seen(positions, window), 0).tolist() == wanted
        most = max(p + 1 - first for p, first in zip(positions, wanted, strict=True))
        assert most == (tokens_of(window) or len(positions))


def test_windows_of_nothing():
    assert wrong_window(Chunk(1)) is wrong_window(1) is wrong_window(None) is None
    assert wrong_window(0) == "window 0 is not positive; None is no window"
    with pytest.raises(ValueError, match="chunks of 0 tokens"):
        Chunk(0)
