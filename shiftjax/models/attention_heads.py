"""Attention of models whose layers have heads of several shapes: one backend for each.

A layer knows which of `ModelConfig.attentions` it has, a window and a shape of heads. What one
backend cannot compute another may: kernels that are too narrow for some heads serve the others.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shiftjax.arch.config import LayerKind, ModelConfig
from shiftjax.models.attention import LayerTerms
from shiftjax.models.attention_backend import AttentionBackend
from shiftjax.parallel.layout import Layout


def layouts_by_heads(layout: Layout) -> list[Layout]:
    """Return, for each of the model's `head_shapes`, the layout of a model of such layers alone.

    It has one for each of the windows that they have, in the order of `ModelConfig.attentions`.
    Where all heads are alike that is the layout itself.
    """
    model, found = layout.model, []
    if len(model.head_shapes) == 1:
        return [layout]
    for heads in range(len(model.head_shapes)):
        windows = [window for window, own in model.attentions if own == heads]
        kinds = tuple(map(LayerKind.of_window, windows))
        own = {"layer_kinds": kinds, "num_layers": len(kinds), "num_shared_kv_layers": 0}
        found.append(replace(layout, model=replace(model.of_heads(heads), stage=None, **own)))
    return found


def by_heads(model: ModelConfig, backends: Sequence[AttentionBackend]) -> AttentionBackend:
    """Return attention of layers whose heads have several shapes, by those of `layouts_by_heads`.

    Work is divided once for each of `ModelConfig.attentions`, by the backend that computes it.
    """
    if len(backends) == 1:
        return backends[0]
    owners = [heads for _, heads in model.attentions]
    places = [owners[:nth].count(heads) for nth, heads in enumerate(owners)]

    def in_order(of_heads: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        return tuple(of_heads[heads][place] for heads, place in zip(owners, places, strict=True))

    def own(terms: LayerTerms) -> tuple[AttentionBackend, LayerTerms]:
        return backends[owners[terms.window]], replace(terms, window=places[terms.window])

    def works(backend: AttentionBackend, work: tuple[Any, ...]) -> tuple[Any, ...]:
        mine = zip(work, owners, strict=True)
        return tuple(each for each, heads in mine if backends[heads] is backend)

    def divide(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return in_order([backend.divide(*args, **kwargs) for backend in backends])

    def divide_rows(*args: Any) -> tuple[Any, ...]:
        return in_order([backend.divide_rows(*args) for backend in backends])

    def attend(q, pool, metadata, terms):
        backend, terms = own(terms)
        return backend.attend(q, pool, metadata._replace(work=works(backend, metadata.work)), terms)

    def attend_rows(q, pool, block_tables, work, terms):
        backend, terms = own(terms)
        return backend.attend_rows(q, pool, block_tables, works(backend, work), terms)

    def write(pool, k, v, slot_mapping, terms):
        backend, terms = own(terms)
        return backend.write(pool, k, v, slot_mapping, terms)

    reads = [backend.most_row_reads for backend in backends]
    return AttentionBackend(
        "+".join(dict.fromkeys(backend.name for backend in backends)),
        *(divide, divide_rows, attend, attend_rows, write),
        None if None in reads else min(filter(None, reads), default=0),
        _localise(model, backends[0].localise),
        "; ".join(dict.fromkeys(backend.reason for backend in backends)),
    )


def _localise(model: ModelConfig, of_one: Callable[..., Any] | None) -> Callable[[Any], Any] | None:
    """Return what makes a step's inputs this device's own, for all windows, of that of a backend.

    All backends split positions alike, or none does.
    """
    if of_one is None:
        return None
    return functools.partial(of_one, windows=tuple(window for window, _ in model.attentions))
