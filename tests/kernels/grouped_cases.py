"""Steps for the tests of the grouped product of experts, and what must come out, by definition."""

from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from attention_cases import INTERPRETER, interpreted

from pallas_kernels import grouped
from pallas_kernels.gates import SILU, Gate
from pallas_kernels.grouped_work import ExpertWeights, Routed

FP8 = jnp.float8_e4m3fn
E2M1, INT4 = "e2m1", "int4"  # codes of four bits, in groups
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
BLOCK = 128  # inputs of codes that share a scale, and channels of a square
OTHERS = -1  # an expert of another device


class Case(NamedTuple):
    """A step; defaults are small, as the interpreter is slow."""

    chosen: Any  # [tokens, k]: the expert of every pair, or OTHERS
    experts: int = 3
    hidden: int = 64
    width: int = 64
    rows: int = 16
    stages: int | None = 2
    dtype: Any = jnp.bfloat16
    weight_dtype: Any = jnp.bfloat16
    gate: Gate = SILU
    has_bias: bool = False
    parts: tuple[int, int] = (1, 1)
    group: int = 32  # of codes of four bits
    has_zeros: bool = False
    scale_dtype: Any = jnp.float32  # of integers
    has_squares: bool = False  # codes with scales of square blocks

    @property
    def is_packed(self) -> bool:
        """Whether weights are codes of four bits."""
        return self.weight_dtype in (E2M1, INT4)


# More of a `Case`: as gpt-oss has it, with so low a limit that some are beyond it.
BIASED: dict[str, Any] = {"gate": Gate(1.702, 0.8), "has_bias": True}


class Step(NamedTuple):
    """The arrays of a case."""

    x: Any
    weights: ExpertWeights
    routed: Routed
    gains: Any


def route(chosen: Any, experts: int) -> Routed:
    """Sort pairs by expert, others' last."""
    flat = np.asarray(chosen).reshape(-1)
    order = np.argsort(np.where(flat == OTHERS, experts, flat), kind="stable")
    sizes = np.bincount(flat[flat != OTHERS], minlength=experts)
    return Routed(jnp.asarray(order, jnp.int32), jnp.asarray(sizes, jnp.int32))


def make_step(case: Case, seed: int = 0, step: Step | None = None) -> Step:
    """Make a step; the tokens that no own expert has, and matrices that no token has, are NaN.

    Or make one of the first tokens of `step`.
    """
    if step is not None:
        count = len(case.chosen)
        routed = route(case.chosen, case.experts)
        return Step(step.x[:count], step.weights, routed, step.gains[:count])
    rng = np.random.default_rng(seed)
    chosen = np.asarray(case.chosen)
    x = rng.standard_normal((chosen.shape[0], case.hidden))
    x[(chosen == OTHERS).all(axis=1)] = np.nan
    shape = case.experts, case.width, case.hidden
    matrices = [rng.standard_normal(shape) / case.hidden**0.5 for _ in range(2)]
    matrices.append(rng.standard_normal((case.experts, case.hidden, case.width)) / case.width**0.5)
    if case.is_packed:
        weights = pack_all(case, [m.shape for m in matrices], rng)
    for matrix in matrices:
        matrix[~np.isin(np.arange(case.experts), chosen)] = np.nan
    scales = [None] * 3
    if case.weight_dtype == FP8:
        shapes = [m.shape[:2] for m in matrices]
        if case.has_squares:
            shapes = [(m.shape[0], *(-(-n // BLOCK) for n in m.shape[1:])) for m in matrices]
        scales = [jnp.asarray(rng.uniform(0.5, 2, shape), jnp.float32) for shape in shapes]
    biases = [None] * 3
    if case.has_bias:
        biases = [jnp.asarray(rng.standard_normal(m.shape[:2]), case.dtype) for m in matrices]
    if case.is_packed:
        weights = ExpertWeights(*weights[:6], *biases, *weights[9:])
    else:
        codes = (jnp.asarray(m, case.weight_dtype) for m in matrices)
        weights = ExpertWeights(*codes, *scales, *biases)
    gains = jnp.asarray(rng.uniform(0.1, 1, chosen.shape), jnp.float32)
    return Step(jnp.asarray(x, case.dtype), weights, route(chosen, case.experts), gains)


def pack_all(case: Case, shapes: list[Any], rng: np.random.Generator) -> ExpertWeights:
    """Draw codes of four bits, with scales that keep the size of what they multiply.

    Scales of experts that no token has are as large as there are.
    """
    codes, scales, zeros = [], [], []
    unused = ~np.isin(np.arange(case.experts), np.asarray(case.chosen))
    for experts, channels, inputs in shapes:
        codes.append(jnp.asarray(rng.integers(0, 256, (experts, channels, inputs // 2)), jnp.uint8))
        shape = experts, inputs // case.group, channels
        if case.weight_dtype == E2M1:
            scale = rng.integers(122, 126, shape)
            scale[unused] = 190
            scales.append(jnp.asarray(scale, jnp.uint8))
            zeros.append(None)
        else:
            scale = rng.uniform(0.02, 0.06, shape) * 8 / inputs**0.5
            scale[unused] = 1e3
            scales.append(jnp.asarray(scale, case.scale_dtype))
            zero = jnp.asarray(rng.integers(0, 17, shape), jnp.uint8)
            zeros.append(zero if case.has_zeros else None)
    return ExpertWeights(*codes, *scales, None, None, None, *zeros)


def unpacked(codes: Any, scale: Any, zero: Any) -> np.ndarray:
    """Return the numbers [out, in] of an expert's codes, rounded as devices round them."""
    codes, scale = np.asarray(codes), np.asarray(scale)
    nibbles = np.stack([codes % 16, codes // 16], -1).reshape(codes.shape[0], -1).astype(int)

    def spread(numbers: np.ndarray) -> np.ndarray:
        return np.repeat(numbers, nibbles.shape[1] // numbers.shape[0], axis=0).T

    if scale.dtype == np.uint8:
        return E2M1_VALUES[nibbles] * 2.0 ** (spread(scale).astype(np.float64) - 127)
    moved = nibbles - (8 if zero is None else spread(np.asarray(zero)).astype(int))
    narrow = jnp.asarray(scale).astype(jnp.bfloat16)
    return wide(jnp.asarray(moved * spread(wide(narrow))).astype(jnp.bfloat16))


# One pair, three parts of each contraction.
CANCELS = Case([[0]], experts=1, hidden=192, width=192, parts=(3, 3))


def cancelling(product: str) -> Step:
    """Make a step of `CANCELS` whose parts of a product are 2^24, 1 and -2^24.

    In their order they are 0 in float32, and so is what comes out; in reverse they are 1.
    """
    large, firsts = 2.0**12, [0, 64, 128]  # the first number of each part
    parts = np.array([large, 1, -large])
    x, ones = np.zeros((1, 192)), np.ones((1, 192, 192))
    gate, up, down = np.zeros((3, 1, 192, 192))
    if product == "gate":
        x[0, firsts], gate[0][:, firsts], up[0, :, 64], down = abs(parts), parts, 1, ones
    else:  # silu(16) is 16
        x[0, 0], gate[0, :, 0], up[0, firsts, 0] = 1, 16, abs(parts) / 16
        down[0][:, firsts] = parts
    arrays = [jnp.asarray(array, jnp.bfloat16) for array in (x, gate, up, down)]
    weights = ExpertWeights(*arrays[1:])
    return Step(arrays[0], weights, route([[0]], 1), jnp.ones((1, 1), jnp.float32))


def run(case: Case, step: Step, module: ModuleType = grouped) -> np.ndarray:
    """Run the kernels."""
    config = grouped.GroupedConfig(case.rows, num_blocks=2, stages=case.stages, parts=case.parts)
    return interpreted(
        lambda *arrays: module.grouped_mlp(*arrays, config, INTERPRETER, case.gate), *step
    )


def wide(x: Any) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


def as_codes(x: np.ndarray) -> np.ndarray:
    """Return a row rounded to codes by blocks: in float32, where there are ties."""
    blocks = np.split(x.astype(np.float32), range(BLOCK, x.size, BLOCK))
    scales = [np.maximum(abs(one).max(), np.float32(1e-20)) * np.float32(1 / 448) for one in blocks]
    pairs = zip(blocks, scales, strict=True)
    return np.concatenate([(one / s).astype(FP8).astype(np.float64) * float(s) for one, s in pairs])


def rounded(x: np.ndarray, case: Case) -> np.ndarray:
    """Return a row as it lies between the products."""
    if case.weight_dtype == FP8:
        return as_codes(x)
    return np.asarray(x.astype(case.dtype), np.float64)


def spread(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the scales of a matrix's numbers, of channels or of square blocks."""
    if scale.ndim == 1:
        return scale[:, None]
    return scale.repeat(BLOCK, 0)[: shape[0]].repeat(BLOCK, 1)[:, : shape[1]]


def define(case: Case, step: Step, token: int, j: int) -> tuple[np.ndarray, np.ndarray]:
    """Return what a pair must come to, and how far off it may be, in float64.

    Sums may be off by 2^-14 of what is added up; what is rounded after them goes either way where
    the sums do not tell which, and the result is rounded once more.
    """
    expert = np.asarray(case.chosen)[token, j]
    if case.is_packed:
        own = (step.weights[:3], step.weights[3:6], step.weights[9:12])
        gate, up, down = (
            unpacked(codes[expert], scale[expert], None if zero is None else zero[expert])
            for codes, scale, zero in zip(*own, strict=True)
        )
    else:
        gate, up, down = (wide(matrix[expert]) for matrix in step.weights[:3])
    if case.weight_dtype == FP8:
        scales = [wide(scale[expert]) for scale in step.weights[3:6] if scale is not None]
        pairs = zip((gate, up, down), scales, strict=True)
        gate, up, down = (m * spread(s, m.shape) for m, s in pairs)
    x, gain = rounded(wide(step.x[token]), case), float(step.gains[token, j])
    biases = [0 if bias is None else wide(bias[expert]) for bias in step.weights[6:9]]
    g, u = gate @ x + biases[0], up @ x + biases[1]
    of_sum = 2.0**-14
    g_error, u_error = (of_sum * (abs(matrix) @ abs(x)) for matrix in (gate, up))
    if limit := case.gate.limit:  # which makes no error larger
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit) + 1
    h = g / (1 + np.exp(-case.gate.slope * g)) * u
    h_error = 1.1 * g_error * (abs(u) + u_error) + abs(g) * u_error  # |silu'| < 1.1, |silu g| < |g|
    inner = rounded(h, case)
    either = [abs(rounded(h + sign * h_error, case) - inner) for sign in (1, -1)]
    error = abs(down) @ np.maximum(*either) + of_sum * (abs(down) @ abs(inner))
    out = down @ inner + biases[2]
    of_out = float(jnp.finfo(case.dtype).eps) / 2
    return gain * out, gain * (error + of_out * (abs(out) + error)) + 1e-9


def worst(case: Case, step: Step, out: np.ndarray) -> float:
    """Return the largest error in units of what is allowed; infinity where one is not finite."""
    chosen, most = np.asarray(case.chosen), 0.0
    for token, j in np.argwhere(chosen != OTHERS):
        expected, allowed = define(case, step, token, j)
        if not np.isfinite(out[token, j]).all():
            return np.inf
        most = max(most, float((abs(out[token, j] - expected) / allowed).max()))
    return most
