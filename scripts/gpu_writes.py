"""The kernel that writes keys and values into a pool of codes: right, and how fast."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_write import LARGEST_FP8, write_kv
from pallas_kernels.measure import Ceilings, Effort, WriteShape, chain_seconds, row_of, write_calls
from shiftjax.models import attention

FP8 = "float8_e4m3fn"
WRITES = {
    f"{tokens:,} tokens, {heads} KV head{'s' * (heads > 1)}": WriteShape(tokens, heads, dtype=FP8)
    for tokens, heads in ((64, 8), (64, 1), (8192, 8))
}
DRY = {"dry": WriteShape(6, 2, 64, 8, FP8)}
SCALES = (0.25, 2.0)
DEVIATION = 60.0  # of keys and values: some of the scaled ones are beyond the largest code


def write_rows(effort: Effort, ceilings: Ceilings, *, dry: bool) -> Iterator[dict[str, Any]]:
    """Yield, for each shape, whether every byte of the pools is right, and the time.

    `xla_us` is XLA's scatter of the same, which the loops use.
    """
    for name, shape in (DRY if dry else WRITES).items():
        write = partial(write_kv, interpret=effort.interpret)
        row = {"row": name, "right": is_right(shape, write)}
        seconds = chain_seconds(write_calls(shape, write), effort)
        scatter = chain_seconds(write_calls(shape, attention.write_kv), effort)
        yield row | row_of(shape, seconds, ceilings) | {"xla_us": scatter * 1e6}


def is_right(shape: WriteShape, write: Any) -> bool:
    """Whether codes are in their slots and all others are as before, but for the null block."""
    rng, blocks = np.random.default_rng(0), 2 + -(-shape.tokens // shape.block_size)
    size = blocks, shape.kv_heads, shape.block_size, shape.head_dim
    pool = rng.standard_normal((2, *size)).astype(shape.dtype)
    tokens = (2, shape.tokens, shape.kv_heads, shape.head_dim)
    rows = (DEVIATION * rng.standard_normal(tokens)).astype(jnp.bfloat16)
    slots = rng.permutation(np.arange(shape.block_size, blocks * shape.block_size))
    slots = slots[: shape.tokens].astype(np.int32)
    slots[-1] = 3  # in the null block, as padding is
    got = jax.jit(partial(write, scales=SCALES))(tuple(pool), *rows, slots)
    block, offset = np.divmod(slots, shape.block_size)
    for before, new, scale, after in zip(pool, rows, SCALES, got, strict=True):
        scaled = np.clip(new.astype(np.float32) / scale, -LARGEST_FP8, LARGEST_FP8)
        before[block, :, offset] = scaled.astype(shape.dtype)
        if before[1:].tobytes() != np.asarray(after)[1:].tobytes():
            return False
    return True
