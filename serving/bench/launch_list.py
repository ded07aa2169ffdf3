"""The launches of one decoder layer by name, in order, read from the text of compiled steps.

A lost fusion is a launch more, under the name of what was fused. Names come from the source lines
that XLA keeps with every instruction: a launch has those of the functions whose work is in it.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from serving.bench.compiled_cost import KERNEL_CALL, PRODUCTS, kernel_name
from serving.bench.hlo import COLLECTIVES, Computation, Instruction, computations, launches
from shiftjax.device.all_reduces import all_reduce_kind

# Hidden in every launch, and the work of none: they read, shape or spread what others make.
_SHAPING = (
    *("parameter", "constant", "bitcast", "reshape", "broadcast", "slice", "tuple"),
    *("get-tuple-element", "iota"),
)
# Where a product is written, whoever multiplies: its name is that of who asks for it.
_OF_PRODUCTS = (
    *("products.py", "part.py", "four_bits.py", "packed_backend.py", "product_backend.py"),
    "block_product.py",
)
ENDS = ("product", "collective")  # of a layer, and of attention
_CALLED = re.compile(r"calls=%?([\w.\-]+)")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_ROWS = {
    "FileNames": r'^(\d+) "(.*)"$',
    "FunctionNames": r'^(\d+) "(.*)"$',
    "FileLocations": r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) ",
    "StackFrames": r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)\}",
}


class Launch(NamedTuple):
    """One thing that a device is told to do in a layer."""

    kind: str  # product, kernel (of `pallas_kernels`), collective, other
    name: str


def layer_launches(few: Sequence[Launch], many: Sequence[Launch]) -> list[Launch]:
    """Launches of one layer, in order: those that a program has beside one with fewer layers.

    Of as many layers as it has more, if these differ. A layer begins behind the last product, or
    sum over devices, of the layer before.
    """
    start = _equal(few, many)
    end = len(few) - min(_equal(few[::-1], many[::-1]), len(few) - start)
    if start < end:  # the order differs: names and numbers are left
        more = Counter(many) - Counter(few)
        layers = 1 if any(count % 2 for count in more.values()) else 2
        return sorted((one for one in more for _ in range(more[one] // layers)), key=many.index)
    found = _from_its_begin(list(many[start : start + len(many) - len(few)]))
    half = len(found) // 2
    return found[:half] if found[:half] == found[half:] else found


def _from_its_begin(layers: list[Launch]) -> list[Launch]:
    """Turn launches of layers, which repeat, so that the first one begins a layer."""
    attention = next((i for i, one in enumerate(layers) if "attention" in one.name), 0)
    turned = layers[attention:] + layers[:attention]
    products = [i for i, one in enumerate(turned) if one.kind == "product"]
    begin = products[-1] if products else 0  # of queries, keys and values
    while begin and turned[begin - 1].kind not in ENDS:
        begin -= 1
    return turned[begin:] + turned[:begin]


def _equal(some: Sequence[Launch], others: Sequence[Launch]) -> int:
    """How many launches two programs have in common, from the first on."""
    pairs = zip(some, others, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), len(some))


def named_launches(text: str) -> list[Launch]:
    """Every launch of a program, in the order in which a device runs them."""
    program = _Sources(text)
    return [program.launch(one) for one in launches(text)]


class _Sources:
    """A program's text with the tables of its sources."""

    def __init__(self, text: str):
        self.bodies = computations(text)
        tables = {name: _table(text, name) for name in _ROWS}
        self.files = {key: path.rpartition("/")[2] for key, (path,) in tables["FileNames"].items()}
        self.functions = {key: name for key, (name,) in tables["FunctionNames"].items()}
        self.places, self.frames = tables["FileLocations"], tables["StackFrames"]

    def launch(self, one: Instruction) -> Launch:
        """A launch by its kind and name."""
        inside = list(self._inside(one))
        for each in inside:
            if (opcode := each.opcode.removesuffix("-start")) in COLLECTIVES:
                strategy = f", {all_reduce_kind(each.rest)}" if opcode == "all-reduce" else ""
                return Launch("collective", opcode + strategy)
            if KERNEL_CALL in each.rest:
                return self._kernel(each)
        for each in inside:
            if each.opcode == "dot" or "__cublas" in each.rest:
                return Launch("product", f"product of {self._asked_by(each)}")
        names = [self._function(each) for each in inside if each.opcode not in _SHAPING]
        names = list(dict.fromkeys(name for name in names if name))
        return Launch("other", " + ".join(names) or self._function(one) or one.opcode)

    def _kernel(self, one: Instruction) -> Launch:
        name = kernel_name(one)
        if name.startswith((*PRODUCTS, "grouped_")):
            return Launch("product", f"{name} of {self._asked_by(one)}")
        return Launch("kernel", name)

    def _inside(self, one: Instruction) -> Iterator[Instruction]:
        """What a launch computes; of a fusion all that it holds, in order."""
        called = _CALLED.search(one.rest)
        body: Computation | None = self.bodies.get(called[1]) if called else None
        if body is None:
            yield one
            return
        for each in body.instructions:
            yield from self._inside(each)

    def _function(self, one: Instruction) -> str:
        """The function in which an instruction is written."""
        chain = self._chain(one)
        return _plain(chain[0][1]) if chain else ""

    def _asked_by(self, one: Instruction) -> str:
        """The function that asks for a product."""
        chain = self._chain(one)
        asking = (name for file, name in chain if file not in _OF_PRODUCTS)
        return _of_class(next(asking, chain[0][1])) if chain else one.name

    def _chain(self, one: Instruction) -> list[tuple[str, str]]:
        """(file, function) of an instruction, and of who called that, inwards first."""
        found, frame = [], _FRAME.search(one.rest)
        key = frame[1] if frame else "0"
        while key in self.frames and len(found) < len(self.frames):
            place, parent = self.frames[key]
            file, function = self.places[place]
            found.append((self.files[file], self.functions[function]))
            key = str(int(parent) - 1)  # as XLA writes it: 1 is none
        return found


def _plain(function: str) -> str:
    """A function's name without what is inside of it, and without its class."""
    return _of_class(function).rpartition(".")[2].strip("_")


def _of_class(function: str) -> str:
    """The same with its class, which alone stands for `__call__`."""
    owner, _, name = function.partition(".<locals>")[0].rpartition(".")
    return ".".join(filter(None, (owner, name.strip("_") if name != "__call__" else "")))


def _table(text: str, name: str) -> dict[str, tuple[str, ...]]:
    """Read one of the tables before the program, by row."""
    _, found, rest = text.partition(f"\n{name}\n")
    rows = rest.split("\n\n", 1)[0].splitlines() if found else []
    matches = (re.match(_ROWS[name], row) for row in rows)
    return {match[1]: match.groups()[1:] for match in matches if match}
