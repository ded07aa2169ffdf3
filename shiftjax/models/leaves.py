"""Products with row-parallel weights: what a device adds to the sum over all that split them."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from shiftjax.models.exchange import Parallel
from shiftjax.models.product_backend import Products
from shiftjax.models.products import Activations, Codes, Matrix, project_in
from shiftjax.models.sums import SUMS


def row_product(
    x: Activations,
    matrix: Matrix,
    products: Products,
    parallel: Parallel,
    dtype: DTypeLike | None = None,
) -> Float[Array, "*leaves tokens out"]:
    """Return what this device adds, as `Parallel.sum` takes it.

    Where the setting `numerics` rounds before the sum it is of `dtype`, else float32.
    """
    numerics = parallel.numerics
    if not numerics.is_strict:
        return project_in(x, matrix, products, jnp.float32 if numerics.is_wide else dtype)
    leaves = _leaves_of(x, matrix, parallel.num_leaves)
    parts = [project_in(own, of_leaf, products, jnp.float32) for own, of_leaf in leaves]
    if matrix.scale is not None and len(parts) > 1:
        # XLA:CPU would multiply by a scale and add as one operation, which rounds once; a device
        # with one leaf has nothing to add.
        parts = jax.lax.optimization_barrier(parts)
    return SUMS[numerics.name].own(parts)


def _leaves_of(x: Activations, matrix: Matrix, num: int) -> Iterator[tuple[Activations, Matrix]]:
    """Cut the inputs of a matrix, and of what it multiplies."""
    if num == 1:
        yield x, matrix
        return
    values = x.values if isinstance(x, Codes) else x
    width, rows = values.shape[1] // num, matrix.values.shape[0] // num
    for nth in range(num):
        own = values[:, nth * width : (nth + 1) * width]
        if isinstance(x, Codes):
            blocks = x.scale.shape[0] // num
            own = Codes(own, x.scale[nth * blocks : (nth + 1) * blocks])
        yield own, matrix._replace(values=matrix.values[nth * rows : (nth + 1) * rows])
