"""Predicted seconds of a compiled step, kernel by kernel: XLA's plan at a machine's rates.

`costs/step_costs.py` predicts a step from formulas, before there is a program. Here the program is
there: what it launches is read from its text, with the bytes that each launch reads and writes (of
slices and gathers what they take, of writes in place what they write, as in XLA's HloCostAnalysis)
and the operations of its products. The machine's constants are the same, so the two differ by what
the compiler does otherwise than the formulas say: launches first of all.

Not in the text is how much of the KV cache a step reads; `Attention` says it. A branch counts as a
launch: in a greedy step it has nothing to do.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from serving.bench.hlo import (
    COLLECTIVES,
    Computation,
    Instruction,
    computations,
    launches,
    shape_bytes,
    sizes_of,
)
from shiftjax.costs.collectives import Collective
from shiftjax.costs.kernel_costs import matmul_seconds
from shiftjax.costs.levels import transfer_seconds, ways_of
from shiftjax.costs.machine import Machine
from shiftjax.costs.memory import kv_token_bytes
from shiftjax.costs.step_costs import CostModel
from shiftjax.costs.work import Work
from shiftjax.device.all_reduces import all_reduce_kind
from shiftjax.parallel.grid import Mode

KERNEL_CALL = 'custom_call_target="mosaic_gpu'
PRODUCTS = ("block_",)  # kernels that multiply codes, or numbers, by how their names begin
SWITCHED = "sum_norm", "sum_norm_rows", "sum_rows"  # kernels of sums by a switch, one and two shots
SWITCH = "all-reduce, switch"  # their kind
_THROUGH = ("bitcast", "reshape", "copy", "convert")  # inside a fusion: nothing is read twice
_TAKES_A_PART = ("dynamic-slice", "slice", "gather")
_WRITES_A_PART = {"dynamic-update-slice": 1, "scatter": 2}  # the operand that is written
_CALLED = re.compile(r"calls=%?([\w.\-]+)")
_CONTRACTED, _BATCH = (
    re.compile(r"lhs_" + which + r"_dims=\{([\d,]+)\}") for which in ("contracting", "batch")
)


class Kernel(NamedTuple):
    """Equal launches of a step; bytes and FLOP are of one of them on one device."""

    kind: str  # product, attention, kernel, a collective with its algorithm, other
    name: str
    shape: str  # of the result
    num_bytes: int
    flops: int
    seconds: float


class Product(NamedTuple):
    """A matrix product of a launch, `[rows, inner]` by `[inner, columns]`."""

    rows: int
    inner: int
    columns: int
    is_of_codes: bool


class Attention(NamedTuple):
    """What one layer's attention over contexts takes: by costs, as the text does not say it."""

    num_bytes: int
    flops: int
    seconds: float


class Prices(NamedTuple):
    """What a launch costs."""

    machine: Machine
    format: str  # of matrix products that are not of codes
    attention: Mapping[str, Attention]  # by what the kernel's name contains
    num_devices: int = 1  # that a switch's sums join

    @classmethod
    def of(cls, costs: CostModel, mode: Mode, work: Work) -> "Prices":
        """Those of one step of a cost model."""
        layers, token_bytes = costs.model.num_layers, kv_token_bytes(costs.layout, costs.formats)
        heads = costs.layout.heads_per_device * costs.model.head_dim

        def of_layer(part: Work, context: int) -> Attention:
            seconds = costs.breakdown(mode, part).attention / layers
            return Attention(
                context * token_bytes // layers, 4 * heads * part.attention_pairs, seconds
            )

        decodes = work._replace(chunk_context_tokens=0, attention_pairs=0)
        chunks = work._replace(context_tokens=0)
        attention = {
            "decode": of_layer(decodes, work.context_tokens),
            "prefill": of_layer(chunks, work.chunk_context_tokens),
        }
        devices = costs.layout.num_devices
        return cls(costs.machine, costs.formats.activations, attention, devices)


def kernels_of(text: str, prices: Prices) -> Counter[Kernel]:
    """Every launch of a compiled step on one device, and how often it is there."""
    program = _Program(text)
    return Counter(_kernel(one, program, prices) for one in launches(text))


def step_seconds(kernels: Mapping[Kernel, float]) -> float:
    """Seconds of all launches, one after the other."""
    return sum(kernel.seconds * count for kernel, count in kernels.items())


class _Program:
    """A program's text, taken apart once."""

    def __init__(self, text: str):
        self.bodies = computations(text)
        every = [one for body in self.bodies.values() for one in body.instructions]
        self.shapes = {one.name: one.shape for one in every}
        self.done = {one.operands[0]: one.shape for one in every if one.opcode.endswith("-done")}

    def body(self, one: Instruction) -> Computation | None:
        """What a fusion computes."""
        called = _CALLED.search(one.rest)
        return self.bodies.get(called[1]) if called else None

    def num_bytes(self, one: Instruction) -> int:
        """Bytes that a launch reads and writes."""
        body = self.body(one)
        if body is None or body.root is None:
            read = sum(shape_bytes(self.shapes.get(name, "")) for name in one.operands)
            return read + shape_bytes(one.shape)
        parameters = (each for each in body.instructions if each.opcode == "parameter")
        return sum(_read(each, body) for each in parameters) + _written(body.root, body)

    def inside(self, one: Instruction) -> Iterator[Instruction]:
        """The instruction itself, and what its fusion holds."""
        body = self.body(one)
        return iter((one, *(body.instructions if body else ())))

    def product(self, one: Instruction) -> "Product | None":
        """The matrix product in a launch.

        Of one that is cut along what it sums over (split-K), the parts are a batch.
        """
        if "__cublas" in one.rest:
            left, right = (math.prod(self.sizes(name)) for name in one.operands[:2])
            rows, columns = sizes_of(one.shape)[-2:]
            inner = math.isqrt(left * right // (rows * columns))
            return Product(rows, inner, columns, self._is_of_codes(one))
        body = self.body(one)
        for each in body.instructions if body else ():
            if each.opcode == "dot":
                left = self.sizes(each.operands[0])
                found = [match[1] for p in (_CONTRACTED, _BATCH) if (match := p.search(each.rest))]
                places = [int(place) for places in found for place in places.split(",")]
                rows, columns = (1, *sizes_of(each.shape))[-2:]
                inner = math.prod(left[place] for place in places)
                return Product(rows, inner, columns, self._is_of_codes(each))
            if each.opcode == "fusion" and (found := self.product(each)):
                return found
        return None

    def _is_of_codes(self, one: Instruction) -> bool:
        return self.shapes[one.operands[0]].startswith("f8")

    def sizes(self, name: str) -> list[int]:
        """The dimensions of what an instruction makes."""
        return sizes_of(self.shapes[name])


def _users(one: Instruction, body: Computation) -> Iterator[Instruction]:
    for each in body.instructions:
        if one.name in each.operands:
            yield each


def _read(one: Instruction, body: Computation) -> int:
    """Bytes of a parameter that a fusion reads."""
    total, whole = 0, shape_bytes(one.shape)
    for user in _users(one, body):
        is_first = user.operands[0] == one.name
        if user.opcode in _THROUGH:
            total += _read(user, body)
        elif user.opcode in _TAKES_A_PART and is_first:
            total += shape_bytes(user.shape)
        elif not (user.opcode in _WRITES_A_PART and is_first):
            return whole
    return min(total, whole)


def _written(one: Instruction, body: Computation) -> int:
    """Bytes that a fusion writes."""
    by_name = {each.name: each for each in body.instructions}
    if one.opcode == "tuple" or one.opcode in ("bitcast", "reshape"):
        return sum(_written(by_name[name], body) for name in one.operands)
    if one.opcode in _WRITES_A_PART:
        return shape_bytes(by_name[one.operands[_WRITES_A_PART[one.opcode]]].shape)
    return shape_bytes(one.shape)


def _kernel(one: Instruction, program: _Program, prices: Prices) -> Kernel:
    machine = prices.machine
    name = re.sub(r"[.\d]+$", "", one.name)
    for each in program.inside(one):
        if (opcode := each.opcode.removesuffix("-start")) in COLLECTIVES:
            return _collective(one, each, opcode, program, machine)
        if KERNEL_CALL in each.rest:
            name = kernel_name(each)
            if name.startswith(PRODUCTS) or "norm" in name or name in SWITCHED:
                return _own_kernel(one, each, program, prices)
            return _attention(one, name, prices)
    if one.opcode in ("conditional", "while"):
        return Kernel("branch", name, one.shape, 0, 0, machine.kernel_seconds)
    moved = program.num_bytes(one)
    if (product := program.product(one)) is not None:
        return _product(name, one.shape, moved, product, prices)
    reading = moved / (machine.memory_bytes_per_second * machine.memory_efficiency)
    return Kernel("other", name, one.shape, moved, 0, machine.kernel_seconds + reading)


def _product(name: str, shape: str, moved: int, product: Product, prices: Prices) -> Kernel:
    machine, fmt = prices.machine, "fp8" if product.is_of_codes else prices.format
    reading = moved / (machine.memory_bytes_per_second * machine.memory_efficiency)
    seconds = max(matmul_seconds(machine, *product[:3], fmt), reading)
    seconds += machine.kernel_seconds + machine.product_seconds
    return Kernel("product", name, shape, moved, 2 * math.prod(product[:3]), seconds)


def kernel_name(call: Instruction) -> str:
    """The name of a Mosaic kernel, which is the innermost of its scopes."""
    source = re.search(r'op_name="([^"]*)/[^/"]*"', call.rest)
    return source[1].rpartition("/")[2] if source else call.name


def _own_kernel(one: Instruction, call: Instruction, program: _Program, prices: Prices) -> Kernel:
    """A Mosaic kernel that reads and writes its arrays, each once: a norm, or a product.

    Codes of a product's rows come first, [rows, inner], and those of its matrices follow; of a
    product of numbers that is all.
    """
    machine, name = prices.machine, kernel_name(call)
    if name in SWITCHED:
        return _switched(name, call, program, prices)
    arrays = [program.shapes[operand] for operand in call.operands]
    moved = sum(map(shape_bytes, arrays)) + shape_bytes(call.shape)
    if name.startswith(PRODUCTS):
        codes = [each for each in arrays if each.startswith("f8")]
        (rows, inner), *matrices = map(sizes_of, codes or arrays)
        columns = sum(map(math.prod, matrices)) // inner
        product = Product(rows, inner, columns, is_of_codes=bool(codes))
        return _product(name, one.shape, moved, product, prices)
    reading = moved / (machine.memory_bytes_per_second * machine.memory_efficiency)
    return Kernel("kernel", name, one.shape, moved, 0, machine.kernel_seconds + reading)


def _switched(name: str, call: Instruction, program: _Program, prices: Prices) -> Kernel:
    """A sum over devices by a switch, its norm included. Partial sums are its second operand."""
    ways, shape = prices.machine.switch_sum, program.shapes[call.operands[1]]
    volume = "one_shot" if name == SWITCHED[0] else "two_shot"
    chosen = tuple(way for way in ways if way.volume == volume) or prices.machine.all_reduce
    move = Collective("all-reduce", prices.num_devices, shape_bytes(shape), 1)
    return Kernel(SWITCH, name, shape, move.num_bytes, 0, transfer_seconds(chosen, move))


def _attention(one: Instruction, name: str, prices: Prices) -> Kernel:
    """A Mosaic kernel: one of those that read the context, or one that only starts and ends."""
    launch = prices.machine.kernel_seconds
    for part, attention in prices.attention.items():
        if name.startswith(part) and "combine" not in name:
            return Kernel("attention", name, one.shape, *attention[:2], launch + attention.seconds)
    return Kernel("attention", name, one.shape, 0, 0, launch)


def _collective(
    one: Instruction, inner: Instruction, kind: Any, program: _Program, machine: Machine
) -> Kernel:
    """A latency, which holds the launch, and bytes over a rate."""
    shape = program.done.get(one.name, one.shape)
    chosen, label, num_bytes = ways_of(machine, kind), kind, shape_bytes(shape)
    if kind == "all-reduce":
        strategy = all_reduce_kind(inner.rest)
        label, volume = f"{kind}, {strategy}", "one_shot" if strategy == "one shot" else "ring"
        chosen = tuple(way for way in chosen if way.volume == volume) or chosen
    devices = _group_size(inner.rest)
    seconds = transfer_seconds(chosen, Collective(kind, devices, num_bytes, 1))
    return Kernel(label, label.partition(",")[0], shape, num_bytes, 0, seconds)


def _group_size(rest: str) -> int:
    """How many devices a collective joins, in any of the ways in which XLA writes its groups."""
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    if table := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(table[1])
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return listed[1].count(",") + 1
    raise ValueError(f"a collective without groups: {rest[:200]}")
