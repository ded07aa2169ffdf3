"""The gated MLPs of a device's experts, for Hopper: rows sorted by expert, in a few launches.

    collect     x[token] of every own pair, tile by tile      (grouped_rows)
    gated       silu(gate x) * up x, or as a `Gate` says      (grouped_product)
    combine     with parts: their sums, before the silu       (grouped_combine)
    product     down h (and bias), times the pair's gain      (grouped_product)

and XLA's: the tiles (`grouped_work`), and the order undone, which fuses with the sum over a token's
experts. Those in e4m3 codes have launches of the same names, for rows in codes (`grouped_codes`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.four_bits import Groups, in_order, wrong_groups
from pallas_kernels.gates import SILU, Gate
from pallas_kernels.grouped_codes import Rows, most_rows, multiply_codes, wrong_experts
from pallas_kernels.grouped_combine import add_down, combine_gated
from pallas_kernels.grouped_problem import (
    OVERHEAD_BYTES,
    GroupedConfig,
    Inputs,
    make_problem,
)
from pallas_kernels.grouped_product import multiply_tiles
from pallas_kernels.grouped_rows import COLLECTED, MOST_COLUMNS, Launch, collect_rows
from pallas_kernels.grouped_split import (
    CHANNELS,
    FOUR_BITS,
    TILE_ROWS,
    Items,
    count_parts,
    products_of,
    tile_rows,
)
from pallas_kernels.grouped_work import (
    ExpertWeights,
    Routed,
    divide_rows,
    place_pairs,
)
from pallas_kernels.mosaic import FP8
from pallas_kernels.product_ring import SHARED_MEMORY_LIMIT


def config_for(mean_pairs: float, weights: ExpertWeights, cores: int = 132) -> GroupedConfig:
    """Return settings for so many pairs of an expert, on average over those of all devices."""
    parts = count_parts(_products(weights), mean_pairs, weights.gate.shape[0], cores)
    return GroupedConfig(min(tile_rows(mean_pairs), most_rows(weights)), cores, parts=parts)


def _products(weights: ExpertWeights) -> tuple[Items, Items]:
    """Describe how the products of experts are cut."""
    _, width, hidden = weights.gate.shape
    if weights.are_four_bits:
        return products_of(width, 2 * hidden, FOUR_BITS)
    return products_of(width, hidden, weights.gate.dtype.itemsize)


def grouped_mlp(
    x: Float[Array, "tokens hidden"],
    weights: ExpertWeights,
    routed: Routed,
    gains: Float[Array, "tokens k"],
    config: GroupedConfig | None = None,
    interpret: Any = False,
    gate: Gate = SILU,
) -> Float[Array, "tokens k hidden"]:
    """Return every own pair's gain * down(silu(gate x) * up x); other pairs are unspecified.

    With biases where there are any, and what `gate` says for silu. Without `config` experts are
    taken to have a fair share of all pairs. Sums are float32, what lies between the products is
    x's type or codes of it. Raises ValueError for what the kernels cannot do.
    """
    config = config or config_for(gains.size / weights.gate.shape[0], weights)
    check(x, weights, config)
    rows, k = config.rows, gains.shape[1]
    tiles = divide_rows(routed.sizes, gains.size, rows)
    placed = place_pairs(routed, tiles, rows)
    token, row_gains = placed.pair // k, gains.astype(jnp.float32).reshape(-1)[placed.pair]
    if weights.gate.dtype == FP8:
        of_rows = Rows(tiles, placed, token, row_gains)
        out = multiply_codes(x, weights, of_rows, config, (gate, interpret))
        return out.reshape(*gains.shape, x.shape[1])

    def multiply(source: Any, names: tuple[str, ...], gain: Any) -> jax.Array:
        matrices, biases = (_of_all(weights, names, suffix) for suffix in ("", "_bias"))
        groups = _groups(weights, names) if weights.are_four_bits else ()
        inputs, gated = Inputs(tiles, source, matrices, gain, biases, groups), len(names) > 1
        problem = make_problem(config, gate if gated else None, inputs, x.dtype, interpret)
        out = multiply_tiles(problem, inputs)
        return combine_gated(problem, inputs, out) if gated and problem.parts > 1 else out

    x = in_order(x) if weights.are_four_bits else x
    collected = collect_rows(x, token, tiles, Launch(config.collecting, interpret))
    out = multiply(multiply(collected, ("gate", "up"), None), ("down",), row_gains)
    if config.parts[1] > 1:
        out = add_down(out, placed.place, x.shape[1], x.dtype)
    else:
        out = out[placed.place]
    return out.reshape(*gains.shape, x.shape[1])


def _of_all(weights: ExpertWeights, names: tuple[str, ...], suffix: str) -> Any:
    """Return what some matrices have of one kind; None: nothing."""
    found = tuple(getattr(weights, f"{name}{suffix}") for name in names)
    return None if found[0] is None else found


def _groups(weights: ExpertWeights, names: tuple[str, ...]) -> tuple[Groups, ...]:
    """Return what the groups of some matrices have."""
    of_all = ((getattr(weights, f"{name}{of}") for of in ("_scale", "_zero")) for name in names)
    return tuple(Groups(*each) for each in of_all)


def check(x: jax.Array, weights: ExpertWeights, config: GroupedConfig) -> None:
    """Raise ValueError for what the kernels cannot do."""
    (_, width, hidden), dtype = weights.gate.shape, weights.gate.dtype
    wrong, item_bytes = [], dtype.itemsize
    if weights.are_four_bits:
        wrong, hidden, item_bytes = _wrong_codes(x, weights), 2 * hidden, x.dtype.itemsize
    elif x.dtype not in (jnp.bfloat16, jnp.float16) or dtype not in (x.dtype, FP8):
        wrong.append(
            f"x of {x.dtype} and weights of {dtype}: x must be bfloat16 or float16, the weights of "
            f"the same type or {jnp.dtype(FP8)}"
        )
    elif dtype == FP8:
        wrong = wrong_experts(x, weights, config)
    elif weights.gate_scale is not None:
        wrong.append(f"weights of {dtype} take no scales")
    if hidden % CHANNELS or width % CHANNELS:
        wrong.append(f"hidden {hidden} and width {width} must be multiples of {CHANNELS}")
    if config.rows not in TILE_ROWS:
        sizes = ", ".join(map(str, TILE_ROWS))
        wrong.append(f"tiles of {config.rows} rows; there are those of {sizes}")
    products = _products(weights)
    if not all(of.can_be_cut(n) for of, n in zip(products, config.parts, strict=True)):
        steps = tuple(items.steps for items in products)
        wrong.append(f"parts {config.parts} of {steps} steps: they must divide them")
    if config.stages is not None and config.stages < 2:
        wrong.append(f"{config.stages} stages of shared memory, where 2 are needed")
    left = (SHARED_MEMORY_LIMIT - OVERHEAD_BYTES) // (COLLECTED * item_bytes)
    if hidden > (most := min(left, MOST_COLUMNS)):
        wrong.append(f"hidden {hidden} is more than the {most} of rows that can be collected")
    if wrong:
        raise ValueError("grouped_mlp: " + "; ".join(wrong))


def _wrong_codes(x: jax.Array, weights: ExpertWeights) -> list[str]:
    """Say what kernels cannot do with codes of four bits."""
    wrong = [] if x.dtype == jnp.bfloat16 else [f"x of {x.dtype}: codes take bfloat16 only"]
    for name in ("gate", "up", "down"):
        codes, (groups,) = getattr(weights, name), _groups(weights, (name,))
        wrong += [f"{name}: {what}" for what in wrong_groups(codes, groups)]
    return wrong
