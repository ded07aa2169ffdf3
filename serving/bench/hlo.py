"""What a compiled program says of itself, in XLA's text: instructions, launches, collectives."""

import math
import re
from collections import Counter
from typing import NamedTuple

COLLECTIVES = ("all-to-all", "all-reduce", "all-gather", "collective-permute", "reduce-scatter")
# What a GPU executes nothing for; an asynchronous operation counts where it starts.
FREE = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all")
_LINE = re.compile(r"^\s*(ROOT )?%?(\S+) = (\(*[a-z0-9]+\[.*?) ([a-z][a-z-]*)\((.*)")
_HEADER = re.compile(r"^(?:ENTRY )?%?(\S+) \(.*\{$")
_ARRAY = re.compile(r"([a-z]+)(\d*)[a-z0-9]*\[([\d,]*)\]")


class Instruction(NamedTuple):
    """One line of a compiled program."""

    name: str
    shape: str  # as HLO prints it; a tuple has parentheses
    opcode: str
    rest: str  # operands and attributes

    @property
    def operands(self) -> list[str]:
        """Names of what it is computed from."""
        return re.findall(r"%([\w.\-]+)", self.rest.partition(")")[0])


class Computation(NamedTuple):
    """The entry of a program, or what one of its fusions, branches or loops computes."""

    instructions: list[Instruction]
    root: Instruction | None


def instructions(text: str) -> list[Instruction]:
    """Read all instructions of a compiled program, those inside of fusions and loops included."""
    matches = (_LINE.match(line) for line in text.splitlines())
    return [Instruction(*match.groups()[1:]) for match in matches if match]


def computations(text: str) -> dict[str, Computation]:
    """Read a program computation by computation, by name."""
    found: dict[str, Computation] = {}
    name, lines, root = "", [], None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            lines, root, name = [], None, header[1]
        elif match := _LINE.match(line):
            lines.append(Instruction(*match.groups()[1:]))
            root = lines[-1] if match[1] else root
        elif line.startswith("}"):
            found[name] = Computation(lines, root)
    return found


def entry(text: str) -> list[Instruction]:
    """Read the top level: what runs one after the other."""
    return instructions(text[text.index("\nENTRY ") :])


def launches(text: str) -> list[Instruction]:
    """Return what the device is told to do, each loop or branch counted as one."""
    return [
        one for one in entry(text) if one.opcode not in FREE and not one.opcode.endswith("-done")
    ]


def sizes_of(shape: str) -> list[int]:
    """The dimensions of an array as HLO prints it, the first of a tuple."""
    return [int(n) for n in _ARRAY.findall(shape)[0][2].split(",") if n]


def shape_bytes(shape: str) -> int:
    """Bytes of a (tuple) shape as HLO prints it."""
    total = 0
    for kind, bits, sizes in _ARRAY.findall(shape):
        item = 1 if kind == "pred" else int(bits or 0) // 8
        total += item * math.prod(int(n) for n in sizes.split(",") if n)
    return total


def collectives(text: str) -> Counter[tuple[str, int]]:
    """(opcode, bytes of the result on one device) -> how often.

    An asynchronous one is counted where it is done: its start may return its operand, too.
    """
    found: Counter[tuple[str, int]] = Counter()
    for one in instructions(text):
        name = one.opcode.removesuffix("-done")
        if name in COLLECTIVES:
            found[name, shape_bytes(one.shape)] += 1
    return found
