"""The device memory of the KV cache: one K and one V array per layer, sharded by heads."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from shiftjax.device.mesh import named, pool_spec
from shiftjax.models.attention import LayerPool, pool_shape
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
