"""Queries as kernels of attention read them: of the type of their operands, by KV head."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Queries:
    """Queries that are ready; to whom asks for shape and type they are those of the model."""

    values: Float[Array, "tokens kv_heads rows head_dim"]  # rows: query heads, then zeros
    heads: int = field(metadata={"static": True})
    dtype: DTypeLike = field(metadata={"static": True})  # of what attention returns

    @property
    def shape(self) -> tuple[int, int, int]:
        """Tokens, query heads, head_dim."""
        return self.values.shape[0], self.heads, self.values.shape[-1]


def operand_type(dtype: DTypeLike, pool_dtype: DTypeLike) -> DTypeLike:
    """Return the type of what kernels of attention multiply; float16 holds every code of 8 bits."""
    are_codes = jnp.dtype(pool_dtype) == jnp.float8_e4m3fn
    return jnp.dtype(jnp.float16 if are_codes else dtype)


def by_kv_head(
    q: jax.Array | Queries, size: tuple[int, int, int], dtype: DTypeLike
) -> Float[Array, "count kv_heads rows head_dim"]:
    """Return the queries of at least `count` tokens, `rows` of each KV head; `size` has the three.

    What is ready already costs no launch.
    """
    count, kv_heads, rows = size
    if isinstance(q, Queries):
        if q.values.shape[2] == rows:
            return q.values
        values = q.values[:count, :, : q.heads // kv_heads]
    else:
        values = q[:count].reshape(count, kv_heads, q.shape[1] // kv_heads, q.shape[2])
    added = rows - values.shape[2]
    return jnp.pad(values.astype(dtype), ((0, 0), (0, 0), (0, added), (0, 0)))


def by_head(q: jax.Array | Queries, dtype: DTypeLike) -> Float[Array, "tokens heads head_dim"]:
    """Return the queries head by head."""
    if not isinstance(q, Queries):
        return q.astype(dtype)
    group = q.heads // q.values.shape[1]
    return q.values[:, :, :group].reshape(q.shape)
