"""What a compiled step says of itself, on any backend: collectives, copies of weights, launches."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import jax
import numpy as np

from shiftjax.device.step import StepDef
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout

COLLECTIVES = ("all-to-all", "all-reduce", "all-gather", "collective-permute", "reduce-scatter")
MOVES = ("slice", "dynamic-slice", "copy", "transpose", "copy-start")
# What a GPU executes nothing for; an asynchronous operation counts where it starts.
FREE = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all")
FLOAT32_BYTES = 4
LINE = re.compile(r"^\s*(?:ROOT )?%?(\S+) = (\(*[a-z0-9]+\[.*?) ([a-z][a-z-]*)\((.*)")
ARRAY = re.compile(r"([a-z]+)(\d*)[a-z0-9]*\[([\d,]*)\]")


class Instruction(NamedTuple):
    """One line of a compiled program."""

    name: str
    shape: str  # as HLO prints it; a tuple has parentheses
    opcode: str
    rest: str  # operands and attributes


def instructions(text: str) -> list[Instruction]:
    """Read all instructions of a compiled program, those inside of fusions and loops included."""
    matches = (LINE.match(line) for line in text.splitlines())
    return [Instruction(*match.groups()) for match in matches if match]


def entry(text: str) -> list[Instruction]:
    """Read the top level: what runs one after the other."""
    return instructions(text[text.index("\nENTRY ") :])


def launches(text: str) -> list[Instruction]:
    """Return what the device is told to do, each loop or branch counted as one."""
    return [
        one for one in entry(text) if one.opcode not in FREE and not one.opcode.endswith("-done")
    ]


def shape_bytes(shape: str) -> int:
    """Bytes of a (tuple) shape as HLO prints it."""
    total = 0
    for kind, bits, sizes in ARRAY.findall(shape):
        item = 1 if kind == "pred" else int(bits or 0) // 8
        total += item * int(np.prod([int(n) for n in sizes.split(",") if n]))
    return total


def collectives(text: str) -> Counter:
    """(opcode, bytes of the result on one device) -> how often."""
    found = Counter()
    for one in instructions(text):
        name = one.opcode.removesuffix("-done")
        if name in COLLECTIVES:
            found[name, shape_bytes(one.shape)] += 1
    return found


def product_flops(text: str) -> int:
    """Floating-point operations of the products of two matrices, those in branches included.

    Attention is not among them: its products have batches of heads.
    """
    found, total = instructions(text), 0
    shapes = {one.name: one.shape for one in found}
    for one in found:
        if one.opcode == "dot" and "batch_dims" not in one.rest:
            left = re.match(r"%?([\w.-]+)", one.rest)
            contracted = re.search(r"lhs_contracting_dims={(\d+)}", one.rest)
            assert left and contracted, one
            inner = _sizes(shapes[left[1]])[int(contracted[1])]
            total += 2 * inner * int(np.prod(_sizes(one.shape)))
    return total


def expected_collectives(
    layout: Layout, mode: Mode, tokens: int, rows: int, item_bytes: int
) -> Counter:
    """What the published algorithm moves (bytes of results per device).

    Per layer: two all-reduces of n / sp tokens over the devices that split a weight; where tokens
    are split (not in SHIFT), one all-to-all of q, k, v and one of the output over sp. Beside the
    layers: the embedding's all-reduce; sampled rows of split tokens cross sp; the float32 logits
    change from vocabulary to rows; the sampled tokens (id, log-probability, finite) go everywhere.
    """
    model, found = layout.model, Counter()
    hidden = model.hidden_size * item_bytes
    splits = mode.sp > 1
    local_tokens = tokens // mode.sp
    reducers = layout.num_devices // mode.sp
    if reducers > 1:
        found["all-reduce", local_tokens * hidden] += 1 + 2 * model.num_layers
    if splits:
        h, m = layout.heads_per_device, layout.kv_heads_per_device
        head = tokens * model.head_dim * item_bytes
        found["all-to-all", head * (h + 2 * m)] += model.num_layers
        found["all-to-all", head * h] += model.num_layers
        found["all-reduce", rows * hidden] += 1
    if layout.num_devices > 1:
        found["all-to-all", rows * layout.vocab_size * FLOAT32_BYTES // layout.num_devices] += 1
        found["all-gather", rows * 3 * FLOAT32_BYTES] += 1
    return found


def matrices(
    step: StepDef, params: Iterable[jax.Array | jax.ShapeDtypeStruct]
) -> set[tuple[int, int]]:
    """(rows, columns) that the matrices among the weights have on one device."""
    pairs = zip(step.model.declared, params, strict=True)
    shapes = [x.sharding.shard_shape(x.shape) for weight, x in pairs if len(weight.shape) > 1]
    return {(int(np.prod(shape[:-1])), shape[-1]) for shape in shapes}


def weight_moves(text: str, weights: set[tuple[int, int]], item_type: str) -> list[Instruction]:
    """Slices, copies and transposes whose result is such a matrix, or its transpose."""
    return [
        one
        for one in instructions(text)
        if one.opcode in MOVES and one.shape.startswith(item_type) and _views(one.shape) & weights
    ]


def _sizes(shape: str) -> list[int]:
    """The dimensions of an array as HLO prints it."""
    return [int(n) for n in ARRAY.findall(shape)[0][2].split(",") if n]


def _views(shape: str) -> set[tuple[int, int]]:
    """The matrices as which an array can be read, row by row, and their transposes."""
    sizes = _sizes(shape)
    cuts = [(int(np.prod(sizes[:i])), int(np.prod(sizes[i:]))) for i in range(1, len(sizes))]
    return {*cuts, *(cut[::-1] for cut in cuts)}
