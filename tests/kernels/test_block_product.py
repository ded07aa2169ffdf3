"""Products of codes with scales of blocks against their definition, in the Mosaic interpreter."""

import jax
import jax.numpy as jnp
import pytest
from attention_cases import interpreted
from block_cases import FP8, Case, make, run, worst
from spent import quick

from pallas_kernels.block_problem import (
    BlockCodes,
    BlockConfig,
    BlockMatrix,
    Groups,
    Result,
    block_config,
    fixed_config,
)
from pallas_kernels.block_product import block_product, wrong_block
from pallas_kernels.gates import GELU_TANH, SILU, Gate

CASES = {
    "few rows, tiles that they do not fill, half a block of channels": Case(21, 256, (192,)),
    "few rows, scales of blocks, a ragged last one": Case(8, 192, (256,), of_channels=False),
    "row-parallel, cut, bias": Case(12, 512, (128,), 16, 2, block=128, has_bias=True),
    "row-parallel, scales of blocks of 64, cut": Case(
        12, 256, (192,), 32, 2, block=64, of_channels=False
    ),
    "blocks of 96": Case(8, 192, (64,), block=96),
    "q, k and v joined, ragged inputs, biases": Case(8, 320, (256, 128, 64), has_bias=True),
    "q, k and v joined and cut, scales of blocks": Case(
        8, 256, (256, 128, 64), 16, 2, of_channels=False
    ),
    "gate and up": Case(20, 256, (192, 192), gate=SILU, has_bias=True),
    "gate and up, codes, two tiles": Case(20, 256, (256, 256), gate=SILU, quantised=True),
    "gate and up, codes, half a block": Case(8, 256, (192, 192), gate=SILU, quantised=True),
    "many rows, gate and up, codes, half a block": Case(
        72, 256, (192, 192), 128, gate=SILU, quantised=True
    ),
    "gate and up limited, codes, scales of blocks": Case(
        9, 256, (128, 128), 64, gate=Gate(1.702, 7.0), quantised=True, of_channels=False
    ),
    "many rows": Case(136, 256, (192,), 128),
    "many rows, row-parallel, scales of blocks": Case(
        136, 256, (192,), 128, block=128, of_channels=False
    ),
    "many rows, joined, ragged inputs, biases": Case(72, 192, (128, 64), 128, has_bias=True),
    "many rows, gate and up, gelu": Case(72, 256, (128, 128), 128, gate=GELU_TANH),
    "many rows, gate and up, codes": Case(136, 256, (256, 256), 128, gate=SILU, quantised=True),
    "float32, a number of rows that is padded": Case(5, 256, (192,), dtype=jnp.float32),
    "float32, many rows": Case(72, 256, (64,), 128, dtype=jnp.float32),
    "gate and up, codes, a cluster": Case(
        20, 512, (128, 128), 32, gate=SILU, quantised=True, cluster=4
    ),
    "joined, a cluster, scales of blocks": Case(
        8, 256, (256, 128, 64), of_channels=False, cluster=2
    ),
    "numbers": Case(21, 256, (192,), is_plain=True, has_bias=True),
    "numbers, row-parallel, a cluster": Case(12, 512, (192,), block=128, is_plain=True, cluster=2),
    "numbers, row-parallel, blocks of 64": Case(8, 192, (128,), block=64, is_plain=True),
    "numbers, joined, blocks of 64": Case(8, 320, (256, 128, 64), is_plain=True),
    "numbers, joined and cut": Case(12, 512, (256, 128, 64), 16, 2, is_plain=True),
    "numbers, gate and up, a cluster": Case(
        12, 512, (256, 256), gate=SILU, is_plain=True, cluster=4
    ),
    "codes of one matrix, float32": Case(3, 256, (128,), quantised=True, dtype=jnp.float32),
    "numbers and low rank": Case(21, 256, (192,), is_plain=True, added=64),
    "numbers, joined, and low rank that is no whole step": Case(
        8, 256, (256, 128, 64), is_plain=True, added=24
    ),
    "numbers, joined and cut, and low rank": Case(
        12, 512, (256, 128, 64), 16, 2, is_plain=True, added=128
    ),
    "numbers, gate and up, a cluster, and low rank": Case(
        12, 512, (256, 256), gate=SILU, is_plain=True, cluster=4, added=136
    ),
    "numbers, row-parallel, and low rank": Case(
        40, 256, (320,), 32, block=128, is_plain=True, added=40
    ),
    "row-parallel, scales of blocks, a cluster, and low rank": Case(
        12, 512, (192,), 32, block=128, of_channels=False, cluster=2, added=72
    ),
    "gate and up, codes, and low rank": Case(
        20, 256, (256, 256), 64, gate=SILU, quantised=True, added=128
    ),
    "float32 and low rank": Case(5, 256, (192,), dtype=jnp.float32, added=64),
    "groups": Case(21, 256, (192,), is_plain=True, groups=Groups(3, 16)),
    "groups, no whole block of channels, a cluster": Case(
        12, 512, (24,), is_plain=True, groups=Groups(3, 8), cluster=2
    ),
    "groups, row-parallel": Case(
        40, 256, (136,), 32, is_plain=True, block=128, groups=Groups(17, 8)
    ),
}


@pytest.mark.parametrize(
    "name", quick(list(CASES), "gate and up, codes, two tiles", "row-parallel, cut, bias")
)
def test_it_is_the_product_with_the_numbers_of_the_codes(name):
    case = CASES[name]
    made = make(case)
    assert worst(case, made, run(case, made)) <= 1


@pytest.mark.thorough
def test_neither_tiles_nor_other_tokens_change_a_bit():
    case = Case(20, 384, (128, 128), gate=SILU, quantised=True)
    made = make(case)
    whole = run(case, made)
    part = made._replace(x=BlockCodes(made.x.values[:7], made.x.scale[:, :7]))
    alone = run(case._replace(rows=64), part)
    assert (alone.values.view("u1") == whole.values[:7].view("u1")).all()
    assert (alone.scale == whole.scale[:, :7]).all()


@pytest.mark.costs(6)
def test_fixed_settings_do_not_depend_on_rows_or_on_how_a_mode_splits_channels():
    case = Case(72, 512, (256,))
    made = make(case)
    (matrix,), x = made.matrices, made.x
    half = BlockMatrix(matrix.values[:128], matrix.scale[:128])
    few = BlockCodes(x.values[:3], x.scale[:, :3])
    configs = {fixed_config(*each, case.result) for each in ((x, (matrix,)), (few, (half,)))}
    assert configs == {BlockConfig(64)} != {block_config(few, (half,), case.result)}
    (config,) = configs
    small = config._replace(num_blocks=2, stages=2)
    whole = interpreted(lambda x: block_product(x, (matrix,), case.result, small), x)
    part = interpreted(lambda x: block_product(x, (half,), case.result, small), few)
    assert (part == whole[:3, :128]).all()


def shapes(tokens: int, outs: tuple[int, ...], inputs: int) -> tuple:
    """A product of a size, as shapes."""
    steps = -(-inputs // 128)
    x = BlockCodes(
        jax.ShapeDtypeStruct((tokens, inputs), FP8),
        jax.ShapeDtypeStruct((steps, tokens), jnp.float32),
    )
    matrices = (jax.ShapeDtypeStruct((out, inputs), FP8) for out in outs)
    return x, tuple(BlockMatrix(values) for values in matrices)


@pytest.mark.parametrize(
    ("tokens", "outs", "inputs", "rows", "cluster"),
    [
        (8, (1024, 128, 128), 8192, 16, 8),  # q, k, v of Llama-70B on one of 8: 10 columns
        (64, (1024, 128, 128), 8192, 64, 8),
        (8, (3584,), 8192, 16, 4),
        (8, (8192,), 3584, 16, 1),
        (8, (1024,), 7936, 16, 2),  # 62 steps
        (8, (1024,), 128, 16, 1),
        (256, (1024, 128, 128), 8192, 64, 1),  # 40 small tiles for 20 large ones
        (2048, (1024, 128, 128), 8192, 128, 1),
        (8192, (8192, 1024, 1024), 8192, 128, 1),
    ],
)
def test_few_items_have_their_contraction_cut(tokens, outs, inputs, rows, cluster):
    own = BlockConfig(rows, 1, 132 // cluster, cluster=cluster)
    assert block_config(*shapes(tokens, outs, inputs), Result()) == own
    blocks = 132 // cluster * cluster
    assert own.in_parts() == BlockConfig(rows, cluster, blocks)  # the same parts, left open


def test_what_is_activated_is_cut_too():
    x, matrices = shapes(8, (3584, 3584), 8192)
    own = BlockConfig(16, 1, 33, cluster=4)
    assert block_config(x, matrices, Result(gate=SILU)) == own
    of_blocks = tuple(each._replace(blocks=0) for each in matrices)
    x, _ = shapes(8192, (3584, 3584), 8192)
    assert block_config(x, matrices, Result(gate=SILU)) == BlockConfig(128)
    assert block_config(x, of_blocks, Result(gate=SILU)) == BlockConfig(64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outs": (96,)}, "96 outputs must be a multiple of 64"),
        ({"inputs": 240}, "240 and 240 inputs must be multiples of 32"),
        ({"inputs": 160, "block": 160}, "160 inputs are not 1 blocks of 32, 64, 96 or 128"),
        ({"splits": 3}, "3 splits of 2 steps"),
        ({"cluster": 4}, "4 splits of 2 steps"),
        ({"cluster": 3, "inputs": 384}, "clusters of 3 thread blocks"),
        ({"cluster": 2, "splits": 2, "inputs": 512}, "clusters of 2 thread blocks"),
        ({"tokens": 72, "is_plain": True}, "72 rows of plain numbers are more than 64"),
        ({"inputs": 96, "is_plain": True}, "96 and 96 inputs must be multiples of 64"),
        ({"is_plain": True, "dtype": jnp.float32}, "x of float32 and weights of float32"),
        ({"is_plain": True, "rows": 128}, "tiles of 128 rows: not of numbers"),
        ({"rows": 24}, "tiles of 24 rows"),
        ({"rows": 128, "splits": 2}, "splits of tiles of 128 rows"),
        ({"outs": (64, 128)}, r"\[64, 128\] outputs of joined matrices"),
        ({"outs": (128, 64), "gate": SILU}, "two matrices of as many outputs"),
        ({"outs": (128, 128), "quantised": True}, r"codes are of one result, not of \[128, 128\]"),
        ({"quantised": True, "splits": 2}, "can be neither activated nor quantised"),
        (
            {"outs": (128, 128), "gate": SILU, "rows": 128, "of_channels": False},
            "tiles of 128 rows: not of numbers; with scales of blocks gates spill",
        ),
    ],
)
def test_what_it_cannot_take_is_said(change, message):
    case = Case(8, 256, (128,))._replace(**change)
    made = make(case)
    with pytest.raises(ValueError, match=message):
        block_product(made.x, made.matrices, case.result, case.config)


@pytest.mark.parametrize(
    ("change", "beside", "message"),
    [
        ({"tokens": 72, "rows": 128}, {}, "128 rows are more than 64"),
        ({}, {"added": jnp.zeros((8, 12), jnp.bfloat16)}, "1 times a multiple of 8, of 16 bits"),
        ({}, {"added": jnp.zeros((8, 16))}, "1 times a multiple of 8, of 16 bits"),
        ({}, {"added": jnp.zeros((8, 32), jnp.bfloat16)}, r"a factor must be \(128, 32\)"),
        ({"block": 128}, {"added": jnp.zeros((8, 32), jnp.bfloat16)}, r"must be \(32, 128\)"),
        ({}, {"added": None}, "there is nothing for factors"),
        ({"added": 0, "groups": Groups(2, 64)}, {"group": None}, "every row has one"),
    ],
)
def test_what_it_cannot_add_is_said(change, beside, message):
    case = Case(8, 256, (128,), added=16)._replace(**change)
    made = make(case)
    own = made.beside._replace(**beside)
    with pytest.raises(ValueError, match=message):
        block_product(made.x, made.matrices, case.result, case.config, own)


def test_activations_are_codes_of_as_many_inputs():
    x, (matrix, *_) = shapes(8, (128,), 256)
    assert wrong_block(x, (matrix,)) == []
    plain = x._replace(values=jax.ShapeDtypeStruct((8, 256), jnp.bfloat16))
    assert "must be codes" in wrong_block(plain, (matrix,))[0]
    assert wrong_block(shapes(8, (128,), 384)[0], (matrix,))
    row = BlockMatrix(jax.ShapeDtypeStruct((2, 128, 128), FP8))
    assert "of different kinds" in wrong_block(x, (matrix, row))[-1]
