"""The collectives of one decoder layer in each mode, inside `shard_map`.

A mode that splits tokens is Ulysses sequence parallelism times TP (arXiv 2309.14509; with grouped
KV heads and replication in the send buffer: Shift Parallelism, arXiv 2509.16495, section 3.2).
Tokens are split over `sp`; one all-to-all of q, k and v together turns them into heads split over
all axes, a second one turns the attention output back. SHIFT is plain TP over all devices.

Per layer, `n` tokens, width `d`, `h` query heads and `m` KV heads per device (bytes of `b` each),
with tokens split `sp` ways:

    all-to-all  n * (h + 2 m) * head_dim * b  and  n * h * head_dim * b per device, if sp > 1
    all-reduce  2 of (n / sp) * d * b over the P / sp devices that split a weight

With latents in place of k and v (MLA), heads are exchanged as wide as queries and values are, and
an all-gather of n * width * b brings every device the latents of all tokens.

Experts are used as in a mode of their own, which splits tokens e ways. If e >= sp they move what an
MLP moves. Else the sp / e devices that share experts bring their tokens together, and beside the
second all-reduce there are

    all-gather      (n / e) * d * b over sp / e
    reduce-scatter  (n / sp) * d * b over sp / e

Where a token has few experts, and all devices split them (e = 1), its pairs go to them and back
instead, if that is fewer bytes: two all-to-alls over all P with room for r pairs from each device
to each, P * r * d * b, and an all-gather of the tokens that neighbours have computed, (n / sp) * d
* b over the P / sp devices (`costs.expert_load.room_of_exchange`).
What an expert that all tokens use adds goes along in the all-reduce; beside an exchange it has one.

Between pipeline stages hidden states are split over all devices, so that n * d * b bytes cross in
all. The next stage gathers its tokens' over the P / sp devices that split a weight.

Where weights are stored as SHIFT uses them (`Layout.gathers`), BASE gathers every matrix of a layer
over `sp`, w / TP on each device; the embedding is looked up by all devices for all tokens, and one
reduce-scatter of n * d * b over `sp` leaves each with its own.

SwiftKV's late layers run in SHIFT in every mode, on logit rows: one all-gather of n * d * b over
`sp` comes before them, where tokens are split.

Devices that split positions exchange queries and what they find, of rows, or normalisers alone, and
the contexts of tiles: `neighbours.py`.
"""

import functools
import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num, Shaped

from shiftjax.arch.numerics import FAST, Numerics
from shiftjax.models.sums import SUMS, Units, Ways, in_units, largest_of, of_units, units_for
from shiftjax.parallel.grid import (
    ALL_AXES,
    DEAL_AXIS,
    EXPERT_AXES,
    PLAIN_USE,
    SHARE_AXIS,
    TOKEN_AXES,
    WEIGHT_AXES,
    Mode,
    Use,
)
from shiftjax.parallel.layout import Layout

LIMBS, LIMB_BITS = 3, 10  # of squares that are summed in integers: 3e-10 of the largest

Activations = Float[Array, "tokens hidden"]
# What one device has before and after the exchange of tokens for heads.
AllHeads = Float[Array, "tokens_sp heads_tp head_dim"]
AllKvHeads = Float[Array, "tokens_sp kv_heads_tp head_dim"]
OwnHeads = Float[Array, "tokens heads_tp_sp head_dim"]
OwnKvHeads = Float[Array, "tokens kv_heads_tp_sp head_dim"]


@dataclass(frozen=True)
class Parallel:
    """One mode of one layout: what the layers call where devices must talk."""

    layout: Layout
    mode: Mode
    use: Use = PLAIN_USE  # as in which modes its steps use experts, and q and o
    numerics: Numerics = FAST  # how partial products are summed

    def of_heads(self, heads: int) -> "Parallel":
        """The same for layers with such heads (`ModelConfig.head_shapes`)."""
        return self if heads == 0 else replace(self, layout=self.layout.shapes[heads])

    @property
    def splits_tokens(self) -> bool:
        """Whether activations are split over `sp`."""
        return self.mode.sp > 1

    def local_tokens(self, per_token: jax.Array) -> jax.Array:
        """Return this device's tokens of a replicated array `[tokens, ...]`."""
        if not self.splits_tokens:
            return per_token
        count = per_token.shape[0] // self.mode.sp
        start = jax.lax.axis_index(TOKEN_AXES) * count
        return jax.lax.dynamic_slice_in_dim(per_token, start, count)

    def reduce(self, partial: Activations) -> Activations:
        """Sum over the devices that split a weight, in any order and in the type of what comes.

        In SHIFT these are all, in whatever mode's mesh: late layers run in SHIFT inside of BASE.
        """
        if self.layout.ways(self.mode) == 1:
            return partial
        return jax.lax.psum(partial, WEIGHT_AXES if self.splits_tokens else ALL_AXES)

    @property
    def num_leaves(self) -> int:
        """Leaves of a weight that a device has: one a device of the widest group (`sums.py`)."""
        return self.layout.padded_for // self.layout.ways(self.mode)

    def sum(self, partial: Float[Array, "*leaves tokens width"], dtype: DTypeLike) -> Activations:
        """Sum partial products as `reduce` does, in the order and format of `numerics`."""
        axes = WEIGHT_AXES if self.splits_tokens else ALL_AXES
        ways = Ways(axes, self.layout.ways(self.mode), self.layout.padded_for)
        return SUMS[self.numerics.name].over(partial, ways, dtype)

    @property
    def place(self) -> Int[Array, ""]:
        """This device's place in the group, by which it has heads and tokens' logits."""
        return jax.lax.axis_index(ALL_AXES) if self.layout.num_devices > 1 else jnp.int32(0)

    def sum_of_all(
        self, partial: Float[Array, "tokens hidden"]
    ) -> Float[Array, "tokens_sp hidden"]:
        """Sum what all devices add to all tokens; each keeps its own.

        Where tokens are split: one reduce-scatter over `sp`, then one all-reduce of the rest over
        the devices that split a weight. In SHIFT one all-reduce over all devices.
        """
        if self.splits_tokens:
            partial = jax.lax.psum_scatter(partial, TOKEN_AXES, scatter_dimension=0, tiled=True)
        return self.reduce(partial)

    @property
    def as_experts(self) -> Mode:
        """The mode as which its steps use experts."""
        return self.use.experts or self.layout.shift

    @property
    def of_all(self) -> bool:
        """Whether a device has the queries of all neighbours that split positions with it."""
        return self.use.queries is not None

    @property
    def query_heads(self) -> int:
        """Heads of queries that attention is given on a device."""
        own = self.layout.heads_per_device
        return own * self.layout.position_ways if self.of_all else own

    @property
    def shares(self) -> int:
        """Devices that bring their tokens together, and split experts further than weights."""
        return max(1, self.mode.sp // self.as_experts.sp)

    @property
    def deals(self) -> int:
        """Devices that have the same experts and the same tokens."""
        return max(1, self.as_experts.sp // self.mode.sp)

    @property
    def expert_place(self) -> Int[Array, ""]:
        """This device's place among those that split the experts."""
        is_split = self.layout.ways(self.as_experts) > 1
        return jax.lax.axis_index(EXPERT_AXES) if is_split else jnp.int32(0)

    @property
    def deal_place(self) -> Int[Array, ""]:
        """This device's place among those that have the same experts and tokens."""
        return jax.lax.axis_index(DEAL_AXIS) if self.deals > 1 else jnp.int32(0)

    def bring_tokens(
        self, hidden: Float[Array, "tokens_sp hidden"]
    ) -> Float[Array, "tokens_experts hidden"]:
        """Return the tokens of all that share their experts: one all-gather over `share`."""
        if self.shares == 1:
            return hidden
        return jax.lax.all_gather(hidden, SHARE_AXIS, tiled=True)

    def own_of_brought(self, brought: Shaped[Array, "tokens_experts ..."]) -> jax.Array:
        """Return what is this device's own of what it has of the tokens of `bring_tokens`."""
        if self.shares == 1:
            return brought
        count = brought.shape[0] // self.shares
        start = jax.lax.axis_index(SHARE_AXIS) * count
        return jax.lax.dynamic_slice_in_dim(brought, start, count)

    def brought(self, num_own: int) -> Int[Array, " tokens_experts"]:
        """Return which tokens of the step those of `bring_tokens` are, with so many of each."""
        shares, apart = self.shares, min(self.mode.sp, self.as_experts.sp)
        if apart == 1:
            return jnp.arange(shares * num_own)
        first = jnp.arange(shares) * apart + jax.lax.axis_index(TOKEN_AXES[1])
        return (first[:, None] * num_own + jnp.arange(num_own)[None]).reshape(-1)

    def share_experts(
        self,
        partial: Float[Array, "tokens_experts hidden"],
        beside: Float[Array, "tokens_sp hidden"] | None = None,
    ) -> Float[Array, "tokens_sp hidden"]:
        """Return what devices add to the tokens of `bring_tokens`; each keeps its own.

        One reduce-scatter over `share`, if tokens were brought. An MLP's all-reduce is still to
        follow, over the devices that split a weight (`reduce`). That takes along what those have
        `beside` it for their tokens, partial products of a weight.
        """
        if self.shares > 1:
            partial = jax.lax.psum_scatter(partial, SHARE_AXIS, scatter_dimension=0, tiled=True)
        return partial if beside is None else partial + beside

    def sum_pairs(
        self, parts: Float[Array, "tokens_experts k hidden"]
    ) -> Float[Array, "tokens_sp hidden"]:
        """Sum what experts give to the tokens of `bring_tokens`, in no order: float32.

        Each keeps its own. Parts are fixed-point numbers, zeros where a pair is another device's:
        which devices have a token's experts changes no bit.
        """
        leaves, axes = parts.swapaxes(0, 1), (*WEIGHT_AXES, SHARE_AXIS)
        largest = jax.lax.pmax(largest_of(leaves), axes)
        units = units_for(largest, len(leaves))
        total = in_units(leaves, units)
        if self.shares > 1:
            total = jax.lax.psum_scatter(total, SHARE_AXIS, scatter_dimension=0, tiled=True)
            start = jax.lax.axis_index(SHARE_AXIS) * len(total)
            own = (jax.lax.dynamic_slice_in_dim(each, start, len(total)) for each in units)
            units = Units(*own)
        return of_units(jax.lax.psum(total, WEIGHT_AXES), units)

    def own_part(self, local: jax.Array) -> jax.Array:
        """Return the part of its tokens that this device has to itself.

        The devices that split a weight have the same tokens, as many as they can share evenly.
        """
        ways = self.layout.ways(self.mode)
        if ways == 1:
            return local
        count = local.shape[0] // ways
        start = jax.lax.axis_index(WEIGHT_AXES) * count
        return jax.lax.dynamic_slice_in_dim(local, start, count)

    def whole_part(self, own: jax.Array) -> jax.Array:
        """Undo `own_part`: one all-gather over the devices that split a weight."""
        if self.layout.ways(self.mode) == 1:
            return own
        return jax.lax.all_gather(own, WEIGHT_AXES, tiled=True)

    def exchange(self, to_all: Shaped[Array, "devices rows ..."]) -> jax.Array:
        """Give every device its part, and return what all have for this one: one all-to-all."""
        return jax.lax.all_to_all(to_all, ALL_AXES, split_axis=0, concat_axis=0)

    def any_of_all(self, flag: Bool[Array, ""]) -> Bool[Array, ""]:
        """Whether any device says so: an all-reduce of 4 bytes."""
        return jax.lax.pmax(flag.astype(jnp.int32), ALL_AXES) > 0

    @property
    def gathers(self) -> bool:
        """Whether the layers' weights come in SHIFT's shards, and have to be gathered."""
        return self.layout.gathers and self.splits_tokens

    def whole(self, shard: jax.Array, axis: str) -> jax.Array:
        """Gather this mode's shard of a weight out of SHIFT's, along its first dimension, `axis`.

        KV heads that several devices replicate arrive several times; one of each is kept.
        """
        gathered = _gather_codes(shard) if shard.dtype.itemsize == 1 else _gather(shard)
        layout, axis = self.layout.of_axis(axis)
        if axis != "kv_heads":
            return gathered
        order, count = layout.kv_gather_order(self.mode), gathered.shape[0]
        if order.shape[1] == count and (order == np.arange(count)).all():
            return gathered
        return gathered[jnp.asarray(order)[jax.lax.axis_index(WEIGHT_AXES)]]

    @property
    def in_shift(self) -> "Parallel":
        """SHIFT inside a step of this mode: for layers that compute logit rows alone."""
        return replace(self, mode=self.layout.shift, use=self.use._replace(queries=None))

    def gather_tokens(
        self, hidden: Float[Array, "tokens_sp hidden"]
    ) -> Float[Array, "tokens hidden"]:
        """Return the hidden states of all tokens on every device: one all-gather over `sp`."""
        return _gather(hidden) if self.splits_tokens else hidden

    def to_next_stage(
        self, hidden: Float[Array, "tokens_sp hidden"]
    ) -> Float[Array, "tokens_sp hidden_tp"]:
        """Return what this device hands to the next stage: its columns of its tokens."""
        ways = self.layout.ways(self.mode)
        if ways == 1:
            return hidden
        padded = jnp.pad(hidden, ((0, 0), (0, -hidden.shape[1] % ways)))
        count = padded.shape[1] // ways
        start = jax.lax.axis_index(WEIGHT_AXES) * count
        return jax.lax.dynamic_slice_in_dim(padded, start, count, axis=1)

    def from_stage_before(
        self, part: Float[Array, "tokens_sp hidden_tp"]
    ) -> Float[Array, "tokens_sp hidden"]:
        """Undo `to_next_stage`: one all-gather over the devices that split a weight."""
        if self.layout.ways(self.mode) == 1:
            return part
        padded = jax.lax.all_gather(part, WEIGHT_AXES, axis=1, tiled=True)
        return padded[:, : self.layout.model.hidden_size]

    def scatter_heads(
        self, q: AllHeads, k: AllKvHeads, v: AllKvHeads
    ) -> tuple[OwnHeads, OwnKvHeads, OwnKvHeads]:
        """Exchange tokens for heads: one fused all-to-all of q, k and v.

        k and v come with the heads of `Layout.kv_heads_of_ranks`. In SHIFT this is the identity.
        """
        if not self.splits_tokens:
            return q, k, v
        h, m = self.layout.heads_per_device, self.layout.kv_heads_per_device
        got = self.scatter_joined(q, k, v)
        return got[:, :h], got[:, h : h + m], got[:, h + m :]

    def scatter_joined(
        self, q: AllHeads, k: AllKvHeads, v: AllKvHeads
    ) -> Float[Array, "tokens own_heads head_dim"]:
        """Exchange tokens for heads; what comes are heads of q, k and v, joined in this order."""
        k, v = self._replicate(k), self._replicate(v)
        parts = [x.reshape(x.shape[0], self.mode.sp, -1, x.shape[-1]) for x in (q, k, v)]
        send = jnp.concatenate(parts, axis=2).swapaxes(0, 1)
        got = jax.lax.all_to_all(send, TOKEN_AXES, split_axis=0, concat_axis=0)
        return got.reshape(-1, *got.shape[2:])

    def scatter_queries(self, q: AllHeads) -> OwnHeads:
        """Exchange tokens for heads of queries alone, where keys and values are in the cache."""
        if not self.splits_tokens:
            return q
        send = q.reshape(q.shape[0], self.mode.sp, -1, q.shape[-1]).swapaxes(0, 1)
        got = jax.lax.all_to_all(send, TOKEN_AXES, split_axis=0, concat_axis=0)
        return got.reshape(-1, *got.shape[2:])

    def scatter_latents(
        self, q: AllHeads, latents: Float[Array, "tokens_sp 1 width"]
    ) -> tuple[OwnHeads, Float[Array, "tokens 1 width"]]:
        """Exchange tokens for heads of queries; every device gets the latents of all tokens."""
        if not self.splits_tokens:
            return q, latents
        return self.scatter_queries(q), _gather(latents)

    def gather_heads(self, out: OwnHeads) -> AllHeads:
        """Exchange heads for tokens; in SHIFT this is the identity."""
        if not self.splits_tokens:
            return out
        send = out.reshape(self.mode.sp, -1, *out.shape[1:])
        got = jax.lax.all_to_all(send, TOKEN_AXES, split_axis=0, concat_axis=0)
        return got.swapaxes(0, 1).reshape(got.shape[1], -1, got.shape[-1])

    def gather_codes(
        self, values: Num[Array, "tokens heads_tp_sp"], scale: Float[Array, "blocks_tp_sp tokens"]
    ) -> tuple[Num[Array, "tokens_sp heads_tp"], Float[Array, "blocks_tp tokens_sp"]]:
        """Exchange heads for tokens, as codes of one byte with float32 scales of their blocks.

        One all-to-all of bytes: the scales of all tokens travel behind their codes.
        """
        sp, (tokens, own), blocks = self.mode.sp, values.shape, len(scale)
        each = tokens // sp
        octets = jax.lax.bitcast_convert_type(values, jnp.uint8).reshape(sp, -1)
        scales = jax.lax.bitcast_convert_type(scale, jnp.uint8).reshape(blocks, sp, each, 4)
        send = jnp.concatenate([octets, scales.swapaxes(0, 1).reshape(sp, -1)], axis=1)
        got = jax.lax.all_to_all(send, TOKEN_AXES, split_axis=0, concat_axis=0)
        octets, scales = jnp.split(got, [each * own], axis=1)
        octets = octets.reshape(sp, each, own).swapaxes(0, 1).reshape(each, -1)
        scales = scales.reshape(sp * blocks, each, 4)
        back = zip((octets, scales), (values, scale), strict=True)
        codes, scale = (jax.lax.bitcast_convert_type(x, to.dtype) for x, to in back)
        return codes, scale

    def exact_squares(
        self, x: Float[Array, "tokens heads head_dim"], shares: Float[Array, " heads"]
    ) -> Float[Array, " tokens"]:
        """Sum the squares of heads of all devices, each head `shares` times, in integers.

        So no order matters. `shares` are 1, or those of `kv_head_shares`. Squares are in units of
        the next power of two of a token's largest, and have LIMBS digits of LIMB_BITS bits; the sum
        of up to 2^18 heads' columns holds 31 bits.
        """
        axes, wide = WEIGHT_AXES if self.splits_tokens else ALL_AXES, x.astype(jnp.float32)
        is_one = self.layout.ways(self.mode) == 1
        largest = jnp.abs(wide).max((1, 2))
        largest = largest if is_one else jax.lax.pmax(largest, axes)
        unit = jnp.exp2(jnp.floor(jnp.log2(jnp.where(largest > 0, largest, 1.0))) + 1)
        whole = math.lcm(*self._kv_head_copies().flat)  # so that each share is an integer
        times = jnp.round(shares * whole).astype(jnp.int32)
        rest, digits = jnp.square(wide / unit[:, None, None]), []
        for _ in range(LIMBS):
            digit = jnp.floor(rest * 2.0**LIMB_BITS)
            rest = rest * 2.0**LIMB_BITS - digit
            digits.append((digit.astype(jnp.int32).sum(2) * times[None]).sum(1))
        totals = jnp.stack(digits)
        totals = totals if is_one else jax.lax.psum(totals, axes)
        scales = 2.0 ** (-LIMB_BITS * np.arange(1, LIMBS + 1, dtype=np.float32))
        low_first = (totals[i].astype(jnp.float32) * scales[i] for i in reversed(range(LIMBS)))
        return functools.reduce(jnp.add, low_first) * jnp.square(unit) / whole

    def kv_head_shares(self) -> Float[Array, " kv_heads"]:
        """Return 1 / (how many times all devices that split weights hold it) of each KV head here.

        A sum over heads, weighed so and reduced, counts every head once.
        """
        shares = (1 / self._kv_head_copies()).astype(np.float32)
        if self.layout.ways(self.mode) == 1:
            return jnp.asarray(shares[0])
        return jnp.asarray(shares)[jax.lax.axis_index(WEIGHT_AXES)]

    def _kv_head_copies(self) -> np.ndarray:
        """Return how many times all devices that split weights hold each KV head of a device."""
        ranks = np.array(self.layout.kv_heads_of_ranks(self.mode))
        return np.bincount(ranks.reshape(-1))[ranks]

    def _replicate(self, heads: AllKvHeads) -> Float[Array, "tokens_sp sent_heads head_dim"]:
        """Lay out the KV heads in the order in which the devices of `sp` want them."""
        order = self.layout.kv_send_order(self.mode)
        if order.shape[1] == heads.shape[1] and (order == np.arange(heads.shape[1])).all():
            return heads
        if (order == order[0]).all():
            return heads[:, order[0]]
        return jnp.take(heads, jnp.asarray(order)[jax.lax.axis_index(WEIGHT_AXES)], axis=1)

    def take_rows(
        self, hidden: Activations, rows: Int[Array, " rows"]
    ) -> Float[Array, "rows hidden"]:
        """Return the hidden states of the sampled tokens on every device.

        `rows` index the step's tokens. Where tokens are split, only these rows cross `sp`.
        """
        if not self.splits_tokens:
            return hidden[rows]
        count = hidden.shape[0]
        owner, local = rows // count, rows % count
        mine = (owner == jax.lax.axis_index(TOKEN_AXES))[:, None]
        return jax.lax.psum(jnp.where(mine, hidden[local], jnp.zeros((), hidden.dtype)), TOKEN_AXES)

    def total(self, own: Int[Array, "..."]) -> Int[Array, "..."]:
        """Sum integers over all devices: one all-reduce."""
        return own if self.layout.num_devices == 1 else jax.lax.psum(own, ALL_AXES)

    def of_all_devices(self, own: jax.Array) -> jax.Array:
        """Return one array of each device, of 4-byte elements, in the order of their places.

        A sum of integers to which a device adds its own and zeros elsewhere: for small sums XLA
        has kernels on GPUs, where a gather is NCCL's, which is slower and recorded at every step.
        """
        devices = self.layout.num_devices
        if devices == 1:
            return own[None]
        bits = jax.lax.bitcast_convert_type(own, jnp.int32)
        slots = jax.lax.broadcasted_iota(jnp.int32, (devices, *bits.shape), 0)
        slots = jnp.where(slots == self.place, bits[None], 0)  # one launch on a GPU
        return jax.lax.bitcast_convert_type(jax.lax.psum(slots, ALL_AXES), own.dtype)


def _gather(part: jax.Array) -> jax.Array:
    return jax.lax.all_gather(part, TOKEN_AXES, tiled=True)


def _gather_codes(part: jax.Array) -> jax.Array:
    """Gather codes: on a CPU as bytes, because XLA widens there what it has no collective for.

    Elsewhere as they are: a product reads a block of them in place, of bytes a copy.
    """

    def as_bytes(part: jax.Array) -> jax.Array:
        whole = _gather(jax.lax.bitcast_convert_type(part, jnp.uint8))
        return jax.lax.bitcast_convert_type(whole, part.dtype)

    return jax.lax.platform_dependent(part, cpu=as_bytes, default=_gather)
