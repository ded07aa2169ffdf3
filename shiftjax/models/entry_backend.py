"""How heads get from the product with q, k and v to attention: a function of attention's table.

xla       the model's own operations, then `AttentionBackend.write`: every platform and model
pallas    one launch (`pallas_kernels/rope_write.py`) beside the attention kernels, where heads
          are not exchanged and rotate by halves; it adds up what the product left in parts
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.head_terms import Given, Projected
from shiftjax.arch.config import LayerKind, ModelConfig
from shiftjax.arch.formats import FORMATS, Formats
from shiftjax.models.attention import AttentionMetadata, LayerPool, LayerTerms, write_kv
from shiftjax.parallel.layout import Layout


class EntryShape(NamedTuple):
    """The heads of a layer on a device, as the kernel sees them."""

    heads: int
    kv_heads: int
    head_dim: int
    half: int  # of what rotates; 0: nothing does
    dtype: str  # of activations, a name of NumPy's
    kv_dtype: str
    # of q and k: eps, the weight is 1 more, rounded after the weight; None: there is none
    norm: tuple[float, bool, bool] | None = None


# Returns queries as the backend's `attend` takes them, and the written pool.
Run = Callable[[Projected, Given, LayerPool, AttentionMetadata, LayerTerms], tuple[Any, LayerPool]]
Entry = Callable[[EntryShape], Run | None]  # None: the model's own operations


def entry_shape(
    model: ModelConfig, kind: LayerKind, types: tuple[DTypeLike, DTypeLike]
) -> EntryShape:
    """Return the heads of layers of a kind, all of them; `types` are of activations and of KV."""
    own = model.rms_norm_eps, model.norm_offset, model.norm_in_float32
    half, norm = model.rope_of(kind).width // 2, own if model.qk_norm else None
    dtype, kv_dtype = (jnp.dtype(each).name for each in types)
    sizes = model.num_heads, model.num_kv_heads, model.head_dim, half
    return EntryShape(*sizes, dtype, kv_dtype, norm)


def why_not_entered(model: ModelConfig, kind: LayerKind) -> str | None:
    """Return what layers of a kind do to heads that the kernel does not; None: nothing."""
    reasons = {
        "neighbours are rotated, not halves": model.rope_interleaved and kind.has_rope,
        "norms of q and k are over all heads": model.wide_qk_norm,
        "norms of q and k follow the rotation": model.qk_unit_norm,
        "each head has a norm of its own": model.qk_norm_by_head,
        "norms of q and k subtract a mean": model.qk_norm and model.norm_centred,
        "values are normed": model.value_unit_norm,
        "values are keys": kind.keys_are_values,
        "queries grow": model.rope_of(kind).growth is not None,
        "heads have several shapes": len(model.head_shapes) > 1,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def tried_entry(layout: Layout, formats: Formats) -> EntryShape | None:
    """Return the heads of a device with which the kernel is tried: of the first kind of layers.

    None: it has those of no layer.
    """
    model = layout.model
    types = FORMATS[formats.activations].dtype, FORMATS[formats.kv].dtype
    for kind in model.kinds:
        shape = entry_shape(model, kind, types)
        if not why_not_entered(model, kind) and not wrong_shape(shape):
            own = layout.heads_per_device, layout.kv_heads_per_device
            return shape._replace(heads=own[0], kv_heads=own[1])
    return None


def why_not_traced(model: ModelConfig, types: tuple[DTypeLike, DTypeLike]) -> str | None:
    """Return why heads are XLA's in some layers; None: the kernel has those of all."""
    for kind in dict.fromkeys(model.kinds):
        if reason := why_not_entered(model, kind):
            return reason
        if wrong := wrong_shape(entry_shape(model, kind, types)):
            return "; ".join(wrong)
    return None


def wrong_shape(shape: EntryShape) -> list[str]:
    """Say what the kernel cannot do, in its own words."""
    from pallas_kernels.rope_write import wrong_heads

    return wrong_heads(_heads(shape), shape.half, shape.kv_dtype)


def kv_scales(terms: LayerTerms) -> Any:
    """Return the scales of a layer as kernels take them."""
    return (1.0, 1.0) if terms.kv_scales is None else terms.kv_scales


def pallas_write(interpret: Any = False) -> Callable[..., LayerPool]:
    """Return what writes keys and values beside kernels: codes by one, all else by XLA's scatters.

    `interpret` is for tests alone.
    """
    from pallas_kernels import kv_write

    def write(
        pool: LayerPool,
        k: jax.Array,
        v: jax.Array | None,
        slot_mapping: jax.Array,
        terms: LayerTerms,
    ) -> LayerPool:
        if v is None or jnp.dtype(pool[0].dtype) != jnp.float8_e4m3fn:
            return write_kv(pool, k, v, terms.slots(pool, slot_mapping), terms.kv_scales)
        own = {"scales": kv_scales(terms), "first": terms.first(pool), "interpret": interpret}
        return kv_write.write_kv((pool[0], pool[1]), k, v, slot_mapping, **own)

    return write


def pallas_entry(interpret: Any = False, *, pads: bool = True) -> Entry:
    """Return the kernel; `interpret` is for tests alone.

    It `pads` queries for the decode kernel where it is alone, but for those that travel first.
    """
    from pallas_kernels.decode import ROW_TILE
    from pallas_kernels.queries import Queries
    from pallas_kernels.rope_write import Target, rope_write

    def entry(shape: EntryShape) -> Run | None:
        if wrong_shape(shape):
            return None
        heads = _heads(shape)

        def run(
            projected: Projected,
            given: Given,
            pool: LayerPool,
            metadata: AttentionMetadata,
            terms: LayerTerms,
        ) -> tuple[Queries, LayerPool]:
            own, kv_heads = heads, shape.kv_heads
            # all are rows of the decode kernel
            if pads and metadata.work[terms.window].prefill is None:
                own = heads._replace(q_rows=-(-heads.group // ROW_TILE) * ROW_TILE)
            k, v = pool
            target = Target((k, v), metadata.slot_mapping, kv_scales(terms), terms.first(pool))
            q, written = rope_write(projected, given, target, own, interpret)
            values = q.reshape(q.shape[0], kv_heads, own.q_rows, shape.head_dim)
            return Queries(values, shape.heads, jnp.dtype(shape.dtype)), written

        return run

    return entry


def _heads(shape: EntryShape) -> Any:
    """Return what the kernel is compiled for; queries without zeros behind them."""
    from pallas_kernels.queries import operand_type
    from pallas_kernels.rope_write import HeadNorm, Heads

    heads, kv_heads, head_dim, _, dtype, kv_dtype, norm = shape
    own = heads, kv_heads, head_dim, jnp.dtype(dtype), operand_type(dtype, kv_dtype)
    return Heads(*own, heads // kv_heads, None if norm is None else HeadNorm(*norm))
