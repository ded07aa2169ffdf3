"""The kernel from the product with q, k and v to attention, in the Mosaic interpreter."""

from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import FP8, INTERPRETER, watched_races
from mutations import load

from pallas_kernels import rope_write
from pallas_kernels.head_terms import Given, Projected
from pallas_kernels.rope_write import HeadNorm, Heads, Target

BLOCK_SIZE, NUM_BLOCKS = 16, 6
PADDED = 2  # tokens, the last
ROUNDINGS = 6 * 2**-9  # of the product, its norm twice, its bias or weight, the rotation


class Case(NamedTuple):
    """A step; slots are random, and the last tokens are padding."""

    tokens: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    q_rows: int = 2
    half: int = 32
    kind: str = "numbers"  # or "joined", "parts", "turned"
    kv_dtype: Any = jnp.bfloat16
    q_dtype: Any = jnp.bfloat16
    norm: HeadNorm | None = None
    bias: bool = False
    first: int = 0  # block of the pool


class Step(NamedTuple):
    """The arrays of a case."""

    projected: Projected
    given: Given
    target: Target


CASES = {
    "numbers": Case(),
    "joined, biases, nothing rotates": Case(kind="joined", half=0, bias=True, tokens=5),
    "turned parts, codes, zeros behind": Case(
        kind="turned", kv_dtype=FP8, q_dtype=jnp.float16, q_rows=8, head_dim=128, half=64, first=1
    ),
    "parts, norms, a part of a head": Case(kind="parts", norm=HeadNorm(1e-6), head_dim=128),
    "codes, norms with 1 more": Case(
        kv_dtype=FP8, norm=HeadNorm(1e-6, offset=True, in_float32=True)
    ),
}


def make_step(case: Case) -> Step:
    rng = np.random.default_rng(0)
    sizes = [n * case.head_dim for n in (case.heads, case.kv_heads, case.kv_heads)]
    if case.kind in ("parts", "turned"):
        rows = 16 if case.kind == "turned" else case.tokens
        parts = rng.standard_normal((3, rows, sum(sizes))).astype(np.float32)
        values = (jnp.asarray(parts.swapaxes(1, 2) if case.kind == "turned" else parts),)
    else:
        sizes = [sum(sizes)] if case.kind == "joined" else sizes
        values = tuple(
            jnp.asarray(rng.standard_normal((case.tokens, n)), jnp.bfloat16) for n in sizes
        )
    angles = rng.uniform(0, 6, (case.tokens, case.half)).astype(np.float32)
    rope = (jnp.cos(angles), jnp.sin(angles)) if case.half else None

    def weights(size: int) -> jax.Array:
        return jnp.asarray(1 + rng.standard_normal(size) / 4, jnp.bfloat16)

    heads = case.heads, case.kv_heads, case.kv_heads
    biases = tuple(weights(n * case.head_dim) for n in heads) if case.bias else None
    norms = (weights(case.head_dim), weights(case.head_dim)) if case.norm else None
    size = NUM_BLOCKS, case.kv_heads, BLOCK_SIZE, case.head_dim
    pool = tuple(jnp.asarray(rng.standard_normal(size), case.kv_dtype) for _ in "kv")
    slots = rng.permutation(np.arange(BLOCK_SIZE, (NUM_BLOCKS - case.first) * BLOCK_SIZE))
    slots = slots[: case.tokens].astype(np.int32)
    slots[-PADDED:] = 3
    scales = jnp.asarray(rng.uniform(0.5, 2, (2, case.kv_heads)), jnp.float32)
    first = jnp.int32(case.first) if case.first else None
    target = Target(pool, jnp.asarray(slots), scales, first)
    return Step(Projected(values, case.kind == "turned"), Given(rope, biases, norms), target)


def run(case: Case, step: Step, module: ModuleType = rope_write) -> list[np.ndarray]:
    """Return queries `[tokens, kv_heads, q_rows, head_dim]`, K and V, float64."""
    own = case.heads, case.kv_heads, case.head_dim, jnp.dtype(jnp.bfloat16), case.q_dtype
    heads = Heads(*own, case.q_rows, case.norm)

    def enter(values: Any, given: Given, target: Target) -> Any:
        target = target if case.kv_dtype == FP8 else target._replace(scales=(1.0, 1.0))
        projected = step.projected._replace(values=values)
        return module.rope_write(projected, given, target, heads, INTERPRETER)

    with watched_races() as states:
        out = jax.jit(enter)(step.projected.values, step.given, step.target)
        q, pool = jax.block_until_ready(out)
    if any(state.races_found for state in states):
        raise RuntimeError("a data race")
    q = q.reshape(case.tokens, case.kv_heads, case.q_rows, case.head_dim)
    return [float64(each) for each in (q, *pool)]


def float64(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


def expected(case: Case, step: Step) -> list[np.ndarray]:
    """Return q, k and v by definition, `[tokens, heads, head_dim]`."""
    values = [float64(each) for each in step.projected.values]
    if len(values[0].shape) == 3:
        whole = values[0].sum(axis=0)
        values = [(whole.T if case.kind == "turned" else whole)[: case.tokens]]
    joined = np.concatenate(values, axis=1).reshape(case.tokens, -1, case.head_dim)
    if case.bias:
        biases = np.concatenate([float64(each) for each in step.given.biases])
        joined = joined + biases.reshape(1, -1, case.head_dim)
    q, k, v = np.split(joined, [case.heads, case.heads + case.kv_heads], axis=1)
    if case.norm is not None:
        q, k = (normed(case, x, w) for x, w in zip((q, k), step.given.norms, strict=True))
    return [rotated(case, q, step), rotated(case, k, step), v]


def normed(case: Case, x: np.ndarray, weight: jax.Array) -> np.ndarray:
    size = np.sqrt((x**2).mean(axis=-1, keepdims=True) + case.norm.eps)
    return x / size * (float64(weight) + case.norm.offset)


def rotated(case: Case, x: np.ndarray, step: Step) -> np.ndarray:
    if not case.half:
        return x
    a, b, rest = np.split(x, [case.half, 2 * case.half], axis=-1)
    cos, sin = (float64(table)[:, None] for table in step.given.rope)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def errors(case: Case, step: Step, out: list[np.ndarray]) -> float:
    """Return the largest error in units of what is allowed; all else must keep its bits."""
    q, *pools = out
    right_q, *right = expected(case, step)
    group = case.heads // case.kv_heads
    if q[:, :, group:].any():
        return np.inf
    worst = off(q[:, :, :group].reshape(right_q.shape), right_q, ROUNDINGS)
    slots = np.asarray(step.target.slots)
    real = slots >= BLOCK_SIZE
    block, offset = np.divmod(slots[real], BLOCK_SIZE)
    for i, (pool, old, new) in enumerate(zip(pools, step.target.pool, right, strict=True)):
        is_coded = case.kv_dtype == FP8
        scale = np.asarray(step.target.scales[i])[None, :, None] if is_coded else 1.0
        there = case.first + block, slice(None), offset
        worst = max(worst, off(pool[there] * scale, new[real], 2**-4 if is_coded else ROUNDINGS))
        pool[there] = float64(old)[there]
        if (pool != float64(old)).any():
            return np.inf
    return worst


def off(got: np.ndarray, right: np.ndarray, step: float) -> float:
    """The largest error; roundings are of numbers as large as the head's, which may cancel."""
    return (np.abs(got - right) / (step * np.abs(right).max(axis=-1, keepdims=True))).max()


@pytest.mark.parametrize("name", CASES)
def test_heads_are_rotated_and_in_their_slots(name):
    case = CASES[name]
    step = make_step(case)
    assert errors(case, step, run(case, step)) <= 1


FAULTS = {
    "the first head for all": ("out.at[work.tokens, head]", "out.at[work.tokens, 0]", "numbers"),
    "queries are those of the head before": ("* group + place", "* group + place - 1", "numbers"),
    "the rotation is turned round": ("a * cos - b * sin", "a * cos + b * sin", "numbers"),
    "values are rotated, too": ("if i == 0:", "if True:", "numbers"),
    "a part is lost": (
        "range(parts.shape[0])", "range(parts.shape[0] - 1)", "parts, norms, a part of a head"
    ),
    "a part is lost as it is turned": (
        "range(parts.shape[0])", "range(parts.shape[0] - 1)", "turned parts, codes, zeros behind"
    ),
    "values are those of keys": (
        "heads.q, heads.q + heads.kv)", "heads.q, heads.q)", "joined, biases, nothing rotates"
    ),
    "v has the scale of k": ("head)[i]", "head)[0]", "codes, norms with 1 more"),
    "the scale is that of the first head": (
        "arrays.scales, head)", "arrays.scales, 0)", "codes, norms with 1 more"
    ),
    "the weight of k is that of q": (
        "norms[which], pl.ds", "norms[0], pl.ds", "codes, norms with 1 more"
    ),
    "a head's bias is the first's": (
        "pl.ds(head * heads.head_dim + first", "pl.ds(first", "joined, biases, nothing rotates"
    ),
    "the wrong slot": ("lax.rem(slot, block_size)", "lax.rem(slot + 1, block_size)", "numbers"),
    "the pool's first block for all layers": (
        "blocks.at[origin + block", "blocks.at[block", "turned parts, codes, zeros behind"
    ),
    "padding is written": ("@pl.when(block > 0)", "@pl.when(block >= 0)", "numbers"),
    "the last token is left out": (
        "enumerate(slots)", "enumerate(slots[:-3])", "numbers"
    ),
    "what is staged is not made visible": (
        "    plgpu.commit_smem()\n    block_size", "    block_size", "numbers"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault):
    old, new, name = FAULTS[fault]
    module = load(("rope_write",), "rope_write", old, new)
    case = CASES[name]
    step = make_step(case)
    try:
        error = errors(case, step, run(case, step, module))
    except Exception as problem:  # the interpreter's own
        error = problem
    assert isinstance(error, Exception) or error > 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(half=48, head_dim=128), "head_dim 128, of which 96 rotate: not in pieces of 32"),
        (dict(kv_dtype=jnp.float16), "a pool of float16"),
        (dict(q_rows=1), "4 query heads in 2 groups of 1"),
    ],
)
def test_what_it_cannot_do_is_said(changes, message):
    case = Case()._replace(**changes)
    with pytest.raises(ValueError, match=message):
        run(case, make_step(case))
