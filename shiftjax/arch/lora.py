"""Which matrices low-rank adapters change (LoRA, arXiv 2106.09685), and their factors. No JAX.

An adapter adds b (a x) to what a matrix gives for x. A device has room for several adapters: slots.
Factors lie with the slots side by side, and are stored as the matrix is that they belong to:

    column-parallel   a [matrices, slots, rank, in] of all that read one input, on every device
                      b [*out, slots, rank], split by outputs, as the matrix is
    experts           a [experts, slots, rank, in], b [experts, out, slots, rank], split by experts
    row-parallel      a [*in, slots, rank], split by inputs, as the matrix is
                      b [slots, rank, out], on every device

What is split has the rows of its matrix, so that what a mode uses of it is a view, too. Sums of the
column-parallel need no exchange, those of the row-parallel go along in the sum that is made anyway.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

from shiftjax.arch.config import LoraSlots, ModelConfig
from shiftjax.arch.weights import Weight, weights_of

A, B = "_lora_a", "_lora_b"  # after the name of a matrix, or of the first that reads an input
_TOGETHER = ("q", "k", "v"), ("gate", "up")  # that read one input
_PARTS = "attention", "mlp", "mlp.shared", "mlp.dense"  # of a layer


class Adapted(NamedTuple):
    """A matrix that adapters may change, or that of each of a layer's experts."""

    weight: Weight
    first: str  # name of the matrix that has the factors `a` of all that read this one's input
    nth: int  # among them; 0 of a row-parallel one

    @property
    def is_of_experts(self) -> bool:
        """Whether it is that of all experts."""
        return self.weight.split == "experts"

    @property
    def outputs(self) -> int:
        """Its outputs, unpadded."""
        weight = self.weight
        if self.is_of_experts:
            return weight.shape[-2]
        return weight.shape[-1] if weight.transposed else weight.num_elements // weight.shape[-1]

    @property
    def inputs(self) -> int:
        """Its inputs, unpadded."""
        shape = self.weight.shape
        if self.is_of_experts or not self.weight.transposed:
            return shape[-1]
        return self.weight.num_elements // self.outputs


def read_together(name: str) -> tuple[str, ...]:
    """Return the column-parallel matrices of a part that may read one input with this one."""
    return next((each for each in _TOGETHER if name in each), (name,))


@cache
def matrices_of(model: ModelConfig) -> tuple[Adapted, ...]:
    """Return the matrices that adapters may change; those of all experts are one.

    Those of attention and MLPs, but for the latents' (MLA) projections up, which are used in both
    directions, and for SwiftKV's late layers; experts where `LoraSlots` say so.
    """
    of_experts = model.lora is not None and model.lora.of_experts
    return tuple(_adapted(weights_of(model), of_experts=of_experts))


@cache
def adapted(model: ModelConfig) -> Mapping[str, Adapted]:
    """Return the matrices that adapters may change, by the names of their tensors."""
    found: dict[str, Adapted] = {}
    for one in matrices_of(model):
        if one.is_of_experts:
            each = map(one.weight.of_expert, range(one.weight.shape[0]))
            found |= {weight.source: one._replace(weight=weight) for weight in each}
        else:
            found[one.weight.source] = one
    return found


def factors_of(weights: Iterable[Weight], slots: LoraSlots) -> Iterator[Weight]:
    """Yield the factors of all matrices among `weights` that adapters may change."""
    found = list(_adapted(weights, of_experts=slots.of_experts))
    num = {each.first: each.nth + 1 for each in found}
    for weight, first, nth in found:
        own = weight._replace(kind="factor", source="", transposed=False)
        size, whole = (slots.num, slots.rank), (None, None)
        if weight.split == "experts":
            experts, outputs, inputs = weight.shape
            a = own._replace(name=f"{weight.name}{A}", shape=(experts, *size, inputs))
            yield a._replace(axes=(*weight.axes, None))
            b = own._replace(name=f"{weight.name}{B}", shape=(experts, outputs, *size))
            yield b._replace(axes=(*weight.axes, None))
            continue
        if weight.transposed:
            *inputs, outputs = weight.shape
            a = own._replace(name=f"{weight.name}{A}", shape=(*inputs, *size))
            yield a._replace(axes=(*weight.axes[:-1], *whole))
            b = own._replace(name=f"{weight.name}{B}", shape=(*size, outputs))
            yield b._replace(axes=(*whole, None))
            continue
        *outputs, inputs = weight.shape
        if nth == 0:
            a = own._replace(name=f"{first}{A}", axes=(None,) * 4)
            yield a._replace(shape=(num[first], *size, inputs))
        b = own._replace(name=f"{weight.name}{B}", shape=(*outputs, *size))
        yield b._replace(axes=(*weight.axes[:-1], *whole))


def _adapted(weights: Iterable[Weight], *, of_experts: bool) -> Iterator[Adapted]:
    firsts: dict[tuple[str, tuple[str, ...]], tuple[str, int]] = {}
    for weight in weights:
        layer, _, name = weight.name.rpartition(".")
        part = layer.split(".", 2)[-1]
        if not layer.startswith("layers.") or weight.kind != "matrix":
            continue
        if part == "mlp.experts" and of_experts:
            yield Adapted(weight, weight.name, 0)
        if part not in _PARTS:
            continue
        if weight.in_shift or name in ("router", "shared_gate"):
            continue
        if weight.transposed:
            yield Adapted(weight, weight.name, 0)
            continue
        group = layer, read_together(name)
        first, count = firsts.get(group, (weight.name, 0))
        firsts[group] = first, count + 1
        yield Adapted(weight, first, count)
