"""How the heads and widths of one model fall on a group of devices. No JAX.

Counts only: where each head sits follows the order of `parallel/sharding.py`, flat device
`j = t * SP + s` (tp-major).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shiftjax.arch.config import ModelConfig
from shiftjax.parallel.mode import Mode


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
    """How the heads and widths of one model fall on SP x TP devices. Counts are padded ones."""

    model: ModelConfig
    sp: int
    tp: int

    @property
    def num_devices(self) -> int:
        """P, the devices of the group."""
        return self.sp * self.tp

    @property
    def modes(self) -> list[Mode]:
        """The modes that differ: with SP = 1 both are one configuration, SHIFT."""
        return list(Mode) if self.sp > 1 else [Mode.SHIFT]

    def splits_tokens(self, mode: Mode) -> bool:
        """Whether activations are split over SP."""
        return mode is Mode.BASE and self.sp > 1

    @cached_property
    def _heads(self) -> tuple[int, int]:
        return pad_heads(self.model.num_heads, self.model.num_kv_heads, self.num_devices)

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
    def heads_per_device(self) -> int:
        """Query heads that attention sees on one device, in every mode."""
        return self.num_heads // self.num_devices

    @property
    def kv_heads_per_device(self) -> int:
        """KV heads that one device caches, in every mode; one replica when P > num_kv_heads."""
        return max(1, self.num_kv_heads // self.num_devices)

    @property
    def intermediate_size(self) -> int:
        """MLP width, padded to a multiple of P."""
        return round_up(self.model.intermediate_size, self.num_devices)

    @property
    def vocab_size(self) -> int:
        """Vocabulary, padded to a multiple of P."""
        return round_up(self.model.vocab_size, self.num_devices)

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

    @cached_property
    def kv_send_order(self) -> np.ndarray:
        """Local KV heads that each TP rank sends: int `[tp, sp * kv_heads_per_device]`.

        Entry `[t, s * m + i]` is the place in rank t's shard of the i-th head of device (s, t).
        A head that several devices replicate appears several times (arXiv 2509.16495, 3.2).
        """
        order = [
            [
                self.base_kv_heads[t].index(h)
                for s in range(self.sp)
                for h in self.kv_heads_of(j0 + s)
            ]
            for t, j0 in enumerate(range(0, self.num_devices, self.sp))
        ]
        return np.array(order, np.int32)

    def stored_kv_heads(self, mode: Mode) -> list[int]:
        """Return the KV head in every stored place of a k or v weight, replicas included."""
        if mode is Mode.BASE:
            return [head for rank in self.base_kv_heads for head in rank]
        return [head for j in range(self.num_devices) for head in self.kv_heads_of(j)]

    def source_rows(self, axis: str, mode: Mode = Mode.BASE) -> np.ndarray:
        """Return, per stored row of a sharded axis, the checkpoint's row, or -1 for padding.

        Rows are heads for `heads` and `kv_heads`, single rows for the other axes.
        """
        model = self.model
        if axis == "kv_heads":
            stored = np.array(self.stored_kv_heads(mode))
            return np.where(stored < model.num_kv_heads, stored, -1)
        if axis == "heads":
            kv_head, offset = np.divmod(np.arange(self.num_heads), self.q_per_kv)
            q_per_kv = model.num_heads // model.num_kv_heads
            real = (kv_head < model.num_kv_heads) & (offset < q_per_kv)
            return np.where(real, kv_head * q_per_kv + offset, -1)
        real_size, size = {
            "intermediate": (model.intermediate_size, self.intermediate_size),
            "vocab": (model.vocab_size, self.vocab_size),
            "lm_vocab": (model.vocab_size, self.vocab_size),
        }[axis]
        rows = np.arange(size)
        return np.where(rows < real_size, rows, -1)

    def shift_offset(self, axis: str, s: int, t: int) -> int:
        """Return the first row of device (s, t)'s shift shard inside its base shard."""
        if axis == "kv_heads":
            return int(self.kv_send_order[t, s * self.kv_heads_per_device])
        return s * self.shift_rows(axis)

    def shift_rows(self, axis: str) -> int:
        """Return the rows of a shift shard of this axis."""
        return len(self.source_rows(axis, Mode.SHIFT)) // self.num_devices
