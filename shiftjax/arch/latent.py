"""Multi-head latent attention (MLA, arXiv 2405.04434, 2.1): widths, cache, scale. No JAX."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shiftjax.arch.cache import CacheSpec, Entry

if TYPE_CHECKING:
    from shiftjax.arch.config import RopeScaling

EPSILON = 1e-6  # of the norms of latents and of narrow queries, whatever `rms_norm_eps` says


@dataclass(frozen=True)
class Latent:
    """Keys and values of all heads made of one latent a token, which alone is cached.

    It has `rank` numbers, and `rope_dim` rotated ones that the keys of all heads share. In a config
    with it all heads share one row of the cache, whose `head_dim` is the sum of both.
    """

    rank: int
    rope_dim: int
    nope_dim: int  # of a head's queries and keys, beside what is rotated
    value_dim: int
    query_rank: int | None = None  # None: queries are made of hidden states at once
    mscale: float = 0.0  # yarn's `mscale_all_dim`: scores grow with it; 0: they do not
    # Keys that a token attends to, which an indexer chooses (DeepSeek Sparse Attention). Contexts
    # are no longer than that here, so that it attends to all, and the indexer is left out.
    index_topk: int | None = None

    @property
    def width(self) -> int:
        """Numbers that are cached of a token."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Numbers of a head's queries and keys."""
        return self.nope_dim + self.rope_dim

    @property
    def cache(self) -> CacheSpec:
        """What a layer keeps of a token: every device has all of it."""
        return CacheSpec((Entry("latent", 1, self.width),))

    def scale(self, scaling: "RopeScaling | None") -> float:
        """Return what scores are multiplied with, where frequencies are stretched so."""
        gain = 1.0
        if scaling is not None and self.mscale and scaling.factor > 1:
            gain = 0.1 * self.mscale * math.log(scaling.factor) + 1.0
        return self.query_dim**-0.5 * gain**2
