"""Products for the tests of `block_product`, and what must come out, by definition."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import INTERPRETER, watched_races

from pallas_kernels import block_product
from pallas_kernels.block_problem import BlockCodes, BlockConfig, BlockMatrix, Groups, Result
from pallas_kernels.block_product import Beside
from pallas_kernels.gates import Gate

FP8 = jnp.float8_e4m3fn
OF_SUM = 2.0**-20  # of what is added up, in float32 with exact products: the interpreter's
CHANNELS = 128  # that have a scale in common


class Case(NamedTuple):
    """A product; small, as the interpreter is slow."""

    tokens: int
    inputs: int
    outs: tuple[int, ...]
    rows: int = 16  # of a tile
    splits: int = 1
    gate: Gate | None = None
    quantised: bool = False
    dtype: Any = jnp.bfloat16
    block: int = 0  # of a row-parallel matrix; 0: column-parallel, blocks of 128
    of_channels: bool = True  # what scales of weights are of; else of blocks
    has_bias: bool = False
    cluster: int = 1  # thread blocks, among which the contraction is cut
    is_plain: bool = False  # numbers of 16 bits
    added: int = 0  # width of matrices of low rank; 0: none
    groups: Groups | None = None  # of channels, of which a row keeps its own

    @property
    def result(self) -> Result:
        """What is asked for."""
        return Result(self.dtype, self.gate, self.quantised, INTERPRETER, self.groups)

    @property
    def config(self) -> BlockConfig:
        """Two thread blocks, or clusters, which take several items, and a ring that goes round."""
        return BlockConfig(self.rows, self.splits, 2, 2, self.cluster)


class Made(NamedTuple):
    """The arrays of a case, and the numbers that they are."""

    x: BlockCodes
    matrices: tuple[BlockMatrix, ...]
    tokens: np.ndarray
    weights: list[np.ndarray]
    biases: list[np.ndarray]
    beside: Beside = Beside()


def make(case: Case, seed: int = 0) -> Made:
    """Draw codes, and scales that differ by some factors from one block to the next."""
    rng = np.random.default_rng(seed)
    made = _make_plain(case, rng) if case.is_plain else _make_codes(case, rng)
    if case.added:
        made = _with_added(case, made, rng)
    if case.groups is not None:
        group = rng.integers(-1, case.groups.num + 1, case.tokens, np.int32)
        made = made._replace(beside=Beside(group=jnp.asarray(group)))
    return made


def _make_codes(case: Case, rng: np.random.Generator) -> Made:
    block = case.block or CHANNELS
    steps = -(-case.inputs // block)

    def scales(*shape: int) -> np.ndarray:
        return np.exp(rng.normal(size=shape)).astype(np.float32)

    def codes(rows: int) -> np.ndarray:
        return np.asarray(rng.normal(size=(rows, case.inputs)) * 4, FP8)

    x, x_scale = codes(case.tokens), scales(case.tokens, steps)
    matrices, weights, biases = [], [], []
    for out in case.outs:
        values, bias = codes(out), rng.normal(size=out).astype(np.float32) * case.has_bias
        if case.of_channels:
            scale = of_numbers = scales(out, 1) / 512
            own = {"scale": jnp.asarray(scale[:, 0])}
        else:
            scale = scales(-(-out // CHANNELS), steps) / 512
            of_numbers = scale.repeat(CHANNELS, 0)[:out].repeat(block, 1)[:, : case.inputs]
            own = {"blocks": jnp.asarray(scale.T if case.block else scale)}
        weights.append(values.astype(np.float64) * of_numbers)
        biases.append(bias.astype(np.float64))
        if case.block:
            values = values.reshape(out, steps, block).swapaxes(0, 1)
        if case.has_bias:
            own["bias"] = jnp.asarray(bias)
        matrices.append(BlockMatrix(jnp.asarray(values), **own))
    numbers = x.astype(np.float64) * x_scale.repeat(block, 1)[:, : case.inputs]
    rows = BlockCodes(jnp.asarray(x), jnp.asarray(x_scale.T))
    return Made(rows, tuple(matrices), numbers, weights, biases)


def _make_plain(case: Case, rng: np.random.Generator) -> Made:
    """Draw numbers of 16 bits."""

    def numbers(rows: int) -> np.ndarray:
        return np.asarray(rng.normal(size=(rows, case.inputs)), case.dtype)

    x, matrices, weights, biases = numbers(case.tokens), [], [], []
    for out in case.outs:
        values, bias = numbers(out), rng.normal(size=out).astype(np.float32) * case.has_bias
        weights.append(values.astype(np.float64))
        biases.append(bias.astype(np.float64))
        own = values.T.reshape(-1, case.block, out) if case.block else values
        matrices.append(
            BlockMatrix(jnp.asarray(own), bias=jnp.asarray(bias) if case.has_bias else None)
        )
    rows = BlockCodes(jnp.asarray(x))
    return Made(rows, tuple(matrices), x.astype(np.float64), weights, biases)


def _with_added(case: Case, made: Made, rng: np.random.Generator) -> Made:
    """Add matrices of low rank, whose inputs are as large as those of the others."""
    size = float(np.sqrt(np.mean(made.tokens**2) * case.inputs / case.added))
    shape = case.tokens, len(case.outs) * case.added
    added = jnp.asarray(rng.normal(size=shape) * size, jnp.bfloat16)
    matrices = []
    for matrix, weight in zip(made.matrices, made.weights, strict=True):
        factor = rng.normal(size=(matrix.outputs, case.added)) * np.std(weight)
        factor = factor.T if case.block else factor
        matrices.append(matrix._replace(factor=jnp.asarray(factor, jnp.bfloat16)))
    return made._replace(matrices=tuple(matrices), beside=Beside(added))


def _added_terms(case: Case, made: Made) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return what is added to each product, and the sums of the sizes of its terms."""
    if made.beside.added is None:
        return [(np.zeros(()), np.zeros(()))] * len(case.outs)
    inner = np.split(np.asarray(made.beside.added, np.float64), len(case.outs), 1)
    factors = [np.asarray(matrix.factor, np.float64) for matrix in made.matrices]
    factors = [f if case.block else f.T for f in factors]
    pairs = zip(inner, factors, strict=True)
    return [(x @ factor, abs(x) @ abs(factor)) for x, factor in pairs]


def define(case: Case, made: Made) -> tuple[np.ndarray, np.ndarray]:
    """Return the product in float64, and how far off it may be before it is rounded."""
    parts = list(zip(made.weights, made.biases, _added_terms(case, made), strict=True))
    each = [made.tokens @ weight.T + bias + more for weight, bias, (more, _) in parts]
    errors = [
        OF_SUM * (abs(made.tokens) @ abs(w).T + abs(bias) + size) for w, bias, (_, size) in parts
    ]
    if case.gate is None:
        whole, error = np.concatenate(each, 1), np.concatenate(errors, 1)
        if case.groups is None:
            return whole, error
        group = np.arange(whole.shape[1]) // case.groups.channels % case.groups.num
        is_own = np.asarray(made.beside.group)[:, None] == group[None]
        return whole * is_own, error * is_own
    (g, u), (g_error, u_error) = each, errors
    slope, limit, cubic = case.gate
    if limit is not None:
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit) + 1
    inner = g / (1 + np.exp(np.minimum(-slope * (g + cubic * g**3), 700)))
    # No activation is steeper than 1.2; the exponent has the error of a float32 product.
    return inner * u, 1.2 * g_error * (abs(u) + u_error) + abs(inner) * (u_error + OF_SUM * abs(u))


def run(case: Case, made: Made, module: ModuleType = block_product) -> Any:
    """Run the kernel; a data race is an error."""
    multiply: Callable[..., Any] = jax.jit(
        lambda x, matrices, beside: module.block_product(
            x, matrices, case.result, case.config, beside
        )
    )
    with watched_races() as states:
        out = jax.tree.map(np.asarray, multiply(made.x, made.matrices, made.beside))
    assert states
    if any(state.races_found for state in states):
        raise RuntimeError("a data race")
    return out


def worst(case: Case, made: Made, out: Any) -> float:
    """Return the largest error in units of what is allowed; infinity where one is not finite."""
    expected, error = define(case, made)
    if case.quantised:
        return _worst_codes(out, expected, error)
    if case.splits > 1:
        assert out.shape[0] == case.splits
        out = out.astype(np.float64).sum(0).T[: case.tokens, : expected.shape[1]]
    out = np.asarray(out, np.float64)
    assert out.shape == expected.shape
    if not np.isfinite(out).all():
        return np.inf
    of_out = 0 if case.splits > 1 else float(jnp.finfo(case.dtype).eps) / 2
    return float((abs(out - expected) / (error + of_out * (abs(expected) + error) + 1e-30)).max())


def _worst_codes(out: Any, expected: np.ndarray, error: np.ndarray) -> float:
    """Codes are the nearest ones, but where the sums do not tell which; scales are of the largest.

    A number that is rounded before it becomes a code gives another one now and then.
    """
    codes, scale = np.asarray(out.values, np.float64), np.asarray(out.scale, np.float64).T
    assert codes.shape == expected.shape
    width = expected.shape[1]
    assert scale.shape == (expected.shape[0], -(-width // CHANNELS))
    firsts = range(0, width, CHANNELS)  # the last block may be half of one
    most = np.maximum.reduceat(abs(expected), firsts, 1) / 448
    allowed = np.maximum.reduceat(error, firsts, 1) / 448 + 2.0**-22 * most
    of_scale = float((abs(scale - most) / allowed).max())
    scale = scale.repeat(CHANNELS, 1)[:, :width]
    scaled = expected / scale
    nearest = np.asarray(np.clip(scaled, -448, 448).astype(FP8), np.float64)
    slack = 2 * (error / scale + 2.0**-22 * abs(scaled))
    far = (abs(codes - scaled) - abs(nearest - scaled)) / slack
    return np.inf if not np.isfinite(far).all() else max(of_scale, float(far.max()))
