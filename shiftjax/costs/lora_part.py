"""Seconds of what adapters add to a layer's products, in steps in which some token has one. No JAX.

Every slot is multiplied, whichever adapters a step has (`models/lora.py`). Launches are as compiled
steps of Llama-70B have them (`tests/compile/test_lora_steps.py`).
"""

import math

from pallas_kernels.grouped_split import MOST_PARTS, PART, reading_share
from shiftjax.arch.config import LayerParts
from shiftjax.arch.lora import A, factors_of
from shiftjax.arch.weights import weights_of
from shiftjax.costs.kernel_costs import KernelCosts, Product
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout

OF_CODES = 7  # launches that make numbers of codes for factors
FEW_ROWS = 64  # up to which GPUs multiply by factors in kernels


def lora_products(
    kernels: KernelCosts, layout: Layout, mode: Mode, rows: int, parts: LayerParts
) -> tuple[float, int]:
    """(seconds, kernels) of a layer with so many tokens on the device; none without slots.

    Of few rows GPUs have a launch for each first factor, and the second goes along with the
    product that it adds to.
    """
    slots = layout.model.lora
    if slots is None:
        return 0.0, 0
    goes_along = rows <= FEW_ROWS and not kernels.machine.shared_cores
    name = f"layers.{layout.model.parts.index(parts)}."
    own = (weight for weight in weights_of(layout.model) if weight.name.startswith(name))
    seconds, added = 0.0, 0
    num_kernels = OF_CODES if kernels.formats.has_codes_of_inputs else 0
    for factor in map(layout.stored, factors_of(own, slots)):
        sizes = zip(factor.axes, factor.shape, strict=True)
        numbers = math.prod(layout.local_size(axis, size, mode) for axis, size in sizes)
        width, is_a = slots.num * slots.rank, factor.name.endswith(A)
        if goes_along and not is_a:
            seconds += kernels.moved(numbers * kernels.formats.activation_bytes)
            continue
        if is_a and factor.axes[0] is None:
            width *= factor.shape[0]  # of all that read one input
        other, reading = numbers // width, 1.0
        if goes_along:  # of few channels: no more thread blocks read than a cluster has
            items = float(-(-width // PART) * MOST_PARTS)
            reading = reading_share(items, kernels.machine.compute_units)
        own_product = Product(rows, *((other, width) if is_a else (width, other)))
        seconds += kernels.plain(own_product, reading)
        num_kernels += 1
        if is_a:  # zeros for other slots
            num_kernels += not goes_along
        elif factor.axes[0] is not None:
            added += other
            num_kernels += ".attention." in factor.name
    moved = 3 * rows * added * kernels.formats.activation_bytes
    return seconds + kernels.moved(moved), num_kernels
