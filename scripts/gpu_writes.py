"""The kernel that writes keys and values into a pool of codes: right, and how fast."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from gpu_parts import Run

from pallas_kernels.kv_write import write_kv
from pallas_kernels.measure import WriteShape, chain_seconds, row_of, write_calls
from shiftjax.device import write_cases
from shiftjax.device.attention_steps import Shape
from shiftjax.models import attention

FP8 = "float8_e4m3fn"
WRITES = {
    f"{tokens:,} tokens, {heads} KV head{'s' * (heads > 1)}": WriteShape(tokens, heads, dtype=FP8)
    for tokens, heads in ((64, 8), (64, 1), (8192, 8))
}
DRY = {"dry": WriteShape(6, 2, 64, 8, FP8)}


def write_rows(run: Run) -> Iterator[dict[str, Any]]:
    """Yield, for each shape, whether every byte of the pools is right, and the time.

    `xla_us` is XLA's scatter of the same, which the loops use.
    """
    effort = run.effort
    write = partial(write_kv, interpret=effort.interpret)
    for name, shape in (DRY if run.dry else WRITES).items():
        row = {"row": name, "right": is_right(shape, write)}
        seconds = chain_seconds(write_calls(shape, write), effort)
        scatter = chain_seconds(write_calls(shape, attention.write_kv), effort)
        yield row | row_of(shape, seconds, run.ceilings) | {"xla_us": scatter * 1e6}


def is_right(shape: WriteShape, write: Any) -> bool:
    """Whether codes are in their slots and all others are as before, but for the null block.

    Scales are powers of two, so that no quotient is rounded before its code is.
    """
    sizes = 1, shape.kv_heads, shape.head_dim, shape.block_size
    bucket = shape.tokens, 8, 8
    checked = Shape(*sizes, (None,), "bfloat16", "fp8", bucket)
    arrays = write_cases.make_arrays(checked, shape.tokens)
    arrays = arrays._replace(scales=2 ** np.round(np.log2(arrays.scales)))
    got = jax.jit(partial(write, scales=arrays.scales))(*arrays[:4])
    codes = np.stack([np.asarray(pool) for pool in got]).view(np.uint8)
    return bool((codes == write_cases.expected_codes(arrays))[:, 1:].all())
