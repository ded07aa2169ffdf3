"""What the kernel that writes codes of keys and values must get right; see `attention_cases`.

Held against XLA's scatter on the same device. All that no token is written to must keep its bits,
which are those of NaN, but for the null block, where padding may go.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shiftjax.arch.formats import FORMATS
from shiftjax.device.attention_steps import Shape
from shiftjax.device.mesh import on_each
from shiftjax.models.attention import LayerTerms
from shiftjax.models.attention_backend import AttentionBackend
from shiftjax.parallel.grid import Device

MOST_TOKENS = 1024  # the code is the same for every bucket
BEYOND = 2000.0  # times what others are: more than codes can say
# Two divisions may differ in their last bit, and then to which of two codes a number is nearer.
MOST_NEIGHBOURS = 1e-3  # of all codes


class Arrays(NamedTuple):
    """The arrays of a step: of NumPy, in a program JAX's."""

    pool: tuple[Any, ...]
    k: Any  # [tokens, kv_heads, head_dim]
    v: Any
    slots: Any  # [tokens]
    scales: Any  # [2, kv_heads]


def make_arrays(shape: Shape, most_tokens: int = MOST_TOKENS) -> Arrays:
    """Draw tokens that fill no tile of the kernel, their slots, and scales of each head.

    Tokens are one less than those of the bucket, or than the most. Some numbers are beyond the
    largest code; every eighth token is padding.
    """
    rng, size = np.random.default_rng(0), shape.block_size
    tokens = min(shape.bucket[0], most_tokens) - 1
    blocks = 2 + -(-tokens // size)  # the null block, and room for slots that are left alone
    k_pool, v_pool = shape.pool(blocks)
    k, v = rng.standard_normal((2, tokens, shape.kv_heads, shape.head_dim), np.float32)
    k[::5] *= BEYOND
    v[1::5] *= BEYOND
    slots = size + rng.permutation((blocks - 1) * size)[:tokens].astype(np.int32)
    slots[7::8] = 0
    scales = 2 ** rng.uniform(-1, 1, (2, shape.kv_heads)).astype(np.float32)
    dtype = FORMATS[shape.dtype].dtype
    return Arrays((k_pool, v_pool), k.astype(dtype), v.astype(dtype), slots, scales)


def expected_codes(arrays: Arrays) -> np.ndarray:
    """Return the bytes of both pools after the write, [2, *pool], as NumPy has them."""
    pools = np.stack(arrays.pool)
    largest, size = float(jnp.finfo(pools.dtype).max), pools.shape[3]
    block, offset = np.divmod(arrays.slots, size)
    for pool, new, scale in zip(pools, (arrays.k, arrays.v), arrays.scales, strict=True):
        codes = np.clip(new.astype(np.float32) / scale[:, None], -largest, largest)
        pool[block, :, offset] = codes.astype(pools.dtype)
    return pools.view(np.uint8)


def outputs_of(
    backend: AttentionBackend, arrays: Arrays, devices: Sequence[Device]
) -> Callable[[], np.ndarray]:
    """Compile a write, the same on every device; what comes back runs it.

    It returns the bytes of the pools, [devices, 2, blocks, kv_heads, block_size, head_dim].
    """

    def run(arrays: Arrays) -> jax.Array:
        terms = LayerTerms(kv_scales=arrays.scales)
        pool = backend.write(*arrays[:4], terms)
        return jax.lax.bitcast_convert_type(jnp.stack(pool), jnp.uint8)

    return on_each(run, devices, arrays)


def wrong_with_codes(outputs: Sequence[np.ndarray], expected: np.ndarray) -> str | None:
    """Say what is wrong with the pools of one device, a run each; `expected` are the scatter's."""
    got, right = (_numbered(array[:, 1:]) for array in (outputs[0], expected))
    if any((later[:, 1:] != outputs[0][:, 1:]).any() for later in outputs[1:]):
        return "codes change from run to run"
    steps = np.abs(got - right)
    if wrong := int((steps > 1).sum()):
        return f"{wrong} of {right.size} codes are wrong"
    if (steps > 0).mean() > MOST_NEIGHBOURS:
        return f"{(steps > 0).mean():.2g} of all codes are rounded otherwise"
    return None


def _numbered(codes: np.ndarray) -> np.ndarray:
    """Return numbers of e4m3 codes, given as bytes: neighbours are one apart, NaN is far off."""
    magnitude = (codes & 127).astype(np.int16)
    return np.where(magnitude == 127, 1000, np.where(codes > 127, -1 - magnitude, magnitude))
