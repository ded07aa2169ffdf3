"""The launches of a layer beside products, attention and what devices exchange: rows by name.

An engine's file lists those of its layers by the format of their matrices (`layer_launches`). They
are counted in compiled steps by `serving/bench/launch_list.py`; `tests/compile/test_launches.py`
compares the two. A row says what a launch reads and writes of each token on the device; of what it
does to heads and the cache, `layer_costs.py` has the bytes. No JAX.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

CODE_BYTES = 1


class Widths(NamedTuple):
    """How wide on one device is what launches read and write, in numbers."""

    hidden: int  # the residual stream
    heads: int  # what o multiplies
    inner: int  # what down multiplies; 0: experts, whose numbers are those of `expert_part.py`


class Moved(NamedTuple):
    """How often a launch reads and writes activations, and codes of them, of each width."""

    hidden: int = 0
    heads: int = 0
    inner: int = 0
    hidden_codes: int = 0
    heads_codes: int = 0
    inner_codes: int = 0

    def num_bytes(self, widths: Widths, number_bytes: int) -> int:
        """Bytes of a token."""
        hidden, heads, inner = widths
        numbers = self.hidden * hidden + self.heads * heads + self.inner * inner
        codes = self.hidden_codes * hidden + self.heads_codes * heads + self.inner_codes * inner
        return numbers * number_bytes + codes * CODE_BYTES


LAUNCHES: Mapping[str, Moved] = MappingProxyType(
    {
        "add": Moved(hidden=3),
        "norm": Moved(hidden=2),
        "add, norm": Moved(hidden=4),
        "largest of norm": Moved(hidden=1),
        "norm, codes": Moved(hidden=1, hidden_codes=1),
        "add, norm, codes": Moved(hidden=3, hidden_codes=1),
        "scale": Moved(),
        "rotate q": Moved(),
        "rotate k": Moved(),
        "rotate and write k": Moved(),
        "cut off v": Moved(),
        "pack": Moved(),
        "unpack": Moved(),
        "rotate, write": Moved(),
        "sum, rotate, write": Moved(),
        "combine": Moved(),
        "combine, codes": Moved(),
        "largest of heads": Moved(heads=1),
        "codes of heads": Moved(heads=1, heads_codes=1),
        "scales of heads": Moved(),
        "activation": Moved(inner=3),
        "activation, codes": Moved(inner=2, inner_codes=1),
        "largest of activation": Moved(inner=1),
        "codes of activation": Moved(inner=1, inner_codes=1),
    }
)
"""Rows that an engine's file may name."""
PLAIN = ("add, norm", "add, norm", "activation")  # what is moved without a list; not the number


def moved_bytes(names: Sequence[str], widths: Widths, number_bytes: int) -> int:
    """Bytes that launches read and write of each token."""
    return sum(LAUNCHES[name].num_bytes(widths, number_bytes) for name in names)
