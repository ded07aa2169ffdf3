"""The work of one step for both kernels: divided on the host, once, for all layers. No JAX."""

from typing import NamedTuple

from pallas_kernels.decode_work import DecodeConfig, DecodeWork, divide_decode
from pallas_kernels.prefill_work import PrefillConfig, PrefillWork, divide_prefill
from pallas_kernels.rows import Sequences
from pallas_kernels.window import Window


class KernelConfig(NamedTuple):
    """The settings of both kernels."""

    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    # Every token is of a tile, decode rows, too: both kernels cut keys and add up in other orders.
    in_tiles: bool = False


DEFAULT_CONFIG = KernelConfig()


class StepWork(NamedTuple):
    """Who computes what in one step: int32 NumPy arrays on the host, JAX arrays inside the step."""

    prefill: PrefillWork | None  # None: every token of the bucket may be a decode row
    decode: DecodeWork | None  # None: no token of the engine's steps is a decode row


def divide_step(
    sequences: Sequences,
    *,
    num_tokens: int | None,
    heads: tuple[int, int],
    window: Window | None = None,
    max_context: int | None = None,
    config: KernelConfig = DEFAULT_CONFIG,
) -> StepWork:
    """Divide one step; `num_tokens` is the bucket's.

    `heads` (of queries, of keys and values) are those of one device. Without `num_tokens` there are
    no tiles: the bucket has as many rows as tokens, and every sequence must be among the first
    `num_decodes`. Layers with different windows can share what is
    divided for the widest of them: it is right for all, and balanced for that one. `max_context`
    is for `PrefillConfig.fixed_rounds`.
    """
    tiles = None
    if config.in_tiles:
        sequences = sequences._replace(num_decodes=0)
    if num_tokens is not None:
        tiles = divide_prefill(
            sequences,
            num_tokens=num_tokens,
            heads=heads,
            window=window,
            max_context=max_context,
            config=config.prefill,
        )
    if config.in_tiles:
        return StepWork(tiles, None)
    return StepWork(
        tiles,
        divide_decode(
            sequences.rows,
            sequences.most_rows,
            kv_heads=heads[1],
            window=window,
            config=config.decode,
        ),
    )
