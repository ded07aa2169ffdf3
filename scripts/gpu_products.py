"""Products with row-parallel matrices as steps make them, of e4m3 codes and of bfloat16.

Inputs become codes on the way, a scale for each token and block (`shiftjax/models/products.py`).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from gpu_parts import Run

from pallas_kernels.measure import Calls, chain_seconds
from shiftjax.arch.formats import Formats
from shiftjax.costs.kernel_costs import KernelCosts
from shiftjax.costs.machine import Machine
from shiftjax.models.products import Matrix, in_blocks, project_in, quantise
from shiftjax.parallel.blocks import BLOCK

COPIES = 2  # of a matrix, in turns, so that no cache holds what is read
PLAIN = "bfloat16"
# Of codes: the product and its scaling; the largest number of each row, and the codes.
COUNTS = {PLAIN: {"launches": 1}, "float8_e4m3fn": {"launches": 2, "quantises": 2}}


class ProductShape(NamedTuple):
    """Tokens times a square matrix."""

    tokens: int
    width: int = 8192
    dtype: str = "float8_e4m3fn"  # of the matrix

    @property
    def flops(self) -> int:
        """Operations, two for a product and its sum."""
        return 2 * self.tokens * self.width**2

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the matrix."""
        return self.width**2 * jnp.dtype(self.dtype).itemsize


PRODUCTS = {
    "codes, 8 tokens": ProductShape(8),
    "codes, 8 tokens, 16,384 wide": ProductShape(8, 16_384),
    "codes, 64 tokens": ProductShape(64),
    "codes, 4,096 tokens": ProductShape(4096),
    "bfloat16, 8 tokens": ProductShape(8, dtype=PLAIN),
    "bfloat16, 8 tokens, 16,384 wide": ProductShape(8, 16_384, dtype=PLAIN),
    "bfloat16, 4,096 tokens": ProductShape(4096, dtype=PLAIN),
}
DRY = {
    "dry": ProductShape(4, 64),
    "dry, in 2 blocks": ProductShape(4, 256),
    "dry, bfloat16": ProductShape(4, 64, dtype=PLAIN),
}


def product_rows(run: Run) -> Iterator[dict[str, Any]]:
    """Time each, beside the copy and the GEMM of bfloat16 that were measured.

    `of_copy` counts the bytes of the matrix. Rows are products as
    `shiftjax/sim/measured_kernels.py` reads them.
    """
    ceilings = run.ceilings
    for name, shape in (DRY if run.dry else PRODUCTS).items():
        seconds = chain_seconds(_calls(shape), run.effort)
        of_gemm = shape.flops / seconds / ceilings.flops_per_second
        of_copy = shape.matrix_bytes / seconds / ceilings.bytes_per_second
        row = {"row": name, "us": seconds * 1e6, "of_gemm": of_gemm, "of_copy": of_copy}
        yield row | _as_kernel(shape)


def _as_kernel(shape: ProductShape) -> dict[str, Any]:
    sizes = {"rows": shape.tokens, "inner": shape.width, "columns": shape.width}
    return {"kernel": "product", "shape": sizes | {"dtype": shape.dtype}} | COUNTS[shape.dtype]


def _calls(shape: ProductShape) -> Calls:
    key, *keys = jax.random.split(jax.random.key(5), 1 + COPIES)
    matrices = []
    for each in keys:
        plain = jax.random.normal(each, (shape.width, shape.width)) * shape.width**-0.5
        if shape.dtype == PLAIN:
            matrices.append((Matrix(plain.astype(PLAIN)),))
            continue
        codes, scale = quantise(plain)
        matrices.append((Matrix(in_blocks(codes, max(1, shape.width // BLOCK)), scale),))
    x = jax.random.normal(key, (shape.tokens, shape.width), jnp.bfloat16)
    return Calls(project_in, x, matrices)


def predicted_seconds(shape: ProductShape, machine: Machine) -> float:
    """By the machine's constants, whose products of codes quantise their inputs, too."""
    weights = PLAIN if shape.dtype == PLAIN else "fp8"
    alone = replace(machine, sustained_efficiency=1.0)  # kernels by themselves
    costs = KernelCosts(alone, Formats(weights, "bfloat16", "bfloat16"))
    return costs.product(shape.tokens, shape.width, shape.width)
