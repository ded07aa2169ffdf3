"""Parts of a model: modules whose weights the weight table has under their names."""

from typing import Any, ClassVar

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.call import CodeKind
from pallas_kernels.head_terms import Projected
from shiftjax.arch.config import ModelConfig
from shiftjax.models.four_bits import is_packed
from shiftjax.models.layers import Context
from shiftjax.models.leaves import row_product
from shiftjax.models.lora import added_in, added_out
from shiftjax.models.product_backend import XLA_PRODUCTS, Products
from shiftjax.models.products import (
    Activations,
    Matrix,
    block_of,
    project_joined,
    project_out,
    project_parts,
    result_type,
)
from shiftjax.models.stream import Addend
from shiftjax.parallel.blocks import BLOCK
from shiftjax.parallel.four_bits import ZERO
from shiftjax.parallel.stored import INPUTS, SCALE

Params = dict[str, Any]  # name -> nnx.Param, or the Params of a part


class Part(nnx.Module):
    """A part of a model, with the weights that the table has under its name."""

    read: ClassVar[tuple[str, ...]] = ()  # matrices that read what the part is given, and only they

    def __init__(self, config: ModelConfig, params: Params):
        self.config = config
        for name, param in params.items():
            setattr(self, name, param)

    @property
    def reads_codes(self) -> bool:
        """Whether all that the part is given becomes codes, each block in units of its own."""
        own = [name for name in self.read if hasattr(self, name)]
        return bool(own) and all(
            hasattr(self, f"{name}{SCALE}")
            and not hasattr(self, f"{name}{INPUTS}")
            and not is_packed(getattr(self, name)[...])
            for name in own
        )

    def _out(
        self, x: Activations, name: str, products: Products = XLA_PRODUCTS
    ) -> Float[Array, "..."]:
        """Multiply by a column-parallel matrix, stored `[*outputs, in]`: `[tokens, *outputs]`."""
        out = project_out(x, self.column(name), products)
        return out.reshape(out.shape[0], *getattr(self, name)[...].shape[:-1])

    def read_by(
        self, x: Activations, names: tuple[str, ...], context: Context
    ) -> list[Float[Array, "..."]]:
        """Multiply by column-parallel matrices, in one launch where that can be.

        With what adapters add.
        """
        outs = project_joined(x, self.columns(x, names, context), context.products)
        sizes = (getattr(self, name)[...].shape[:-1] for name in names)
        return [out.reshape(out.shape[0], *size) for out, size in zip(outs, sizes, strict=True)]

    def parts_of(self, x: Activations, names: tuple[str, ...], context: Context) -> Projected:
        """Multiply by them as `read_by`, for a kernel that adds up parts of the sums."""
        return project_parts(x, self.columns(x, names, context), context.products)

    def columns(
        self, x: Activations, names: tuple[str, ...], context: Context
    ) -> tuple[Matrix, ...]:
        """Return column-parallel matrices that read `x`, with what adapters add."""
        added = added_out(self, x, names, context.slot, context.products)
        pairs = zip(map(self.column, names), added, strict=True)
        return tuple(matrix._replace(added=one) for matrix, one in pairs)

    def _in(
        self,
        x: Activations,
        name: str,
        context: Context,
        dtype: DTypeLike | None = None,
    ) -> Float[Array, "*leaves tokens out"]:
        """Multiply by a row-parallel matrix, stored `[*inputs, out]`, or in blocks of codes.

        With what adapters add.
        """
        added = added_in(self, x, name, context.slot, context.products)
        matrix = self.row(name)._replace(added=added)
        return row_product(x, matrix, context.products, context.parallel, dtype)

    def _added(
        self,
        x: Activations,
        name: str,
        context: Context,
        bias: Float[Array, " hidden"] | None,
        dtype: DTypeLike | None = None,
    ) -> Addend:
        """Return what a row-parallel matrix adds to a stream of a type, else of that of `x`."""
        partial = self._in(x, name, context, dtype)
        return Addend(partial, bias, is_partial=True, dtype=result_type(x, dtype))

    def has_codes(self, name: str) -> bool:
        """Whether a row-parallel matrix multiplies codes."""
        matrix = self.row(name)
        return matrix.scale is not None and not is_packed(matrix.values)

    def _codes_into(self, name: str) -> CodeKind | None:
        """Return what a row-parallel matrix's inputs are in units of, if kernels may make codes.

        None: it multiplies numbers, or shares scales among other inputs than kernels do.
        """
        matrix = self.row(name)
        if not self.has_codes(name) or block_of(matrix) != BLOCK:
            return None
        return CodeKind(matrix.inputs)

    def column(self, name: str) -> Matrix:
        """Return a column-parallel matrix as its products take it."""
        values = getattr(self, name)[...]
        return self._matrix(name, values.reshape(-1, values.shape[-1]), values.ndim)

    def row(self, name: str) -> Matrix:
        """Return a row-parallel matrix as its products take it."""
        values = getattr(self, name)[...]
        kept = 2 if hasattr(self, f"{name}{SCALE}") else 1
        return self._matrix(name, values.reshape(-1, *values.shape[-kept:]), 2)

    def _matrix(self, name: str, values: Array, of_blocks: int) -> Matrix:
        """Return a matrix with its scales, and with what its inputs are in units of, if it is.

        Scales of square blocks have at least `of_blocks` dimensions.
        """
        parts = (getattr(self, f"{name}{suffix}", None) for suffix in (SCALE, INPUTS, ZERO))
        scale, inputs, zero = (None if each is None else each[...] for each in parts)
        if scale is None:
            return Matrix(values)
        if not is_packed(values):
            kept = scale.shape[-1:] if scale.ndim >= of_blocks else ()
            scale = scale.reshape(-1, *kept)
        elif values.ndim == 2:  # column-parallel, perhaps of heads
            scale = scale.reshape(-1, scale.shape[-1])
            zero = None if zero is None else zero.reshape(scale.shape)
        return Matrix(values, scale, inputs, zero)
