"""What multiplying codes adds to a layer, beside the products: kernels, and what they move. No JAX.

As `models/products.py` does it and XLA fuses it. The norms give codes in the place of what they
normed, which costs nothing. Before the product with o its input is read twice, for the largest of a
block and for its codes; before that with down once, for the activation finds the largest. Where a
device has several blocks, each has a product of its own, whose float32 sums are written and read
again to be added.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shiftjax.arch.formats import FORMATS, Formats
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout

_SUM_BYTES = 4  # float32


class Quantising(NamedTuple):
    """What quantising activations adds to a layer, on one device."""

    num_kernels: int = 0
    num_bytes: int = 0  # read and written


def quantising(
    kernels: Sequence[int], layout: Layout, mode: Mode, num_tokens: int, formats: Formats
) -> Quantising:
    """What a layer with an MLP adds for `num_tokens`, a multiple of the mode's sp; or nothing.

    `kernels` are an engine's `quantising_kernels`; without any, its norms and activations quantise
    in passing.
    """
    if not kernels or not formats.has_codes_of_inputs:
        return Quantising()
    model, ways, local = layout.model, layout.ways(mode), num_tokens // mode.sp
    blocks = layout.padded_for // ways
    plain, codes = formats.activation_bytes, FORMATS[formats.weights].dtype.itemsize
    heads, inner = layout.num_heads * model.head_dim // ways, layout.intermediate_size // ways
    num_bytes = heads * (2 * plain + codes) + inner * (plain + codes)
    if blocks > 1:
        num_bytes += 2 * blocks * model.hidden_size * 2 * _SUM_BYTES
    index = min((blocks - 1).bit_length(), len(kernels) - 1)
    return Quantising(kernels[index], local * num_bytes)
