"""How the heads and widths of one model fall on a group of devices. No JAX.

Devices of a group are counted by place `j = t * SP + s` (tp-major, see `parallel/grid.py`). In a
mode that splits tokens `sp` ways, `sp` neighbours of that order hold the same weights: a rank.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shiftjax.arch.cache import CacheSpec, Entry, LayerCache
from shiftjax.arch.config import ModelConfig
from shiftjax.arch.weights import Weight, plain_axis, read_axis
from shiftjax.parallel.blocks import heads_of_block
from shiftjax.parallel.grid import PLAIN_USE, Group, Mode, Use
from shiftjax.parallel.positions import Positions

# To a multiple of P.
_MLPS = ("intermediate", "wide_intermediate", "shared_intermediate")
_PADDED_AXES = ("vocab", "draft_vocab", *_MLPS, "experts")


def pad_heads(num_heads: int, num_kv_heads: int, num_devices: int) -> tuple[int, int]:
    """Return the least `(num_kv_heads, q_per_kv)` that P devices can split evenly.

    Either every device gets whole KV heads, or P / num_kv_heads devices share one and split its
    query heads. Least means fewest query heads, then fewest KV heads. Padded heads have zero
    weights and change no output.
    """
    q_per_kv = num_heads // num_kv_heads
    choices = []
    for kv_heads in range(num_kv_heads, num_kv_heads + num_devices):
        if kv_heads % num_devices == 0:
            choices.append((kv_heads * q_per_kv, kv_heads, q_per_kv))
        elif num_devices % kv_heads == 0:
            share = num_devices // kv_heads
            padded = -(-q_per_kv // share) * share
            choices.append((kv_heads * padded, kv_heads, padded))
    _, kv_heads, padded = min(choices)
    return kv_heads, padded


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple that is not below `number`."""
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class Layout:
    """A model on a group of `sp` units of `tp` devices each. Counts are padded ones.

    Groups of several widths can share what their units store. It is then stored whole in every
    unit and padded for the widest of them, of `widest` units; 0: the group has its weights alone.
    With `gathers` all weights are stored as SHIFT uses them, 1/P on each device, and modes that
    split tokens gather those of a layer when they come to it.

    Experts are stored as the mode uses them that splits tokens `experts_sp` ways: P / experts_sp
    ways. 1: over all devices. Steps may split them further, each as it says (`expert_modes`); with
    `experts_as` all use them as in the mode that splits tokens so many ways, or the nearest. Where
    groups share weights, experts are whole in a unit, and `experts_sp` is how little they may be
    split.

    With `by_position` devices that would hold copies of a KV head split its positions instead.
    Which of `query_modes` a step of theirs has is its own choice, but for `normalisers`: True, all
    steps that may have queries of all neighbours have them; False, none has.

    `leaves` are devices of which each would have whole shards, a multiple of all of them: of
    another configuration that shall add up the same numbers (`models/sums.py`).
    """

    model: ModelConfig
    sp: int
    tp: int
    widest: int = 0
    gathers: bool = False
    experts_sp: int = 1
    experts_as: int | None = None
    by_position: bool = False
    leaves: int = 0
    normalisers: bool | None = None

    @property
    def num_devices(self) -> int:
        """P, the devices of the group."""
        return self.sp * self.tp

    @cached_property
    def modes(self) -> tuple[Mode, ...]:
        """The modes of the group, from base to shift; with SP = 1 they are one."""
        return Group(0, self.sp).modes

    @property
    def base(self) -> Mode:
        """The mode that splits tokens most: weights are stored as it uses them."""
        return self.modes[0]

    @property
    def shift(self) -> Mode:
        """The mode that splits no tokens: full tensor parallelism."""
        return self.modes[-1]

    def ways(self, mode: Mode) -> int:
        """How many ways a step of this mode splits the weights."""
        return self.num_devices // mode.sp

    @property
    def least_split(self) -> Mode:
        """The mode that splits experts least: as it uses them they are stored, but in a fleet."""
        return Mode(self.sp, 1 if self.gathers else math.gcd(self.sp, self.experts_sp))

    @property
    def least_ways(self) -> int:
        """How many ways experts are split in the mode that splits them least."""
        return self.ways(self.least_split)

    def expert_modes(self, mode: Mode) -> tuple[Mode, ...]:
        """The modes as which steps of a mode may use experts; the last splits them most.

        Their shards are rows of what is stored, and their groups lie inside those of the mode, or
        the other way round.
        """
        if self.model.experts is None:
            return (self.shift,)
        found = tuple(
            each
            for each in self.modes
            if self.least_split.sp % each.sp == 0
            if mode.sp % each.sp == 0 or each.sp % mode.sp == 0
        )
        if (wanted := self.experts_as) is None:
            return found
        return (min(found, key=lambda each: (abs(each.sp - wanted), each.sp)),)

    def query_modes(self, mode: Mode) -> tuple[Mode, ...]:
        """The modes as which steps of a mode may use q and o; the first is their own.

        In SHIFT the other is that of neighbours who split positions: as its steps use q and o, a
        device has the heads of all of them, in shards that it stores. Then of decode rows nothing
        but normalisers travels. Not for MLA, nor where norms are of the heads of all devices.
        """
        wide, model = Mode(self.sp, self.position_ways), self.model
        is_plain = model.latent is None and not model.wide_qk_norm and not self.gathers
        can = mode == self.shift and wide in self.modes and wide != mode and is_plain
        if not can or self.normalisers is False:
            return (mode,)
        return (wide,) if self.normalisers else (mode, wide)

    @property
    def padded_for(self) -> int:
        """The devices of the widest group that shares the weights: sizes are multiples of it."""
        return self.leaves or (self.widest or self.sp) * self.tp

    def of_width(self, width: int) -> "Layout":
        """The same model in a group of another width that shares the weights."""
        return replace(self, sp=width)

    @cached_property
    def shapes(self) -> tuple["Layout", ...]:
        """The layout of layers with each of the model's `head_shapes`; this one is the first."""
        others = range(1, len(self.model.head_shapes))
        return self, *(replace(self, model=self.model.of_heads(heads)) for heads in others)

    def of_axis(self, axis: str) -> tuple["Layout", str]:
        """Return the layout that splits an axis, and what that calls it."""
        name, heads = plain_axis(axis)
        return self.shapes[heads], name

    @cached_property
    def _heads(self) -> tuple[int, int]:
        return pad_heads(self.model.num_heads, self.model.num_kv_heads, self.padded_for)

    @property
    def num_kv_heads(self) -> int:
        """KV heads after padding, each counted once."""
        return self._heads[0]

    @property
    def q_per_kv(self) -> int:
        """Query heads per KV head after padding."""
        return self._heads[1]

    @property
    def num_heads(self) -> int:
        """Query heads after padding."""
        return self.num_kv_heads * self.q_per_kv

    @property
    def heads_of_block(self) -> tuple[int, int]:
        """Inputs of o that share a scale as codes, and the heads that they are (`blocks.py`)."""
        model = self.model
        q_per_kv = model.num_heads // model.num_kv_heads
        return heads_of_block(model.num_heads, q_per_kv, model.value_dim)

    @property
    def heads_per_device(self) -> int:
        """Query heads that attention sees on one device, in every mode."""
        return self.num_heads // self.num_devices

    @property
    def kv_heads_per_device(self) -> int:
        """KV heads that one device caches, in every mode; one replica when P > num_kv_heads."""
        return max(1, self.num_kv_heads // self.num_devices)

    @property
    def copies(self) -> int:
        """Devices that have the same KV heads: neighbours by place."""
        return max(1, self.num_devices // self.num_kv_heads)

    @property
    def position_ways(self) -> int:
        """Devices that split the positions of their KV heads; 1: each has all of them."""
        return self.copies if self.by_position else 1

    def positions(self, block_size: int) -> Positions | None:
        """Return how positions fall, in blocks of so many tokens; None: all devices have all.

        Raises ValueError for blocks that devices cannot split evenly.
        """
        ways = self.position_ways
        if block_size % ways:
            raise ValueError(f"{ways} devices cannot split blocks of {block_size} tokens.")
        splits = ways // self.of_width(1).position_ways if self.widest else 1
        return Positions(ways, block_size // ways, splits) if ways > 1 else None

    @property
    def intermediate_size(self) -> int:
        """MLP width, padded to a multiple of P."""
        return round_up(self.model.intermediate_size, self.padded_for)

    @property
    def wide_intermediate_size(self) -> int:
        """Width of the MLP of layers that share the cache of others, padded likewise."""
        return round_up(2 * self.model.intermediate_size, self.padded_for)

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the expert that every token uses, padded likewise; 0: there is none."""
        return round_up(self._shared_width, self.padded_for)

    @property
    def _shared_width(self) -> int:
        return self.model.experts.shared_intermediate_size if self.model.experts else 0

    @property
    def num_experts(self) -> int:
        """Experts of a layer, padded to a multiple of P by some that no token is sent to."""
        return round_up(self.model.experts.num if self.model.experts else 0, self.padded_for)

    @property
    def vocab_size(self) -> int:
        """Vocabulary, padded to a multiple of P."""
        return round_up(self.model.vocab_size, self.padded_for)

    @property
    def num_draft_ids(self) -> int:
        """Token ids that a speculator drafts, unpadded: those below this; 0 without one."""
        speculator = self.model.speculator
        return speculator.draft_vocab or self.model.vocab_size if speculator else 0

    @cached_property
    def caches(self) -> tuple[LayerCache, ...]:
        """What layers keep of a token on one device, as `ModelConfig.caches` has it."""
        caches = self.model.caches
        return tuple(each._replace(spec=self.shapes[each.heads].cache) for each in caches)

    @property
    def cached_numbers(self) -> int:
        """Numbers of a token that one device caches, of all layers."""
        return sum(cache.numbers for cache in self.caches)

    @cached_property
    def cache(self) -> CacheSpec:
        """What a layer with the model's own heads keeps of a token on one device.

        Entries have the rows of any device.
        """
        entries = (e._replace(rows=len(self.cached_rows(e, 0))) for e in self.model.cache.entries)
        return CacheSpec(tuple(entries))

    def cached_rows(self, entry: Entry, device: int) -> tuple[int, ...]:
        """Return the rows of an entry of the model that a flat device caches, padding included."""
        return tuple(range(entry.rows) if entry.axis is None else self.kv_heads_of(device))

    def block_tokens(self, block_size: int, of: "Layout | None" = None) -> int:
        """Tokens of a KV block of this group, if one `of` another, or of a unit, has `block_size`.

        What is constant between groups that share their pools is the bytes of a block on a device;
        with more devices, each has fewer rows of more tokens, until it has one row. Then blocks
        stay as they are, or devices split their tokens. Layers with other heads must come to the
        same: `deploy/resolve.py` refuses widths where they do not.
        """
        other = of or self.of_width(1)
        tokens = block_size * other.cache.numbers * self.position_ways
        return tokens // (self.cache.numbers * other.position_ways)

    def kv_heads_of(self, device: int) -> list[int]:
        """Return the KV heads that flat device `j = t * SP + s` caches."""
        per_device, first = self.kv_heads_per_device, device * self.num_kv_heads // self.num_devices
        return list(range(first, first + per_device))

    @cached_property
    def base_kv_heads(self) -> list[list[int]]:
        """KV heads stored by each TP rank in BASE: those that its SP devices cache between them.

        Ranks may share a head (SmolLM2's 3 KV heads at SP=3, TP=2: ranks hold [0, 1] and
        [1, 2]); all lists have one length, filled up by repeating the last head.
        """
        ranks = []
        for t in range(self.tp):
            devices = range(t * self.sp, (t + 1) * self.sp)
            ranks.append(sorted({head for j in devices for head in self.kv_heads_of(j)}))
        width = max(map(len, ranks))
        return [heads + heads[-1:] * (width - len(heads)) for heads in ranks]

    def kv_heads_of_ranks(self, mode: Mode) -> list[list[int]]:
        """Return the KV heads in the k and v shards of every rank of a mode.

        Each is a range of what its rank stores in BASE. All are equally long, so some hold a head
        that none of their devices cache.
        """
        if mode not in self._kv_heads_by_mode:  # every weight of KV heads asks
            self._kv_heads_by_mode[mode] = self._find_kv_heads(mode)
        return self._kv_heads_by_mode[mode]

    @cached_property
    def _kv_heads_by_mode(self) -> dict[Mode, list[list[int]]]:
        return {}

    def _find_kv_heads(self, mode: Mode) -> list[list[int]]:
        shards, ranks = [], range(0, self.num_devices, mode.sp)
        needed = [{h for j in range(r, r + mode.sp) for h in self.kv_heads_of(j)} for r in ranks]
        width = max(map(len, needed)) if mode != self.base else len(self.base_kv_heads[0])
        for first, heads in zip(ranks, needed, strict=True):
            stored = self.base_kv_heads[first // self.sp]
            start = min(stored.index(min(heads)), len(stored) - width)
            shards.append(stored[start : start + width])
        return shards

    def kv_send_order(self, mode: Mode) -> np.ndarray:
        """Local KV heads that each rank sends: int `[ranks, sp * kv_heads_per_device]`.

        Entry `[r, b * m + i]` is the place in rank r's shard of the i-th head of its device b. A
        head that several devices replicate appears several times (arXiv 2509.16495, 3.2).
        """
        order = [
            [shard.index(h) for b in range(mode.sp) for h in self.kv_heads_of(r * mode.sp + b)]
            for r, shard in enumerate(self.kv_heads_of_ranks(mode))
        ]
        return np.array(order, np.int32)

    def kv_gather_order(self, mode: Mode) -> np.ndarray:
        """Where each rank's KV heads are among those of its devices: int `[ranks, heads]`.

        Heads of the devices one after the other, as a gather of SHIFT's shards brings them; one
        that several replicate is taken from the first. For a head that none caches, which nobody
        is sent, the first stands in.
        """
        ranks = []
        for rank, wanted in enumerate(self.kv_heads_of_ranks(mode)):
            devices = range(rank * mode.sp, (rank + 1) * mode.sp)
            held = [head for device in devices for head in self.kv_heads_of(device)]
            ranks.append([held.index(head) if head in held else 0 for head in wanted])
        return np.array(ranks, np.int32)

    def stored(self, weight: Weight) -> Weight:
        """Return the weight as it is stored: padded, its KV heads replicated."""
        mode, sizes = self.stored_in(weight), zip(weight.axes, weight.shape, strict=True)
        return weight._replace(shape=tuple(self._stored_size(*each, mode) for each in sizes))

    def stored_in(self, weight: Weight) -> Mode:
        """Return the mode as whose steps split it a weight is stored."""
        if self.widest:
            return self.base
        if weight.in_shift or self.gathers:
            return self.shift
        return self.least_split if weight.split == "experts" else self.base

    def used_in(self, weight: Weight, mode: Mode, use: Use = PLAIN_USE) -> Mode:
        """Return the mode as whose steps split it a weight enters a step of `mode`.

        Experts, and what makes queries and reads what they find, are used as `use` says.
        """
        if weight.in_shift:
            return self.shift
        if weight.split == "experts":
            return use.experts or self.shift
        return mode if use.queries is None or not _is_of_queries(weight) else use.queries

    def is_gathered(self, weight: Weight) -> bool:
        """Whether modes that split tokens gather a weight: those of layers that modes differ in."""
        is_split = weight.axes[0] not in (None, "experts") and not weight.in_shift
        return self.gathers and is_split and weight.kind != "table"

    def _stored_size(self, axis: str | None, size: int, mode: Mode) -> int:
        if axis is None:
            return size
        whole, (layout, axis) = read_axis(axis).whole, self.of_axis(axis)
        if axis == "heads":
            return layout.num_heads
        if axis == "kv_heads":
            return sum(map(len, layout.kv_heads_of_ranks(mode)))
        return round_up(size, whole * self.padded_for) if axis in _PADDED_AXES else size

    def source_rows(self, axis: str, mode: Mode | None = None) -> np.ndarray:
        """Return, per row of a sharded axis, the checkpoint's row, or -1 for padding.

        Rows are heads for `heads` and `kv_heads`, single rows for the other axes; they are those
        of `mode`, or as stored. Only KV heads differ: ranks hold replicas. Where an axis counts
        blocks of rows, those of the checkpoint are blocks as large.
        """
        _, _, whole, num = read_axis(axis)
        layout, axis = self.of_axis(axis)
        rows = layout._source_rows(axis, whole, mode)
        return rows if num == 1 else np.where(rows < 0, -1, rows // num)[::num]

    def _source_rows(self, axis: str, whole: int, mode: Mode | None) -> np.ndarray:
        model = self.model
        if axis == "kv_heads":
            held = np.array(self.kv_heads_of_ranks(mode or self.base)).reshape(-1)
            return np.where(held < model.num_kv_heads, held, -1)
        if axis == "heads":
            kv_head, offset = np.divmod(np.arange(self.num_heads), self.q_per_kv)
            q_per_kv = model.num_heads // model.num_kv_heads
            real = (kv_head < model.num_kv_heads) & (offset < q_per_kv)
            return np.where(real, kv_head * q_per_kv + offset, -1)
        real_size = {
            "intermediate": model.intermediate_size,
            "wide_intermediate": 2 * model.intermediate_size,
            "shared_intermediate": self._shared_width,
            "experts": model.experts.num if model.experts else 0,
            "vocab": model.vocab_size,
            "draft_vocab": self.num_draft_ids,
        }[axis]
        rows = np.arange(round_up(real_size, whole * self.padded_for))
        return np.where(rows < real_size, rows, -1)

    def local_size(self, axis: str | None, size: int, mode: Mode) -> int:
        """Return the part of a stored dimension that a device has in a mode."""
        if axis is None:
            return size
        layout, axis = self.of_axis(axis)
        if axis == "kv_heads" and mode != self.base:
            return len(layout.kv_heads_of_ranks(mode)[0])
        return size // self.ways(mode)

    def attention_columns(
        self, mode: Mode, num_kv: int = 2, queries_as: Mode | None = None
    ) -> tuple[int, int]:
        """Columns of a device's products in a mode: those of q, and of q, k and v together.

        `num_kv` is how many of k and v there are (`LayerParts`). q is used as in the mode
        `queries_as`, if one is given.
        """
        queries = self.num_heads // self.ways(queries_as or mode) * self.model.value_dim
        kv = len(self.kv_heads_of_ranks(mode)[0]) * self.model.head_dim
        return queries, queries + num_kv * kv

    def shard_rows(self, axis: str, mode: Mode) -> int:
        """Return the rows of this axis in a weight shard of a mode."""
        if axis == "blocks":
            return self.padded_for // self.ways(mode)
        return len(self.source_rows(axis, mode)) // self.ways(mode)

    def shard_offset(self, axis: str, mode: Mode, device: int) -> int:
        """Return where the shard of a mode begins in the shard that the device stores."""
        stored = self.sp if axis != "experts" or self.widest else self.least_split.sp
        base_rank, rank = device // stored, device // mode.sp
        layout, name = self.of_axis(axis)
        if name == "kv_heads":
            heads = layout.kv_heads_of_ranks(mode)[rank]
            return layout.base_kv_heads[base_rank].index(heads[0])
        return (rank - base_rank * (stored // mode.sp)) * self.shard_rows(axis, mode)


def _is_of_queries(weight: Weight) -> bool:
    """Whether it is q or o of attention, or belongs to one: biases, norms, scales."""
    return ".attention." in weight.name and weight.split not in (None, "kv_heads")
