"""Registers of four-bit weights become operands of matrix instructions: in terms of MLIR.

Pallas has no conversion of a word to numbers of another width. All bits are made by the functions
that are passed in, on anything that has the operators of `Word`; here is only what goes where.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

CHANNELS, UNIT = 64, 64  # of an operand
HALVES = 2  # rows of a thread
WORDS = 2  # of a thread, a row and a unit


class Word(NamedTuple):
    """A word of 32 bits in a register."""

    value: Any

    def __and__(self, mask: np.uint32) -> "Word":
        return Word(arith.andi(self.value, _constant(mask)))

    def __or__(self, other: "Word | np.uint32") -> "Word":
        bits = other.value if isinstance(other, Word) else _constant(other)
        return Word(arith.ori(self.value, bits))

    def __lshift__(self, by: int) -> "Word":
        return Word(arith.shli(self.value, _constant(by)))

    def __rshift__(self, by: int) -> "Word":
        return Word(arith.shrui(self.value, _constant(by)))


def _constant(bits: int | np.uint32) -> Any:
    signed = int(np.uint32(bits).astype(np.int32))
    return arith.constant(ir.IntegerType.get_signless(32), signed)


def renamed(numbers: Any, layout: Any) -> Any:
    """Return bfloat16 registers as float32 under another layout, which is another order of numbers.

    Registers as they are would be taken for the array that they come from.
    """
    wide = numbers.astype(ir.F32Type.get())
    registers = wide.registers.reshape(layout.registers_shape(wide.shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def widen(
    pairs_of: Callable[[Word], Iterator[Word]],
    codes: Any,
    factors: Sequence[Any],
    origins: Sequence[Any],
) -> tuple[Any, ...]:
    """Return operands [CHANNELS, UNIT], one for each factor: (number - origin) * factor.

    Factors have pairs of bfloat16, twice the same, for each row of a thread, and so have origins,
    if there are any.
    """
    registers = codes.registers.reshape(len(factors), HALVES)
    operands = []
    for unit, factor in enumerate(factors):
        made = np.empty((WORDS * 4, HALVES), dtype=object)  # columns of instructions, rows
        for half in range(HALVES):
            words = vector.bitcast(_vector(WORDS, _i32()), registers[unit, half])
            scale = _number_of(factor, half)
            origin = _number_of(origins[unit], half) if origins else None
            for word in range(WORDS):
                value = Word(vector.extract(words, [], [word]))
                for pair, bits in enumerate(pairs_of(value)):
                    number = _as_pair(bits.value)
                    if origin is not None:
                        number = arith.subf(number, origin)
                    made[4 * word + pair, half] = arith.mulf(number, scale)
        shape = mgpu.WGMMA_LAYOUT.registers_shape((CHANNELS, UNIT))
        operands.append(
            mgpu.FragmentedArray(
                _registers=made.reshape(shape), _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
            )
        )
    return tuple(operands)


def _number_of(pairs: Any, half: int) -> Any:
    return _as_pair(vector.extract(pairs.registers.reshape(-1)[half], [], [0]))


def _as_pair(word: Any) -> Any:
    one = vector.broadcast(_vector(1, _i32()), word)
    return vector.bitcast(_vector(2, ir.BF16Type.get()), one)


def _vector(size: int, element: Any) -> Any:
    return ir.VectorType.get((size,), element)


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)
