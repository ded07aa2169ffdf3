"""What is expected of compiled steps, on any backend: collectives, products, no copies."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from serving.bench.hlo import (
    COLLECTIVES,
    Instruction,
    collectives,
    computations,
    entry,
    instructions,
    launches,
    shape_bytes,
    sizes_of,
)
from shiftjax.costs.collectives import Collective
from shiftjax.device.step import StepDef
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout

__all__ = [
    "Instruction",
    "collectives",
    "counted",
    "entry",
    "expected_collectives",
    "groups_of",
    "instructions",
    "launches",
    "matrices",
    "moves",
    "product_flops",
    "shape_bytes",
    "sizes_of",
    "unordered",
    "weight_moves",
]
_CALLED = ("body", "condition", "to_apply", "calls", "true_computation", "false_computation")
MOVES = ("slice", "dynamic-slice", "copy", "transpose", "copy-start")
FLOAT32_BYTES = 4


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
            inner = sizes_of(shapes[left[1]])[int(contracted[1])]
            total += 2 * inner * int(np.prod(sizes_of(one.shape)))
    return total


def expected_collectives(
    layout: Layout, mode: Mode, tokens: int, rows: int, item_bytes: int, block: int = 0
) -> Counter:
    """What the published algorithm moves (bytes of results per device).

    Heads return as codes of a byte with a float32 scale for each `block` of them; 0: as numbers.

    Per layer: two all-reduces of n / sp tokens over the devices that split a weight; where tokens
    are split (not in SHIFT), one all-to-all of q, k, v and one of the output over sp. Beside the
    layers: the embedding's all-reduce; sampled rows of split tokens cross sp; each device's best
    token of every row (id, logit, finite) goes everywhere.
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
        columns = h * model.head_dim
        coded = tokens * (columns + FLOAT32_BYTES * columns // block) if block else head * h
        found["all-to-all", coded] += model.num_layers
        found["all-reduce", rows * hidden] += 1
    if layout.num_devices > 1:
        found["all-reduce", rows * layout.num_devices * 3 * FLOAT32_BYTES] += 1
    return found


def counted(moves: Iterable[Collective]) -> Counter[tuple[str, int]]:
    """Return the costs' collectives by kind and bytes, as `collectives` counts a program's."""
    found: Counter[tuple[str, int]] = Counter()
    for move in moves:
        found[move.kind, move.num_bytes] += move.num_times
    return found


def groups_of(one: Instruction) -> np.ndarray:
    """The devices that a collective joins, [groups, members], by their place in the mesh.

    XLA names axes of a mesh, or says how to reshape and transpose all places, or lists them.
    """
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", one.rest):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        inner = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", mesh[2])]
        order = [i for i in range(len(sizes)) if i not in inner] + inner
        members = int(np.prod([list(sizes.values())[i] for i in inner]))
        places = np.arange(np.prod(list(sizes.values()))).reshape(*sizes.values())
        return places.transpose(order).reshape(-1, members)
    iota = r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
    if found := re.search(iota, one.rest):
        places = np.arange(int(found[1]) * int(found[2])).reshape(_numbers(found[3]))
        order = _numbers(found[4]) if found[4] else range(places.ndim)
        return places.transpose(order).reshape(int(found[1]), int(found[2]))
    listed = re.search(r"replica_groups=\{(\{.*?\})\}", one.rest)
    assert listed, one.rest
    return np.array([_numbers(group) for group in re.findall(r"\{([\d,]+)\}", listed[1])])


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


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
        for one in moves(text, MOVES)
        if one.shape.startswith(item_type) and _views(one.shape) & weights
    ]


def moves(text: str, opcodes: Sequence[str]) -> list[Instruction]:
    """Return the instructions of these kinds that move something.

    A slice at a fixed place that a fusion begins with does not: the fusion reads only that.
    """
    fused = set(re.findall(r"calls=%?([\w.-]+)", text))
    return [
        one
        for name, body in computations(text).items()
        for one in body.instructions
        if one.opcode in opcodes
        and not (name in fused and one.opcode == "slice" and one is not body.root)
    ]


def _views(shape: str) -> set[tuple[int, int]]:
    """The matrices as which an array can be read, row by row, and their transposes."""
    sizes = sizes_of(shape)
    cuts = [(int(np.prod(sizes[:i])), int(np.prod(sizes[i:]))) for i in range(1, len(sizes))]
    return {*cuts, *(cut[::-1] for cut in cuts)}


def unordered(text: str) -> list[tuple[str, str]]:
    """Pairs of like collectives, one in a loop or branch, that may meet in either order.

    Like: of one kind and as many devices. What is computed from another comes after it. Others are
    ordered by a CPU only where both are at the same level: a loop may go on beside what follows it.
    """
    program = computations(text)
    kinds: dict[str, set[tuple[str, int]]] = {}

    def kinds_in(name: str) -> set[tuple[str, int]]:
        if name not in kinds:
            kinds[name] = set()
            for one in program[name].instructions:
                kinds[name] |= kinds_of(one)
        return kinds[name]

    def kinds_of(one: Instruction) -> set[tuple[str, int]]:
        if one.opcode in COLLECTIVES:
            return {(one.opcode, _group_size(one.rest))}
        called = re.findall(rf"\b(?:{'|'.join(_CALLED)})=%?([\w.-]+)", one.rest)
        for names in re.findall(r"branch_computations={([^}]*)}", one.rest):
            called += re.findall(r"[\w.-]+", names)
        return set().union(*map(kinds_in, called))

    found = []
    for computation in program.values():
        before: dict[str, set[str]] = {}
        earlier: list[tuple[str, set[tuple[str, int]], bool]] = []
        for one in computation.instructions:
            from_ = [name for name in one.operands if name in before]
            before[one.name] = set(from_).union(*(before[name] for name in from_))
            if own := kinds_of(one):
                found += [
                    (name, one.name)
                    for name, kinds, direct in earlier
                    if kinds & own and name not in before[one.name]
                    if not (direct and one.opcode in COLLECTIVES)
                ]
                earlier.append((one.name, own, one.opcode in COLLECTIVES))
    return found


def _group_size(rest: str) -> int:
    """Devices of a collective's group, however it is written."""
    if groups := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return groups[1].count(",") + 1
    if groups := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(groups[1])
    mesh, axes = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", rest).groups()
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh))
    return int(np.prod([int(sizes[axis]) for axis in re.findall(r"\w+", axes)]))
