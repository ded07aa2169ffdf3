"""What a compiled program says of itself."""

import re
from collections import Counter

# An asynchronous collective is counted where it is done: its start may return its operand, too.
_COLLECTIVE = re.compile(
    r" = (\(?[a-z0-9]+\[.*?\)?) (all-to-all|all-reduce|all-gather)(?:-done)?\("
)
_ARRAY = re.compile(r"([a-z]+)(\d+)[a-z0-9]*\[([\d,]*)\]")


def collective_bytes(text: str) -> Counter[str]:
    """Bytes of the results of every kind of collective in a compiled program, on one device."""
    found: Counter[str] = Counter()
    for shape, kind in _COLLECTIVE.findall(text):
        found[kind] += sum(_array_bytes(*array) for array in _ARRAY.findall(shape))
    return found


def _array_bytes(_kind: str, bits: str, sizes: str) -> int:
    count = 1
    for size in sizes.split(","):
        count *= int(size) if size else 1
    return count * int(bits) // 8
