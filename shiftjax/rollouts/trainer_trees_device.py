"""Trees of other JAX trainers, as tensors of a Hugging Face checkpoint.

    tunix     Llama 3, Qwen2, Qwen3 and its mixtures (tunix/models/*/params.py)
    MaxText   the same, each layer apart or all stacked by a scan
              (maxtext/checkpoint_conversion/utils/param_mapping.py)

Both have matrices as `[in, out]`, and heads as a dimension of their own. MaxText's Llamas rotate
neighbours, and their queries are scaled by the weights.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shiftjax.arch.config import ModelConfig
from shiftjax.weights.errors import CheckpointError

Array = jax.Array | np.ndarray
Turn = Callable[[Array], Array]
FAMILIES = "llama", "qwen2", "qwen3", "qwen3_moe"


class Rule(NamedTuple):
    """What a parameter is in a checkpoint: one of each expert where the name has `{expert}`."""

    name: str  # behind that of the layer
    turn: Turn


class Tree(NamedTuple):
    """How a trainer names its parameters."""

    layer: re.Pattern[str]  # finds the number of a layer, or none in stacked ones, and what follows
    of_layers: Mapping[str, Rule]  # by what follows
    others: Mapping[str, Rule]  # by the last two parts of a name

    def rule(self, name: str) -> tuple[Rule | None, str | None, bool]:
        """Return what a parameter is, the number of its layer, and whether it is of all layers."""
        if found := self.layer.search(name):
            number, rest = found.groups()
            return self.of_layers.get(rest), number, number is None
        return self.others.get(".".join(name.split(".")[-2:])), None, False


class Renamed(Mapping[str, Array]):
    """Tensors, each made when it is asked for."""

    def __init__(self, makers: Mapping[str, Callable[[], Array]]):
        self._makers = makers

    def __getitem__(self, name: str) -> Array:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def in_checkpoint_names(given: Mapping[str, Array], config: ModelConfig) -> Mapping[str, Array]:
    """Return a trainer's tree as the tensors of a checkpoint; any other as it is.

    Raises:
        CheckpointError: the trainer's trees of such a model are not known, or none of its
            parameters has such a name.
    """
    trees = trees_of(config)
    tree = next((each for each in trees if any(each.rule(name)[0] for name in given)), None)
    if tree is None:
        return given
    if config.architecture not in FAMILIES:
        words = f"trees of trainers are read for {', '.join(FAMILIES)}, not {config.architecture}"
        raise CheckpointError(f"the update: {config.name}: {words}")
    return Renamed(
        {name: make for each in given.items() for name, make in _made(tree, *each, config)}
    )


def _made(
    tree: Tree, name: str, array: Array, config: ModelConfig
) -> Iterator[tuple[str, Callable[[], Array]]]:
    """Yield the tensors that a parameter is, and what makes them."""
    rule, number, is_stacked = tree.rule(name)
    if rule is None:
        raise CheckpointError(f"the update: tensor {name}: expected no such tensor")
    every = slice(None)
    layers = range(config.num_layers) if is_stacked else [number]
    experts = range(array.shape[0]) if "{expert}" in rule.name else [every]
    for layer, expert in itertools.product(layers, experts):
        full = rule.name if layer is None else f"model.layers.{layer}.{rule.name}"
        part = (expert, layer) if is_stacked else (expert,)
        yield full.format(expert=expert), partial(_turned, rule.turn, array, part)


def _turned(turn: Turn, array: Array, part: tuple[Any, ...]) -> Array:
    return turn(array[part])


def _same(array: Array) -> Array:
    return array


def _flat(array: Array) -> Array:
    return array.reshape(-1)


def _turn(array: Array) -> Array:
    return array.T


def _from_heads(array: Array) -> Array:
    """`[in, heads, width]` to `[out, in]`."""
    return array.reshape(array.shape[0], -1).T


def _to_heads(array: Array) -> Array:
    """`[heads, width, out]` to `[out, in]`."""
    return array.reshape(-1, array.shape[-1]).T


def _halves(array: Array) -> Array:
    """Heads whose pairs are neighbours to heads whose pairs are half a head apart."""
    return jnp.concatenate([array[..., ::2], array[..., 1::2]], axis=-1)


def trees_of(config: ModelConfig) -> tuple[Tree, ...]:
    """Return how each trainer names and shapes the parameters of such a model."""

    def unscaled(array: Array) -> Array:
        wide = jnp.asarray(array, jnp.float32) * np.float32(config.head_dim**0.5)
        return wide.astype(array.dtype)

    def rows(array: Array) -> Array:
        return array[: config.vocab_size]

    attention, experts = "self_attn.{}_proj.{}", "mlp.experts.{{expert}}.{}_proj.weight"
    tunix = {
        "attn.o_proj.w": Rule(attention.format("o", "weight"), _to_heads),
        "mlp.router.kernel": Rule("mlp.gate.weight", _turn),
    }
    for one in "qkv":
        tunix[f"attn.{one}_proj.w"] = Rule(attention.format(one, "weight"), _from_heads)
        tunix[f"attn.{one}_bias"] = Rule(attention.format(one, "bias"), _flat)
    for one in "qk":
        tunix[f"attn.{one}_norm.w"] = Rule(f"self_attn.{one}_norm.weight", _same)
    for one in ("input", "post_attention"):
        tunix[f"{one}_layernorm.w"] = Rule(f"{one}_layernorm.weight", _same)
    for one in ("gate", "up", "down"):
        tunix[f"mlp.{one}_proj.kernel"] = Rule(f"mlp.{one}_proj.weight", _turn)
        tunix[f"mlp.{one}_proj"] = Rule(experts.format(one), _turn)

    is_llama = config.architecture == "llama"
    query: Turn = (lambda x: _from_heads(_halves(unscaled(x)))) if is_llama else _from_heads
    key: Turn = (lambda x: _from_heads(_halves(x))) if is_llama else _from_heads
    maxtext = {
        "self_attention.out.kernel": Rule(attention.format("o", "weight"), _to_heads),
        "moe_block.gate.kernel": Rule("mlp.gate.weight", _turn),
        "pre_self_attention_layer_norm.scale": Rule("input_layernorm.weight", _same),
        "post_self_attention_layer_norm.scale": Rule("post_attention_layernorm.weight", _same),
    }
    for one, turn in (("query", query), ("key", key), ("value", _from_heads)):
        own = f"self_attention.{one}"
        maxtext[f"{own}.kernel"] = Rule(attention.format(one[0], "weight"), turn)
        maxtext[f"{own}.bias"] = Rule(attention.format(one[0], "bias"), _flat)
        maxtext[f"self_attention.{one}_norm.scale"] = Rule(f"self_attn.{one[0]}_norm.weight", _same)
    for one, its in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")):
        maxtext[f"mlp.{its}.kernel"] = Rule(f"mlp.{one}_proj.weight", _turn)
        maxtext[f"moe_block.{its}"] = Rule(experts.format(one), _turn)

    embedding, norm, head = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
    return (
        Tree(
            re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$"),
            tunix,
            {
                "embedder.input_embedding": Rule(embedding, rows),
                "final_norm.w": Rule(norm, _same),
                "lm_head.w": Rule(head, _turn),
            },
        ),
        Tree(
            re.compile(r"(?:^|\.)decoder\.layers(?:_(\d+))?\.(.+)$"),
            maxtext,
            {
                "token_embedder.embedding": Rule(embedding, rows),
                "decoder_norm.scale": Rule(norm, _same),
                "logits_dense.kernel": Rule(head, lambda x: rows(x.T)),
            },
        ),
    )
