"""The weights of every model: the one table that all else about weights derives from. No JAX.

Loading and splitting (`device/place.py`), the readers and writers of checkpoints, random weights,
counts of parameters and bytes per device (`costs/memory.py`) read it; the modules of `models/` find
their weights by these names.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Literal, NamedTuple

from shiftjax.arch.config import AttentionKind, Experts, LayerParts, ModelConfig, Speculator
from shiftjax.arch.traits import DECODERS
from shiftjax.options import ConfigError

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
SPECULATOR = "speculator."  # before the names of what drafts; some checkpoints of it leave it out
LSTM_GATES = ("forget", "input", "output", "cell")
EACH = "{expert}"  # in the source of a stack of experts: checkpoints have a tensor for each


Plain = Literal["matrix", "latent_up", "table", "norm", "head_norm", "bias", "correction"]
Kind = Plain | Literal["codes", "scale", "scales", "zeros", "input_scale", "kv_scale", "factor"]


def of_shape(axis: str, heads: int) -> str:
    """Return the name of an axis of heads in layers that have such heads (`head_shapes`)."""
    return f"{axis}@{heads}" if heads else axis


class Axis(NamedTuple):
    """What the name of an axis says: `name@heads:whole/rows`, where all but the name may lack."""

    name: str
    heads: int = 0  # of layers with such heads (`head_shapes`)
    whole: int = 1  # padded so that every device has a multiple of it
    rows: int = 1  # neighbours that are one row of the weight

    def __str__(self) -> str:
        whole = f":{self.whole}" if self.whole > 1 else ""
        rows = f"/{self.rows}" if self.rows > 1 else ""
        return f"{of_shape(self.name, self.heads)}{whole}{rows}"


_AXIS = re.compile(r"(\w+)(?:@(\d+))?(?::(\d+))?(?:/(\d+))?")


@cache
def read_axis(axis: str) -> Axis:
    """Undo `str` of an axis."""
    found = _AXIS.fullmatch(axis)
    assert found is not None, axis
    name, heads, whole, rows = found.groups()
    return Axis(name, int(heads or 0), int(whole or 1), int(rows or 1))


def plain_axis(axis: str) -> tuple[str, int]:
    """Return the name of an axis and the heads of the layers that have it."""
    name, heads, *_ = read_axis(axis)
    return name, heads


class Weight(NamedTuple):
    """One weight of a model, unpadded; `axes` says what its dimensions count.

    The dimension that devices split comes first, so that a shard is contiguous. Checkpoints hold
    every matrix as `[out, in]`, so one whose input is split is `transposed`.

    A `table` is the embedding or the LM head; a `latent_up` is a matrix that is used in both
    directions, and so never becomes codes; a `head_norm` is a norm that checkpoints have as
    `[heads, head_dim]`; a `correction` is float32 in every format. `codes` are a quantised matrix,
    `scale` what they are in units of and `input_scale` what its inputs are; `scales` and `zeros`
    are those of groups of inputs (`parallel/stored.py`). A `factor` is of adapters (`lora.py`).
    """

    name: str  # the path to it in its module: layers.0.attention.q
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    source: str  # the checkpoint's tensor, by Hugging Face's name
    kind: Kind = "matrix"
    transposed: bool = False
    tied_to: str | None = None  # the weight whose memory it shares
    in_shift: bool = False  # split over all devices in every mode, as SHIFT splits it
    stacked: tuple[str, ...] = ()  # tensors along the second dimension, in place of `source`

    @property
    def split(self) -> str | None:
        """What devices split it by, whatever the shape of the heads is; None: they do not."""
        return None if self.axes[0] is None else plain_axis(self.axes[0])[0]

    @property
    def num_elements(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)

    @property
    def parts(self) -> "tuple[Weight, ...]":
        """The weights that are stacked in it, each of one tensor; itself where none are."""
        if not self.stacked:
            return (self,)
        part = self._replace(
            shape=(self.shape[0], *self.shape[2:]),
            axes=(self.axes[0], *self.axes[2:]),
            stacked=(),
        )
        return tuple(part._replace(source=source) for source in self.stacked)

    def of_expert(self, expert: int) -> "Weight":
        """The matrix of one expert, out of a stack of all."""
        source = self.source.replace(EACH, str(expert))
        return self._replace(shape=self.shape[1:], axes=self.axes[1:], source=source)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of what a checkpoint has of it, where heads are not told from widths."""
        if self.tied_to is not None:
            return {}
        if self.stacked:
            return {name: shape for part in self.parts for name, shape in part.tensors.items()}
        if self.axes[0] == "experts":
            experts = map(self.of_expert, range(self.shape[0]))
            return {name: shape for one in experts for name, shape in one.tensors.items()}
        if self.kind == "head_norm":
            return {self.source: self.shape}
        if self.kind in ("norm", "bias", "correction"):
            return {self.source: (self.num_elements,)}
        shape = (math.prod(self.shape[:-1]), self.shape[-1])
        return {self.source: shape[::-1] if self.transposed else shape}


# A layer's norms of hidden states, before or after what they are named for, by its checkpoint's.
_NORMS_BEFORE = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_NORMS_AROUND = {
    "input_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
_NORMS_AFTER = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
_GEMMAS = "gemma2", "gemma3_text", "gemma4_text"
_NORM_OF_BLOCK = {"input_norm": "input_layernorm"}
NORMS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys((*_GEMMAS, "gemma4_unified_text"), _NORMS_AROUND),
        "glm4": {
            "input_norm": "input_layernorm",
            "attention_out_norm": "post_self_attn_layernorm",
            "mlp_norm": "post_attention_layernorm",
            "mlp_out_norm": "post_mlp_layernorm",
        },
        **dict.fromkeys(("olmo2", "olmo3", "exaone4"), _NORMS_AFTER),
        **dict.fromkeys(("cohere", "cohere2"), _NORM_OF_BLOCK),
    }
)


def layer_norms(config: ModelConfig) -> Mapping[str, str]:
    """Return the norms of hidden states that a layer has, as checkpoints call them."""
    return NORMS.get(config.architecture, _NORMS_BEFORE)


class Family(NamedTuple):
    """Architectures of one forward pass: `models/families.py` has it under this name."""

    name: str
    weights: Callable[[ModelConfig], Iterator[Weight]]


def _llama(config: ModelConfig) -> Iterator[Weight]:
    vocab, hidden = config.vocab_size, config.hidden_size
    if config.is_first_stage:
        yield Weight("embed", (vocab, hidden), ("vocab", None), EMBEDDING, "table")
    yield from _layer_inputs(config)
    late, first = list(_late_layer(config)), config.stage.first if config.stage else 0
    layers = {parts: list(_llama_layer(config, parts)) for parts in set(config.parts)}
    for index, parts in enumerate(config.parts):
        for weight in layers[parts] if index < config.num_early_layers else late:
            source = f"model.layers.{first + index}.{weight.source}"
            yield weight._replace(name=f"layers.{index}.{weight.name}", source=source)
    yield from _swiftkv(config)
    if not config.is_last_stage:
        return
    yield _norm("norm", hidden, "model.norm")
    if config.num_labels:
        yield Weight("score", (config.num_labels, hidden), (None, None), "score.weight")
        return
    source, tied_to = (EMBEDDING, "embed") if config.tie_word_embeddings else (LM_HEAD, None)
    head = Weight("lm_head", (vocab, hidden), ("vocab", None), source, "table")
    tied_to = tied_to if config.is_first_stage else None  # the embedding is on other devices
    yield head._replace(tied_to=tied_to, in_shift=True)


def _layer_inputs(config: ModelConfig) -> Iterator[Weight]:
    """What makes the inputs that layers have of their own; a row of the table is of all layers."""
    width = config.layer_input_width
    if not width:
        return
    all_layers, name = config.num_layers * width, "layer_inputs"
    table = Weight(f"{name}.embed", (config.vocab_size, all_layers), ("vocab", None), "", "table")
    yield table._replace(source="model.embed_tokens_per_layer.weight")
    source = "model.per_layer_model_projection.weight"
    shape = all_layers, config.hidden_size
    yield Weight(f"{name}.projection", shape, (None, None), source)
    yield _norm(f"{name}.norm", width, "model.per_layer_projection_norm")


def _own_input(hidden: int, width: int) -> Iterator[Weight]:
    """A layer's part of it: small, so that every device has it whole."""
    for name, shape, source in (
        ("gate", (width, hidden), "per_layer_input_gate"),
        ("out", (hidden, width), "per_layer_projection"),
    ):
        yield Weight(f"own_input.{name}", shape, (None, None), f"{source}.weight")
    yield _norm("own_input.norm", hidden, "post_per_layer_input_norm")


def _late_layer(config: ModelConfig) -> Iterator[Weight]:
    """A layer that computes logit rows alone, which are few in every mode: all devices split it."""
    for weight in _llama_layer(config, LayerParts()):
        if weight.axes[0] != "kv_heads":
            source = weight.source.replace("q_proj", "q_proj_swiftkv")
            yield weight._replace(source=source, in_shift=weight.axes[0] is not None)


def _swiftkv(config: ModelConfig) -> Iterator[Weight]:
    """What makes the late layers' keys and values: one product for all of them, k before v."""
    if config.num_kv_layers is None:
        return
    yield _norm("swiftkv.norm", config.hidden_size, "model.norm_swiftkv")
    if not config.num_late_layers:
        return
    layers = range(config.num_early_layers, config.num_layers)
    sources = [f"model.layers.{i}.self_attn.{n}_proj_swiftkv" for n in "kv" for i in layers]
    shape = config.num_kv_heads, len(sources), config.head_dim, config.hidden_size
    matrix = Weight("swiftkv.kv", shape, ("kv_heads", None, None, None), "")
    for weight in _projection(matrix, config.attention_bias):
        stacked = tuple(f"{source}{weight.source}" for source in sources)
        yield weight._replace(source="", stacked=stacked, in_shift=True)


def _llama_layer(config: ModelConfig, parts: LayerParts) -> Iterator[Weight]:
    hidden = config.hidden_size
    for name, source in layer_norms(config).items():
        yield _norm(name, hidden, source)
    yield from _ATTENTIONS[config.attention](config, parts)
    if parts.has_experts and config.experts is not None:
        names = EXPERT_NAMES.get(config.architecture, _QWEN_EXPERTS)  # what is planned for alone
        yield from _moe(config.experts, hidden, names)
        if config.experts.beside_mlp:
            yield from _beside_experts(config)
    else:
        source = "feed_forward" if config.architecture == "llama4_text" else "mlp"
        width, axis = config.intermediate_size, "intermediate"
        if parts.is_wide:
            width, axis = 2 * width, "wide_intermediate"
        yield from _mlp("mlp", (width, hidden), source, config.mlp_bias, axis)
    if config.qk_norm:
        norms = _qk_norms(config, config.head_shapes[parts.heads][1])
        yield from norms if parts.num_kv else itertools.islice(norms, 1)
    if config.layer_input_width:
        yield from _own_input(hidden, config.layer_input_width)
    if config.layer_scalars:
        yield Weight("scalar", (1,), (None,), "layer_scalar", "bias")
    if config.attention_sinks:  # attention has its own heads in every mode, as SHIFT splits them
        shape, axes, source = (config.num_heads, 1), ("heads", None), "self_attn.sinks"
        yield Weight("attention.sinks", shape, axes, source, "bias", in_shift=True)


def _grouped_attention(config: ModelConfig, parts: LayerParts) -> Iterator[Weight]:
    hidden, (num_kv_heads, head_dim) = config.hidden_size, config.head_shapes[parts.heads]
    for name, axis, num_heads, has_bias in (
        ("q", "heads", config.num_heads, config.attention_bias),
        ("k", "kv_heads", num_kv_heads, config.attention_bias),
        ("v", "kv_heads", num_kv_heads, config.attention_bias),
        ("o", "heads", config.num_heads, config.output_bias),
    ):
        if name in "kv"[parts.num_kv :]:
            continue
        shape, source = (num_heads, head_dim, hidden), f"self_attn.{name}_proj"
        axes = of_shape(axis, parts.heads), None, None
        matrix = Weight(f"attention.{name}", shape, axes, source)
        yield from _projection(matrix._replace(transposed=name == "o"), has_bias)


def _latent_attention(config: ModelConfig, parts: LayerParts) -> Iterator[Weight]:
    """Projections down, which every device has whole, their norms, and projections up, by heads.

    `kv_up` is used by attention, which has its own heads in every mode, as SHIFT splits them.
    """
    latent, hidden, heads = config.latent, config.hidden_size, config.num_heads
    assert latent is not None
    by_heads = "heads", None, None
    source, width = "self_attn.q_proj", hidden
    if latent.query_rank is not None:
        source, width = "self_attn.q_b_proj", latent.query_rank
        down = Weight("attention.q_down", (width, hidden), (None, None), "self_attn.q_a_proj")
        yield from _projection(down, config.attention_bias)
        yield _norm("attention.q_norm", width, "self_attn.q_a_layernorm")
    yield Weight("attention.q", (heads, latent.query_dim, width), by_heads, f"{source}.weight")
    source = "self_attn.kv_a_proj_with_mqa"
    down = Weight("attention.kv_down", (latent.width, hidden), (None, None), source)
    yield from _projection(down, config.attention_bias)
    yield _norm("attention.kv_norm", latent.rank, "self_attn.kv_a_layernorm")
    shape, source = (heads, latent.nope_dim + latent.value_dim, latent.rank), "self_attn.kv_b_proj"
    up = Weight("attention.kv_up", shape, by_heads, f"{source}.weight", "latent_up")
    yield up._replace(in_shift=True)
    shape = heads, latent.value_dim, hidden
    out = Weight("attention.o", shape, by_heads, "self_attn.o_proj", transposed=True)
    yield from _projection(out, config.output_bias)


_ATTENTIONS: Mapping[AttentionKind, Callable[[ModelConfig, LayerParts], Iterator[Weight]]] = (
    MappingProxyType({"grouped": _grouped_attention, "latent": _latent_attention})
)


def _qk_norms(config: ModelConfig, head_dim: int) -> Iterator[Weight]:
    """The norms of queries and keys: one that all heads share, or weights of each head."""
    for name, axis, num_heads in (
        ("q", "heads", config.num_heads),
        ("k", "kv_heads", config.num_kv_heads),
    ):
        norm = _norm(f"attention.{name}_norm", head_dim, f"self_attn.{name}_norm")
        if config.wide_qk_norm or config.qk_norm_by_head:
            norm = norm._replace(shape=(num_heads, head_dim), axes=(axis, None))
        if config.qk_norm_by_head:
            norm = norm._replace(kind="head_norm")
        yield norm


class ExpertNames(NamedTuple):
    """What a family's checkpoints call the parts of a layer with experts."""

    router: str
    expert: str
    gate: str
    up: str
    down: str
    shared: str = "mlp.shared_expert"
    correction: str = ""  # as usual: beside the router's weight


_QWEN_EXPERTS = ExpertNames("mlp.gate", f"mlp.experts.{EACH}", "gate_proj", "up_proj", "down_proj")
_MIXTRAL_EXPERTS = ExpertNames(
    "block_sparse_moe.gate", f"block_sparse_moe.experts.{EACH}", "w1", "w3", "w2"
)
EXPERT_NAMES: Mapping[str, ExpertNames] = MappingProxyType(
    {
        **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe"), _QWEN_EXPERTS),
        **dict.fromkeys(
            ("glm4_moe", "deepseek_v2", "deepseek_v3", "kimi_k2", "glm_moe_dsa"),
            _QWEN_EXPERTS._replace(shared="mlp.shared_experts"),
        ),
        "gemma4_text": _QWEN_EXPERTS._replace(router="router.proj", expert=f"experts.{EACH}"),
        "gpt_oss": _QWEN_EXPERTS._replace(router="mlp.router"),  # as `weights/hf_names.py` reads it
        "llama4_text": _QWEN_EXPERTS._replace(
            router="feed_forward.router",
            expert=f"feed_forward.experts.{EACH}",
            shared="feed_forward.shared_expert",
        ),
        "mixtral": _MIXTRAL_EXPERTS,
        "minimax_m2": _MIXTRAL_EXPERTS._replace(
            correction="block_sparse_moe.e_score_correction_bias"
        ),
    }
)
"""Architectures whose layers have experts."""


def _moe(experts: Experts, hidden: int, names: ExpertNames) -> Iterator[Weight]:
    """The experts of a layer: whole ones, split as `Layout.experts_sp` and steps say.

    They are `[expert, out, in]`, `down` too: nobody splits its inputs. Every device has the router.
    A shared expert is an MLP, and split as one.
    """
    yield Weight("mlp.router", (experts.num, hidden), (None, None), f"{names.router}.weight")
    width = experts.intermediate_size
    for name, shape, part in (
        ("gate", (width, hidden), names.gate),
        ("up", (width, hidden), names.up),
        ("down", (hidden, width), names.down),
    ):
        source, axes = f"{names.expert}.{part}.weight", ("experts", None, None)
        matrix = Weight(f"mlp.experts.{name}", (experts.num, *shape), axes, source)
        yield matrix
        if experts.has_bias:
            bias = matrix._replace(name=f"{matrix.name}_bias", shape=matrix.shape[:2], kind="bias")
            yield bias._replace(axes=axes[:2], source=f"{names.expert}.{part}.bias")
    if experts.has_bias:
        source, axes = f"{names.router}.bias", (None,)
        yield Weight("mlp.router_bias", (experts.num,), axes, source, "bias")
    if experts.has_correction:
        source = names.correction or f"{names.router}.e_score_correction_bias"
        yield Weight("mlp.router_correction", (experts.num,), (None,), source, "correction")
    if experts.shared_intermediate_size:
        shape = experts.shared_intermediate_size, hidden
        yield from _mlp("mlp.shared", shape, names.shared, axis="shared_intermediate")
    if experts.has_shared_gate:
        yield Weight("mlp.shared_gate", (1, hidden), (None, None), f"{names.shared}_gate.weight")


def _beside_experts(config: ModelConfig) -> Iterator[Weight]:
    """The MLP beside experts, their norms, and what scales the router's input and output."""
    hidden, experts = config.hidden_size, config.experts
    assert experts is not None
    yield from _mlp("mlp.dense", (config.intermediate_size, hidden), "mlp")
    for name, source in (
        ("dense_norm", "post_feedforward_layernorm_1"),
        ("experts_norm", "post_feedforward_layernorm_2"),
        ("entry_norm", "pre_feedforward_layernorm_2"),
    ):
        yield _norm(f"mlp.{name}", hidden, source)
    yield Weight("mlp.router_scale", (hidden,), (None,), "router.scale", "norm")
    source = "router.per_expert_scale"
    yield Weight("mlp.expert_scale", (experts.num,), (None,), source, "correction")


def _mlp(
    name: str,
    shape: tuple[int, int],
    source: str,
    has_bias: bool = False,
    axis: str = "intermediate",
) -> Iterator[Weight]:
    for part in ("gate", "up", "down"):
        matrix = Weight(f"{name}.{part}", shape, (axis, None), f"{source}.{part}_proj")
        yield from _projection(matrix._replace(transposed=part == "down"), has_bias)


def _projection(matrix: Weight, has_bias: bool) -> Iterator[Weight]:
    """A matrix and its bias, whose outputs are not split where the inputs are."""
    yield matrix._replace(source=f"{matrix.source}.weight")
    if has_bias:
        outputs = slice(-1, None) if matrix.transposed else slice(-1)
        shape, axes = matrix.shape[outputs], matrix.axes[outputs]
        yield Weight(f"{matrix.name}_bias", shape, axes, f"{matrix.source}.bias", "bias")


def _norm(name: str, width: int, source: str) -> Weight:
    return Weight(name, (width,), (None,), f"{source}.weight", "norm")


def _bert(config: ModelConfig) -> Iterator[Weight]:
    """An encoder, which every device holds whole: no axis is split."""
    assert config.encoder is not None
    hidden, encoder = config.hidden_size, config.encoder
    for name, num, source in (
        ("tokens", config.vocab_size, "word"),
        ("positions", config.max_position_embeddings + encoder.position_offset, "position"),
        ("token_types", encoder.num_token_types, "token_type"),
    ):
        tensor = f"embeddings.{source}_embeddings.weight"
        yield Weight(name, (num, hidden), (None, None), tensor, "table")
    yield from _layer_norm("norm", hidden, "embeddings.LayerNorm")
    layer = list(_bert_layer(hidden, config.intermediate_size))
    for index in range(config.num_layers):
        for weight in layer:
            source = f"encoder.layer.{index}.{weight.source}"
            yield weight._replace(name=f"layers.{index}.{weight.name}", source=source)
    yield from _scoring_head(config)


def _scoring_head(config: ModelConfig) -> Iterator[Weight]:
    """A dense layer over the first token, and one that makes a number for each label of it."""
    assert config.encoder is not None
    hidden, num_labels = config.hidden_size, config.encoder.num_labels
    names = "classifier.dense", "classifier.out_proj"
    if config.architecture == "bert":
        names = "pooler.dense", "classifier"
    if num_labels:
        for name, num, source in zip(("dense", "out"), (hidden, num_labels), names, strict=True):
            matrix = Weight(f"head.{name}", (num, hidden), (None, None), source)
            yield from _projection(matrix, has_bias=True)


def _bert_layer(hidden: int, intermediate: int) -> Iterator[Weight]:
    """The matrices of a layer with their biases, and the norm after each residual."""
    for name, shape, source in (
        ("q", (hidden, hidden), "attention.self.query"),
        ("k", (hidden, hidden), "attention.self.key"),
        ("v", (hidden, hidden), "attention.self.value"),
        ("o", (hidden, hidden), "attention.output.dense"),
        ("up", (intermediate, hidden), "intermediate.dense"),
        ("down", (hidden, intermediate), "output.dense"),
    ):
        yield from _projection(Weight(name, shape, (None, None), source), has_bias=True)
    yield from _layer_norm("attention_norm", hidden, "attention.output.LayerNorm")
    yield from _layer_norm("output_norm", hidden, "output.LayerNorm")


def _layer_norm(name: str, width: int, source: str) -> Iterator[Weight]:
    yield _norm(name, width, source)
    yield Weight(f"{name}_bias", (width,), (None,), f"{source}.bias", "bias")


def _speculator(config: ModelConfig) -> Iterator[Weight]:
    """What drafts for the model, by the names of Arctic Inference's checkpoints.

    Of stages the last one has it, beside the hidden states that it begins with.
    """
    speculator = config.speculator
    if speculator is None or not config.is_last_stage:
        return
    own = _lstm_speculator if speculator.method == "lstm" else _mlp_speculator
    for weight in own(speculator, config.vocab_size, config.hidden_size):
        source = weight.source and f"{SPECULATOR}{weight.source}"
        stacked = tuple(f"{SPECULATOR}{part}" for part in weight.stacked)
        yield weight._replace(name=f"{SPECULATOR}{weight.name}", source=source, stacked=stacked)


def _mlp_speculator(speculator: Speculator, vocab: int, hidden: int) -> Iterator[Weight]:
    """A state of each draft out of the one before; tied, all but the first projection are one."""
    inner = speculator.inner_dim
    num_own = 1 if speculator.tie_weights else speculator.num_predict
    for i in range(num_own):
        yield _draft_table(f"embed.{i}", vocab, inner, f"emb.{i}")
        yield from _numbered_norm("norm", i, inner, "ln")
        yield _draft_head(i, speculator, vocab)
    for i in range(2 if speculator.tie_weights else num_own):
        shape = inner, inner if i else hidden
        yield Weight(f"proj.{i}", shape, (None, None), f"proj.{i}.weight")


def _lstm_speculator(speculator: Speculator, vocab: int, hidden: int) -> Iterator[Weight]:
    """The gates and the cell's candidate are one product, in the order of LSTM_GATES."""
    inner = speculator.inner_dim
    embed = _draft_table("embed.0", vocab, inner, f"{LSTM_GATES[0]}_emb.0")
    if not speculator.tie_lstm_embs:
        shape, axes = (vocab, len(LSTM_GATES), inner), ("vocab", None, None)
        stacked = tuple(f"{gate}_emb.0.weight" for gate in LSTM_GATES)
        embed = embed._replace(shape=shape, axes=axes, source="", stacked=stacked)
    yield embed
    for i, width in enumerate((hidden, inner)):
        stacked = tuple(f"{gate}_proj.{i}.weight" for gate in LSTM_GATES)
        shape = inner, len(LSTM_GATES), width
        yield Weight(f"proj.{i}", shape, (None, None, None), "", stacked=stacked)
    yield from _numbered_norm("cell_norm", 0, inner, "cell_ln")
    yield from _numbered_norm("state_norm", 0, inner, "state_ln")
    yield _draft_head(0, speculator, vocab)


def _draft_table(name: str, num_rows: int, inner: int, source: str) -> Weight:
    """A table that all devices split in every mode: few rows of a step draft."""
    weight = Weight(name, (num_rows, inner), ("vocab", None), f"{source}.weight", "table")
    return weight._replace(in_shift=True)


def _draft_head(index: int, speculator: Speculator, vocab: int) -> Weight:
    rows = speculator.draft_vocab or vocab
    head = _draft_table(f"head.{index}", rows, speculator.inner_dim, f"head.{index}")
    return head._replace(axes=("draft_vocab", None))


def _numbered_norm(name: str, index: int, width: int, source: str) -> Iterator[Weight]:
    for weight in _layer_norm(name, width, f"{source}.{index}"):
        yield weight._replace(name=f"{weight.name}.{index}")


_LLAMA, _BERT = Family("llama", _llama), Family("bert", _bert)
FAMILIES: dict[str, Family] = dict(
    dict.fromkeys(DECODERS, _LLAMA) | dict.fromkeys(("bert", "roberta", "xlm-roberta"), _BERT)
)
"""The family of every `ModelConfig.architecture`."""


def family_of(config: ModelConfig) -> Family:
    """Return the model's family. Raises ConfigError where there is none."""
    if config.architecture not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(
            [f"{config.name}: architecture {config.architecture!r} is none of {known}"]
        )
    return FAMILIES[config.architecture]


@cache
def weights_of(config: ModelConfig) -> tuple[Weight, ...]:
    """Return every weight of the model, in the order of checkpoints."""
    return (*family_of(config).weights(config), *_speculator(config))


@cache
def kv_scales_of(config: ModelConfig) -> tuple[Weight, ...]:
    """Return what a KV cache of codes is in units of: for each layer, the scales of K and of V.

    Latents (MLA) have one scale, that of K, which is that of the values in them, too.

    Attention has a device's heads in all modes, so all devices split them in every mode. A
    checkpoint may have them or not, so they are none of `weights_of`.
    """
    first = config.stage.first if config.stage else 0
    sides = "kv" if config.latent is None else "kk"
    return tuple(
        Weight(
            f"layers.{index}.attention.kv_scale",
            (config.head_shapes[cache.heads][0], 2),
            (of_shape("kv_heads", cache.heads), None),
            "",
            "kv_scale",
            in_shift=True,
            stacked=tuple(f"model.layers.{first + index}.self_attn.{n}_scale" for n in sides),
        )
        for index, cache in sorted(
            (each, cache) for cache in config.caches for each in cache.layers
        )
    )


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint; what is tied is no tensor of its own."""
    return {name: shape for weight in weights_of(config) for name, shape in weight.tensors.items()}


def num_parameters(config: ModelConfig) -> int:
    """Return the numbers of the unpadded model, tied ones counted once."""
    return sum(weight.num_elements for weight in weights_of(config) if weight.tied_to is None)


def layer_parameters(config: ModelConfig) -> int:
    """Return the numbers in the matrices of all layers, which are not a speculator's."""
    weights = family_of(config).weights(config)
    return sum(weight.num_elements for weight in weights if weight.kind in ("matrix", "latent_up"))
