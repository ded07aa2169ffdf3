"""Products of codes with scales of blocks, compiled for Hopper GPUs: what the compiler made."""

from typing import Any, NamedTuple

import aot
import jax
import jax.numpy as jnp
import pytest

aot.require()
pytestmark = pytest.mark.thorough

from pallas_kernels.block_problem import (  # noqa: E402
    ADDED_STEP,
    BlockCodes,
    BlockConfig,
    BlockMatrix,
    Groups,
    Result,
    block_config,
    block_of,
)
from pallas_kernels.block_product import Beside, block_product  # noqa: E402
from pallas_kernels.gates import GELU_TANH, SILU, Gate  # noqa: E402

FP8 = jnp.float8_e4m3fn
REGISTERS = 168  # of a thread at the launch: three warpgroups have all of a multiprocessor's
WGMMA = r"wgmma\.mma_async\.sync"


class Case(NamedTuple):
    """A product."""

    outs: tuple[int, ...]
    inputs: int
    block: int = 0  # of a row-parallel matrix
    result: Result = Result()
    of_channels: bool = True
    is_plain: bool = False
    added: int = 0  # width of matrices of low rank

    @property
    def instruction(self) -> int:
        """Inputs that an instruction takes."""
        return 16 if self.is_plain else 32


HIDDEN, WIDTH = 8192, 28672
CODES = Result(gate=SILU, quantised=True)
# On one of 8 devices, and whole.
LLAMA_70B = {
    "q, k, v, TP 8": Case((1024, 128, 128), HIDDEN),
    "o, TP 8": Case((HIDDEN,), 1024, 128),
    "gate and up, TP 8": Case((3584, 3584), HIDDEN, result=Result(gate=SILU)),
    "gate and up, TP 8, codes": Case((3584, 3584), HIDDEN, result=CODES),
    "down, TP 8": Case((HIDDEN,), 3584, 128),
    "q, k, v": Case((HIDDEN, 1024, 1024), HIDDEN),
    "o": Case((HIDDEN,), HIDDEN, 128),
    "gate and up": Case((WIDTH, WIDTH), HIDDEN, result=Result(gate=SILU)),
    "gate and up, codes": Case((WIDTH, WIDTH), HIDDEN, result=CODES),
    "down": Case((HIDDEN,), WIDTH, 128),
}
PLAIN = {  # numbers of 16 bits, few rows
    name: case._replace(is_plain=True, result=case.result._replace(quantised=False))
    for name, case in LLAMA_70B.items()
    if "codes" not in name
} | {
    "half a block of channels": Case((576,), 576, is_plain=True),
    "blocks of 64": Case((576,), 576, 64, is_plain=True),
    "float32": Case((576,), 576, result=Result(jnp.float32), is_plain=True),
    "gelu": Case((512, 512), 512, result=Result(gate=GELU_TANH), is_plain=True),
}
ADDED = [  # width of 8 slots of rank 16
    case._replace(added=128)
    for cases in (LLAMA_70B, PLAIN)
    for name, case in cases.items()
    if "TP 8" in name
]
OTHERS = {
    "scales of blocks": Case((1024, 128, 128), HIDDEN, of_channels=False),
    "scales of blocks, row-parallel": Case((HIDDEN,), 3584, 128, of_channels=False),
    "scales of blocks, codes": Case((3584, 3584), HIDDEN, result=CODES, of_channels=False),
    "ragged inputs, half a block of channels": Case((576,), 576),
    "blocks of 64": Case((576,), 576, 64),
    "blocks of 96": Case((3072,), 3072, 96),
    "float32": Case((576,), 576, result=Result(jnp.float32)),
    "limited, codes": Case((512, 512), 512, result=CODES._replace(gate=Gate(1.702, 7.0))),
    "gelu": Case((512, 512), 512, result=Result(gate=GELU_TANH)),
    "codes of one matrix": Case((1024,), 1024, result=Result(quantised=True)),
}


def shape(sizes: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def arguments(case: Case, tokens: int) -> tuple[BlockCodes, tuple[BlockMatrix, ...], Beside]:
    """The arrays of a product, as shapes."""
    x, matrices = _product(case, tokens)
    if case.result.groups is not None:
        return x, matrices, Beside(group=shape((tokens,), jnp.int32))
    if not case.added:
        return x, matrices, Beside()
    added = shape((tokens, len(case.outs) * case.added), jnp.bfloat16)
    sizes = [(case.added, out) if case.block else (out, case.added) for out in case.outs]
    own = zip(matrices, sizes, strict=True)
    matrices = tuple(each._replace(factor=shape(size, jnp.bfloat16)) for each, size in own)
    return x, matrices, Beside(added)


def _product(case: Case, tokens: int) -> tuple[BlockCodes, tuple[BlockMatrix, ...]]:
    steps = -(-case.inputs // (case.block or 128))
    if case.is_plain:
        numbers = [
            (steps, case.block, out) if case.block else (out, case.inputs) for out in case.outs
        ]
        matrices = tuple(BlockMatrix(shape(sizes, jnp.bfloat16)) for sizes in numbers)
        return BlockCodes(shape((tokens, case.inputs), jnp.bfloat16)), matrices
    matrices = []
    for out in case.outs:
        sizes = (steps, out, case.block) if case.block else (out, case.inputs)
        blocks = (steps, -(-out // 128)) if case.block else (-(-out // 128), steps)
        scale = None if not case.of_channels else shape((out,), jnp.float32)
        scales = shape(blocks, jnp.float32) if scale is None else None
        matrices.append(BlockMatrix(shape(sizes, FP8), scale, scales))
    x = BlockCodes(shape((tokens, case.inputs), FP8), shape((steps, tokens), jnp.float32))
    return x, tuple(matrices)


def check(case: Case, chip: str, tokens: int, config: BlockConfig | None = None) -> None:
    """Compile a product; no register spills, and nothing is made beside what comes out.

    But for sums of a cluster.
    """
    x, matrices, beside = arguments(case, tokens)
    config = config or block_config(x, matrices, case.result)
    mesh = aot.make_mesh(chip, (1,), ("x",))
    program = aot.compile_for(
        mesh,
        lambda x, matrices, beside: block_product(x, matrices, case.result, config, beside),
        *aot.on_device(mesh, (x, matrices, beside)),
    )
    (kernel,) = program.kernels
    parts = 1 if case.result.gate is None else 2
    assert kernel.registers <= REGISTERS
    block = block_of(x, matrices[0])
    assert block
    unrolled, steps = parts * block // case.instruction, (1, 2) if case.added else (0,)
    own = [kernel.count(WGMMA) - n * parts * ADDED_STEP // 16 for n in steps]
    assert any(count > 0 and count % unrolled == 0 for count in own)
    assert max(program.shared_memory_bytes) <= aot.SHARED_MEMORY_LIMIT
    most = 0  # but for scales that end with a block, and what is turned
    if any(out % 128 for out in case.outs):
        most = 4 * (sum(case.outs) + 1024) * (tokens if case.result.dtype == jnp.float32 else 1)
    if case.result.quantised and tokens % config.rows:  # scales are those of whole tiles
        most += 4 * (sum(case.outs) // 128 + 8) * config.rows
    if config.cluster > 1:
        assert config.cluster * config.num_blocks <= 132
        most += 4 * config.cluster * parts * (sum(case.outs) + 128) * config.rows
    assert program.executable.memory_analysis().temp_size_in_bytes <= most


# Each kernel for one chip alone: of what a process compiles again nothing is said.
@pytest.mark.parametrize(
    ("chip", "tokens"), [("h100", 8), ("h200", 64), ("h100", 1024), ("h200", 8192)]
)
def test_products_of_llama_70b_fit_the_chip(chip, tokens, capsys):
    for case in LLAMA_70B.values():
        with capsys.disabled():  # Mosaic prints what it takes
            check(case, chip, tokens)


@pytest.mark.parametrize("name", OTHERS)
def test_other_sizes_and_results_fit_the_chip(name, capsys):
    case = OTHERS[name]
    with capsys.disabled():
        check(case, "h200", 16)
        if case.of_channels or case.result.gate is None:
            check(case, "h100", 4096, BlockConfig())


@pytest.mark.parametrize(("chip", "tokens"), [("h100", 8), ("h200", 64)])
def test_products_of_numbers_fit_the_chip(chip, tokens, capsys):
    for case in PLAIN.values():
        with capsys.disabled():
            check(case, chip, tokens)


@pytest.mark.parametrize(("chip", "tokens"), [("h100", 8), ("h200", 64)])
def test_products_with_matrices_of_low_rank_fit_the_chip(chip, tokens, capsys):
    for case in ADDED:
        with capsys.disabled():
            check(case, chip, tokens)


@pytest.mark.parametrize("channels", [24, 128, 384])
def test_groups_of_channels_fit_the_chip(channels, capsys):
    for block in (0, 128):
        case = Case((channels,), HIDDEN, block, Result(groups=Groups(3, 8)), is_plain=True)
        with capsys.disabled():
            check(case, "h200", 64)
