"""A KV cache that devices split by position where there are no more heads to split. No JAX.

Devices that would hold copies of the same heads are neighbours by place. Each of them holds a part
of the positions instead. A block of the tables is a stripe of `ways * block` tokens, and the r-th
of the neighbours has its r-th run of `block` tokens:

    stripes of 2 * 4 tokens    0 1 2 3 | 4 5 6 7     8 9 10 11 | 12 13 14 15
    place 0                    0 1 2 3               8 9 10 11
    place 1                              4 5 6 7                 12 13 14 15

So tables, hashes and the allocator know stripes alone. What a device has of a sequence is again a
sequence without holes, in the same table, with blocks of `block` tokens. Causal limits and windows
become numbers of its own positions: keys in `[low, high)` are `[count(low), count(high))` there.

The functions take and return numbers, NumPy arrays or JAX arrays of integers.
"""

from dataclasses import dataclass
from typing import Any

# Neighbours gather the contexts of prompts: about so many tokens in an exchange, and so many
# exchanges before anybody attends to them.
GATHERED_TOKENS, GATHERED_TOKENS_ON_CPU = 4096, 512
GATHERS = 8


def gathered_tokens(stripe: int, tokens: int) -> int:
    """Return about `tokens` as whole stripes, at least one."""
    return stripe * max(1, tokens // stripe)


@dataclass(frozen=True)
class Positions:
    """How positions fall on neighbouring devices."""

    ways: int  # devices that split them
    block: int  # tokens of a stripe that each of them has: of its own blocks

    @property
    def stripe(self) -> int:
        """Tokens of a block of the tables."""
        return self.ways * self.block

    def owner(self, position: Any) -> Any:
        """Return the place that has a position."""
        return position % self.stripe // self.block

    def count(self, num: Any, place: Any) -> Any:
        """Return how many of the positions below `num` a place has. Place 0 has most."""
        rest = num % self.stripe - place * self.block
        in_last = (self.block + abs(rest) - abs(rest - self.block)) // 2  # rest in [0, block]
        return num // self.stripe * self.block + in_last

    def own_slots(self, slots: Any, place: Any) -> Any:
        """Return slots of stripes as a place's own; those of other places are 0: the null block's.

        A place's slots are 0, 1, 2 ... of those that it has, as its positions are of a sequence.
        """
        own = self.count(slots, place)
        return (self.count(slots + 1, place) - own) * own
