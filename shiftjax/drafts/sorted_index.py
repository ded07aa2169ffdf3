"""Where a text that no longer grows repeats itself, found by sorting. NumPy, no JAX."""

from array import array
from collections.abc import Sequence

import numpy as np

MULTIPLIER = 0x9E3779B97F4A7C15  # odd: the golden ratio of 64 bits (Knuth, TAOCP 3, 6.4)
WORD_MASK = (1 << 64) - 1


class SortedIndex:
    """The places of a text by the hash of the tokens before them; no loop over the tokens.

    For each of `sizes` (tokens of a key) the hashes are sorted once, stably, so that the places of
    a key stand side by side, the most recent one last. The last place, which no token follows,
    is left out. Hashes may collide: whoever looks up compares the tokens. 12 bytes per token and
    size. NumPy sorts without holding the GIL, so another thread can build it.
    """

    def __init__(self, tokens: array[int], sizes: Sequence[int]):
        words = np.array(tokens, dtype=np.int64).view(np.uint64)[:-1]
        self._hashes: dict[int, np.ndarray] = {}
        self._ends: dict[int, np.ndarray] = {}
        for size in sizes:
            count = max(0, len(words) - size + 1)
            hashes = np.zeros(count, np.uint64)
            for offset in range(size):
                hashes = hashes * np.uint64(MULTIPLIER) + words[offset : offset + count]
            order = np.argsort(hashes, kind="stable")
            self._hashes[size] = hashes[order]
            self._ends[size] = order.astype(np.int32) + np.int32(size)

    def ends(self, key: Sequence[int], most: int) -> list[int]:
        """The most recent places after `key`, the latest first."""
        code = 0
        for token in key:
            code = (code * MULTIPLIER + token) & WORD_MASK
        hashes, sought = self._hashes[len(key)], np.uint64(code)
        stop = int(hashes.searchsorted(sought, "right"))
        start = max(int(hashes.searchsorted(sought, "left")), stop - most)
        return self._ends[len(key)][start:stop][::-1].tolist()
