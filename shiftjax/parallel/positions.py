"""A KV cache that devices split by position where there are no more heads to split. No JAX.

Devices that would hold copies of the same heads are neighbours by place. Each of them holds a part
of the positions instead. A block of the tables is a stripe of `ways * block` tokens, and the r-th
of the neighbours has one of its runs of `block` tokens, the r-th:

    stripes of 2 * 4 tokens    0 1 2 3 | 4 5 6 7     8 9 10 11 | 12 13 14 15
    place 0                    0 1 2 3               8 9 10 11
    place 1                              4 5 6 7                 12 13 14 15

So tables, hashes and the allocator know stripes alone. What a device has of a sequence is again a
sequence without holes, in the same table, with blocks of `block` tokens. Causal limits and windows
become numbers of its own positions: keys in `[low, high)` are `[count(low), count(high))` there.

Groups of a fleet of twice the width have twice the ways, and a block of theirs is two of a narrow
group, one after the other. A narrow place's runs go to the two wide ones that it becomes in turn,
so that each of these gets whole blocks. That counts the runs by place with digits reversed:

    ways  runs, by place      A place of 2 has the runs 0, 2, 4, 6 or 1, 3, 5, 7 of a stripe of 8;
    2     0 1                 of these 0 and 4 go to its first half at 4 ways, 2 and 6 to the other
    4     0 2 1 3
    8     0 4 2 6 1 5 3 7

The functions take and return numbers, NumPy arrays or JAX arrays of integers.
"""

import math
from dataclasses import dataclass
from typing import Any

from pallas_kernels.prefill_split import SPAN

# Neighbours gather the contexts of prompts: about so many tokens in an exchange, and so many
# exchanges before anybody attends to them.
GATHERED_TOKENS, GATHERED_TOKENS_ON_CPU = 4096, 512
GATHERS = 8


def span_blocks(stripe: int) -> int:
    """Return how many stripes are whole spans, at which jobs of the prefill kernel end."""
    return math.lcm(stripe, SPAN) // stripe


def gathered_tokens(stripe: int, tokens: int) -> int:
    """Return about `tokens` as whole stripes, at least one; as whole spans if there are such."""
    spans = stripe * span_blocks(stripe)
    unit = spans if spans <= tokens else stripe
    return unit * max(1, tokens // unit)


@dataclass(frozen=True)
class Positions:
    """How positions fall on neighbouring devices."""

    ways: int  # devices that split them
    block: int  # tokens of a stripe that each of them has: of its own blocks
    splits: int = 1  # a power of two: places that one of a fleet's unit has become

    @property
    def stripe(self) -> int:
        """Tokens of a block of the tables."""
        return self.ways * self.block

    def run(self, place: Any) -> Any:
        """Return which run of every stripe a place has."""
        return place // self.splits + self._of_unit * reversed_digits(place, self.splits)

    def place(self, run: Any) -> Any:
        """Return the place that has a run of every stripe."""
        turned = reversed_digits(run // self._of_unit, self.splits)
        return run % self._of_unit * self.splits + turned

    @property
    def _of_unit(self) -> int:
        return self.ways // self.splits

    def owner(self, position: Any) -> Any:
        """Return the place that has a position."""
        return self.place(position % self.stripe // self.block)

    def count(self, num: Any, place: Any) -> Any:
        """Return how many of the positions below `num` a place has. Place 0 has most."""
        rest = num % self.stripe - self.run(place) * self.block
        in_last = (self.block + abs(rest) - abs(rest - self.block)) // 2  # rest in [0, block]
        return num // self.stripe * self.block + in_last

    def own_slots(self, slots: Any, place: Any) -> Any:
        """Return slots of stripes as a place's own; those of other places are 0: the null block's.

        A place's slots are 0, 1, 2 ... of those that it has, as its positions are of a sequence.
        """
        own = self.count(slots, place)
        return (self.count(slots + 1, place) - own) * own


def reversed_digits(number: Any, size: int) -> Any:
    """Return a number modulo `size`, a power of two, with its binary digits reversed."""
    turned, bit = 0 * number, size
    while bit > 1:
        turned, number, bit = 2 * turned + number % 2, number // 2, bit // 2
    return turned
