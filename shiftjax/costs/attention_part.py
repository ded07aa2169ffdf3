"""Seconds of the matrix products of a layer's attention, by its kind. No JAX."""

from shiftjax.arch.config import LayerParts
from shiftjax.costs.kernel_costs import KernelCosts, Product
from shiftjax.costs.leaf_part import row_product
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout


def attention_products(
    kernels: KernelCosts,
    layout: Layout,
    mode: Mode,
    rows: int,
    parts: LayerParts,
    queries: Mode | None = None,
) -> tuple[float, int]:
    """(seconds, kernels) of all of them with `rows` tokens on the device.

    q and o are used as in the mode `queries`; None: as in the step's own.
    """
    heads, columns = layout.attention_columns(mode, parts.num_kv, queries)
    out, num_out = row_product(kernels, layout, mode, rows, heads)
    if layout.model.latent is None:
        return kernels.product(rows, layout.model.hidden_size, columns) + out, 1 + num_out
    seconds, num_kernels = _latent_products(kernels, layout, mode, rows)
    return seconds + out, num_kernels + num_out


def _latent_products(
    kernels: KernelCosts, layout: Layout, mode: Mode, rows: int
) -> tuple[float, int]:
    """The same of MLA, without the last: `models/mla.py`.

    Projections down are whole on every device. What makes keys and values of latents is that of
    own heads, of all tokens; both have the activations' format.
    """
    latent, hidden = layout.model.latent, layout.model.hidden_size
    assert latent is not None
    narrow, tokens = latent.query_rank, rows * mode.sp
    heads, own = layout.num_heads // layout.ways(mode), layout.heads_per_device
    plain = [
        Product(rows, hidden, latent.width),
        Product(tokens, latent.nope_dim, latent.rank, own),
        Product(tokens, latent.rank, latent.value_dim, own),
    ]
    if narrow is not None:
        plain.append(Product(rows, hidden, narrow))
    queries = kernels.product(rows, narrow or hidden, heads * latent.query_dim)
    return sum(map(kernels.plain, plain)) + queries, len(plain) + 1


def absorbed_numbers(layout: Layout) -> int:
    """Numbers of a token that a device puts in front of the rotated ones of its query heads."""
    latent = layout.model.latent
    return 0 if latent is None else 2 * layout.heads_per_device * latent.width
