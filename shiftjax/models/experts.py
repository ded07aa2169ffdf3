"""Layers of experts: which tokens go to which, and the experts that one device has.

A token's router logits are float32, computed on every device that has the token: what they choose
depends on the token alone. The pairs of a token and an expert that a device has are sorted by
expert, so that each expert multiplies rows that lie together (`expert_backend.py`), and no product
is made with an expert that no token has chosen.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32

from pallas_kernels.grouped_work import ExpertWeights, Routed, sort_pairs
from shiftjax.arch.config import Activation, Experts
from shiftjax.costs.expert_load import room_to_exchange
from shiftjax.models.exchange import Parallel
from shiftjax.models.expert_backend import ExpertBackend
from shiftjax.models.expert_lora import Adapted
from shiftjax.models.stream import Addend
from shiftjax.models.tiles import tile_loop

LEAST_SUM = 1e-20  # that sigmoids of a token's experts are divided by


def route(
    x: Float[Array, "tokens hidden"],
    router: Float[Array, "experts hidden"],
    experts: Experts,
    bias: Float[Array, " experts"] | None = None,
    correction: Float[Array, " experts"] | None = None,
) -> tuple[Float[Array, "tokens k"], Int32[Array, "tokens k"]]:
    """Return every token's experts and their weights, float32; see `arch.config.Experts`."""
    logits = jnp.einsum(
        "th,eh->te",
        x,
        router,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    if bias is not None:
        logits = logits + bias[None].astype(jnp.float32)
    if experts.scores == "sigmoid":
        return _by_sigmoids(logits, experts, correction)
    largest, chosen = jax.lax.top_k(_of_best_groups(logits, experts, 1), experts.per_token)
    if experts.norm_topk:
        gains = jax.nn.softmax(largest, axis=-1)
    else:
        gains = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), chosen, axis=-1)
    return gains if experts.scale == 1 else gains * experts.scale, chosen


def _of_best_groups(
    ranked: Float[Array, "tokens experts"], experts: Experts, num_best: int
) -> Float[Array, "tokens experts"]:
    """Return -inf for experts of other groups than those whose so many best sum to most."""
    if experts.groups_per_token >= experts.num_groups:
        return ranked
    groups = ranked.reshape(ranked.shape[0], experts.num_groups, -1)
    best = jax.lax.top_k(groups, num_best)[0].sum(axis=-1)
    _, kept = jax.lax.top_k(best, experts.groups_per_token)
    is_kept = (kept[:, :, None] == jnp.arange(experts.num_groups)[None, None]).any(axis=1)
    return jnp.where(is_kept[:, :, None], groups, -jnp.inf).reshape(ranked.shape)


def _by_sigmoids(
    logits: Float[Array, "tokens experts"],
    experts: Experts,
    correction: Float[Array, " experts"] | None,
) -> tuple[Float[Array, "tokens k"], Int32[Array, "tokens k"]]:
    """The same of sigmoids, which a correction may change for the choice alone.

    Without one, and without groups, logits are ranked: of large ones all sigmoids are 1.
    """
    scores = jax.nn.sigmoid(logits)
    ranked = scores if experts.num_groups > 1 else logits
    ranked = ranked if correction is None else scores + correction[None]
    _, chosen = jax.lax.top_k(_of_best_groups(ranked, experts, 2), experts.per_token)
    gains = jnp.take_along_axis(scores, chosen, axis=-1)
    if experts.norm_topk:
        gains = gains / (gains.sum(axis=-1, keepdims=True) + LEAST_SUM)
    return gains * experts.scale, chosen


class Counted(NamedTuple):
    """What a layer of experts tells of a step, of the part that this device has."""

    pairs: Int32[Array, " own_experts"]  # that it computed with each of its own experts
    chosen: Int32[Array, "tokens_own k"] | None = None  # the experts of tokens (`tells_parts`)


class ExpertLayer(NamedTuple):
    """What a layer of experts has on this device, and what it must know of the step."""

    experts: Experts
    router: Float[Array, "experts hidden"]
    weights: ExpertWeights
    num_tokens: Int[Array, ""]  # of the step; those behind them are padding
    parallel: Parallel
    backend: ExpertBackend
    activation: Activation
    router_bias: Float[Array, " experts"] | None = None
    router_correction: Float[Array, " experts"] | None = None
    # What makes of tokens what experts read, and what the router reads.
    enter: Callable[[jax.Array], tuple[jax.Array, jax.Array]] = lambda x: (x, x)
    scales: Float[Array, " experts"] | None = None  # of the weights of a token's experts
    adapted: Adapted | None = None  # with the slots of all tokens of the step
    tells: bool = False  # which experts each token has chosen

    @property
    def num_own(self) -> int:
        """Experts that this device has, those that are padding included."""
        return self.weights.gate.shape[0]

    def route(
        self, x: Float[Array, "tokens hidden"]
    ) -> tuple[Float[Array, "tokens k"], Int32[Array, "tokens k"]]:
        """Return the experts of some tokens, and their weights."""
        own = self.router_bias, self.router_correction
        gains, chosen = route(x, self.router, self.experts, *own)
        return gains if self.scales is None else gains * self.scales[chosen], chosen

    def multiply(
        self,
        x: Float[Array, "tokens hidden"],
        routed: Routed,
        gains: Float[Array, "tokens k"],
        num_tokens: int,
        slot: Int[Array, " tokens"] | None = None,
    ) -> Float[Array, "tokens k hidden"]:
        """Return what own pairs' experts give, times their gains, in a step of so many tokens.

        `slot` is that of each of these tokens, where adapters change experts.
        """
        if self.adapted is not None and slot is not None:
            own = self.adapted._replace(slot=slot)
            return tile_loop(x, self.weights, routed, gains, self.activation, own)
        mean_pairs = num_tokens * self.experts.per_token / self.experts.num
        return self.backend.multiply(x, self.weights, routed, gains, self.activation, mean_pairs)


def expert_layer(
    x: Float[Array, "tokens_sp hidden"],
    layer: ExpertLayer,
    shared: Float[Array, "tokens_sp hidden"] | None = None,
) -> tuple[Addend, Counted]:
    """Return what their experts add to this device's tokens, and what is counted and told of it.

    With what the `shared` one does, whose sum over the devices that split it is still to be made;
    where numerics are strict it is made, and tokens are always gathered.
    All devices together have every pair once, and none of padding.

    Experts are used as in a mode of their own (`Parallel.experts`). If that splits them as the
    step's mode splits weights, they are an MLP: a sum and nothing else. If it splits them further,
    the devices that share them bring their tokens together. If it splits them less, the devices
    with the same experts and tokens deal out the pairs among themselves.

    Experts that are split over all devices may have pairs sent to them instead, if that is fewer
    bytes (`costs.expert_load.room_to_exchange`). The exchange has room for more pairs than a
    device gets on average; a step in which it is too small gathers.
    """
    parallel = layer.parallel
    if parallel.numerics.is_strict:
        total, counted = _gather(x, layer, None)
        return Addend((total if shared is None else total + shared).astype(x.dtype)), counted
    room = _room(parallel, x.shape[0] * parallel.mode.sp)
    if not room:
        partial, counted = _gather(x, layer, shared)
        return Addend(partial, is_partial=True, dtype=x.dtype), counted
    sent = _send(x, layer, room)

    def gathered() -> tuple[jax.Array, Counted]:
        partial, counted = _gather(x, layer, shared)
        if counted.chosen is not None:
            counted = counted._replace(chosen=parallel.own_part(counted.chosen))
        return parallel.sum(partial, x.dtype), counted

    # Every device takes the same branch, so there are collectives in both.
    out, counted = jax.lax.cond(
        parallel.any_of_all(sent.overflows),
        gathered,
        lambda: _exchange(x, layer, sent, room, shared),
    )
    return Addend(out), counted


def tells_parts(parallel: Parallel, num_tokens: int) -> bool:
    """Whether, in a step of so many tokens, each device tells of a part of its tokens alone.

    Then all devices split the tokens; else those that split a weight tell the same.
    """
    return not parallel.numerics.is_strict and _room(parallel, num_tokens) > 0


def _room(parallel: Parallel, num_tokens: int) -> int:
    use = parallel.layout, parallel.mode, parallel.as_experts
    return room_to_exchange(*use, num_tokens)


def _gather(
    x: Float[Array, "tokens_sp hidden"], layer: ExpertLayer, shared: jax.Array | None
) -> tuple[jax.Array, Counted]:
    """The tokens of all that share the experts on each of them: it adds what its own give."""
    parallel, index = layer.parallel, layer.parallel.brought(x.shape[0])
    x, seen = layer.enter(parallel.bring_tokens(x))
    gains, chosen = layer.route(seen)
    if layer.experts.scales_input:  # one expert a token
        x, gains = _times(x, gains), jnp.ones_like(gains)
    own = chosen - parallel.expert_place * layer.num_own
    is_real = index < layer.num_tokens
    is_own = (own >= 0) & (own < layer.num_own) & is_real[:, None]
    routed = sort_pairs(jnp.where(is_own, own, layer.num_own), layer.num_own)
    if parallel.deals > 1:
        routed, is_own = deal(routed, is_own.shape, parallel.deals, parallel.deal_place)
    slot = None if layer.adapted is None else layer.adapted.slot[index]
    parts = layer.multiply(x, routed, gains, x.shape[0], slot).astype(jnp.float32)
    parts = jnp.where(is_own[..., None], parts, 0)
    counted = Counted(routed.sizes, parallel.own_of_brought(chosen) if layer.tells else None)
    if parallel.numerics.is_strict:
        return parallel.sum_pairs(parts), counted
    partial = parts.sum(axis=1)
    partial = partial if parallel.numerics.is_wide else partial.astype(x.dtype)
    return parallel.share_experts(partial, shared), counted


def deal(
    routed: Routed, shape: tuple[int, ...], num_devices: int, place: Int[Array, ""]
) -> tuple[Routed, Bool[Array, "tokens k"]]:
    """Return one device's part of the pairs that so many devices have alike, and which they are.

    Parts follow each other in the order of experts and differ by one pair at most, so a device
    reads few experts that another reads, too.
    """
    ends, num_pairs = jnp.cumsum(routed.sizes), routed.row.size
    first, last = (ends[-1] * nth // num_devices for nth in (place, place + 1))
    sizes = jnp.minimum(ends, last) - jnp.maximum(ends - routed.sizes, first)
    nth = jnp.arange(num_pairs, dtype=jnp.int32)
    rank = jnp.zeros(num_pairs, jnp.int32).at[routed.row].set(nth, unique_indices=True)
    is_own = ((rank >= first) & (rank < last)).reshape(shape)
    return Routed(routed.row[(nth + first) % num_pairs], jnp.maximum(sizes, 0)), is_own


def _times(
    x: Float[Array, "tokens hidden"], gains: Float[Array, "tokens 1"]
) -> Float[Array, "tokens hidden"]:
    """Return tokens times the weights of their experts."""
    return (x.astype(jnp.float32) * gains).astype(x.dtype)


class Sent(NamedTuple):
    """The pairs of the tokens that this device sends, and where they lie in what it sends."""

    gains: Float[Array, "tokens_own k"]  # 0: of padding
    expert: Int32[Array, "tokens_own k"]
    device: Int32[Array, "tokens_own k"]  # all of them: of padding
    place: Int32[Array, "tokens_own k"]  # among those to the same device
    overflows: Bool[Array, ""]


def _send(x: Float[Array, "tokens_sp hidden"], layer: ExpertLayer, room: int) -> Sent:
    """Route the tokens of which this device is the sender; neighbours have the same tokens."""
    parallel, num_devices = layer.parallel, layer.parallel.layout.num_devices
    gains, chosen = layer.route(layer.enter(parallel.own_part(x))[1])
    index = parallel.own_part(parallel.local_tokens(jnp.arange(x.shape[0] * parallel.mode.sp)))
    is_real = (index < layer.num_tokens)[:, None]
    device = jnp.where(is_real, chosen // layer.num_own, num_devices)
    sorted_pairs = sort_pairs(device, num_devices)
    starts = jnp.cumsum(sorted_pairs.sizes) - sorted_pairs.sizes
    rank = jnp.zeros(device.size, jnp.int32).at[sorted_pairs.row].set(jnp.arange(device.size))
    place = rank.reshape(device.shape) - starts[jnp.minimum(device, num_devices - 1)]
    overflows = sorted_pairs.sizes.max() > room
    return Sent(jnp.where(is_real, gains, 0), chosen, device, place, overflows)


def _exchange(
    x: Float[Array, "tokens_sp hidden"],
    layer: ExpertLayer,
    sent: Sent,
    room: int,
    shared: jax.Array | None,
) -> tuple[jax.Array, Counted]:
    """Pairs go to the devices of their experts and come back, all tokens to their neighbours."""
    parallel, shape = layer.parallel, (layer.parallel.layout.num_devices, room)
    own, (num, k) = layer.enter(parallel.own_part(x))[0], sent.gains.shape
    at, gains = (sent.device, sent.place), sent.gains
    if layer.experts.scales_input:
        own, gains = _times(own, gains), jnp.ones_like(gains)
    rows = jnp.broadcast_to(own[:, None], (num, k, own.shape[1]))
    send = jnp.zeros((*shape, own.shape[1]), x.dtype).at[at].set(rows, mode="drop")
    own_expert, nobody, adapted, slot = (
        sent.expert % layer.num_own,
        layer.num_own,
        layer.adapted,
        None,
    )
    if adapted is not None:  # the slot goes along
        of_tokens = parallel.own_part(parallel.local_tokens(adapted.slot))
        own_expert = adapted.in_one(own_expert, of_tokens[:, None])
        nobody = adapted.in_one(nobody, -1)
    expert = jnp.full(shape, nobody, jnp.int32).at[at].set(own_expert, mode="drop")
    got, expert = (parallel.exchange(each).reshape(-1, *each.shape[2:]) for each in (send, expert))
    if adapted is not None:
        expert, slot = adapted.apart(expert)
    routed = sort_pairs(expert[:, None], layer.num_own)
    ones = jnp.ones((got.shape[0], 1), jnp.float32)
    parts = layer.multiply(got, routed, ones, x.shape[0] * parallel.mode.sp, slot)
    back = parallel.exchange(parts.reshape(send.shape))
    parts = back.at[at].get(mode="fill", fill_value=0).astype(jnp.float32)
    is_sent = (sent.device < shape[0])[..., None]
    out = jnp.where(is_sent, parts * gains[..., None], 0).sum(axis=1).astype(x.dtype)
    out = parallel.whole_part(out)
    counted = Counted(routed.sizes, sent.expert if layer.tells else None)
    return out if shared is None else out + parallel.sum(shared, x.dtype), counted
