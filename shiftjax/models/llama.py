"""The decoder of the Llama family: Mistral, Qwen, Gemma, Phi, GLM, OLMo ..., by flags of config.

With SwiftKV the last layers compute nothing but the rows whose logits are wanted, because their
keys and values follow from what the early layers give: `take_rows`.

`arch/weights.py` says which weights there are; a module is given its own, by name. The forward
pass is written for one device's shard, inside `shard_map`; `Parallel` talks to the others.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from shiftjax.arch.config import AttentionKind, LayerKind, ModelConfig
from shiftjax.models.attention import (
    AttentionMetadata,
    LayerPool,
    LayerTerms,
    ModelPools,
    PoolPlace,
    pool_places,
    soft_cap,
)
from shiftjax.models.entry import enter_heads
from shiftjax.models.exchange import Parallel
from shiftjax.models.experts import Counted
from shiftjax.models.gathered import whole_layers
from shiftjax.models.gemma4 import ExpertsBesideMLP, LayerInput, LayerInputs
from shiftjax.models.layers import (
    Context,
    LogitRows,
    Rope,
    add_norm,
    apply_rope,
    looked_up,
    norm,
    norm_weight,
    rope_tables,
    unit_norm,
    weighted,
)
from shiftjax.models.mla import LatentAttention
from shiftjax.models.mlp import MLP, MoE
from shiftjax.models.open_sums import OpenSums
from shiftjax.models.part import Params, Part
from shiftjax.models.products import Activations, Codes, codes_for
from shiftjax.models.speculator import Speculator
from shiftjax.models.stream import Addend, Stream, scaled

LAYER_NORMS = ("input_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")


class Attention(Part):
    """Grouped-query attention with rotary positions over the paged KV pool."""

    q: nnx.Param
    k: nnx.Param
    v: nnx.Param
    o: nnx.Param
    q_bias: nnx.Param  # with attention_bias
    k_bias: nnx.Param
    v_bias: nnx.Param
    o_bias: nnx.Param  # with output_bias
    q_norm: nnx.Param  # with qk_norm
    k_norm: nnx.Param
    kv_scale: nnx.Param  # with a KV cache of codes
    sinks: nnx.Param  # with attention_sinks
    read = "q", "k", "v"

    def __init__(self, config: ModelConfig, params: Params, kind: LayerKind):
        super().__init__(config, params)
        self.kind = kind
        shapes = config.head_shapes
        self.heads = shapes.index(kind.heads) if kind.heads else 0

    def terms(self, place: PoolPlace | None, parallel: Parallel | None = None) -> LayerTerms:
        """What attention must know of this layer, whose part of a pool is at `place`.

        With `parallel`, the output may be codes as o reads them, and a part of what neighbours add
        up there.
        """
        scales, sinks = getattr(self, "kv_scale", None), getattr(self, "sinks", None)
        return LayerTerms(
            self.config.attentions.index((self.kind.window, self.heads)),
            None if scales is None else scales[...].T,
            None if sinks is None else sinks[...][:, 0],
            place,
            None if parallel is None else self._codes_into("o"),
            parallel is not None and parallel.of_all,
        )

    def __call__(
        self, x: Activations, pool: LayerPool, context: Context
    ) -> tuple[Addend, LayerPool]:
        """Return what the layer adds and the pool with this step's keys and values written."""
        _, metadata, backend, parallel, _, place, *_ = context
        parallel = parallel.of_heads(self.heads)
        if (entered := enter_heads(self, x, pool, context)) is not None:
            q, pool, terms = entered
        else:
            q, k, v = self._exchanged(x, context, parallel)
            terms = self.terms(place, parallel)
            pool = backend.write(pool, k, v, metadata.slot_mapping, terms)
        out = backend.attend(q, pool, metadata, terms)
        return self._output(out, parallel, context), pool

    def _exchanged(
        self, x: Activations, context: Context, parallel: Parallel
    ) -> tuple[Float[Array, "all_tokens _ head_dim"], ...]:
        """Return q, k and v of this device's heads, of all tokens, as they go to attention."""
        names = ("q", "k") if self.kind.keys_are_values else ("q", "k", "v")
        q, k, *others = self.heads_of(x, names, context)
        v = others[0] if others else k
        if self.config.wide_qk_norm:
            q, k = self._normed_together(q, k, context.parallel)
        elif self.config.qk_norm:
            q = norm(q, self.q_norm[...], self.config)
            k = norm(k, self.k_norm[...], self.config)
        q, k = self._grown(self._rotated(q, context), context), self._rotated(k, context)
        if self.config.qk_unit_norm and self.kind.has_rope:
            q, k = (unit_norm(x, self.config.rms_norm_eps) for x in (q, k))
        if self.config.value_unit_norm:
            v = unit_norm(v, self.config.rms_norm_eps)
        return parallel.scatter_heads(q, k, v)

    def heads_of(
        self, x: Activations, names: tuple[str, ...], context: Context
    ) -> list[Float[Array, "tokens heads head_dim"]]:
        """Project to the q, k or v heads of this device."""
        heads = self.read_by(x, names, context)
        if not self.config.attention_bias:
            return heads
        biases = (getattr(self, f"{name}_bias")[...][None] for name in names)
        return [out + bias for out, bias in zip(heads, biases, strict=True)]

    def _rotated(
        self, x: Float[Array, "tokens heads head_dim"], context: Context
    ) -> Float[Array, "tokens heads head_dim"]:
        """Turn heads by their positions, as layers of this kind do, if they do."""
        config, kind = self.config, self.kind
        if not kind.has_rope:
            return x
        return apply_rope(x, self.rope(context), interleaved=config.rope_interleaved)

    def rope(self, context: Context, *, whole: bool = False) -> Rope:
        """What layers of this kind do to heads by positions, of this device's tokens or of all."""
        ropes = context.whole_ropes if whole else context.ropes
        return ropes[self.config.ropes.index(self.config.rope_of(self.kind))]

    def _grown(
        self, q: Float[Array, "tokens heads head_dim"], context: Context
    ) -> Float[Array, "tokens heads head_dim"]:
        """Multiply queries by what their positions ask for, in layers that do."""
        if self.config.rope_of(self.kind).growth is None:
            return q
        gain = self.rope(context).query_gain
        assert gain is not None
        return (q.astype(jnp.float32) * gain[:, None, None]).astype(q.dtype)

    def _normed_together(
        self,
        q: Float[Array, "tokens heads head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"],
        parallel: Parallel,
    ) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "tokens kv_heads head_dim"]]:
        """Norm queries, and keys, by the mean over the heads of all devices (OLMo 2).

        KV heads that several devices hold count once; padded heads are zeros and none of the mean.
        """
        config, share = self.config, parallel.kv_head_shares()
        wide_q, wide_k = q.astype(jnp.float32), k.astype(jnp.float32)
        counts = np.array([config.num_heads, config.num_kv_heads], np.float32) * config.head_dim
        if parallel.numerics.is_strict:
            once = jnp.ones(q.shape[1], jnp.float32)
            sums = [parallel.exact_squares(q, once), parallel.exact_squares(k, share)]
            squares = jnp.stack(sums, axis=1)
        else:
            sums = [(wide_q**2).sum((1, 2)), ((wide_k**2).sum(2) * share[None]).sum(1)]
            squares = parallel.reduce(jnp.stack(sums, axis=1))
        scale = jax.lax.rsqrt(squares / counts[None] + config.rms_norm_eps)

        def weigh(x: Array, scale: Array, param: nnx.Param) -> Array:
            weight, in_float32 = norm_weight(param[...], config), config.norm_in_float32
            return weighted(x * scale[:, None, None], weight, q.dtype, in_float32=in_float32)

        return weigh(wide_q, scale[:, 0], self.q_norm), weigh(wide_k, scale[:, 1], self.k_norm)

    def _output(
        self,
        out: Float[Array, "tokens heads head_dim"] | Codes,
        parallel: Parallel,
        context: Context,
    ) -> Addend:
        """Exchange heads for tokens, and project the heads of this device back.

        Heads are exchanged as the codes that o multiplies: a device has whole blocks of them.
        """
        dtype = None if isinstance(out, Codes) else out.dtype
        if parallel.splits_tokens and self.has_codes("o"):
            if not isinstance(out, Codes):
                out = codes_for(out.reshape(out.shape[0], -1), self.row("o"))
            out = Codes(*parallel.gather_codes(*out))
        elif not isinstance(out, Codes):
            out = parallel.gather_heads(out)
            out = out.reshape(out.shape[0], -1)
        bias = self.o_bias[...] if self.config.output_bias else None
        return self._added(out, "o", context, bias, dtype)


class SharingAttention(Attention):
    """Attention over the keys and values of an earlier layer."""

    def __call__(
        self, x: Activations, pool: LayerPool, context: Context
    ) -> tuple[Addend, LayerPool]:
        """Return what the layer adds and the pool as it is."""
        _, metadata, backend, parallel, _, place, *_ = context
        (q,) = self.heads_of(x, ("q",), context)
        if self.config.qk_norm:
            q = norm(q, self.q_norm[...], self.config)
        parallel = parallel.of_heads(self.heads)
        q = parallel.scatter_queries(self._rotated(q, context))
        out = backend.attend(q, pool, metadata, self.terms(place, parallel))
        return self._output(out, parallel, context), pool


class LateAttention(Attention):
    """Attention of logit rows, in SHIFT, over keys and values that are written already."""

    def __call__(
        self, x: Activations, pool: LayerPool, context: Context
    ) -> tuple[Addend, LayerPool]:
        """Return what the layer adds and the pool as it is."""
        _, metadata, backend, parallel, _, place, *_ = context
        (q,) = self.heads_of(x, ("q",), context)
        q = self._rotated(q, context)
        own = metadata.block_tables, metadata.work, self.terms(place, parallel)
        out = backend.attend_rows(q, pool, *own)
        return self._output(out, parallel, context), pool


class SwiftKV(Part):
    """Keys and values of all late layers, from what the last early one gives.

    (SwiftKV, arXiv 2410.03960, section 3.1; several layers with one KV, section 3.2, not.)
    """

    norm: nnx.Param
    kv: nnx.Param  # where there are late layers
    kv_bias: nnx.Param  # with attention_bias

    def __call__(
        self,
        hidden: Float[Array, "tokens hidden"],
        pools: ModelPools,
        late: list[tuple[int, LayerTerms]],
        rope: Rope,
        context: Context,
    ) -> ModelPools:
        """Return the pools with the keys and values of all tokens written for the late layers.

        `late` says which pool each of them has a part of, and its terms. One product, whose columns
        are heads, then layers (keys of all, values of all).
        """
        x = norm(hidden, self.norm[...], self.config)
        kv = self._out(x, "kv", context.products)
        if self.config.attention_bias:
            kv = kv + self.kv_bias[...][None]
        keys, values = jnp.split(kv, 2, axis=2)
        keys = apply_rope(keys.reshape(x.shape[0], -1, kv.shape[-1]), rope).reshape(keys.shape)
        slots, pools = context.metadata.slot_mapping, list(pools)
        for i, (nth, own) in enumerate(late):
            new = keys[:, :, i], values[:, :, i]
            pools[nth] = context.backend.write(pools[nth], *new, slots, own)
        return pools


ATTENTIONS: Mapping[AttentionKind, type[Attention | LatentAttention]] = MappingProxyType(
    {"grouped": Attention, "latent": LatentAttention}
)
"""What layers of a kind of attention compute."""


def _feed_forward(params: Params) -> type[MLP | MoE]:
    if "dense" in params:
        return ExpertsBesideMLP
    return MoE if "experts" in params else MLP


class DecoderLayer(nnx.Module):
    """Attention and MLP, each beside a residual, with norms before, after or around them."""

    scalar: nnx.Param  # with layer_scalars

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        attention: type[Attention | LatentAttention],
        kind: LayerKind,
    ):
        self.config = config
        for name in (*LAYER_NORMS, "scalar"):
            if name in params:
                setattr(self, name, params[name])
        self.attention = attention(config, params["attention"], kind)
        self.mlp = _feed_forward(params["mlp"])(config, params["mlp"])
        if "own_input" in params:
            self.own_input = LayerInput(config, params["own_input"])

    def __call__(
        self,
        stream: Stream,
        pool: LayerPool,
        context: Context,
        given: Float[Array, "tokens width"] | None = None,
    ) -> tuple[Stream, LayerPool]:
        """Return the stream and the pool; `given` is the layer's own input, if it has one."""
        config, reduce = self.config, context.parallel.sum
        stream, normed = self._entered(stream, "input_norm", self.attention, context)
        out, pool = self.attention(normed, pool, context)
        stream = replace(stream, addend=self._normed(out, "attention_out_norm", context))
        if config.parallel_block:
            x = stream.whole(reduce, config.residual_scale)
            stream = Stream(x, before=stream.before)
        else:
            stream, normed = self._entered(stream, "mlp_norm", self.mlp, context)
        beside = (stream.x,) if isinstance(self.mlp, ExpertsBesideMLP) else ()
        out = self.mlp(normed, context, *beside)
        stream = replace(stream, addend=self._normed(out, "mlp_out_norm", context))
        if given is None and not config.layer_scalars:
            return stream, pool
        x = stream.whole(reduce, config.residual_scale)
        if given is not None:
            x = x + self.own_input(x, given)
        x = x * self.scalar[...][None] if config.layer_scalars else x
        return Stream(x, before=stream.before), pool

    def _entered(
        self, stream: Stream, name: str, part: Part, context: Context
    ) -> tuple[Stream, Any]:
        """Return the new stream, and what a part reads of it; all of it without a norm `name`."""
        param = getattr(self, name, None)
        weight = None if param is None else param[...]
        # a parallel block's other part reads the same
        codes = part.reads_codes and not (self.config.parallel_block and not self.mlp.reads_codes)
        return add_norm(stream, name, weight, self.config, context, codes=codes)

    def _normed(self, out: Addend, name: str, context: Context) -> Addend:
        """Apply a norm that follows a part; as it is where the layer has none of this name."""
        param = getattr(self, name, None)
        if param is None:
            return out
        return Addend(norm(out.whole(context.parallel.sum), param[...], self.config))


class Cached(NamedTuple):
    """Where a layer's keys and values are."""

    place: PoolPlace | None  # in its pool
    group: int = 0  # of `ModelConfig.cache_groups`


RunLayer = Callable[
    [DecoderLayer, Stream, LayerPool, Cached, jax.Array | None, int],
    tuple[Stream, LayerPool],
]


def _traced_once(context: Context) -> RunLayer:
    """Return what runs a layer in this context: traced once for each kind, the others are calls.

    XLA puts the calls in place, so the program is the same. Python would otherwise spend most of
    a start that finds its programs compiled on tracing 30 equal layers.
    """

    @functools.partial(jax.jit, static_argnums=0)
    def call(
        graphdef: nnx.GraphDef[DecoderLayer],
        params: Any,  # nnx.State, whose hints beartype warns of
        stream: Stream,
        pool: LayerPool,
        place: PoolPlace | None,
        given: Float[Array, "tokens width"] | None,
        of_step: tuple[tuple[tuple[Rope, ...], ...], AttentionMetadata, OpenSums | None, Any],
    ) -> tuple[Stream, LayerPool, list[Counted] | None]:
        (ropes, whole), metadata, sums, slot = of_step
        counted = None if context.counted is None else []
        own = context._replace(ropes=ropes, whole_ropes=whole, metadata=metadata, sums=sums)
        own = own._replace(place=place, counted=counted, slot=slot[0], all_slots=slot[1])
        return *nnx.merge(graphdef, params)(stream, pool, own, given), counted

    def run(
        layer: DecoderLayer,
        stream: Stream,
        pool: LayerPool,
        cached: Cached,
        given: Float[Array, "tokens width"] | None,
        index: int,
    ) -> tuple[Stream, LayerPool]:
        sums = None if context.sums is None else context.sums.of_layer(index)
        ropes = context.ropes, context.whole_ropes
        slots = context.slot, context.all_slots
        of_step = ropes, context.metadata.of_group(cached.group), sums, slots
        stream, pool, counted = call(*nnx.split(layer), stream, pool, cached.place, given, of_step)
        if context.counted is not None:
            context.counted.extend(counted or ())
        return stream, pool

    return run


class Llama(nnx.Module):
    """A decoder-only language model; `nnx.split` it once and merge it inside the step."""

    def __init__(self, config: ModelConfig, params: Params):
        layers, early = params["layers"], config.num_early_layers
        self.config = config
        if config.is_first_stage:
            self.embed = params["embed"]
        if config.layer_input_width:
            self.layer_inputs = LayerInputs(config, params["layer_inputs"])
        if config.is_last_stage:
            self.norm = params["norm"]
            if config.num_labels:
                self.score = params["score"]
            else:
                self.lm_head = params["lm_head"]
        usual = ATTENTIONS[config.attention]
        attentions: list[type[Attention | LatentAttention]] = [
            usual if parts.num_kv else SharingAttention for parts in config.parts[:early]
        ]
        attentions += [LateAttention] * config.num_late_layers
        of_layers = enumerate(zip(attentions, config.kinds, strict=True))
        self.layers = nnx.List(
            [DecoderLayer(config, layers[str(index)], *each) for index, each in of_layers]
        )
        if config.num_kv_layers is not None:
            self.swiftkv = SwiftKV(config, params["swiftkv"])
        if config.speculator is not None and config.is_last_stage:
            self.speculator = Speculator(config, params["speculator"])

    def embed_tokens(
        self, token_ids: Int[Array, " all_tokens"], parallel: Parallel
    ) -> Float[Array, "tokens hidden"]:
        """Look the step's tokens up in a table whose rows devices split; returns this device's."""
        embedded = looked_up(self.embed[...], token_ids, parallel)
        if not self.config.scaled_embedding:
            return scaled(embedded, self.config.embedding_scale)
        return embedded * jnp.asarray(self.config.hidden_size**0.5, embedded.dtype)

    def __call__(
        self, token_ids: Int[Array, " all_tokens"], pools: ModelPools, context: Context
    ) -> tuple[list[Stream], ModelPools]:
        """Return the stream after the embedding and each early layer, and the pools.

        `token_ids` are those of the step, the streams of this device's tokens
        (`Parallel.local_tokens`); early layers have written to the pools, each of which holds some
        layers. `hidden_states` makes numbers of a stream, as parity tests do of each.
        """
        embedded = self.embed_tokens(token_ids, context.parallel)
        return self.run_layers(embedded, pools, context._replace(token_ids=token_ids))

    def run_layers(
        self, embedded: Float[Array, "tokens hidden"], pools: ModelPools, context: Context
    ) -> tuple[list[Stream], ModelPools]:
        """Run the layers on hidden states: those of the embedding, or of the previous stage."""
        begun = Stream(embedded) if context.sums is None else context.sums.begun(embedded)
        streams, pools = [begun], list(pools)
        run = _traced_once(context)
        given = [None] * self.config.num_layers
        if self.config.layer_input_width:
            given = self.layer_inputs(embedded, context)
        early = self.layers[: self.config.num_early_layers]
        places = pool_places(self.config.caches, len(pools))
        layers = whole_layers(early, streams, context.parallel)
        cached_by, groups = self.config.cached_by, self.config.group_of_layers
        for index, layer in enumerate(layers):
            nth, place = places[cached_by[index]]
            cached = Cached(place, groups[index])
            out, pools[nth] = run(layer, streams[-1], pools[nth], cached, given[index], index)
            streams.append(out)
        return streams, pools

    def hidden_states(self, stream: Stream, parallel: Parallel) -> Float[Array, "tokens hidden"]:
        """Return what a layer gives, or the embedding: the stream with all that is added to it."""
        return stream.whole(parallel.sum, self.config.residual_scale)

    def take_rows(
        self,
        hidden: Float[Array, "tokens hidden"],
        rows: LogitRows,
        pools: ModelPools,
        context: Context,
    ) -> tuple[Float[Array, "rows hidden"], ModelPools]:
        """Return the rows after the last layer, on every device, and the written pools.

        `hidden` is what the last early layer gave. Late layers write the keys and values of all
        tokens and compute the rows alone; a step without rows leaves that out.
        """
        if rows.late is None:
            return context.parallel.take_rows(hidden, rows.tokens), pools
        config, early = self.config, self.config.num_early_layers
        hidden = context.parallel.gather_tokens(hidden)
        (rope,) = rope_tables(rows.positions, config)  # SwiftKV's layers are of one kind
        places = pool_places(config.caches, len(pools))
        late = [(self.layers[i], places[i]) for i in range(early, config.num_layers)]
        own = [(nth, layer.attention.terms(place)) for layer, (nth, place) in late]
        pools = self.swiftkv(hidden, pools, own, rope, context)
        metadata = context.metadata._replace(work=rows.late.work)
        ropes = rope_tables(rows.positions[rows.tokens], config)
        in_shift = context.parallel.in_shift
        of_rows = context._replace(ropes=ropes, metadata=metadata, parallel=in_shift, counted=None)
        of_rows = of_rows._replace(sums=None, slot=None)  # of other rows, in a branch

        def run_late(x: Float[Array, "rows hidden"]) -> Float[Array, "rows hidden"]:
            run, stream = _traced_once(of_rows), Stream(x)
            for layer, (nth, place) in late:
                stream, _ = run(layer, stream, pools[nth], Cached(place), None, 0)
            return self.hidden_states(stream, in_shift)

        # Every device takes the same branch, so there may be collectives in it.
        has_rows = rows.late.num_rows > 0
        x = jax.lax.cond(has_rows, run_late, lambda x: x, hidden[rows.tokens])
        return x, pools

    def normed(self, rows: Float[Array, "rows hidden"]) -> Float[Array, "rows hidden"]:
        """Return rows after the last layer as the LM head reads them."""
        return norm(rows, self.norm[...], self.config)

    def logits(self, normed: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab_tp_sp"]:
        """Return float32 logits of normed rows, each device those of its part of the vocabulary."""
        head = self.lm_head[...]
        logits = jnp.einsum("ti,oi->to", normed, head, preferred_element_type=jnp.float32)
        return soft_cap(scaled(logits, self.config.logit_scale), self.config.logit_soft_cap)
