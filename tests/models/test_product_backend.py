"""Products of codes: which kernels are chosen, and that they give what XLA does."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from spent import thorough

from shiftjax.arch.config import Activation
from shiftjax.arch.formats import Formats, formats_of
from shiftjax.arch.presets import PRESETS
from shiftjax.models.packed_backend import XLA_PACKED
from shiftjax.models.product_backend import (
    XLA_CODES,
    CodeMatrix,
    Products,
    choose_codes,
    choose_products,
    code_shape,
    pallas_codes,
)
from shiftjax.models.products import (
    Codes,
    Matrix,
    numbers,
    project_gated,
    project_in,
    project_joined,
    project_out,
)
from shiftjax.parallel.layout import Layout

FP8 = formats_of("fp8")
LLAMA = replace(PRESETS["llama-70b"], num_layers=2)
DEVICE: Any = SimpleNamespace(device_kind="a GPU", core_count=2)


@pytest.fixture
def kernels() -> Products:
    """Kernels that run in the interpreter."""
    return Products(XLA_PACKED, pallas_codes(DEVICE, interpret=plgpu.InterpretGPUParams()))


def draw(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def matrix(seed: int, out: int, inputs: int, *, is_row: bool = False, squares: bool = False):
    """A matrix of codes, of 128 inputs a block."""
    values = draw(seed, out, inputs).astype(jnp.float8_e4m3fn)
    if is_row:
        values = jnp.swapaxes(values.reshape(out, -1, 128), 0, 1)
    if not squares:
        return Matrix(values, abs(draw(seed + 1, out)) / 64)
    blocks = out // 128, -(-inputs // 128)
    return Matrix(values, abs(draw(seed + 1, *(blocks[::-1] if is_row else blocks))) / 64)


def near(found: jax.Array, expected: jax.Array, of_norm: float) -> bool:
    got, right = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert got.shape == right.shape
    return bool(np.linalg.norm(got - right) < of_norm * np.linalg.norm(right))


@pytest.mark.parametrize("squares", [False, *thorough(True)])
def test_kernels_multiply_what_xla_does(kernels, squares):
    x, own = draw(0, 8, 256), partial(matrix, squares=squares)
    column, row = own(1, 128, 256), own(5, 128, 256, is_row=True)
    for project, weights in ((project_out, column), (project_in, row)):
        found = project(x, weights, kernels)
        assert found.dtype == x.dtype
        assert near(found, project(x, weights), 1e-6)


@pytest.mark.thorough
def test_joined_matrices_are_as_each_alone(kernels):
    x, matrices = draw(0, 8, 192), (matrix(1, 256, 192), matrix(3, 64, 192))
    alone = [project_out(x, each) for each in matrices]
    together = project_joined(x, matrices, kernels)
    assert all(near(*pair, 1e-6) for pair in zip(together, alone, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_what_is_activated_comes_as_codes(kernels, activation: Activation):
    x, gate_and_up = draw(0, 8, 256), (matrix(1, 128, 256), matrix(3, 128, 256))
    down = matrix(5, 64, 128, is_row=True)
    expected = project_gated(x, gate_and_up, down, activation)
    found = project_gated(x, gate_and_up, down, activation, kernels)
    assert isinstance(found, Codes) and not isinstance(expected, Codes)
    assert near(numbers(found, 128, jnp.float32), expected, 3e-2)
    fixed = down._replace(inputs=jnp.ones(1))  # a scale of the checkpoint's own
    plain = project_gated(x, gate_and_up, fixed, activation, kernels)
    assert not isinstance(plain, Codes) and near(plain, expected, 1e-5)


@pytest.mark.thorough
def test_what_the_kernels_have_not_is_xlas(kernels):
    x = draw(0, 8, 256)
    odd = matrix(1, 96, 256), matrix(3, 96, 256)
    down = Matrix(draw(5, 3, 64, 32).astype(jnp.float8_e4m3fn), jnp.ones(64))
    pairs = (
        (project_out(x, odd[0], kernels), project_out(x, odd[0])),
        (project_gated(x, odd, down, "silu", kernels), project_gated(x, odd, down, "silu")),
    )
    for found, expected in pairs:
        np.testing.assert_array_equal(found, expected)


def test_kernels_see_the_matrices_of_every_mode():
    shape = code_shape(Layout(LLAMA, 8, 1), FP8)
    assert shape is not None and shape.dtype == "bfloat16"
    base = [(8192, 8192, 128), (8192, 28672, 128), (28672, 8192, 0), (1024, 8192, 0)]
    shift = [(8192, 1024, 128), (8192, 3584, 128), (3584, 8192, 0), (128, 8192, 0)]
    assert {CodeMatrix(*each, 0) for each in base + shift} <= set(shape.matrices)
    assert code_shape(Layout(LLAMA, 8, 1), Formats()) is None


def test_kernels_run_where_attention_does(caplog):
    layout = Layout(LLAMA, 8, 1)
    chosen = choose_codes(layout, FP8, DEVICE, "pallas")
    assert (chosen.name, chosen.reason) == ("pallas", "") and not caplog.records
    assert choose_codes(layout, FP8, DEVICE, "xla").reason == "attention runs as xla"
    assert choose_codes(layout, Formats(), DEVICE, "pallas").reason == "no matrix has codes"
    assert choose_products(layout, FP8, DEVICE, "pallas").packed.name == "xla"


def test_what_is_left_to_xla_is_said(caplog):
    chosen = choose_codes(Layout(PRESETS["tiny"], 1, 1), FP8, DEVICE, "pallas")
    assert chosen.reason == "block_product: 32 outputs must be a multiple of 64"
    (record,) = caplog.records
    assert "are widened and multiplied by XLA" in record.getMessage()
    x, own = (draw(0, 1, 1), draw(0, 1, 1)), (draw(1, 1, 1), draw(1, 1))
    assert XLA_CODES.multiply(x, (own,), jnp.bfloat16) is None
