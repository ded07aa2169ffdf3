"""A small model that drafts the next tokens from its target's hidden state and sampled token.

The MLP speculator (arXiv 2404.19124) and the LSTM of Arctic Inference's published checkpoints. Both
carry a state from one draft to the next, made of the state before and of the token just drafted:

    state_i = step(proj_i state_(i-1) + alpha * embedding(token_i)),   logits_i = head_i state_i

state_(-1) is the target's hidden state after its final norm, where token_0 was sampled; nothing is
kept between steps of the engine. `mlp_step` and `lstm_step` are the arithmetic alone, on whatever
device. `Speculator` is one device's shard, inside `shard_map`: embedding and head are split over
all devices in every mode, the rest is on each, so a draft costs one all-reduce of its embedding,
`rows * inner_dim` (four times as much with an embedding per gate), and one all-gather of five
numbers a row and device. Logits stay where they are made.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32, Key, UInt32

from shiftjax.arch.config import ModelConfig
from shiftjax.models.argmax import argmax
from shiftjax.models.exchange import Parallel
from shiftjax.models.layers import look_up
from shiftjax.models.noise import token_noise
from shiftjax.parallel.grid import ALL_AXES

EPS = 1e-6  # of all norms
Ids = Int32[Array, " rows"]
PerRow = Float32[Array, " rows"]


class DraftRows(NamedTuple):
    """What drafts begin with, one entry per sequence; the same on every device."""

    hidden: Float[Array, "rows hidden"]  # of the target, after its final norm
    token_ids: Int32[Array, " rows"]  # what was sampled there
    positions: Int32[Array, " rows"]  # whose noise the token after token_ids is drawn with
    seeds: UInt32[Array, "rows 2"]
    temperature: Float32[Array, " rows"]  # 0: greedy


class MLPWeights(NamedTuple):
    """The weights of an MLP speculator for one draft position."""

    proj: Float[Array, "inner in"]
    norm: Float[Array, " inner"]
    norm_bias: Float[Array, " inner"]


class LSTMWeights(NamedTuple):
    """The weights for one draft position: forget, input and output gate, then the candidate."""

    proj: Float[Array, "inner 4 in"]
    cell_norm: Float[Array, " inner"]
    cell_norm_bias: Float[Array, " inner"]
    state_norm: Float[Array, " inner"]
    state_norm_bias: Float[Array, " inner"]


class Carry(NamedTuple):
    """State of the speculator between two draft positions, a row for each sequence."""

    token_ids: Ids
    probabilities: PerRow
    state: Float[Array, "rows width"]
    cell: Float32[Array, "rows inner"]  # of an LSTM


def embedding_scale(num_predict: int, inner_dim: int) -> float:
    """Return alpha, the weight of a token's embedding against the state, projected.

    Half of the last state is to come from the target's (`MLPSpeculator` of foundation-model-stack).
    """
    state_weight = 0.5 ** (0.5 / num_predict)
    return math.sqrt((1 - state_weight**2) * inner_dim / 2) / state_weight


def normed(x: Float32[Array, "*rows width"]) -> Float32[Array, "*rows width"]:
    """Return `x` divided by its root mean square over the last axis (RMS norm, no weight)."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS)


def scaled_input(hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows hidden"]:
    """Return the target's hidden state after `scale_input`: RMS norm, divided by sqrt(2)."""
    return (normed(hidden.astype(jnp.float32)) / math.sqrt(2)).astype(hidden.dtype)


def mlp_step(
    weights: MLPWeights,
    state: Float[Array, "rows in"],
    embedded: Float[Array, "rows inner"],
    scale: float,
) -> Float[Array, "rows inner"]:
    """Return the next state, in the type of `state`; `scale` is `embedding_scale`."""
    x = jnp.einsum("ri,oi->ro", state, weights.proj, preferred_element_type=jnp.float32)
    x = x + scale * embedded.astype(jnp.float32)
    return _gelu_of_norm(x, weights.norm, weights.norm_bias).astype(state.dtype)


def lstm_step(
    weights: LSTMWeights,
    state: Float[Array, "rows in"],
    cell: Float32[Array, "rows inner"],
    embedded: Float[Array, "rows gates inner"],
    scale: float,
) -> tuple[Float[Array, "rows inner"], Float32[Array, "rows inner"]]:
    """Return the next state, in the type of `state`, and cell, which begins as zeros.

    `embedded` has one embedding for all of the four, or one for each.
    """
    x = jnp.einsum("ri,ogi->rgo", state, weights.proj, preferred_element_type=jnp.float32)
    x = x + scale * embedded.astype(jnp.float32)
    forget, take, give = (jax.nn.sigmoid(x[:, gate]) for gate in range(3))
    candidate = _gelu_of_norm(x[:, 3], weights.cell_norm, weights.cell_norm_bias)
    cell = cell * forget + candidate * take
    out = _gelu_of_norm(cell, weights.state_norm, weights.state_norm_bias) * give
    return out.astype(state.dtype), cell


def _gelu_of_norm(
    x: Float32[Array, "rows width"], weight: Float[Array, " width"], bias: Float[Array, " width"]
) -> Float32[Array, "rows width"]:
    """gelu(norm(x) * weight + bias), with the exact gelu."""
    x = normed(x) * weight.astype(jnp.float32)[None] + bias.astype(jnp.float32)[None]
    return jax.nn.gelu(x, approximate=False)


class Speculator(nnx.Module):
    """The speculator of a model, whose config has one; each weight is a list, one per draft.

    Drafts beyond the end of a list, whose weights are tied, use the last of it.
    """

    embed: nnx.List
    proj: nnx.List
    head: nnx.List

    def __init__(self, config: ModelConfig, params: dict[str, Any]):
        assert config.speculator is not None
        self.config = config.speculator
        for name, group in params.items():
            setattr(self, name, nnx.List([group[str(i)] for i in range(len(group))]))

    def __call__(
        self, rows: DraftRows, key: Key[Array, ""], num_steps: Int[Array, ""], parallel: Parallel
    ) -> tuple[Int32[Array, "rows num_predict"], Float32[Array, "rows num_predict"]]:
        """Return drafts and the probability of each: -1 and 0 from the `num_steps`-th on.

        A draft is the most likely token at temperature 0, else the one that the target would
        draw from the same logits: that with the largest p / noise. The probability is that of
        softmax(logits / temperature), at temperature 0 of softmax(logits).
        """
        num_rows, inner = rows.token_ids.shape[0], self.config.inner_dim
        zeros = jnp.zeros((num_rows,), jnp.float32)
        state = scaled_input(rows.hidden) if self.config.scale_input else rows.hidden
        carry = Carry(rows.token_ids, zeros, state, jnp.zeros((num_rows, inner), jnp.float32))
        nothing = carry._replace(
            token_ids=jnp.full_like(rows.token_ids, -1),
            state=jnp.zeros((num_rows, inner), state.dtype),
        )
        drafts = []
        for i in range(self.config.num_predict):

            def draft(carry: Carry, i: int = i) -> Carry:
                return self._draft(i, carry, rows, key, parallel)

            # Every device takes the same branch, so there may be collectives in it. Unrolled,
            # because drafts have weights of their own and the first a state as wide as the target.
            carry = lax.cond(i < num_steps, draft, lambda _: nothing, carry)
            drafts.append(carry)
        ids, probabilities = [d.token_ids for d in drafts], [d.probabilities for d in drafts]
        return jnp.stack(ids, axis=1), jnp.stack(probabilities, axis=1)

    def _draft(
        self, index: int, carry: Carry, rows: DraftRows, key: Key[Array, ""], parallel: Parallel
    ) -> Carry:
        """One draft after `carry`, whose token is the last one."""
        table = self._weight("embed", index)
        partial = look_up(table.reshape(table.shape[0], -1), carry.token_ids, ALL_AXES)
        embedded = parallel.in_shift.reduce(partial)
        scale = embedding_scale(self.config.num_predict, self.config.inner_dim)
        cell = carry.cell
        if self.config.method == "mlp":
            weights = MLPWeights(*(self._weight(name, index) for name in MLPWeights._fields))
            state = mlp_step(weights, carry.state, embedded, scale)
        else:
            weights = LSTMWeights(*(self._weight(name, index) for name in LSTMWeights._fields))
            by_gate = embedded.reshape(embedded.shape[0], -1, self.config.inner_dim)
            state, cell = lstm_step(weights, carry.state, cell, by_gate, scale)
        head = self._weight("head", index)
        logits = jnp.einsum("ri,vi->rv", state, head, preferred_element_type=jnp.float32)
        rows = rows._replace(positions=rows.positions + index)
        token_ids, probabilities = choose(logits, rows, key, parallel)
        return Carry(token_ids, probabilities, state, cell)

    def _weight(self, name: str, index: int) -> jax.Array:
        group = getattr(self, name)
        return group[min(index, len(group) - 1)][...]


def choose(
    logits: Float32[Array, "rows vocab_split"],
    rows: DraftRows,
    key: Key[Array, ""],
    parallel: Parallel,
) -> tuple[Ids, PerRow]:
    """Choose a token per row out of logits that all devices split, and return its probability.

    A device's best token, its weight in the race against the others' and the sum of exponentials
    are relative to its own largest logit until all largest ones are known.
    """
    num_ids = parallel.layout.num_draft_ids
    token_ids = lax.axis_index(ALL_AXES) * logits.shape[1] + jnp.arange(logits.shape[1])
    # not -inf: a device may have nothing but padding
    logits = jnp.where((token_ids < num_ids)[None], logits, jnp.finfo(jnp.float32).min)
    is_drawn = rows.temperature > 0
    temperature = jnp.where(is_drawn, rows.temperature, 1.0)
    greedy, largest = argmax(logits)
    odds = jnp.exp((logits - largest[:, None]) / temperature[:, None])

    def race() -> tuple[Ids, PerRow]:
        noise = token_noise(key, rows.seeds, rows.positions, token_ids)
        drawn, lead = argmax(odds / noise)
        return jnp.where(is_drawn, drawn, greedy), lead

    best, lead = lax.cond(jnp.any(is_drawn), race, lambda: (greedy, jnp.ones_like(largest)))
    chosen = jnp.take_along_axis(odds, best[:, None], axis=1, mode="clip")[:, 0]
    floats = jnp.stack([largest, lead, chosen, jnp.sum(odds, axis=1)])
    own = jnp.concatenate(
        [token_ids[0] + best[None], lax.bitcast_convert_type(floats, jnp.int32)], axis=0
    )
    gathered = parallel.of_all_devices(own)
    floats = lax.bitcast_convert_type(gathered[:, 1:], jnp.float32)
    largest, lead, chosen, total = (floats[:, i] for i in range(4))
    weight = jnp.exp((largest - jnp.max(largest, axis=0)[None]) / temperature[None])
    winner = jnp.argmax(jnp.where(is_drawn[None], lead * weight, largest), axis=0)[None]
    token, chosen = (
        jnp.take_along_axis(part, winner, axis=0)[0] for part in (gathered[:, 0], chosen * weight)
    )
    return token, chosen / jnp.sum(total * weight, axis=0)
