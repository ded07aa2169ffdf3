"""Weights of four bits, widened to bfloat16 in registers: what a matrix instruction multiplies.

Two inputs of a channel are a byte, the even one in its low half. Codes are e2m1 numbers in units of
powers of two (e8m0 bytes), or integers without a sign, from which a zero point is taken before they
are times a scale. Scales are of an output channel and of a group of inputs that follow each other.

    codes     uint8 [expert, out, in / 2]
    scales    [expert, in / group, out]: uint8 with e2m1, else bfloat16, float16 or float32
    zeros     uint8, as scales; None: 8

A thread of a matrix instruction holds pairs of neighbouring inputs of a channel, from many places.
Here it reads what lies together in memory instead, eight bytes, and takes the two halves of a
register from the two halves of a word, with the same shifts. So inputs come in another order,
`INPUT_AT`, and what the weights multiply has to be in that order, too (`in_order`). No number goes
from thread to thread. The channels of gate and up come in that order for down: `TURNED`.

A weight is rounded to bfloat16 after its scale, as in other engines; e2m1 codes are exact.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from pallas_kernels import four_bits_registers
from pallas_kernels.grouped_split import CHANNELS
from pallas_kernels.mosaic import WGMMA

UNIT = 64  # inputs that are put into another order among themselves, and those of an operand
GROUPS = 32, 64, 128  # inputs that have a scale in common
DEFAULT_ZERO = 8
# A place is (word of a thread, pair of the word, thread, half of the pair), the last innermost; an
# input is 16 * thread + 8 * word + 4 * half + pair.
INPUT_AT = np.arange(UNIT).reshape(4, 2, 2, 4).transpose(1, 3, 0, 2).reshape(-1)
# An e2m1 number whose bits are where bfloat16 has its own is 2^126 times too small; scales make
# up for that, but for so many powers of two, which sums are times in the end: else they overflow.
LATER = 64
_ZERO = 0x4300 | DEFAULT_ZERO  # 128 and that, as bfloat16
_E8M0_TO_BFLOAT16 = 126 - LATER  # added to a scale's byte, bfloat16's exponent


class Coded(NamedTuple):
    """How the four bits of a product's weights are to be read."""

    are_floats: bool  # e2m1, and scales e8m0; else integers
    group: int
    have_zeros: bool
    scale_dtype: DTypeLike
    are_turned: bool  # channels come in the order in which the next product takes them

    @property
    def unit(self) -> float:
        """What sums are to be times."""
        return 2.0**LATER if self.are_floats else 1.0

    def rows(self, step: int) -> int:
        """Groups of so many inputs, which begin with one or lie in one."""
        return max(1, step // self.group)


class Groups(NamedTuple):
    """What the groups of a matrix have: [experts, groups, out]."""

    scale: Any
    zero: UInt8[Any, "experts groups out"] | None


def coded_of(codes: Any, groups: Groups, are_turned: bool) -> Coded:
    """Describe the weights of a product by their arrays."""
    scale = groups.scale
    group = codes.shape[-1] * 2 // scale.shape[-2]
    are_floats = scale.dtype == jnp.uint8
    return Coded(are_floats, group, groups.zero is not None, scale.dtype, are_turned)


def wrong_groups(codes: Any, groups: Groups) -> list[str]:
    """Say what kernels cannot do with the groups of a matrix [.., out, in / 2]."""
    (scale, zero), (*before, channels, half) = groups, codes.shape
    if scale is None:
        return ["codes of four bits want scales"]
    sizes = {(*before, 2 * half // group, channels): group for group in GROUPS}
    wrong = []
    if 2 * half % sizes.get(scale.shape, 2 * half + 1):
        found = "x".join(map(str, scale.shape))
        wrong.append(f"scales {found} are not of groups of {', '.join(map(str, GROUPS))} inputs")
    if scale.dtype not in (jnp.uint8, jnp.bfloat16, jnp.float16, jnp.float32):
        wrong.append(f"scales of {scale.dtype}")
    if zero is not None and (scale.dtype, zero.dtype) == (jnp.uint8, jnp.uint8):
        wrong.append("floats have no zero points")
    elif zero is not None and (zero.dtype, zero.shape) != (jnp.uint8, scale.shape):
        wrong.append(f"zero points of {zero.dtype}, {zero.shape}: must be uint8, as scales are")
    return wrong


def in_order(x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
    """Return rows in the order in which codes meet them."""
    units = x.reshape(*x.shape[:-1], -1, 4, 2, 2, 4)
    last = len(units.shape) - 4
    order = [*range(last), *(last + axis for axis in (1, 3, 0, 2))]
    return units.transpose(order).reshape(x.shape)


# ---------------------------------------------------------------- layouts of registers
# A thread's codes: eight bytes of a row, in rows 16 * warp + lane / 4 and 8 more, as instructions
# have their rows. Turned: what is channel INPUT_AT[place] is read as the row of that place.


def _tiled(tiles: Sequence[tuple[int, ...]], warp: Sequence[int], lane: Sequence[Any]) -> Any:
    tiling = plgpu.Tiling(tuple(tiles))
    return plgpu.Layout.TILED(tiling, warp_dims=tuple(warp), lane_dims=tuple(lane), vector_dim=-1)


_ROWS, _TURNED_ROWS = (64, 16, 8), (64, 16, 8, 4, 2)


def _codes_layout(are_turned: bool) -> Any:
    if not are_turned:
        return plgpu.Layout.WGMMA_UPCAST_4X
    return _tiled([*((rows, 32) for rows in _TURNED_ROWS), (8,)], (-9, -5), (-11, -7, -2))


def _channels_layout(are_turned: bool) -> Any:
    """Of a number for each channel, the same for the four threads of a row."""
    if not are_turned:
        return WGMMA.reduce(1)
    same = plgpu.Replicated(4)
    return _tiled([*((rows,) for rows in _TURNED_ROWS), (1,)], (-5, -3), (-6, -4, same))


def _groups_layout(are_turned: bool) -> Any:
    """Of two numbers for each channel: each for the threads that have the inputs of its group."""
    same = plgpu.Replicated(2)
    if not are_turned:
        return _tiled([*((2, rows) for rows in _ROWS), (1,)], (-6,), (-2, -3, same))
    return _tiled([*((2, rows) for rows in _TURNED_ROWS), (1,)], (-8, -4), (-10, -6, -3, same))


def load_channels(ref: Any, are_turned: bool, interpret: Any) -> jax.Array:
    """Read a number for each of CHANNELS channels, as instructions have their rows.

    Turned ones are bfloat16, and become float32.
    """
    if not are_turned:
        return plgpu.load(ref, layout=WGMMA.reduce(1), optimized=False)
    if interpret:
        return _turned(ref[...]).astype(jnp.float32)
    layout, turned = _channels_layout(are_turned), WGMMA.reduce(1)
    shape = plgpu.ShapeDtypeStruct((CHANNELS,), jnp.dtype(jnp.float32), layout=turned)

    def rename(_: Any, numbers: Any) -> Any:
        return four_bits_registers.renamed(numbers, turned.to_mgpu())

    turn: Any = plgpu.inline_mgpu(arg_types=(layout,), return_type=shape)(rename)
    return turn(plgpu.load(ref, layout=layout, optimized=False))


# ---------------------------------------------------------------- bits


_SIGNS, _SIZES = np.uint32(0x80008000), np.uint32(0x01C001C0)
_INTEGERS, _UNITS = np.uint32(0x000F000F), np.uint32(0x43004300)


def pairs_of(word: Any, are_floats: bool) -> Iterator[Any]:
    """Yield pairs of bfloat16 numbers as words of 32 bits, of a word with eight codes.

    Numbers `pair` and `pair + 4` of it. Floats are 2^-126 of what they are, integers 128 more.
    """
    for pair in range(4):
        if are_floats:  # a sign, and three bits of exponent and mantissa
            sign, rest = _shifted(word, 12 - 4 * pair), _shifted(word, 6 - 4 * pair)
            yield (sign & _SIGNS) | (rest & _SIZES)
        else:
            yield (_shifted(word, -4 * pair) & _INTEGERS) | _UNITS


def _shifted(word: Any, by: int) -> Any:
    return word << by if by > 0 else word >> -by if by else word


def _factors(scales: jax.Array, are_floats: bool) -> jax.Array:
    """Return the bits of what codes are to be times, as pairs."""
    if are_floats:
        exponent = jnp.minimum(scales.astype(jnp.int32) + _E8M0_TO_BFLOAT16, 254)
        bits = exponent << 7
    else:
        narrow = scales.astype(jnp.bfloat16)
        bits = lax.bitcast_convert_type(narrow, jnp.uint16).astype(jnp.int32)
    return bits | (bits << 16)


# ---------------------------------------------------------------- in a kernel


class Stage(NamedTuple):
    """What a stage of shared memory has of a matrix, for a warpgroup."""

    codes: UInt8[Any, "channels half_step"]
    scales: Any  # [groups, channels]
    zeros: Any  # the same; None: 8


def widened(coded: Coded, stage: Stage, interpret: Any) -> list[Float[Array, "channels unit"]]:
    """Return the weights of a stage, UNIT inputs each, as operands of matrix instructions.

    Those of e2m1 are 2^-LATER of what they are.
    """
    units = stage.codes.shape[1] * 2 // UNIT
    factors = _of_units(coded, stage.scales, units, interpret)
    factors = [_factors(one, coded.are_floats) for one in factors]
    origins = _origins(coded, stage, factors, interpret)
    if interpret:
        return _interpreted(coded, stage.codes[...], factors, origins)
    codes_layout, layout = _codes_layout(coded.are_turned), _layout_of_groups(coded)
    codes = plgpu.load(stage.codes, layout=codes_layout, optimized=False)
    operand = plgpu.ShapeDtypeStruct((CHANNELS, UNIT), jnp.dtype(jnp.bfloat16), layout=WGMMA)

    def widen_codes(_: Any, codes: Any, factors: Any, origins: Any) -> Any:
        pairs = functools.partial(pairs_of, are_floats=coded.are_floats)
        return four_bits_registers.widen(pairs, codes, factors, origins)

    widen: Any = plgpu.inline_mgpu(
        arg_types=(codes_layout, (layout,) * units, (layout,) * len(origins)),
        return_type=(operand,) * units,
    )(widen_codes)
    return list(widen(codes, tuple(factors), tuple(origins)))


def _origins(
    coded: Coded, stage: Stage, factors: list[jax.Array], interpret: Any
) -> list[jax.Array]:
    """Return the bits of the zero points of integers, as `pairs_of` has those; of floats none."""
    if coded.are_floats:
        return []
    if not coded.have_zeros:
        zero = jnp.full(factors[0].shape, _ZERO * 0x10001, jnp.int32)
        if not interpret:
            zero = plgpu.layout_cast(zero, _layout_of_groups(coded))
        return [zero] * len(factors)
    zeros = _of_units(coded, stage.zeros, len(factors), interpret)
    bits = [zero.astype(jnp.int32) | 0x4300 for zero in zeros]
    return [one | (one << 16) for one in bits]


def _layout_of_groups(coded: Coded) -> Any:
    make = _groups_layout if coded.group < UNIT else _channels_layout
    return make(coded.are_turned)


def _of_units(coded: Coded, numbers: Any, units: int, interpret: Any) -> list[jax.Array]:
    """Read what the groups of each unit have: [2, channels], or of one group [channels]."""
    layout, read = _layout_of_groups(coded), {}
    for unit in range(units):
        first = unit * UNIT // coded.group
        if first not in read:
            here = numbers.at[pl.ds(first, 2)] if coded.group < UNIT else numbers.at[first]
            if interpret:
                read[first] = here[...]
            else:
                read[first] = plgpu.load(here, layout=layout, optimized=False)
    return [read[unit * UNIT // coded.group] for unit in range(units)]


# ---------------------------------------------------------------- in the interpreter


def _interpreted(
    coded: Coded, codes: jax.Array, factors: list[jax.Array], origins: list[jax.Array]
) -> list[jax.Array]:
    """The same by places instead of threads; numbers below 2^-126 are zeros on many CPUs."""
    bytes_of = codes.reshape(CHANNELS, -1, 4, 2, 4).astype(jnp.uint32)  # unit, thread, word, byte
    words = functools.reduce(jnp.bitwise_or, (bytes_of[..., n] << (8 * n) for n in range(4)))
    pairs = jnp.stack(list(pairs_of(words, coded.are_floats)), -1)
    bits = jnp.stack([pairs & 0xFFFF, pairs >> 16], -1)  # unit, thread, word, pair, half
    bits = bits.transpose(1, 0, 3, 4, 2, 5).reshape(-1, CHANNELS, UNIT)
    operands = []
    for unit, own in enumerate(bits):
        factor = _of_places(factors[unit])
        if coded.are_floats:
            values = _as_e2m1(own) * 2.0**-LATER * (factor * 2.0 ** (LATER - 126))
        else:
            values = (_as_float(own) - _of_places(origins[unit])) * factor
        values = values.astype(jnp.bfloat16)
        operands.append(_turned(values) if coded.are_turned else values)
    return operands


def _turned(values: jax.Array) -> jax.Array:
    """Return rows as `INPUT_AT` has them; a kernel has no arrays but its own."""
    return in_order(values.T).T if values.ndim > 1 else in_order(values[None])[0]


def _as_e2m1(bits: jax.Array) -> jax.Array:
    """Return float32 of e2m1 numbers where bfloat16 has its own; NaN of other bits."""
    exponent, mantissa = (bits >> 7) & 3, (bits >> 6) & 1
    halves = jnp.where(exponent, (2 + mantissa) << exponent, 2 * mantissa)
    size = jnp.where(bits & 0x7E3F, jnp.nan, halves.astype(jnp.float32) * 0.25)
    return jnp.where(bits >> 15, -size, size)


def _of_places(pairs: jax.Array) -> jax.Array:
    """Return [channels, places], or [channels, 1], float32, of what groups have."""
    values = _as_float(pairs & 0xFFFF)
    if values.ndim == 1:
        return values[:, None]
    threads = jnp.repeat(values.T, 2, axis=1)[:, None, :, None]
    return jnp.broadcast_to(threads, (CHANNELS, 8, 4, 2)).reshape(CHANNELS, UNIT)


def _as_float(bits: jax.Array) -> jax.Array:
    """Return float32 of the bits of bfloat16."""
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)
