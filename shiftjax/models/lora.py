"""What adapters add to products: to each token what its slot holds, to others nothing.

All slots are multiplied at once, in the middle a token keeps what its own slot gave, and zeros of
all others: two products with plain matrices, slots * rank wide between them (`arch/lora.py`). For
up to some 128 that is as quick as tiles of tokens sorted by adapter (docs/results/lora.md). No
order has to be found, and a token's numbers do not depend on the others'. (Tokens sorted: arXiv
2310.18547, section 4, and 2311.03285, section 5.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from shiftjax.arch.lora import A, B, read_together
from shiftjax.models.products import Activations, Codes, Matrix, block_of, numbers, result_type

if TYPE_CHECKING:
    from shiftjax.models.part import Part

Middle = Float[Array, "tokens slots_rank"]


def added_out(
    part: Part, x: Activations, names: tuple[str, ...], slot: Int[Array, " tokens"] | None
) -> list[Float[Array, "tokens out"]] | None:
    """Return what adapters add to column-parallel products of one input; None: nothing.

    `slot` is that of each token, or one that there is not.
    """
    together = [name for name in read_together(names[0]) if hasattr(part, f"{name}{B}")]
    if slot is None or not together:
        return None
    a = getattr(part, f"{together[0]}{A}")[...]
    num, _, rank, inputs = a.shape
    plain = _numbers(x, part.column(names[0]))
    middle = jnp.einsum("ti,ci->tc", plain, a.reshape(-1, inputs))
    middle = of_slot(middle.reshape(-1, num, len(together) * rank), slot)
    middle = middle.reshape(-1, num, len(together), rank)
    added = []
    for name in names:
        b = getattr(part, f"{name}{B}")[...]
        own = middle[:, :, together.index(name)].reshape(-1, num * rank)
        added.append(jnp.einsum("tc,oc->to", own, b.reshape(-1, num * rank)))
    return added


def added_in(
    part: Part, x: Activations, name: str, slot: Int[Array, " tokens"] | None, dtype: DTypeLike
) -> Float[Array, "tokens out"] | None:
    """Return what adapters add to a row-parallel product, of `dtype`; None: nothing.

    Like the product, it is this device's part of a sum over all that split the inputs.
    """
    if slot is None or not hasattr(part, f"{name}{A}"):
        return None
    a, b = getattr(part, f"{name}{A}")[...], getattr(part, f"{name}{B}")[...]
    num, rank, outputs = b.shape
    middle = jnp.einsum("ti,ic->tc", _numbers(x, part.row(name)), a.reshape(-1, num * rank))
    middle = of_slot(middle.reshape(-1, num, rank), slot).reshape(-1, num * rank)
    b = b.reshape(-1, outputs)
    return jnp.einsum("tc,co->to", middle, b, preferred_element_type=jnp.dtype(dtype))


def of_slot(
    middle: Float[Array, "tokens slots rank"], slot: Int[Array, " tokens"]
) -> Float[Array, "tokens slots rank"]:
    """Return zeros for slots that are not a token's, whatever those hold."""
    is_own = slot[:, None] == jnp.arange(middle.shape[1])[None]
    return jnp.where(is_own[..., None], middle, 0)


def _numbers(x: Activations, matrix: Matrix) -> jax.Array:
    """Return activations as a matrix reads them: what codes say, where it reads codes."""
    return numbers(x, block_of(matrix), result_type(x)) if isinstance(x, Codes) else x
