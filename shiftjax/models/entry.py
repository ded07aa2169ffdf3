"""Heads of a layer to attention in one launch, where its backend has one: `entry_backend.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pallas_kernels.head_terms import Given
from shiftjax.models.attention import LayerPool, LayerTerms
from shiftjax.models.entry_backend import EntryShape, entry_shape, why_not_entered
from shiftjax.models.layers import Context
from shiftjax.models.products import Activations, result_type

if TYPE_CHECKING:
    from shiftjax.models.llama import Attention

NAMES = "q", "k", "v"


def enter_heads(
    layer: Attention, x: Activations, pool: LayerPool, context: Context
) -> tuple[Any, LayerPool, LayerTerms] | None:
    """Return queries as attention takes them, the pool with keys and values, and the layer's terms.

    None: there is no such launch, heads are exchanged, or the model's own operations make them.
    """
    config, kind, backend = layer.config, layer.kind, context.backend
    if backend.enter is None or context.parallel.splits_tokens or why_not_entered(config, kind):
        return None
    if (run := backend.enter(_shape(layer, x, pool))) is None:
        return None
    tables = biases = norms = None
    if kind.has_rope:
        cos, sin, _ = layer.rope(context)
        assert cos is not None and sin is not None
        tables = cos, sin
    if config.attention_bias:
        biases = tuple(getattr(layer, f"{name}_bias")[...].reshape(-1) for name in NAMES)
    if config.qk_norm:
        norms = layer.q_norm[...], layer.k_norm[...]
    parts = layer.parts_of(x, NAMES, context.products)
    terms = layer.terms(context.place, context.parallel)
    return *run(parts, Given(tables, biases, norms), pool, context.metadata, terms), terms


def _shape(layer: Attention, x: Activations, pool: LayerPool) -> EntryShape:
    """Return the heads of this device."""
    heads, kv_heads = (each[...].shape[0] for each in (layer.q, layer.k))
    shape = entry_shape(layer.config, layer.kind, (result_type(x), pool[0].dtype))
    return shape._replace(heads=heads, kv_heads=kv_heads)
