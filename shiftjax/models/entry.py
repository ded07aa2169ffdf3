"""Heads of a layer to attention in one launch, where its backend has one: `entry_backend.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxtyping import Array

from pallas_kernels.head_terms import Given, Projected
from shiftjax.models.attention import LayerPool, LayerTerms
from shiftjax.models.entry_backend import EntryShape, entry_shape, why_not_entered
from shiftjax.models.exchange import Parallel
from shiftjax.models.layers import Context
from shiftjax.models.products import Activations, result_type

if TYPE_CHECKING:
    from shiftjax.models.llama import Attention

NAMES = "q", "k", "v"


def enter_heads(
    layer: Attention, x: Activations, pool: LayerPool, context: Context
) -> tuple[Any, LayerPool, LayerTerms] | None:
    """Return queries as attention takes them, the pool with keys and values, and the layer's terms.

    Where tokens are exchanged for heads, heads are as the product gives them until they are. None:
    there is no such launch, or the model's own operations make heads.
    """
    config, kind, backend = layer.config, layer.kind, context.backend
    if backend.enter is None or why_not_entered(config, kind):
        return None
    if (run := backend.enter(_shape(layer, x, pool, context.parallel))) is None:
        return None
    tables = norms = None
    if kind.has_rope:
        cos, sin, _ = layer.rope(context, whole=True)
        assert cos is not None and sin is not None
        tables = cos, sin
    if config.qk_norm:
        norms = layer.q_norm[...], layer.k_norm[...]
    parts, biases = _projected(layer, x, context)
    terms = layer.terms(context.place, context.parallel)
    return *run(parts, Given(tables, biases, norms), pool, context.metadata, terms), terms


def _projected(
    layer: Attention, x: Activations, context: Context
) -> tuple[Projected, tuple[Array, ...] | None]:
    """Return what products give of this device's heads, and the biases that are to be added."""
    if context.parallel.splits_tokens:
        heads = context.parallel.scatter_joined(*layer.heads_of(x, NAMES, context))
        return Projected((heads.reshape(heads.shape[0], -1),)), None
    biases = None
    if layer.config.attention_bias:
        biases = tuple(getattr(layer, f"{name}_bias")[...].reshape(-1) for name in NAMES)
    return layer.parts_of(x, NAMES, context), biases


def _shape(layer: Attention, x: Activations, pool: LayerPool, parallel: Parallel) -> EntryShape:
    """Return the heads with which this device attends."""
    own = parallel.query_heads, parallel.layout.kv_heads_per_device
    shape = entry_shape(layer.config, layer.kind, (result_type(x), pool[0].dtype))
    return shape._replace(heads=own[0], kv_heads=own[1])
