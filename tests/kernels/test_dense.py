"""Products with one matrix of four bits against their definition, in the Mosaic interpreter."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import INTERPRETER, interpreted
from grouped_cases import unpacked, wide
from spent import quick

from pallas_kernels.dense import DenseWeights, dense_config, dense_product, wrong_dense
from pallas_kernels.grouped_problem import GroupedConfig


class Case(NamedTuple):
    """A product; small, as the interpreter is slow."""

    tokens: int
    blocks: int
    outputs: int
    inputs: int  # of a block
    group: int
    rows: int = 16
    parts: int = 1
    has_zeros: bool = False
    scale_dtype: Any = jnp.float32

    @property
    def config(self) -> GroupedConfig:
        """Two thread blocks, which take several items."""
        return GroupedConfig(self.rows, 2, 2, (1, self.parts), joins=True)


CASES = {
    "one block, tiles that tokens do not fill": Case(21, 1, 320, 128, 64, has_zeros=True),
    "blocks, a step of half a group": Case(5, 3, 192, 192, 32),
    "blocks, cut inside of one": Case(20, 2, 64, 192, 64, parts=3, has_zeros=True),
    "blocks, cut between them, a group a block": Case(70, 2, 192, 128, 128, rows=64, parts=2),
    "one block, cut, scales of bfloat16": Case(
        5, 1, 128, 256, 128, parts=2, scale_dtype=jnp.bfloat16
    ),
}


def make(case: Case) -> tuple[jax.Array, DenseWeights]:
    """Draw tokens, codes, and scales that keep the size of what they multiply."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (case.blocks, case.outputs, case.inputs // 2))
    shape = case.blocks, case.inputs // case.group, case.outputs
    scales = jnp.asarray(rng.uniform(0.02, 0.06, shape), case.scale_dtype)
    zeros = jnp.asarray(rng.integers(0, 17, shape), jnp.uint8) if case.has_zeros else None
    x = jnp.asarray(rng.standard_normal((case.tokens, case.blocks * case.inputs)), jnp.bfloat16)
    return x, DenseWeights(jnp.asarray(codes, jnp.uint8), scales, zeros)


def numbers_of(weights: DenseWeights) -> np.ndarray:
    """Return the matrix [out, in] that the codes are."""
    _, scales, zeros = weights
    blocks = [
        unpacked(codes, scales[nth], None if zeros is None else zeros[nth])
        for nth, codes in enumerate(weights.codes)
    ]
    return np.concatenate(blocks, axis=1)


@pytest.mark.parametrize("name", quick(list(CASES), "blocks, cut inside of one"))
def test_it_is_the_product_with_the_numbers_of_the_codes(name):
    case = CASES[name]
    x, weights = make(case)
    got = interpreted(lambda x, w: dense_product(x, w, case.config, INTERPRETER), x, weights)
    matrix = numbers_of(weights)
    expected, most = wide(x) @ matrix.T, abs(wide(x)) @ abs(matrix).T
    allowed = 2.0**-14 * most + 2.0**-8 * abs(expected)
    assert got.shape == expected.shape
    assert (abs(got - expected) <= allowed).all()


@pytest.mark.parametrize(
    ("tokens", "blocks", "outputs", "inputs", "rows", "parts"),
    [
        (8, 1, 3584, 8192, 16, 8),  # gate of Llama-70B on one of 8: 14 columns
        (64, 1, 3584, 8192, 64, 8),
        (64, 1, 8192, 3584, 64, 4),  # down
        (64, 8, 8192, 3584, 64, 4),  # and whole
        (64, 1, 28672, 8192, 64, 1),
        (2048, 1, 128, 8192, 128, 8),  # k: 16 tiles of one column
        (2048, 1, 3584, 8192, 128, 1),
    ],
)
def test_few_items_have_their_contraction_cut(tokens, blocks, outputs, inputs, rows, parts):
    codes = jax.ShapeDtypeStruct((blocks, outputs, inputs // 2), jnp.uint8)
    config = dense_config(tokens, DenseWeights(codes, None))
    assert config == GroupedConfig(rows, parts=(1, parts), joins=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outputs": 96}, "96 outputs and 64 inputs of a block must be multiples of 64"),
        ({"inputs": 96}, "64 outputs and 96 inputs of a block must be multiples of 64"),
        ({"group": 16}, "scales 2x4x64 are not of groups of 32, 64, 128 inputs"),
    ],
)
def test_what_it_cannot_take_is_said(change, message):
    x, weights = make(Case(3, 2, 64, 64, 32)._replace(**change))
    with pytest.raises(ValueError, match=message):
        dense_product(x, weights)


def test_activations_are_bfloat16_and_as_many_as_inputs():
    x, weights = make(Case(3, 2, 64, 64, 32))
    assert wrong_dense(x, weights) == []
    assert wrong_dense(x.astype(jnp.float32), weights) == ["x of float32: codes take bfloat16 only"]
    assert wrong_dense(x[:, :64], weights) == ["x of 64 inputs, where codes have 128"]
