"""The kernel that writes keys and values into the pool, in the Mosaic interpreter."""

from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import FP8, watched_races
from jax.experimental.pallas import mosaic_gpu as plgpu
from mutations import load

from pallas_kernels import kv_write
from pallas_kernels.mosaic import staged_rows


class Case(NamedTuple):
    """A step of tokens; slots are random, and two of them are padding."""

    tokens: int = 8
    kv_heads: int = 2
    block_size: int = 16
    head_dim: int = 64
    dtype: Any = jnp.bfloat16
    kv_dtype: Any = jnp.bfloat16
    rope: bool = False
    scales: Any = (1.0, 1.0)


class Step(NamedTuple):
    """The arrays of a case."""

    pool: tuple[jax.Array, jax.Array]
    k: jax.Array
    v: jax.Array
    slots: jax.Array
    rope: tuple[jax.Array, jax.Array] | None


NUM_BLOCKS = 6
CASES = {
    "plain": Case(),
    "head_dim 128, float16, 3 heads": Case(
        head_dim=128, dtype=jnp.float16, kv_dtype=jnp.float16, kv_heads=3, block_size=64
    ),
    "tokens that fill no tile": Case(tokens=5, kv_heads=1, rope=True),
    "rope, heads of two blocks": Case(rope=True, head_dim=128, kv_heads=10),
    "fp8": Case(kv_heads=3, kv_dtype=FP8, scales=(0.01, 0.25)),
    "fp8, rope, scales by head": Case(
        kv_dtype=FP8, rope=True, scales=jnp.float32([[0.5, 2], [0.25, 0.5]])
    ),
}


def make_step(case: Case) -> Step:
    rng = np.random.default_rng(0)
    shape = NUM_BLOCKS, case.kv_heads, case.block_size, case.head_dim
    k_pool, v_pool = (jnp.asarray(rng.standard_normal(shape), case.kv_dtype) for _ in "kv")
    size = case.tokens, case.kv_heads, case.head_dim
    k, v = (jnp.asarray(3 * rng.standard_normal(size), case.dtype) for _ in "kv")
    slots = rng.permutation(np.arange(case.block_size, NUM_BLOCKS * case.block_size))
    slots = slots[: case.tokens].astype(np.int32)
    slots[-2:] = [3, 3]  # in the null block, as padding is
    angles = rng.uniform(0, 6, (case.tokens, case.head_dim // 2)).astype(np.float32)
    rope = (jnp.cos(angles), jnp.sin(angles)) if case.rope else None
    return Step((k_pool, v_pool), k, v, jnp.asarray(slots), rope)


def run(case: Case, step: Step, module: ModuleType = kv_write) -> list[np.ndarray]:
    """Return the pool, float64."""

    def write(*arrays: Any, rope: Any) -> Any:
        return module.write_kv(
            *arrays,
            rope=rope,
            scales=case.scales,
            interpret=plgpu.InterpretGPUParams(detect_races=True),
        )

    with watched_races() as states:
        pool = jax.block_until_ready(jax.jit(write)(*step[:4], rope=step.rope))
    if any(state.races_found for state in states):
        raise RuntimeError("a data race")
    return [float64(blocks) for blocks in pool]


def float64(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


def rotated(x: np.ndarray, rope: tuple[jax.Array, jax.Array]) -> np.ndarray:
    cos, sin = (float64(table)[:, None] for table in rope)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def errors(case: Case, step: Step, pool: list[np.ndarray]) -> float:
    """Return the largest error in units of what is allowed; untouched slots must be the same bits.

    Without a rotation nothing is allowed: the one rounding is the conversion's, done here as well.
    """
    worst = 0.0
    scales = [np.broadcast_to(x, case.kv_heads)[:, None] for x in case.scales]
    for new, old, rows, scale in zip(pool, step.pool, step[1:3], scales, strict=True):
        expected, bound = float64(old), np.zeros(old.shape)
        exact = float64(rows)
        is_rotated = case.rope and rows is step.k
        if is_rotated:
            exact = rotated(exact, step.rope)
        finest = exact / scale
        if case.kv_dtype == FP8:
            finest = np.clip(np.float32(exact) / np.float32(scale), -448, 448)
        block, offset = np.divmod(np.asarray(step.slots), case.block_size)
        rounded = float64(jnp.asarray(finest, jnp.float32).astype(case.kv_dtype))
        expected[block, :, offset] = rounded
        if is_rotated:
            steps = [float(jnp.finfo(x).eps) for x in {case.dtype, case.kv_dtype}]
            bound[block, :, offset] = (
                sum(steps) * abs(finest) + 2**-9 * (case.kv_dtype == FP8) + 1e-6
            )
        error = abs(new - expected)[1:]  # but for the null block
        allowed = np.maximum(bound[1:], 1e-300)
        worst = max(worst, (error / allowed).max())
    return worst


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_in_their_slots_and_nothing_else_changed(name):
    case = CASES[name]
    step = make_step(case)
    assert errors(case, step, run(case, step)) <= 1


@pytest.mark.parametrize(("heads", "row_bytes", "room"), [(1, 64, 2), (3, 64, 4), (5, 128, 5)])
def test_every_staged_token_is_aligned(heads, row_bytes, room):
    """TMA reads from multiples of 128 bytes, of which the interpreter knows nothing."""
    assert staged_rows(heads, row_bytes) == room


def test_fp8_saturates():
    case = Case(kv_dtype=FP8, scales=(1e-4, 1.0))
    step = make_step(case)
    k_pool, _ = run(case, step)
    assert np.isfinite(k_pool).all()
    assert abs(k_pool[1:]).max() == 448


FAULTS = {
    "the wrong slot": ("lax.rem(slot, block_size)", "lax.rem(slot + 1, block_size)", "plain"),
    "the wrong block": (
        "lax.div(slot, block_size)",
        "lax.div(slot + block_size, block_size)",
        "plain",
    ),
    "heads change places": ("staged[:, head, :half]", "staged[:, head ^ 1, :half]", "plain"),
    "the rotation is turned round": (
        "a * cos - b * sin",
        "a * cos + b * sin",
        "tokens that fill no tile",
    ),
    "the scale multiplies": (".astype(jnp.float32) / scale", ".astype(jnp.float32) * scale", "fp8"),
    "the scale is 5% off": (
        ".astype(jnp.float32) / scale",
        ".astype(jnp.float32) / scale / 1.05",
        "fp8",
    ),
    "v has the scale of k": ("head)[i]", "head)[0]", "fp8"),
    "the scale is that of the first head": (
        "arrays.scales, first_head + head",
        "arrays.scales, first_head",
        "fp8, rope, scales by head",
    ),
    "what is staged is not made visible": ("    plgpu.commit_smem()\n", "", "plain"),
    "the last token is left out": (
        "range(TOKENS):",
        "range(TOKENS - 2):",
        "tokens that fill no tile",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault):
    old, new, name = FAULTS[fault]
    module = load(("kv_write",), "kv_write", old, new)
    case = CASES[name]
    step = make_step(case)
    try:
        error = errors(case, step, run(case, step, module))
    except Exception as problem:  # the interpreter's own
        error = problem
    assert isinstance(error, Exception) or error > 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(head_dim=96), "head_dim 96 is not a multiple of 64"),
        (dict(scales=(0.5, 1.0)), "scales are for pools of float8_e4m3fn only"),
        (dict(scales=jnp.float32([[1, 1], [1, 1]])), "scales are for pools of float8_e4m3fn only"),
    ],
)
def test_what_it_cannot_write_is_said(change, message):
    case = Case()._replace(**change)
    with pytest.raises(ValueError, match=message):
        run(case, make_step(case))
