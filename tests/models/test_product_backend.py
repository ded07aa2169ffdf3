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
from shiftjax.models.operands import Groups, LowRank, Operand, kept
from shiftjax.models.packed_backend import XLA_PACKED
from shiftjax.models.product_backend import (
    XLA_CODES,
    CodeMatrix,
    Products,
    choose_codes,
    choose_plain,
    choose_products,
    code_shape,
    pallas_codes,
    plain_shape,
)
from shiftjax.models.products import (
    Codes,
    Matrix,
    numbers,
    project_gated,
    project_in,
    project_joined,
    project_out,
    project_parts,
)
from shiftjax.parallel.layout import Layout

FP8 = formats_of("fp8")
LLAMA = replace(PRESETS["llama-70b"], num_layers=2)
DEVICE: Any = SimpleNamespace(device_kind="a GPU", core_count=2)


@pytest.fixture
def kernels() -> Products:
    """Kernels that run in the interpreter."""
    own = pallas_codes(DEVICE, interpret=plgpu.InterpretGPUParams())
    return Products(XLA_PACKED, own, own)


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


def numbers_of(seed: int, *shape: int) -> Matrix:
    """A matrix of bfloat16 numbers, so large that sums of products are of 1."""
    return Matrix((draw(seed, *shape) / 16).astype(jnp.bfloat16))


ROUNDED = 2.0**-8  # bfloat16 numbers, each rounded once


def with_added(matrices: tuple[Matrix, ...], tokens: int) -> tuple[Matrix, ...]:
    """To each column-parallel matrix a factor 24 wide adds about as much as it gives."""
    inner = draw(20, tokens, 24 * len(matrices)).astype(jnp.bfloat16)
    outs = (own.values.shape[0] for own in matrices)
    factors = (draw(21 + n, out, 24).astype(jnp.bfloat16) for n, out in enumerate(outs))
    added = (LowRank(inner, 24 * n, factor) for n, factor in enumerate(factors))
    return tuple(own._replace(added=one) for own, one in zip(matrices, added, strict=True))


KINDS = {
    "numbers": numbers_of,
    "codes": matrix,
}


@pytest.mark.parametrize("kind", ["numbers", *thorough("codes")])
@pytest.mark.parametrize("tokens", [8, *thorough(80)])  # of few rows in the launch, else beside it
def test_what_is_added_goes_along_with_a_product(kernels, kind, tokens):
    x = draw(0, tokens, 256).astype(jnp.bfloat16)
    gate_and_up = with_added((KINDS[kind](1, 128, 256), KINDS[kind](3, 128, 256)), tokens)
    found = project_joined(x, gate_and_up, kernels)
    alone = [project_out(x, each) for each in gate_and_up]
    bare = [project_out(x, each._replace(added=None)) for each in gate_and_up]
    for got, own, without in zip(found, alone, bare, strict=True):
        assert near(got, own, 2 * ROUNDED) and not near(got, without, 0.3)
    parts = project_parts(x, gate_and_up, kernels)
    values = jnp.concatenate(parts.values, axis=parts.turned - 1)
    values = values.sum(axis=0) if parts.is_split else values
    values = values.T if parts.turned else values
    assert near(values[:tokens], jnp.concatenate(alone, axis=1), 2 * ROUNDED)
    down = matrix(5, 64, 128, is_row=True)._replace(inputs=jnp.ones(1))  # which wants numbers
    gated = project_gated(x, gate_and_up, down, "silu", kernels)
    assert not isinstance(gated, Codes)
    assert near(gated, project_gated(x, gate_and_up, down, "silu"), 4 * ROUNDED)


@pytest.mark.parametrize("kind", ["numbers", *thorough("codes")])
def test_what_is_added_goes_along_with_a_row_parallel_product(kernels, kind):
    x = draw(0, 8, 256).astype(jnp.bfloat16)
    own = numbers_of(1, 256, 128) if kind == "numbers" else matrix(1, 128, 256, is_row=True)
    factor = draw(3, 24, 128).astype(jnp.bfloat16)
    added = LowRank(draw(2, 8, 24).astype(jnp.bfloat16), 0, factor, turned=True)
    found, expected = (project_in(x, own._replace(added=added), *each) for each in ((kernels,), ()))
    assert near(found, expected, 2 * ROUNDED) and not near(found, project_in(x, own), 0.3)


def test_kernels_keep_what_is_of_a_tokens_own_group(kernels):
    x, own = draw(0, 8, 256).astype(jnp.bfloat16), numbers_of(1, 48, 256)
    groups = Groups(3, 8, jnp.asarray([0, 1, 2, 3, 0, 2, 3, 1]))
    found = kernels.grouped(x, own.operand, groups)
    assert found is not None and near(found, kept(project_out(x, own), groups), ROUNDED)
    none = np.asarray(found)[[3, 6]]
    assert not none.any() and np.count_nonzero(np.asarray(found)[0]) == 16
    assert Products().grouped(x, own.operand, groups) is None
    of_codes = Products(codes=kernels.codes).grouped(x, own.operand, groups)
    np.testing.assert_array_equal(of_codes, found)


@pytest.mark.parametrize("kind", ["gated", *thorough("row", "column", "joined")])
def test_kernels_multiply_numbers_of_few_rows(kernels, kind):
    x, gate, up = draw(0, 8, 256).astype(jnp.bfloat16), numbers_of(1, 128, 256), None
    if kind == "gated":
        up, down = numbers_of(3, 128, 256), numbers_of(5, 128, 64)
        found, expected = (
            project_gated(x, (gate, up), down, "silu", *own) for own in ((kernels,), ())
        )
    elif kind == "joined":
        matrices = gate, numbers_of(3, 64, 256)
        found, expected = (
            jnp.concatenate(project_joined(x, matrices, *own), 1) for own in ((kernels,), ())
        )
    else:
        project, own = (
            (project_in, numbers_of(5, 256, 64)) if kind == "row" else (project_out, gate)
        )
        found, expected = project(x, own, kernels), project(x, own)
    rounded = ROUNDED * (2 if kind == "gated" else 1)  # XLA rounds gate and up, too
    assert not isinstance(found, Codes) and not isinstance(expected, Codes)
    assert found.dtype == x.dtype and near(found, expected, rounded)


class Asked:
    """Kernels that have nothing, and keep what they were asked for."""

    def __init__(self):
        self.widths: list[list[int]] = []
        self.backend = XLA_CODES._replace(multiply=self.multiply, gated=self.multiply)

    def multiply(self, x, matrices, *_) -> None:
        self.widths.append([values.shape[-2] for values, *_ in matrices])


def test_numbers_that_kernels_cannot_join_are_xlas_to_join():
    asked, x = Asked(), draw(0, 3, 128).astype(jnp.bfloat16)
    own = Products(plain=asked.backend)
    matrices = numbers_of(1, 64, 128), numbers_of(2, 64, 128)
    outs = project_joined(x, matrices, own)
    assert [out.shape for out in outs] == [(3, 64), (3, 64)]
    assert asked.widths == [[64, 64]]  # and neither by itself
    codes = Codes(jnp.ones((3, 128), jnp.float8_e4m3fn), jnp.ones((1, 3)))
    project_out(codes, matrices[0], own)
    assert len(asked.widths) == 1  # codes are no numbers
    project_in(x[:, :96], numbers_of(3, 96, 64), own)
    assert len(asked.widths) == 1  # 96 inputs are no blocks


def test_what_kernels_leave_in_parts_is_added_up_by_who_reads_it():
    x = draw(0, 3, 128).astype(jnp.bfloat16)
    matrices, left = (numbers_of(1, 64, 128), numbers_of(2, 64, 128)), jnp.ones((2, 128, 16))
    kernels = Products(plain=XLA_CODES._replace(parts=lambda *_: left))
    values, turned = project_parts(x, matrices, kernels)
    assert values[0] is left and turned
    (whole,), turned = project_parts(x, matrices, Products(plain=Asked().backend))
    assert not turned  # XLA's, which are cut with tokens first
    alone = jnp.concatenate([project_out(x, each) for each in matrices], axis=1)
    whole = whole if whole.ndim == 2 else whole.sum(axis=0)
    assert near(whole, alone, ROUNDED)


def test_kernels_leave_many_rows_of_numbers_to_xla():
    device = pallas_codes(DEVICE)
    x, own = jnp.ones((65, 128), jnp.bfloat16), Operand(jnp.ones((64, 128), jnp.bfloat16))
    assert device.multiply((x, None), (own,), jnp.bfloat16) is None
    assert device.multiply((x[:8].astype(jnp.float32), None), (own,), jnp.float32) is None


def test_kernels_see_numbers_of_every_mode():
    shape = plain_shape(Layout(LLAMA, 8, 1), Formats())
    assert shape is not None and shape.is_plain and shape.dtype == "bfloat16"
    base = [(8192, 8192, 128), (8192, 28672, 128), (28672, 8192, 0), (1024, 8192, 0)]
    shift = [(8192, 1024, 128), (8192, 3584, 128), (3584, 8192, 0), (128, 8192, 0)]
    assert {CodeMatrix(*each, 0) for each in base + shift} <= set(shape.matrices)
    of_codes = plain_shape(Layout(LLAMA, 8, 1), FP8)
    assert of_codes is not None and not of_codes.matrices
    assert plain_shape(Layout(LLAMA, 8, 1), formats_of("float32")) is None


@pytest.mark.costs(10)
def test_numbers_are_multiplied_by_kernels_that_pass_their_check(caplog):
    layout, asked = Layout(LLAMA, 8, 1), []
    how = layout, Formats(), DEVICE, "pallas"
    assert choose_plain(*how, asked.append).name == "pallas"
    assert asked == [plain_shape(layout, Formats())] and not caplog.records
    failed = choose_plain(*how, lambda _: "the kernels failed their check: off by 3")
    assert (failed.name, failed.reason) == ("xla", "the kernels failed their check: off by 3")
    assert "XLA multiplies numbers of few rows, too: the kernels failed" in caplog.text
    assert choose_plain(*how[:3], "xla").reason == "attention runs as xla"
    no_numbers = choose_plain(layout, FP8, DEVICE, "pallas").reason
    assert no_numbers == "no matrix has numbers of 16 bits"
    assert choose_products(*how).plain.name == "pallas"
    tiny = choose_plain(Layout(PRESETS["tiny"], 1, 1), Formats(), DEVICE, "pallas")
    assert tiny.name == "pallas" and "must be a multiple of 64" in tiny.reason  # of some


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
    x, own = (draw(0, 1, 1), draw(0, 1, 1)), Operand(draw(1, 1, 1), draw(1, 1))
    assert XLA_CODES.multiply(x, (own,), jnp.bfloat16) is None
