"""The weights of every model: the one table that all else about weights derives from. No JAX.

Loading and splitting (`device/place.py`), the readers and writers of checkpoints, random weights,
counts of parameters and bytes per device (`costs/memory.py`) read it; the modules of `models/` find
their weights by these names.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Literal, NamedTuple

from shiftjax.arch.config import ModelConfig
from shiftjax.options import ConfigError

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


class Weight(NamedTuple):
    """One weight of a model, unpadded; `axes` says what its dimensions count.

    The dimension that devices split comes first, so that a shard is contiguous. Checkpoints hold
    every matrix as `[out, in]`, so one whose input is split is `transposed`.
    """

    name: str  # the path to it in its module: layers.0.attention.q
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    source: str  # the checkpoint's tensor, by Hugging Face's name
    kind: Literal["matrix", "table", "norm", "bias"] = "matrix"  # table: embedding, LM head
    transposed: bool = False
    tied_to: str | None = None  # the weight whose memory it shares

    @property
    def num_elements(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)

    @property
    def checkpoint_shape(self) -> tuple[int, ...]:
        """The shape of its tensor in a checkpoint: heads are not told from what is in them."""
        if self.kind in ("norm", "bias"):
            return (self.num_elements,)
        shape = (math.prod(self.shape[:-1]), self.shape[-1])
        return shape[::-1] if self.transposed else shape


class Family(NamedTuple):
    """Architectures of one forward pass: `models/families.py` has it under this name."""

    name: str
    weights: Callable[[ModelConfig], Iterator[Weight]]


def _llama(config: ModelConfig) -> Iterator[Weight]:
    vocab, hidden = config.vocab_size, config.hidden_size
    yield Weight("embed", (vocab, hidden), ("vocab", None), EMBEDDING, "table")
    layer = list(_llama_layer(config))
    for index in range(config.num_layers):
        for weight in layer:
            source = f"model.layers.{index}.{weight.source}"
            yield weight._replace(name=f"layers.{index}.{weight.name}", source=source)
    yield _norm("norm", hidden, "model.norm")
    source, tied_to = (EMBEDDING, "embed") if config.tie_word_embeddings else (LM_HEAD, None)
    head = Weight("lm_head", (vocab, hidden), ("lm_vocab", None), source, "table")
    yield head._replace(tied_to=tied_to)


def _llama_layer(config: ModelConfig) -> Iterator[Weight]:
    heads = (config.num_heads, config.head_dim)
    kv_heads, width = (config.num_kv_heads, config.head_dim), (config.intermediate_size,)
    qkv_bias, mlp_bias = config.attention_bias, config.mlp_bias
    projections = (  # name, source, rows, what they count, has a bias, is transposed
        ("attention.q", "self_attn.q_proj", heads, "heads", qkv_bias, False),
        ("attention.k", "self_attn.k_proj", kv_heads, "kv_heads", qkv_bias, False),
        ("attention.v", "self_attn.v_proj", kv_heads, "kv_heads", qkv_bias, False),
        ("attention.o", "self_attn.o_proj", heads, "heads", config.output_bias, True),
        ("mlp.gate", "mlp.gate_proj", width, "intermediate", mlp_bias, False),
        ("mlp.up", "mlp.up_proj", width, "intermediate", mlp_bias, False),
        ("mlp.down", "mlp.down_proj", width, "intermediate", mlp_bias, True),
    )
    yield _norm("input_norm", config.hidden_size, "input_layernorm")
    yield _norm("mlp_norm", config.hidden_size, "post_attention_layernorm")
    for name, source, rows, axis, has_bias, transposed in projections:
        shape = (*rows, config.hidden_size)
        axes = (axis, *(None for _ in shape[1:]))
        yield Weight(name, shape, axes, f"{source}.weight", transposed=transposed)
        if has_bias:  # one number for each output; those of a transposed matrix are not split
            outputs = slice(-1, None) if transposed else slice(-1)
            yield Weight(f"{name}_bias", shape[outputs], axes[outputs], f"{source}.bias", "bias")
    if config.qk_norm:
        yield _norm("attention.q_norm", config.head_dim, "self_attn.q_norm")
        yield _norm("attention.k_norm", config.head_dim, "self_attn.k_norm")


def _norm(name: str, width: int, source: str) -> Weight:
    return Weight(name, (width,), (None,), f"{source}.weight", "norm")


_LLAMA = Family("llama", _llama)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {"llama": _LLAMA, "mistral": _LLAMA, "qwen2": _LLAMA, "qwen3": _LLAMA}
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
    return tuple(family_of(config).weights(config))


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint; what is tied is no tensor of its own."""
    return {
        weight.source: weight.checkpoint_shape
        for weight in weights_of(config)
        if weight.tied_to is None
    }


def num_parameters(config: ModelConfig) -> int:
    """Return the numbers of the unpadded model, tied ones counted once."""
    return sum(weight.num_elements for weight in weights_of(config) if weight.tied_to is None)


def layer_parameters(config: ModelConfig) -> int:
    """Return the numbers in the matrices of all layers."""
    return sum(weight.num_elements for weight in weights_of(config) if weight.kind == "matrix")
