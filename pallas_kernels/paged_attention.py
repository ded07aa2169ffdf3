"""Ragged paged attention on a Hopper GPU: the one interface to the kernels.

A step holds decode rows (tokens that attend one by one) and then prefill chunks;
`step_work.divide_step` says how they are cut up. Chunks go to `prefill` (bound by the matrix
units), which also clears the padding; then decode rows go to `decode` (split-K, bound by memory),
which writes into the same output. A bucket that is divided without tiles does without the first.
Both read the pools in place. They are two kernels because they
need different shapes of thread block: two warpgroups of 64 full rows with 192 KB of shared memory
there, and as many bytes in flight as possible for a few rows here. With `KernelConfig.in_tiles`
rows are tiles of a token, and the first kernel is alone: the same bits, however a token comes.
"""

from jaxtyping import Array, Float

from pallas_kernels.call import AttentionOptions, PagedKV
from pallas_kernels.decode import decode_attention
from pallas_kernels.head_codes import Heads
from pallas_kernels.prefill import prefill_attention
from pallas_kernels.queries import Queries
from pallas_kernels.step_work import DEFAULT_CONFIG, KernelConfig, StepWork


def ragged_paged_attention(
    q: Float[Array, "tokens heads head_dim"] | Queries,
    kv: PagedKV,
    work: StepWork,
    options: AttentionOptions,
    config: KernelConfig = DEFAULT_CONFIG,
) -> Heads:
    """Attention of every token over its own sequence; rows of padding tokens are zeros.

    q is bfloat16 or float16; the pools are of q's type, or float8_e4m3fn. `work` must have been
    divided with the same `config`. `options.codes` asks for codes, with their scales, in place of
    numbers of q's type. Raises ValueError for what the kernels cannot do.
    """
    if work.prefill is None:
        assert work.decode is not None
        return decode_attention(q, kv, work.decode, options, config.decode)
    out = prefill_attention(q, kv, work.prefill, options, config.prefill)
    if work.decode is None:
        return out
    return decode_attention(q, kv, work.decode, options, config.decode, out=out)
