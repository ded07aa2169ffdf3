"""What a model looks like: the numbers that weights, sharding and steps derive from. No JAX."""

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from pallas_kernels.window import Chunk, Window
from shiftjax.arch.cache import (
    CacheGroup,
    CacheSpec,
    LayerCache,
    groups_of,
    keys_and_values,
)
from shiftjax.arch.latent import Latent

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
Scores = Literal["softmax", "sigmoid"]
AttentionKind = Literal["grouped", "latent"]  # heads that share keys and values, or a latent


@dataclass(frozen=True)
class RopeScaling:
    """Rotary frequencies stretched for long contexts.

    `linear` divides every frequency by `factor`; `llama3` divides those only that turn less than
    `low_freq_factor` times over the original context, keeps those that turn more than
    `high_freq_factor` times, and blends between the two (Llama 3.1 model card). `yarn` does so with
    its beta_slow and beta_fast, blending by place (arXiv 2309.00071, section 3.2); `truncate`
    rounds the ends of that range to whole places. `longrope` divides each frequency by a number of
    its own (arXiv 2402.13753). `attention_factor` multiplies cosines and sines. `proportional`
    divides as `linear` does, and only the first `part` of the frequencies turn (Gemma 4).
    """

    kind: Literal["linear", "llama3", "yarn", "longrope", "proportional"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_factor: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()  # of longrope: up to the original context
    long_factors: tuple[float, ...] = ()  # beyond it
    part: float = 1.0  # of proportional


@dataclass(frozen=True)
class LayerKind:
    """How layers of one kind attend: how far back, and with which rotary positions, if any."""

    sliding_window: int | None = None  # a token sees so many keys at most, itself included
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    has_rope: bool = True
    heads: tuple[int, int] | None = None  # KV heads and the width of heads; None: the model's
    keys_are_values: bool = False  # values are the projection of keys, normed otherwise (Gemma 4)
    chunk: int | None = None  # instead: those of its part, where parts are so many tokens (Llama 4)

    @property
    def window(self) -> Window | None:
        """How far back a token sees; None: all of its context."""
        return self.sliding_window if self.chunk is None else Chunk(self.chunk)

    @classmethod
    def of_window(cls, window: Window | None) -> "LayerKind":
        """Return a kind that sees so far back."""
        is_chunk = isinstance(window, Chunk)
        return cls(chunk=window.tokens) if is_chunk else cls(sliding_window=window)


class LayerParts(NamedTuple):
    """What a layer is made of: layers that are alike in it have weights of the same shapes."""

    has_experts: bool = False
    heads: int = 0  # which of `ModelConfig.head_shapes`
    num_kv: int = 2  # projections of keys and of values; 0: it reads the cache of another layer
    is_wide: bool = False  # its MLP has twice the width


class QueryGrowth(NamedTuple):
    """By how much queries grow: at position p times 1 + beta * log(1 + (p + first) // context).

    In layers with rotary positions (Ministral 3), or in those without (Llama 4; `Temperature` of
    arXiv 2501.19399).
    """

    beta: float
    context: int
    first: int = 0  # what positions are counted from
    in_rotary: bool = True  # else in layers without rotary positions


class RopeKind(NamedTuple):
    """What layers of some kinds do to heads by positions: a rotary embedding, growth of queries."""

    theta: float
    scaling: RopeScaling | None
    width: int  # numbers of a head that are rotated; 0: it is there for its growth alone
    growth: QueryGrowth | None = None  # of the queries of its layers


@dataclass(frozen=True)
class Experts:
    """Experts of the layers' feed-forward part; a token uses `per_token` and the shared one.

    A token's experts are those with the largest router logits, weighted by the softmax of these
    logits (`norm_topk`: the softmax over all experts, made to sum to one, is the same), or by their
    part of the softmax over all; out of the `groups_per_token` groups whose best is largest
    (DeepSeek-V2, arXiv 2405.04434, 2.2.2).

    With `scores` of sigmoid they are those with the largest sigmoids of logits, a correction added
    where there is one, out of the `groups_per_token` groups whose two best sum to most; weighted by
    the sigmoids themselves (DeepSeek-V3, arXiv 2412.19437, 2.1.2).
    """

    num: int
    per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0  # of an expert that every token uses; 0: there is none
    has_shared_gate: bool = False  # it is times the sigmoid of a logit of its own (Qwen2-MoE)
    norm_topk: bool = True  # the weights of a token's experts sum to one
    dense_layers: tuple[int, ...] = ()  # of the whole model: these have an MLP instead
    has_bias: bool = False  # of the router, and of each expert's matrices (gpt-oss)
    scores: Scores = "softmax"
    has_correction: bool = False  # a number of each expert that is added to choose, not to weigh
    num_groups: int = 1  # of neighbours, equally many
    groups_per_token: int = 1
    scale: float = 1.0  # of the weights of a token's experts
    # The layers have an MLP, too; router and experts read the residual, each with its own norm,
    # and the weights of a token's experts are times a number of each expert (Gemma 4).
    beside_mlp: bool = False
    scales_input: bool = False  # weights are of what experts read, not of what they give (Llama 4)


@dataclass(frozen=True)
class Encoder:
    """What makes a model an encoder: BERT (arXiv 1810.04805), and RoBERTa's way to count positions.

    Every token sees all of its text, norms follow what they norm and have a bias, positions are
    learnt. `max_position_embeddings` of its config are those that a text can have.
    """

    num_token_types: int = 2  # the second one is that of the second text of a pair, which is scored
    position_offset: int = 0  # of the first token in the table; RoBERTa: 1 + its pad_token_id
    layer_norm_eps: float = 1e-12
    num_labels: int = 0  # numbers that a head makes of a text's first token; 0: there is no head


@dataclass(frozen=True)
class Speculator:
    """A small model that drafts tokens from its target's hidden state and the token sampled there.

    The MLP of arXiv 2404.19124 or the LSTM of Arctic Inference's published checkpoints. Nothing is
    kept between steps. What it reads is as wide as the target's hidden states, what it knows of
    tokens as `inner_dim`.
    """

    method: Literal["mlp", "lstm"]
    num_predict: int  # tokens drafted at most; how tokens and states are weighed derives from it
    inner_dim: int
    tie_weights: bool = False  # all drafts by the same weights; of an LSTM they always are
    tie_lstm_embs: bool = False  # the LSTM's four gates have one embedding
    scale_input: bool = False  # the target's hidden state is normed and divided by sqrt(2)
    draft_vocab: int | None = None  # ids below this are drafted; None: all of the vocabulary


@dataclass(frozen=True)
class Codes:
    """A checkpoint whose layers have matrices as codes, and not as plain numbers."""

    plain: tuple[str, ...] = ()  # those that it has plain all the same: `Weight.source` of each
    are_made_anew: bool = False  # at load, because devices have no scales as its own
    have_input_scales: bool = False  # of activations, one a matrix; else those of every token
    # Of square blocks (`parallel/blocks.py`): neighbouring outputs that share a scale on devices;
    # 0: output channels have a scale each.
    rows_of_scale: int = 0
    format: str = "fp8"  # a name of `arch.formats`
    group: int = 0  # of four bits: inputs that share a scale; 0: all of an output channel's
    has_zeros: bool = False  # of four bits: groups have zero points


@dataclass(frozen=True)
class Stage:
    """Which layers of a model a pipeline stage has: `ModelConfig.num_layers` from `first` on."""

    first: int
    num_all: int  # layers of the whole model


class LoraSlots(NamedTuple):
    """Room for low-rank adapters on devices: how many, and of which rank at most."""

    num: int
    rank: int
    of_experts: bool = False  # whether they may change experts, too


@dataclass(frozen=True)
class ModelConfig:
    """One decoder of the Llama family, or an encoder; variants are flags here, not files elsewhere.

    Sizes count elements. `head_dim` stands on its own because Qwen3 has
    `num_heads * head_dim != hidden_size`.
    """

    name: str
    architecture: str  # Hugging Face model_type: llama, qwen3, gemma3_text, bert ...
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # bias on q, k and v (Qwen2)
    output_bias: bool = False  # bias on o (Llama's attention_bias sets this too)
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm on q and k before rope, over head_dim (Qwen3)
    wide_qk_norm: bool = False  # over all heads together instead (OLMo 2)
    qk_unit_norm: bool = False  # without weights, and after rope, where there is rope (Llama 4)
    qk_norm_by_head: bool = False  # over head_dim, but each head has weights of its own (Cohere)
    value_unit_norm: bool = False  # values are normed, too, without weights (Gemma 4)
    norm_offset: bool = False  # norms multiply by 1 + weight (Gemma)
    norm_in_float32: bool = False  # and are rounded after the weight is applied, not before
    norm_centred: bool = False  # the mean is subtracted first: LayerNorm without a bias (Cohere)
    parallel_block: bool = False  # attention and MLP read the same norm of the residual (Cohere)
    activation: Activation = "silu"  # of the MLP's gate, and of experts'
    scaled_embedding: bool = False  # times the square root of hidden_size (Gemma)
    embedding_scale: float = 1.0  # embeddings times this (Granite)
    residual_scale: float = 1.0  # what attention and MLP add to the residual, times this (Granite)
    logit_scale: float = 1.0  # logits times this (Granite, Cohere)
    layer_input_width: int = 0  # of an input of its own that each layer is given (Gemma 4)
    layer_scalars: bool = False  # what a layer gives is times a number of its own (Gemma 4)
    query_growth: QueryGrowth | None = None  # queries grow with their positions
    query_scale: float | None = None  # of attention's scores; None: head_dim ** -0.5
    attention_soft_cap: float | None = None  # cap * tanh(score / cap) (Gemma 2)
    logit_soft_cap: float | None = None  # the same of logits
    attention_sinks: bool = False  # a logit for each head that takes part in softmax (GPT-OSS)
    rotary_dim: int | None = None  # only the first so many of head_dim are rotated; None: all
    rope_interleaved: bool = False  # neighbours are rotated against each other, not halves (GLM)
    # Kinds of attention, repeated over the layers of the whole model. Empty: all layers attend as
    # `sliding_window`, `rope_theta` and `rope_scaling` say, which else mean nothing.
    layer_kinds: tuple[LayerKind, ...] = ()
    experts: Experts | None = None  # in place of the MLP, in all layers but some
    encoder: Encoder | None = None  # None: a decoder
    latent: Latent | None = None  # keys and values are made of it; None: they are cached
    num_labels: int = 0  # a decoder that scores a text by its last token; 0: it has a vocabulary's
    sliding_window: int | None = None  # keys further back than this are not seen (Mistral)
    frees_blocks: bool = False  # of the KV cache, where no token sees them; see `cache_groups`
    # The last so many layers have no keys and values: each reads those of the last layer of its
    # kind that has some, and may have an MLP of twice the width (Gemma 4).
    num_shared_kv_layers: int = 0
    has_wide_sharers: bool = False
    num_kv_layers: int | None = None  # SwiftKV: layers with keys and values of their own
    speculator: Speculator | None = None  # drafts by a model; None: none
    codes: Codes | None = None  # what the checkpoint is quantised to; None: plain numbers
    stage: Stage | None = None  # `num_layers` are those of this stage; None: the whole model
    lora: LoraSlots | None = None  # room for adapters; None: there is none
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_scores(self) -> int:
        """The numbers that a head makes of a text; 0: there is no such head."""
        return self.num_labels if self.encoder is None else self.encoder.num_labels

    @property
    def cache(self) -> CacheSpec:
        """What a layer that has the model's own KV heads keeps of a token; see `caches`."""
        if self.latent is not None:
            return self.latent.cache
        return keys_and_values(self.num_kv_heads, self.head_dim)

    @property
    def attention(self) -> AttentionKind:
        """Which weights and which module attention has."""
        return "grouped" if self.latent is None else "latent"

    @property
    def query_dim(self) -> int:
        """Numbers of a head's queries, as devices exchange them."""
        return self.head_dim if self.latent is None else self.latent.query_dim

    @property
    def value_dim(self) -> int:
        """Numbers of a head's output, which the last product of attention reads."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def values_in_keys(self) -> int | None:
        """The first numbers of a cached row that are values, too; None: these are cached apart."""
        return None if self.latent is None else self.latent.rank

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        """What its layers keep of a token: one for each shape of heads that some of them have."""
        caches, start = [], self.stage.first if self.stage else 0
        before = [self._shape_of(self._kind_of(layer)) for layer in range(start)]
        own = self.kinds[: self.num_layers - self.num_shared_kv_layers]
        shapes = [self._shape_of(kind) for kind in own]
        for heads in dict.fromkeys(shapes):
            layers = tuple(layer for layer, shape in enumerate(shapes) if shape == heads)
            first = sum(shape == heads for shape in before)
            groups = self.cache_groups if self.frees_blocks else ()
            caches.append(LayerCache(self.of_heads(heads).cache, layers, first, heads, groups))
        return tuple(caches)

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Its layers with caches, by how far they see where blocks behind that are freed."""
        num = self.num_layers - self.num_shared_kv_layers
        if not self.frees_blocks:
            return (CacheGroup(tuple(range(num)), None),)
        return groups_of([kind.window for kind in self.kinds[:num]])

    @property
    def group_of_layers(self) -> tuple[int, ...]:
        """Which of `cache_groups` has the cache that each of its layers reads."""
        found = {layer: n for n, group in enumerate(self.cache_groups) for layer in group.layers}
        return tuple(found[layer] for layer in self.cached_by)

    @property
    def head_shapes(self) -> tuple[tuple[int, int], ...]:
        """The KV heads and the width of heads of its layers: its own first, then others."""
        own = self.num_kv_heads, self.head_dim
        return tuple(dict.fromkeys((own, *(kind.heads or own for kind in self.layer_kinds))))

    def _shape_of(self, kind: LayerKind) -> int:
        """Return which of `head_shapes` layers of a kind have."""
        return self.head_shapes.index(kind.heads) if kind.heads else 0

    @property
    def cached_by(self) -> tuple[int, ...]:
        """For each of its layers the one whose cache it reads: itself, but for those that share."""
        kinds, first = self.kinds, self.num_layers - self.num_shared_kv_layers
        shared = {kind: layer for layer, kind in enumerate(kinds[:first])}  # the last of each
        return (*range(first), *(shared[kind] for kind in kinds[first:]))

    @cached_property
    def parts(self) -> tuple[LayerParts, ...]:
        """What each of its layers is made of."""
        first = self.num_layers - self.num_shared_kv_layers
        return tuple(
            LayerParts(
                self.has_experts(layer),
                self._shape_of(kind),
                0 if layer >= first else 2 - kind.keys_are_values,
                layer >= first and self.has_wide_sharers,
            )
            for layer, kind in enumerate(self.kinds)
        )

    def of_heads(self, heads: int) -> "ModelConfig":
        """Return the model whose own KV heads are those of `head_shapes[heads]`.

        It answers questions of single layers: what they keep, and how their heads are split.
        """
        if heads == 0:
            return self
        num_kv_heads, head_dim = self.head_shapes[heads]
        return replace(self, num_kv_heads=num_kv_heads, head_dim=head_dim)

    @property
    def has_codes(self) -> bool:
        """Whether devices can have the codes of the checkpoint."""
        return self.codes is not None and not self.codes.are_made_anew

    @property
    def num_early_layers(self) -> int:
        """Layers that compute every token: all, but for SwiftKV (arXiv 2410.03960, section 3.1)."""
        return self.num_layers if self.num_kv_layers is None else self.num_kv_layers

    @property
    def num_late_layers(self) -> int:
        """Layers that compute logit rows alone; the early ones' output gives all their KV."""
        return self.num_layers - self.num_early_layers

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from the first of this stage, has experts."""
        first = self.stage.first if self.stage else 0
        return self.experts is not None and first + layer not in self.experts.dense_layers

    @property
    def num_expert_layers(self) -> int:
        """Layers with experts."""
        return sum(map(self.has_experts, range(self.num_layers)))

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """How each of its layers attends, in order."""
        first = self.stage.first if self.stage else 0
        return tuple(map(self._kind_of, range(first, first + self.num_layers)))

    @property
    def attentions(self) -> tuple[tuple[Window | None, int], ...]:
        """The distinct windows and shapes of heads of the whole model's layers, by first use.

        Of a stage, too: a step's work is divided once, for all stages.
        """
        count = self.stage.num_all if self.stage else self.num_layers
        kinds = map(self._kind_of, range(count))
        return tuple(dict.fromkeys((kind.window, self._shape_of(kind)) for kind in kinds))

    @property
    def windows(self) -> tuple[Window | None, ...]:
        """The window of each of `attentions`."""
        return tuple(window for window, _ in self.attentions)

    def _kind_of(self, layer: int) -> LayerKind:
        """How a layer of the whole model attends."""
        if self.layer_kinds:
            return self.layer_kinds[layer % len(self.layer_kinds)]
        return LayerKind(self.sliding_window, self.rope_theta, self.rope_scaling)

    @property
    def ropes(self) -> tuple[RopeKind, ...]:
        """What its layers do to heads by positions: the distinct ones, of those that do any."""
        found = dict.fromkeys(map(self.rope_of, self.kinds))
        return tuple(rope for rope in found if rope.width or rope.growth)

    def rope_of(self, kind: LayerKind) -> RopeKind:
        """Return what layers of a kind do to heads by positions."""
        growth = self.query_growth
        if growth is not None and growth.in_rotary != kind.has_rope:
            growth = None
        if not kind.has_rope:
            return RopeKind(1.0, None, 0, growth)
        width = self.rotary_dim or self.head_shapes[self._shape_of(kind)][1]
        return RopeKind(kind.rope_theta, kind.rope_scaling, width, growth)

    @property
    def attention_scale(self) -> float:
        """What attention multiplies the products of queries and keys with."""
        if self.latent is not None:
            return self.latent.scale(self.rope_scaling)
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    @property
    def is_first_stage(self) -> bool:
        """Whether it begins with token ids, so that it has the embedding; a whole model does."""
        return self.stage is None or self.stage.first == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it ends with logits, so that it has the last norm and the LM head."""
        return self.stage is None or self.stage.first + self.num_layers == self.stage.num_all


def stages_of(config: ModelConfig, pp: int) -> tuple[ModelConfig, ...]:
    """Cut a model into `pp` stages of neighbouring layers, the first ones with one more.

    A whole model is its own only stage. Raises ValueError for more stages than layers.
    """
    if pp == 1:
        return (config,)
    if not 1 <= pp <= config.num_layers:
        raise ValueError(f"{config.num_layers} layers cannot be cut into {pp} stages.")
    each, rest = divmod(config.num_layers, pp)
    starts = [index * each + min(index, rest) for index in range(pp + 1)]
    return tuple(
        replace(config, num_layers=end - first, stage=Stage(first, config.num_layers))
        for first, end in itertools.pairwise(starts)
    )
