"""Writing a step's keys and values into the paged pool, in place, for Hopper GPUs.

One launch rotates k, quantises and writes both. XLA does the same in two, in place as well: the
rotation and the rounding fuse with the scatter of k. Decoding 64 tokens moves about a megabyte,
less than starting a kernel costs, so half the launches are half the time. Rotating k here is free:
it is in registers anyway. The rotary embedding of q is left to XLA, which fuses it with the padding
of q that attention needs.

A token's heads are contiguous neither in k's halves nor in the pool, where they lie `block_size`
rows apart. Registers take the halves apart; one TMA copy of `[kv_heads, head_dim]` for K, and one
for V, puts the token into its slot.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.call import KVScales
from pallas_kernels.mosaic import FP8, apart, scales_in_memory, scales_of_head, staged_rows

TOKENS = 4  # of a thread block: one for each warp
MOST_HEADS = 8  # of a thread block: in registers all at once
LANES = 32
LARGEST_FP8 = float(jnp.finfo(FP8).max)

Blocks = Float[Array, "blocks kv_heads block_size head_dim"]


class Arrays(NamedTuple):
    """The kernel's arrays in global memory; None is what this call does without."""

    k: Any  # [tokens, kv_heads, head_dim]
    v: Any
    slots: Any  # [tokens]
    cos: Any  # [tokens, head_dim / 2] float32
    sin: Any
    scales: Any  # [2, kv_heads] float32, of K and of V; None where they are numbers
    first: Any  # [1]: the block of the pool that slots are counted from; None: 0


def write_kv(
    pool: tuple[Blocks, Blocks],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slot_mapping: Int32[Array, " tokens"],
    *,
    rope: tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]] | None = None,
    scales: KVScales = (1.0, 1.0),
    first: Int32[Array, ""] | None = None,
    interpret: Any = False,
) -> tuple[Blocks, Blocks]:
    """Write each token's k and v into its slot, in place where the pool is donated.

    Slots are counted from the block `first` of the pool, which is then the null block (None: 0).

    With `rope`, the float32 cosines and sines of each token, k is rotated first: the halves of a
    head against each other, and rounded to k's type. A pool of float8_e4m3fn holds k and v divided
    by their `scales`, saturated; others hold k and v as they
    are and take no scales. Tokens whose slot is in the null block 0 are padding and are not
    written. Raises ValueError where head_dim is not a multiple of 64.
    """
    tokens, kv_heads, head_dim = k.shape
    _check(head_dim, pool[0].dtype == FP8, scales)
    heads = next(n for n in range(MOST_HEADS, 0, -1) if kv_heads % n == 0)
    tiles = -(-tokens // TOKENS)

    def padded(x: Any) -> Any:
        """Fill the last tile up; its slots are then 0, in the null block."""
        return jnp.pad(x, [(0, tiles * TOKENS - tokens), *[(0, 0)] * (x.ndim - 1)])

    by_token = Arrays(k, v, slot_mapping, *(rope or (None, None)), None, None)
    origin = None if first is None else first.reshape(1)
    arrays = jax.tree.map(padded, by_token)._replace(scales=scales_in_memory(scales), first=origin)
    leaves, tree = jax.tree.flatten(apart(arrays))
    written = jax.new_ref(pool[0]), jax.new_ref(pool[1])
    shape = TOKENS, staged_rows(heads, head_dim * pool[0].dtype.itemsize), head_dim
    staged = plgpu.SMEM(shape, pool[0].dtype)
    plgpu.kernel(
        functools.partial(_write_kernel, tree, scales, heads),
        scratch_types=dict(staged_k=staged, staged_v=staged),
        grid=(tiles, kv_heads // heads),
        grid_names=("tile", "heads"),
        kernel_name="write_kv",
        interpret=interpret,
    )(*leaves, *written)
    return written[0][...], written[1][...]


def _check(head_dim: int, quantised: bool, scales: KVScales) -> None:
    if head_dim % (2 * LANES):
        raise ValueError(f"write_kv: head_dim {head_dim} is not a multiple of {2 * LANES}")
    if not quantised and not (isinstance(scales, tuple) and scales == (1, 1)):
        raise ValueError(f"write_kv: scales are for pools of {jnp.dtype(FP8)} only")


def _write_kernel(
    tree: Any,
    scales: KVScales,
    count: int,
    *refs: Any,
    staged_k: Any,
    staged_v: Any,
) -> None:
    arrays, pool = jax.tree.unflatten(tree, refs[:-2]), refs[-2:]
    begin = lax.axis_index("tile") * TOKENS
    tile, first_head = pl.ds(begin, TOKENS), lax.axis_index("heads") * count
    # All loads come before the first store: they are under way together.
    k, v = (_load_halves(source.at[tile], first_head, count) for source in (arrays.k, arrays.v))
    if arrays.cos is not None:
        cos, sin = _load(arrays.cos.at[tile]), _load(arrays.sin.at[tile])
        k = [_rotated(*halves, cos, sin) for halves in k]
    for i, (staged, heads) in enumerate(((staged_k, k), (staged_v, v))):
        for head, (first, second) in enumerate(heads):
            scale = scales_of_head(scales, arrays.scales, first_head + head)[i]
            half = first.shape[1]
            staged[:, head, :half] = stored(first, staged.dtype, scale)
            staged[:, head, half:] = stored(second, staged.dtype, scale)
    plgpu.commit_smem()
    heads, first = pl.ds(first_head, count), 0 if arrays.first is None else arrays.first[0]
    for i in range(TOKENS):
        token = tuple(staged.at[i, pl.ds(0, count)] for staged in (staged_k, staged_v))
        _store(arrays.slots[begin + i], first, heads, token, pool)
    plgpu.wait_smem_to_gmem(0)


def _load_halves(tile: Any, first_head: jax.Array, count: int) -> list[tuple[Any, Any]]:
    """Load `count` heads of `[TOKENS, kv_heads, head_dim]`, as the two halves of each."""
    half = tile.shape[-1] // 2
    heads = [tile.at[:, first_head + i] for i in range(count)]
    return [(_load(x.at[:, pl.ds(0, half)]), _load(x.at[:, pl.ds(half, half)])) for x in heads]


def _load(ref: Any) -> jax.Array:
    """Load a `[TOKENS, n * LANES]` tile: a token a warp, neighbouring columns a lane."""
    columns = ref.shape[1]
    tiling = plgpu.Tiling(((TOKENS, columns), (columns // LANES,)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    return plgpu.load(ref, layout=layout, optimized=False)


def _rotated(
    first: jax.Array, second: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Rotate the halves against each other (arXiv 2104.09864), in float32, as the model does."""
    a, b = first.astype(jnp.float32), second.astype(jnp.float32)
    return (a * cos - b * sin).astype(first.dtype), (b * cos + a * sin).astype(first.dtype)


def stored(values: jax.Array, dtype: Any, scale: float | jax.Array) -> jax.Array:
    """Convert to the pool's type; fp8 saturates, where a plain conversion may give NaN."""
    if dtype != FP8:
        return values.astype(dtype)
    scaled = values.astype(jnp.float32) / scale
    return jnp.clip(scaled, -LARGEST_FP8, LARGEST_FP8).astype(dtype)


def _store(
    slot: jax.Array,
    first: int | jax.Array,
    heads: Any,
    staged: tuple[Any, Any],
    pool: tuple[Any, Any],
) -> None:
    """Copy a token's K and V into their slot, if that is not in the null block."""
    block_size = jnp.int32(pool[0].shape[2])
    block, offset = lax.div(slot, block_size), lax.rem(slot, block_size)

    @pl.when(block > 0)
    def _() -> None:
        for source, blocks in zip(staged, pool, strict=True):
            plgpu.copy_smem_to_gmem(source, blocks.at[first + block, heads, offset])
