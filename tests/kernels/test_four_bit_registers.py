"""Weights of four bits in registers: threads have what a matrix instruction takes from them.

A GPU's path is run on arrays of 128 threads in place of registers: its layouts, shifts and places
are the kernel's, and what they come to is held against the definition.
"""

import itertools
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_cases import E2M1_VALUES
from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels import four_bits, four_bits_registers
from pallas_kernels.four_bits import LATER, UNIT, Coded, Groups, in_order, pairs_of, wrong_groups

THREADS = 128
# What a place of a unit holds, by the instruction's layout: thread `place // 2 % 4` of a row has
# the pairs of 16 inputs that lie together.
INPUT_OF = [
    16 * (place // 2 % 4) + 8 * (place // 32) + 4 * (place % 2) + place // 8 % 4
    for place in range(UNIT)
]


def distribute(array: np.ndarray, layout: Any) -> np.ndarray:
    """Return registers of a tiled layout, each [threads, numbers of a vector]."""
    tiled = array
    for tile in layout.tiling.tiles:
        before, last = tiled.shape[: -len(tile)], tiled.shape[-len(tile) :]
        split = [n for whole, part in zip(last, tile, strict=True) for n in (whole // part, part)]
        first, axes = len(before), range(len(tile))
        order = [*range(first), *(first + 2 * a for a in axes), *(first + 2 * a + 1 for a in axes)]
        tiled = tiled.reshape(*before, *split).transpose(order)
    registers = np.empty(layout.registers_shape(array.shape), dtype=object)
    for at in np.ndindex(registers.shape):
        threads = []
        for warp, lane in itertools.product(range(4), range(32)):
            index: list[Any] = list(at)
            for dims, number in ((layout.warp_dims, warp), (layout.lane_dims, lane)):
                sizes = [tiled.shape[dim] if isinstance(dim, int) else dim.times for dim in dims]
                for dim, own in zip(dims, np.unravel_index(number, sizes), strict=True):
                    if isinstance(dim, int):
                        index[dim] = own
            index[layout.vector_dim] = slice(None)
            threads.append(tiled[tuple(index)].reshape(-1))
        registers[at] = np.stack(threads)
    return registers


def collect(registers: np.ndarray, layout: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return the array that registers hold."""
    places = distribute(np.arange(math.prod(shape)).reshape(shape), layout)
    out = np.full(math.prod(shape), np.nan)
    for place, values in zip(places.flat, registers.flat, strict=True):
        out[place] = values
    return out.reshape(shape)


def float_of(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.fixture
def on_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make operations of MLIR those of arrays [threads, ...] that hold bits, or numbers."""

    def as_numbers(kind: tuple[str, int], value: np.ndarray) -> np.ndarray:
        if kind[0] == "i32":
            return np.ascontiguousarray(value).view(np.uint32)
        return float_of(np.ascontiguousarray(value).view(np.uint16))

    by_name = {
        "andi": np.bitwise_and,
        "ori": np.bitwise_or,
        "shli": np.left_shift,
        "shrui": np.right_shift,
        "subf": np.subtract,
        "mulf": np.multiply,
        "constant": lambda _, bits: np.int32(bits).astype(np.uint32),
    }
    vectors = SimpleNamespace(
        bitcast=as_numbers,
        extract=lambda value, _, at: value[:, at[0]],
        broadcast=lambda _, value: value[:, None],
    )
    types = SimpleNamespace(
        VectorType=SimpleNamespace(get=lambda shape, element: (element, shape[0])),
        IntegerType=SimpleNamespace(get_signless=lambda bits: f"i{bits}"),
        BF16Type=SimpleNamespace(get=lambda: "bf16"),
    )
    arrays = SimpleNamespace(
        WGMMA_LAYOUT=mgpu.WGMMA_LAYOUT,
        FragmentedArray=lambda **parts: SimpleNamespace(registers=parts["_registers"]),
    )
    fakes = dict(arith=SimpleNamespace(**by_name), vector=vectors, ir=types, mgpu=arrays)
    for name, fake in fakes.items():
        monkeypatch.setattr(four_bits_registers, name, fake)


def registers_of(array: np.ndarray, layout: Any) -> SimpleNamespace:
    return SimpleNamespace(registers=distribute(array, layout.to_mgpu()))


@pytest.mark.parametrize("are_turned", [False, True])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("are_floats", [False, True])
def test_threads_hold_what_instructions_take(are_turned, group, are_floats, on_arrays):
    rng = np.random.default_rng(0)
    coded = Coded(are_floats, group, not are_floats, jnp.float32, are_turned)
    codes = rng.integers(0, 256, (64, UNIT), np.uint8)  # of two units
    shape = (2, 2, 64) if group < UNIT else (2, 64)  # of units, and their groups
    numbers = rng.integers(0x3C00, 0x4080, shape, np.uint32)  # bfloat16
    zeros = rng.integers(0, 17, shape, np.uint32)
    layout = four_bits._layout_of_groups(coded)

    def pairs(bits: np.ndarray) -> list[Any]:
        return [registers_of(one * 0x10001, layout) for one in bits.astype(np.uint32)]

    codes_in = registers_of(codes, four_bits._codes_layout(are_turned))
    origins = [] if are_floats else pairs(zeros | 0x4300)
    how = partial(pairs_of, are_floats=are_floats)
    operands = four_bits_registers.widen(how, codes_in, pairs(numbers), origins)
    nibbles = np.stack([codes % 16, codes // 16], -1).reshape(64, 2, UNIT)
    for unit, operand in enumerate(operands):
        values = collect(operand.registers, mgpu.WGMMA_LAYOUT, (64, UNIT))
        factor, zero = (
            np.repeat(np.atleast_2d(each[unit]), UNIT // np.atleast_2d(each[unit]).shape[0], 0).T
            for each in (float_of(numbers), zeros.astype(int))
        )
        own = nibbles[:, unit].astype(int)
        expected = E2M1_VALUES[own] * 2.0**-126 if are_floats else own - zero
        expected = (expected * factor)[:, INPUT_OF]
        np.testing.assert_array_equal(values, expected[INPUT_OF] if are_turned else expected)


@pytest.mark.parametrize("are_floats", [False, True])
def test_every_word_has_its_eight_numbers(are_floats):
    """Bits beside a number's own, and other numbers of the word, change none."""
    words = np.random.default_rng(1).integers(0, 1 << 32, 4096, np.uint32)
    for pair, bits in enumerate(pairs_of(words, are_floats)):
        for half, own in enumerate((bits & 0xFFFF, bits >> 16)):
            codes = words >> np.uint32(4 * (pair + 4 * half)) & 15
            expected = E2M1_VALUES[codes] * 2.0**-126 if are_floats else 128.0 + codes
            np.testing.assert_array_equal(float_of(own), expected)


def test_inputs_come_in_the_order_of_places():
    x = np.arange(2 * 3 * UNIT).reshape(2, 3 * UNIT)
    expected = x.reshape(2, 3, UNIT)[..., INPUT_OF].reshape(x.shape)
    np.testing.assert_array_equal(in_order(jnp.asarray(x, jnp.float32)), expected)
    assert four_bits.INPUT_AT.tolist() == INPUT_OF


def test_scales_of_any_size_are_exact():
    """But for those that no sum would notice; the largest are as large as bfloat16 allows."""
    for byte in (0, 64, 127, 190):
        (pair,) = four_bits._factors(jnp.full(1, byte, jnp.uint8), are_floats=True)
        factor = float_of(np.asarray(pair & 0xFFFF, np.uint32))
        assert factor * 2.0**-126 * 2.0**LATER == 2.0 ** (byte - 127)


@pytest.mark.parametrize(
    ("scale", "zero", "message"),
    [
        (None, None, "want scales"),
        (((1, 5, 64), jnp.uint8), None, "scales 1x5x64 are not of groups of 32, 64, 128 inputs"),
        (((1, 4, 64), jnp.int32), None, "scales of int32"),
        (((1, 4, 64), jnp.uint8), ((1, 4, 64), jnp.uint8), "floats have no zero points"),
        (((1, 4, 64), jnp.float32), ((1, 2, 64), jnp.uint8), "must be uint8, as scales are"),
    ],
)
def test_what_groups_cannot_be_is_said(scale, zero, message):
    scale, zero = (None if one is None else jax.ShapeDtypeStruct(*one) for one in (scale, zero))
    (words,) = wrong_groups(jax.ShapeDtypeStruct((1, 64, 64), jnp.uint8), Groups(scale, zero))
    assert message in words
