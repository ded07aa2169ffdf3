"""What the kernel from the product to attention must get right first; see `attention_cases`.

Held against the model's own operations and XLA's scatter on the same device. Parts of a sum are
large beside it, so that one lost part shows; every eighth token is padding.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.head_terms import Given, Projected
from shiftjax.device.expert_cases import wrong_rows
from shiftjax.device.mesh import on_each
from shiftjax.models.attention import AttentionMetadata, LayerPool, LayerTerms, write_kv
from shiftjax.models.attention_backend import AttentionBackend
from shiftjax.models.entry_backend import EntryShape
from shiftjax.models.layers import Rope, apply_rope, rms_norm
from shiftjax.parallel.grid import Device

FEW, MANY = 20, 200  # tokens; both fill no tile of 16
BLOCK_SIZE = 16
SPLITS = 3
UNTOUCHED = 0.5  # in slots that no token is written to
MOST_ERROR = 1e-2  # of a head, relative to its norm
MOST_OF_CODES = 5e-2  # codes keep 4 bits: 2^-5 of a number
Outputs = tuple[jax.Array, LayerPool]  # queries [tokens, heads, head_dim], and the pool


class EntryStep(NamedTuple):
    """Tokens, and what a product has left of them."""

    tokens: int
    kind: str  # "numbers", "joined numbers", "parts" or "turned parts"
    has_bias: bool = False

    @property
    def name(self) -> str:
        """For people."""
        return f"heads of {self.tokens} tokens from {self.kind}"


class Arrays(NamedTuple):
    """What a step is given."""

    parts: Projected
    given: Given
    pool: LayerPool
    slots: Any
    scales: Any  # [2, kv_heads]; None: the pool has numbers


def entry_steps() -> Iterator[EntryStep]:
    """Yield steps that reach all of the kernel."""
    yield EntryStep(FEW, "numbers", has_bias=True)
    yield EntryStep(FEW, "parts")
    yield EntryStep(FEW, "turned parts")
    yield EntryStep(MANY, "joined numbers")


def draw(shape: EntryShape, step: EntryStep) -> Arrays:
    """Return a step, made where it is used."""
    keys = iter(jax.random.split(jax.random.key(0), 12))
    sizes = [n * shape.head_dim for n in (shape.heads, shape.kv_heads, shape.kv_heads)]

    def normal(*size: int) -> jax.Array:
        return jax.random.normal(next(keys), size)

    tokens, dtype = step.tokens, jnp.dtype(shape.dtype)
    if "parts" in step.kind:
        values = (4 * normal(SPLITS, tokens, sum(sizes)),)
        values = (values[0].swapaxes(1, 2),) if "turned" in step.kind else values
    else:
        sizes = [sum(sizes)] if "joined" in step.kind else sizes
        values = tuple(normal(tokens, size).astype(dtype) for size in sizes)
    blocks = 2 + -(-tokens // BLOCK_SIZE)
    size = 2, blocks, shape.kv_heads, BLOCK_SIZE, shape.head_dim
    pool = jnp.full(size, UNTOUCHED).astype(shape.kv_dtype)
    slots = jax.random.permutation(next(keys), (blocks - 1) * BLOCK_SIZE)[:tokens] + BLOCK_SIZE
    slots = jnp.where(jnp.arange(tokens) % 8 == 7, 3, slots).astype(jnp.int32)
    scales = jnp.exp2(jax.random.uniform(next(keys), (2, shape.kv_heads), minval=-2, maxval=2))
    return Arrays(
        Projected(values, "turned" in step.kind),
        _given(shape, step, normal),
        (pool[0], pool[1]),
        slots,
        scales if has_codes(shape) else None,
    )


def _given(shape: EntryShape, step: EntryStep, normal: Callable[..., jax.Array]) -> Given:
    dtype, heads = jnp.dtype(shape.dtype), (shape.heads, shape.kv_heads, shape.kv_heads)
    rope = biases = norms = None
    if shape.half:
        angles = 3 * normal(step.tokens, shape.half)
        rope = jnp.cos(angles), jnp.sin(angles)
    if step.has_bias:
        biases = tuple(normal(n * shape.head_dim).astype(dtype) for n in heads)
    if shape.norm is not None:
        own = (1 + normal(2, shape.head_dim) / 4).astype(dtype)
        norms = own[0], own[1]
    return Given(rope, biases, norms)


def has_codes(shape: EntryShape) -> bool:
    """Whether keys and values are codes."""
    return jnp.dtype(shape.kv_dtype).itemsize == 1


class _Work(NamedTuple):
    """As far as the kernel asks: whether all tokens are rows."""

    prefill: Any


def kernel(shape: EntryShape, step: EntryStep, backend: AttentionBackend) -> Outputs:
    """Return what the kernel gives; ValueError where it has no such heads."""
    run = backend.enter(shape) if backend.enter else None
    if run is None:
        raise ValueError(f"there is no kernel for {shape}")
    parts, given, pool, slots, scales = draw(shape, step)
    work = (_Work(None if step.tokens == FEW else True),)
    nothing: Any = jnp.zeros(1, jnp.int32)
    metadata = AttentionMetadata(slots, nothing, nothing, nothing, nothing, work)
    q, pool = run(parts, given, pool, metadata, LayerTerms(kv_scales=scales))
    group = shape.heads // shape.kv_heads
    return q.values[:, :, :group].reshape(q.shape), pool


def operations(shape: EntryShape, step: EntryStep) -> Outputs:
    """Return what the model's own operations give."""
    parts, given, pool, slots, scales = draw(shape, step)
    q, k, v = made_heads(shape, parts, given)
    return q, write_kv(pool, k, v, slots, scales)


def made_heads(shape: EntryShape, projected: Projected, given: Given) -> tuple[jax.Array, ...]:
    """Return q, k and v as they go to attention and into the pool, by the model's operations."""
    values = projected.values
    if projected.is_split:
        whole = values[0].sum(axis=0).astype(jnp.dtype(shape.dtype))
        values = (whole.T if projected.turned else whole,)
    joined = jnp.concatenate(values, axis=1)
    joined = joined.reshape(joined.shape[0], -1, shape.head_dim)
    if given.biases is not None:
        joined = joined + jnp.concatenate(given.biases).reshape(1, -1, shape.head_dim)
    q, k, v = jnp.split(joined, [shape.heads, shape.heads + shape.kv_heads], axis=1)
    if shape.norm is not None and given.norms is not None:
        q, k = (_normed(shape, *each) for each in zip((q, k), given.norms, strict=True))
    if given.rope is not None:
        q, k = (apply_rope(each, Rope(*given.rope)) for each in (q, k))
    return q, k, v


def _normed(shape: EntryShape, x: jax.Array, weight: jax.Array) -> jax.Array:
    assert shape.norm is not None
    eps, offset, in_float32 = shape.norm
    weight = 1.0 + weight.astype(jnp.float32) if offset else weight
    return rms_norm(x, weight, eps, in_float32=in_float32)


def outputs_of(
    run: Callable[[EntryShape, EntryStep], Outputs],
    shape: EntryShape,
    step: EntryStep,
    devices: Sequence[Device],
) -> Callable[[], np.ndarray]:
    """Compile a step, the same on every device; what comes back runs it.

    It returns [devices, rows, head_dim] float32: queries, then slots of K, then of V.
    """

    def run_all() -> jax.Array:
        q, pool = run(shape, step)
        heads = (q, *(blocks[1:] for blocks in pool))  # padding may go to the null block
        return jnp.concatenate([x.astype(jnp.float32).reshape(-1, shape.head_dim) for x in heads])

    return on_each(run_all, devices)


def wrong_with_heads(
    outputs: Sequence[np.ndarray], expected: np.ndarray, shape: EntryShape, step: EntryStep
) -> str | None:
    """Say what is wrong with the outputs of one device, a run each; `expected` are XLA's."""
    count, most = step.tokens * shape.heads, MOST_OF_CODES if has_codes(shape) else MOST_ERROR
    wrong = partial(wrong_rows, [out[:count] for out in outputs], expected[:count])
    cached = partial(wrong_rows, [out[count:] for out in outputs], expected[count:])
    return wrong(MOST_ERROR, "a query") or cached(most, "a key or a value")
