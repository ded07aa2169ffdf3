"""The kernel that adds to the stream and norms it, in the Mosaic interpreter."""

from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import INTERPRETER, watched_races
from mutations import fit, load
from spent import mutants

from pallas_kernels import norm_codes
from pallas_kernels.norm_codes import BLOCK, NormKind, pieces_of

EPS = 1e-5
LARGEST = 448.0


class Case(NamedTuple):
    """A norm of three rows; small, as the interpreter is slow."""

    width: int = 576
    kind: NormKind = NormKind(EPS)
    adds: bool = True
    has_bias: bool = False
    dtype: Any = jnp.bfloat16
    rows: int = 3


class Arrays(NamedTuple):
    x: jax.Array
    added: jax.Array | None
    weight: jax.Array
    bias: jax.Array | None


CODES = NormKind(EPS, codes=True)
CASES = {
    "tiles of both sizes, and blocks": Case(1664),
    "tiles of both sizes, and blocks, codes": Case(1664, CODES),
    "half a block": Case(576),
    "half a block, codes": Case(576, CODES),
    "more than registers of one tile, codes": Case(2048, CODES, rows=1),
    "nothing is added": Case(512, CODES, adds=False),
    "an offset, rounded once": Case(512, NormKind(EPS, offset=True, in_float32=True)),
    "a bias, and a part of what is added": Case(
        640, NormKind(EPS, scale=0.22, codes=True), has_bias=True
    ),
    "float16": Case(512, dtype=jnp.float16),
}


def make(case: Case) -> Arrays:
    """Draw rows whose blocks differ in size, one of them zeros."""
    rng = np.random.default_rng(case.width)
    x, added = rng.standard_normal((2, case.rows, case.width))
    of_blocks = np.repeat(2.0 ** rng.integers(-3, 4, -(-case.width // BLOCK)), BLOCK)[: case.width]
    x, added = x * of_blocks, added * of_blocks
    x[0, BLOCK : 2 * BLOCK] = added[0, BLOCK : 2 * BLOCK] = 0
    weight, bias = 1 + 0.2 * rng.standard_normal((2, case.width))
    as_given = [jnp.asarray(each, case.dtype) for each in (x, added, weight, bias)]
    x, added, weight, bias = as_given
    return Arrays(x, added if case.adds else None, weight, bias if case.has_bias else None)


def run(case: Case, arrays: Arrays, module: ModuleType = norm_codes) -> Any:
    """Return what the kernel gives. Raises RuntimeError for a data race."""

    def add_norm(x, added, weight, bias):
        return module.add_norm(x, added, weight, case.kind, bias, INTERPRETER)

    with watched_races() as states:
        out = jax.block_until_ready(jax.jit(add_norm)(*arrays))
    assert states
    if any(state.races_found for state in states):
        raise RuntimeError("a data race")
    return out


def wide(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


def rounded(x: np.ndarray, case: Case) -> np.ndarray:
    return wide(jnp.asarray(x, jnp.float32).astype(case.dtype))


def expected(case: Case, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Return the new stream, exactly, and its norm, by definition."""
    total = wide(arrays.x)
    if arrays.added is not None:
        added = wide(arrays.added)
        if arrays.bias is not None:
            added = rounded(added + wide(arrays.bias), case)
        if case.kind.scale != 1:
            added = rounded(added * np.float32(case.kind.scale), case)
        total = rounded(total + added, case)
    weight = wide(arrays.weight) + case.kind.offset
    return total, total / np.sqrt((total**2).mean(1, keepdims=True) + EPS) * weight


def error(case: Case, arrays: Arrays, out: Any) -> float:
    """Return the largest error in units of what is allowed."""
    total, normed = expected(case, arrays)
    got, result = out
    assert got.shape == total.shape
    if (wide(got) != total).any():
        return np.inf
    step = float(jnp.finfo(case.dtype).eps)
    allowed = (1 if case.kind.in_float32 else 2) * 0.51 * step * abs(normed) + 1e-30
    if not case.kind.codes:
        return (abs(wide(result) - normed) / allowed).max()
    codes, scales = result
    assert codes.shape == total.shape and scales.shape == (-(-case.width // BLOCK), case.rows)
    behind = np.pad(abs(normed), ((0, 0), (0, -case.width % BLOCK)))
    most = behind.reshape(case.rows, -1, BLOCK).max(axis=2).T
    units = np.asarray(scales, np.float64)
    of_scales = abs(units * LARGEST - most) / (2 * step * most + 1e-20)
    each = np.repeat(units.T, BLOCK, axis=1)[:, : case.width]
    far = abs(wide(codes) * each - normed)
    return max(of_scales.max(), (far / (allowed + 2**-4 * abs(normed) + 2**-10 * each)).max())


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_norm_of_the_sum(name):
    case = CASES[name]
    arrays = make(case)
    assert error(case, arrays, run(case, arrays)) <= 1


@pytest.mark.parametrize("width", [64, 128, 576, 896, 2880, 4096, 5120, 5376, 8192, 16384])
def test_pieces_cover_a_row_once(width):
    covered = []
    for piece in pieces_of(width):
        columns = piece.blocks * BLOCK or BLOCK // 2
        covered += range(piece.first * BLOCK, piece.first * BLOCK + columns)
    assert covered == list(range(width))


def test_a_row_does_not_depend_on_the_others():
    """Codes of a row alone, and beside others, are the same bits."""
    case = Case(640, CODES)
    arrays = make(case)
    _, (codes, scales) = run(case, arrays)
    alone = case._replace(rows=1)
    one = arrays._replace(x=arrays.x[1:2], added=arrays.added[1:2])
    _, (own, units) = run(alone, one)
    np.testing.assert_array_equal(wide(own)[0], wide(codes)[1])
    np.testing.assert_array_equal(units[:, 0], scales[:, 1])


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(96), "rows of 96: must be a multiple of 64"),
        (Case(512, dtype=jnp.float32), "rows of float32: must be bfloat16 or float16"),
    ],
)
def test_what_it_cannot_do_is_said(case, message):
    with pytest.raises(ValueError, match=message):
        run(case, make(case))


MIXED, MIXED_CODES = CASES["tiles of both sizes, and blocks"], CASES["half a block, codes"]
TILES = CASES["tiles of both sizes, and blocks, codes"]
FAULTS = {
    "the weight's offset is forgotten": (
        "if kind.offset:",
        "if False:",
        CASES["an offset, rounded once"],
    ),
    "more is added than there is": (
        "return (x.astype(jnp.float32) + added).astype(dtype)",
        "return (x.astype(jnp.float32) + 1.05 * added).astype(dtype)",
        MIXED,
    ),
    "only what is added is normed": (
        "return (x.astype(jnp.float32) + added).astype(dtype)",
        "return added.astype(dtype)",
        MIXED,
    ),
    "what is added is whole": (
        "if kind.scale != 1:",
        "if False:",
        CASES["a bias, and a part of what is added"],
    ),
    "the bias is forgotten": (
        "if arrays.bias is not None:",
        "if False:",
        CASES["a bias, and a part of what is added"],
    ),
    "the mean is of the first pieces alone": (
        "_squares(pieces, rows) *",
        "_squares(pieces[:1], rows[:1]) *",
        MIXED,
    ),
    "the scale is the row's": (
        "jnp.max(jnp.abs(values), axis=-1)",
        "jnp.max(jnp.abs(values), axis=-1) * 0 + 4.0",
        TILES,
    ),
    "a scale is that of the next block": (
        "scales.at[pl.ds(piece.first, piece.blocks), row]",
        "scales.at[pl.ds(piece.first + 1, piece.blocks), row]",
        TILES,
    ),
    "the last block is forgotten": (
        "    if width % BLOCK:\n        yield Piece(blocks, 0)\n",
        "",
        MIXED_CODES,
    ),
    "codes are rounded twice": (
        "(values / units).astype(FP8)",
        "(values / units * 0.9).astype(FP8)",
        MIXED_CODES,
    ),
}


def test_every_fault_fits_its_source():
    fit([("norm_codes", *fault) for fault in FAULTS.values()])


@pytest.mark.parametrize("fault", mutants(*FAULTS))
def test_a_fault_is_found(fault):
    old, new, case = FAULTS[fault]
    arrays = make(case)
    try:
        wrong = error(case, arrays, run(case, arrays, load(["norm_codes"], "norm_codes", old, new)))
    except Exception as problem:  # the interpreter's own
        wrong = problem
    assert isinstance(wrong, Exception) or not wrong <= 1
