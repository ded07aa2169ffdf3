"""The noise of tokens: exponential to the ends of both tails, and independent of its neighbours."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import numpy_sampling
from scipy import stats

from shiftjax.models.noise import _exponential as exponential
from shiftjax.models.noise import token_noise

KEY = jax.random.key(77)
ALPHA = 1e-3  # significance; every sample is always the same


@cache
def compiled():
    return jax.jit(partial(token_noise, KEY))


def noise_of(seeds: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """Noise of rows with these 64-bit seeds and positions, which broadcast."""
    seeds, positions = np.broadcast_arrays(seeds, positions)
    words = seeds.astype("<u8").view("<u4").reshape(-1, 2)  # low word first
    return np.asarray(compiled()(words, positions.astype(np.int32), token_ids.astype(np.int32)))


def test_both_ends_keep_all_32_bits():
    """Against float64; the least are the draws from far down the tail, and none is 0 or infinite.

    The far tail: a token of probability p wins where its noise is under p times one exponential
    variable, so all that 2**-24 steps would round away is what decides there.
    """
    ends = np.unique([2**k + d for k in range(33) for d in range(-3, 4) if 0 <= 2**k + d < 2**32])
    drawn = np.random.default_rng(1).integers(0, 2**32, 100_000)
    bits = np.concatenate([ends, 2**32 - 1 - ends, drawn]).astype(np.uint32)
    got = np.asarray(jax.jit(exponential)(bits[None]))[0]
    expected = -np.log1p(-(bits.astype(np.float64) + 0.5) / 2**32)
    np.testing.assert_allclose(got, expected, rtol=3e-6)
    assert np.isfinite(got).all()
    assert (got > 0).all()


def test_a_tokens_noise_depends_on_its_id_alone():
    """Whichever tokens are asked for, in whatever order: on a shard, or of a smaller vocabulary."""
    seeds, positions = np.array([3, 2**40, 2**63 + 5], np.uint64), np.array([0, 7, 2**31 - 1])
    everything = noise_of(seeds, positions, np.arange(4096))
    some = np.random.default_rng(2).permutation(4096)[:1000]
    np.testing.assert_array_equal(noise_of(seeds, positions, some), everything[:, some])
    alone = noise_of(seeds[1:2], positions[1:2], np.arange(4096))
    np.testing.assert_array_equal(alone, everything[1:2])


def test_noise_is_the_oracles():
    seeds, positions = np.array([1, 2**33]), np.array([5, 6])
    got = noise_of(seeds, positions, np.arange(50_000))
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        key = jax.random.fold_in(jax.random.fold_in(KEY, seed & 0xFFFFFFFF), seed >> 32)
        words = jax.random.bits(jax.random.fold_in(key, position), (2,), dtype=jnp.uint32)
        expected = numpy_sampling.noise(np.asarray(words), 50_000)
        np.testing.assert_allclose(got[row], expected, rtol=3e-6)


def p_value(cells: np.ndarray, num_cells: int) -> float:
    """Of chi-square that all cells are as likely; two-sided, as a sample can be too even."""
    seen = np.bincount(cells.ravel(), minlength=num_cells)
    p = stats.chisquare(seen).pvalue
    return min(p, 1 - p)


GRIDS = {  # seeds, positions, tokens: a million or more numbers of neighbours
    "tokens of a row": (np.array([9]), np.array([4]), np.arange(2**20)),
    "positions": (np.array([9]), np.arange(2**14), np.arange(128)),
    "seeds": (np.arange(2**14), np.array([4]), np.arange(128)),
    "high words of seeds": (np.arange(2**14) << 32, np.array([4]), np.arange(128)),
}


@pytest.mark.parametrize("name", GRIDS)
def test_neighbours_are_independent(name: str):
    """Uniform in 1,024 cells; in 32 x 32 cells together with the next row, token, and both."""
    noise = noise_of(*GRIDS[name])
    uniform = -np.expm1(-noise.astype(np.float64))
    cells = np.minimum((uniform * 1024).astype(np.int64), 1023)
    assert p_value(cells, 1024) > ALPHA
    coarse = cells >> 5
    pairs = [(coarse[:, :-step], coarse[:, step:]) for step in (1, 2, 32)]
    if len(coarse) > 1:
        pairs += [(coarse[:-1], coarse[1:]), (coarse[:-1, 1:], coarse[1:, :-1])]
    for one, other in pairs:
        assert p_value(one * 32 + other, 1024) > ALPHA


@pytest.mark.thorough
def test_the_tails_have_the_mass_they_should():
    """Of 2**26 numbers: how many lie under 1e-6 and 1e-7, and above 12 and 15, against Poisson."""
    below, above = np.array([1e-6, 1e-7]), np.array([12.0, 15.0])

    @jax.jit
    def count(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        seeds = jnp.zeros((len(positions), 2), jnp.uint32)
        noise = token_noise(KEY, seeds, positions, jnp.arange(2**20, dtype=jnp.int32))
        lower = jnp.stack([(noise < t).sum() for t in below.astype(np.float32)])
        return lower, jnp.stack([(noise > t).sum() for t in above.astype(np.float32)])

    turns = [count(jnp.arange(8, dtype=jnp.int32) + 8 * turn) for turn in range(8)]
    for column, probability in enumerate((-np.expm1(-below), np.exp(-above))):
        seen = sum(np.asarray(turn[column]) for turn in turns)
        expected = 2**26 * probability
        tails = np.minimum(stats.poisson.cdf(seen, expected), stats.poisson.sf(seen - 1, expected))
        assert (tails > ALPHA).all(), (seen, expected)


def test_a_key_of_another_kind_is_refused():
    key = jax.random.key(0, impl="rbg")
    seeds, positions = jnp.zeros((1, 2), jnp.uint32), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="threefry2x32, not rbg"):
        token_noise(key, seeds, positions, jnp.arange(8, dtype=jnp.int32))
