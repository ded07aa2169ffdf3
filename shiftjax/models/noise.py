"""Random numbers of tokens: what makes a draw a function of the request alone.

Every token of the vocabulary gets a number of its own, from (key, seed, position, token id) and
nothing else, so it is the same on every device, in every batch, and for every model that asks: a
draft model that draws with the target's noise agrees with it as often as their distributions do
(Daliri et al. 2024, arXiv 2408.07978).

threefry (Salmon et al. 2011) makes two words of (key, seed, position), once a row. A token's 32
bits are `mix(mix(token ^ word 0) ^ word 1)` with a bijection of two multiplications; threefry for
every token would take several times as long as all the rest of the sampler.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, Key, UInt32

__all__ = ["token_noise"]

LEAST_LOG = 1 / 64  # from here up float32's log of 1 - r is good to 2**-19


def token_noise(
    key: Key[Array, ""],
    seeds: UInt32[Array, "rows 2"],
    positions: Int32[Array, " rows"],
    token_ids: Int32[Array, " tokens"],
) -> Float32[Array, "rows tokens"]:
    """Independent exponential variables of mean 1, finite and positive.

    The token that has the largest p / noise is a draw from p, unnormalised or not: exponential
    clocks of rates p, of which the first to ring wins. It is the Gumbel-max trick less a
    logarithm, since -log(noise) is Gumbel noise (Maddison et al. 2014, arXiv 1411.0030, section 2).

    The least value is 2**-33, so a token of p under 2**-34 of the sum is drawn too seldom, and
    under 2**-37 never. Raises ValueError for a key of another kind than threefry, whose numbers
    would depend on the batch.
    """
    if str(jax.random.key_impl(key)) != "threefry2x32":
        raise ValueError(f"the key must be of kind threefry2x32, not {jax.random.key_impl(key)}")
    words = _row_words(key, seeds, positions)
    tokens = lax.convert_element_type(token_ids, jnp.uint32)[None]
    return _exponential(_mix(_mix(tokens ^ words[:, :1]) ^ words[:, 1:]))


def _row_words(
    key: Key[Array, ""], seeds: UInt32[Array, "rows 2"], positions: Int32[Array, " rows"]
) -> UInt32[Array, "rows 2"]:
    def words(seed: UInt32[Array, "2"], position: Int32[Array, ""]) -> UInt32[Array, "2"]:
        folded = key
        for data in (seed[0], seed[1], position):
            folded = jax.random.fold_in(folded, data)
        return jax.random.bits(folded, (2,), dtype=jnp.uint32)

    return jax.vmap(words)(seeds, positions)


def _mix(x: UInt32[Array, "rows tokens"]) -> UInt32[Array, "rows tokens"]:
    """lowbias32 of Wellons' hash-prospector (github.com/skeeto/hash-prospector, public domain)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _exponential(bits: UInt32[Array, "rows tokens"]) -> Float32[Array, "rows tokens"]:
    """`-log(1 - v)` of v = (bits + 1/2) / 2**32, with all 32 bits at either end of (0, 1).

    float32 cannot hold v near 1, nor 1 - v near 0, so it holds r, the distance to the nearer end.
    """
    signed = lax.bitcast_convert_type(bits, jnp.int32)
    is_upper = signed < 0  # v >= 1/2
    nearest = (signed ^ (signed >> 31)).astype(jnp.float32)  # the bits, or their complement
    r = (nearest + 0.5) * jnp.float32(2.0**-32)
    logarithm = -jnp.log(jnp.where(is_upper, r, 1.0 - r))
    series = r * (1.0 + r * (1 / 2 + r * (1 / 3 + r * (1 / 4))))
    return jnp.where(is_upper | (r >= LEAST_LOG), logarithm, series)
