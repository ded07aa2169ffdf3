"""The device memory of the KV cache: one K and one V array per layer, sharded by heads."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from shiftjax.device.mesh import named, pool_spec
from shiftjax.models.attention import Blocks, LayerPool, pool_shape
from shiftjax.parallel.layout import Layout


@dataclass(frozen=True)
class PoolOptions:
    """The KV pool of a group."""

    num_blocks: int  # the null block 0 included
    block_size: int  # tokens
    blocks_per_seq: int  # of the longest sequence
    dtype: np.dtype


def make_pools(
    mesh: Mesh, layout: Layout, num_blocks: int, block_size: int, dtype: DTypeLike
) -> list[LayerPool]:
    """Allocate zeroed pools; block 0 is the null block that padding reads and writes."""
    abstract = abstract_pools(mesh, layout, num_blocks, block_size, dtype)
    zeros = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract),
        out_shardings=named(mesh, pool_spec()),
    )
    return zeros()


def abstract_pools(
    mesh: Mesh, layout: Layout, num_blocks: int, block_size: int, dtype: DTypeLike
) -> list[tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """Describe the pools: what compiling a step needs to know of them."""
    kv_heads = layout.kv_heads_per_device * layout.num_devices
    shape = pool_shape(num_blocks, kv_heads, block_size, layout.model.head_dim)
    pool = jax.ShapeDtypeStruct(shape, dtype, sharding=named(mesh, pool_spec()))
    return [(pool, pool) for _ in range(layout.model.num_layers)]


def copy_blocks(pools: list[LayerPool], copies: Int[Array, "copies 2"]) -> list[LayerPool]:
    """Copy the contents of blocks to new blocks, `(block, new block)`, in all layers.

    Pairs with the null block are padding and come last. As many turns of a loop as there are
    copies: a step without any pays for none, and the pools stay where they are.
    """

    def copy(i: Int[Array, ""], pools: list[LayerPool]) -> list[LayerPool]:
        old, new = copies[i, 0], copies[i, 1]
        return [(_copy(k, old, new), _copy(v, old, new)) for k, v in pools]

    return jax.lax.fori_loop(0, jnp.count_nonzero(copies[:, 1]), copy, pools)


def _copy(blocks: Blocks, old: Int[Array, ""], new: Int[Array, ""]) -> Blocks:
    block = jax.lax.dynamic_index_in_dim(blocks, old)
    return jax.lax.dynamic_update_index_in_dim(blocks, block, new, 0)
