"""What adapters add to products: to each token what its slot holds, to others nothing.

All slots are multiplied at once, in the middle a token keeps what its own slot gave, and zeros of
all others: two products with plain matrices, slots * rank wide between them (`arch/lora.py`). For
up to some 128 that is as quick as tiles of tokens sorted by adapter (docs/results/lora.md). No
order has to be found, and a token's numbers do not depend on the others'. (Tokens sorted: arXiv
2310.18547, section 4, and 2311.03285, section 5.)

The first product is made here, the second one goes along with the matrix's own (`LowRank`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from shiftjax.arch.lora import A, B, read_together
from shiftjax.models.operands import Groups, LowRank, Operand, kept
from shiftjax.models.product_backend import Products, in_plain_blocks
from shiftjax.models.products import Activations, Codes, Matrix, block_of, numbers, result_type

if TYPE_CHECKING:
    from shiftjax.models.part import Part

Slot = Int[Array, " tokens"] | None  # of each token, or one that there is not; None: no token has


def added_out(
    part: Part, x: Activations, names: tuple[str, ...], slot: Slot, products: Products
) -> list[LowRank | None]:
    """Return what adapters add to column-parallel products of one input."""
    together = [name for name in read_together(names[0]) if hasattr(part, f"{name}{B}")]
    if slot is None or not together:
        return [None] * len(names)
    a = getattr(part, f"{together[0]}{A}")[...]
    _, num, rank, inputs = a.shape
    a, plain = a.reshape(-1, inputs), _numbers(x, part.column(names[0]))
    groups = Groups(num, rank, slot)
    inner = products.grouped(plain, Operand(a), groups)
    if inner is None:
        inner = kept(jnp.einsum("ti,ci->tc", plain, a), groups)
    added: list[LowRank | None] = []
    for name in names:
        b = getattr(part, f"{name}{B}")[...].reshape(-1, num * rank)
        added.append(LowRank(inner, together.index(name) * num * rank, b))
    return added


def added_in(
    part: Part, x: Activations, name: str, slot: Slot, products: Products
) -> LowRank | None:
    """Return what adapters add to a row-parallel product.

    Like the product, it is this device's part of a sum over all that split the inputs.
    """
    if slot is None or not hasattr(part, f"{name}{A}"):
        return None
    a, b = getattr(part, f"{name}{A}")[...], getattr(part, f"{name}{B}")[...]
    num, rank, outputs = b.shape
    a, plain = a.reshape(-1, num * rank), _numbers(x, part.row(name))
    groups, blocks, inner = Groups(num, rank, slot), in_plain_blocks(a), None
    if blocks is not None:
        inner = products.grouped(plain, Operand(blocks), groups)
    if inner is None:
        inner = kept(jnp.einsum("ti,ic->tc", plain, a), groups)
    return LowRank(inner, 0, b.reshape(-1, outputs), turned=True)


def _numbers(x: Activations, matrix: Matrix) -> jax.Array:
    """Return activations as a matrix reads them: what codes say, where it reads codes."""
    return numbers(x, block_of(matrix), result_type(x)) if isinstance(x, Codes) else x
