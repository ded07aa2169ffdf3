"""The grouped product of experts, compiled for Hopper GPUs: what the compiler made of it."""

from typing import Any, NamedTuple

import aot
import jax
import jax.numpy as jnp
import pytest
from hlo import entry, launches

aot.require()
pytestmark = pytest.mark.thorough

from pallas_kernels.gates import SILU, Gate  # noqa: E402
from pallas_kernels.grouped import GroupedConfig, grouped_mlp  # noqa: E402
from pallas_kernels.grouped_work import ExpertWeights, Routed, most_tiles  # noqa: E402
from pallas_kernels.product_ring import MAX_STAGES  # noqa: E402

FP8 = jnp.float8_e4m3fn
SM_REGISTERS = 65536
THREADS = 3 * 128  # of a thread block of the products
WIDENED = r"mul\S*\.bf16x2"
WGMMA, TMA_LOAD = r"wgmma\.mma_async", r"cp\.async\.bulk\.tensor\.\dd\.shared"


class Case(NamedTuple):
    """The experts of one of 8 devices, and a step."""

    hidden: int
    width: int
    experts: int
    k: int
    tokens: int
    rows: int
    weight_dtype: Any = jnp.bfloat16
    chip: str = "h100"
    is_limited: bool = False  # clamped, with biases
    parts: tuple[int, int] = (1, 1)  # of the contractions
    group: int = 0  # of codes of four bits, in units of scales of a type
    scale_dtype: Any = None
    has_zeros: bool = False
    has_squares: bool = False  # scales of codes

    @property
    def are_codes(self) -> bool:
        """Whether they are block products."""
        return self.weight_dtype == FP8

    @property
    def beside(self) -> list[str]:
        """Kernels beside the two products."""
        return ["grouped_collect"] + ["grouped_combine"] * (self.parts[0] > 1)

    def row_bytes(self, width: int) -> int:
        """Of what a product reads of a row."""
        return width + 4 * -(-width // 128) if self.are_codes else 2 * width


SQUARES: dict[str, Any] = {"has_squares": True, "chip": "h200"}
MXFP4: dict[str, Any] = {"weight_dtype": jnp.uint8, "group": 32, "scale_dtype": jnp.uint8}
INT4: dict[str, Any] = {"weight_dtype": jnp.uint8, "group": 128, "scale_dtype": jnp.float32}
CASES = {
    "Qwen3-30B-A3B, chunks": Case(2048, 768, 16, 8, 4096, 128),
    "Qwen3-30B-A3B, decodes, codes": Case(2048, 768, 16, 8, 64, 16, FP8),
    "Mixtral 8x7B on one device, decodes": Case(4096, 14336, 8, 2, 64, 16, chip="h200"),
    "GPT-OSS 120B, chunks, codes": Case(2880, 2880, 16, 4, 4096, 128, FP8, is_limited=True),
    "Qwen3-30B-A3B, few rows": Case(2048, 768, 16, 8, 4, 16, parts=(4, 4)),
    "Qwen3-30B-A3B, few rows, codes": Case(2048, 768, 16, 8, 1, 16, FP8, parts=(8, 3)),
    "Qwen3-235B-A22B, decodes, squares": Case(4096, 1536, 16, 8, 64, 16, FP8, **SQUARES),
    "Qwen3-235B-A22B, few rows, squares": Case(
        4096, 1536, 16, 8, 1, 16, FP8, parts=(8, 3), **SQUARES
    ),
    "Qwen3-235B-A22B, chunks, squares": Case(4096, 1536, 16, 8, 4096, 64, FP8, **SQUARES),
    "Qwen3-235B-A22B, chunks, codes": Case(4096, 1536, 16, 8, 4096, 128, FP8, chip="h200"),
    "DeepSeek V3 on one of 8, squares": Case(7168, 2048, 32, 8, 256, 32, FP8, **SQUARES),
    "Mixtral 8x7B, few rows": Case(4096, 14336, 1, 2, 8, 16, chip="h200", parts=(1, 8)),
    "GPT-OSS 120B, few rows": Case(2880, 2880, 16, 4, 8, 16, is_limited=True, parts=(3, 5)),
    "GPT-OSS 120B, large tiles, cut": Case(
        2880, 2880, 1, 4, 64, 128, is_limited=True, parts=(5, 9)
    ),
    "GPT-OSS 120B on one device, four bits": Case(
        2880, 2880, 128, 4, 64, 16, chip="h200", is_limited=True, **MXFP4
    ),
    "GPT-OSS 120B, chunks, four bits": Case(2880, 2880, 16, 4, 4096, 128, is_limited=True, **MXFP4),
    "GPT-OSS 120B, few rows, four bits": Case(
        2880, 2880, 16, 4, 7, 16, is_limited=True, parts=(4, 8), **MXFP4
    ),
    "Qwen3-30B-A3B, decodes, integers": Case(2048, 768, 16, 8, 64, 16, has_zeros=True, **INT4),
    "Mixtral 8x7B, chunks, integers": Case(4096, 14336, 1, 2, 4096, 128, **INT4),
    "Scout on two devices, integers": Case(
        5120, 8192, 8, 1, 256, 32, chip="h200", **(INT4 | {"group": 32})
    ),
}


def struct(shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def compile_case(case: Case) -> aot.Compiled:
    """Compile the sum over a token's experts, as a layer has it."""
    inner, outer = [(case.experts, n) for n in (case.width, case.hidden)]
    halved = 2 if case.group else 1
    weights = [
        (*size, n // halved)
        for size, n in ((inner, case.hidden), (inner, case.hidden), (outer, case.width))
    ]
    scales = [struct(n, jnp.float32) for n in (inner, inner, outer)]
    zeros = None
    if case.has_squares:
        scales = [struct((n, -(-out // 128), -(-k // 128)), jnp.float32) for n, out, k in weights]
    if case.group:
        groups = [(n[0], 2 * n[2] // case.group, n[1]) for n in weights]
        scales = [struct(n, case.scale_dtype) for n in groups]
        zeros = [struct(n, jnp.uint8) for n in groups]
    biases = [struct(n, jnp.bfloat16) for n in (inner, inner, outer)]
    weights = ExpertWeights(
        *(struct(shape, case.weight_dtype) for shape in weights),
        *(scales if case.group or case.weight_dtype == FP8 else [None] * 3),
        *(biases if case.is_limited else [None] * 3),
        *(zeros if zeros and case.has_zeros else [None] * 3),
    )
    gate = Gate(1.702, 7.0) if case.is_limited else SILU
    pairs = case.tokens, case.k
    x = struct((case.tokens, case.hidden), jnp.bfloat16)
    routed = Routed(struct((case.tokens * case.k,)), struct((case.experts,)))

    def layer(x, weights, routed, gains, is_own):
        config = GroupedConfig(case.rows, parts=case.parts)
        out = grouped_mlp(x, weights, routed, gains, config, gate=gate)
        out = jnp.where(is_own[..., None], out.astype(jnp.float32), 0)
        return out.sum(axis=1).astype(x.dtype)

    arguments = x, weights, routed, struct(pairs, jnp.float32), struct(pairs, jnp.bool_)
    mesh = aot.make_mesh(case.chip, (1,), ("x",))
    return aot.compile_for(mesh, layer, *aot.on_device(mesh, arguments))


@pytest.mark.parametrize("name", CASES)
def test_the_products_fit_the_chip(name, capsys):
    case = CASES[name]
    with capsys.disabled():  # Mosaic prints what it takes
        program = compile_case(case)
    kernels = {kernel.name.split("_mosaic")[0]: kernel for kernel in program.kernels}
    assert sorted(kernels) == sorted([*case.beside, "grouped_gated", "grouped_product"])
    products = ("grouped_gated", case.hidden), ("grouped_product", case.width)
    for (product, contraction), parts in zip(products, case.parts, strict=True):
        kernel, step_bytes = kernels[product], 64 if contraction * 2 % 128 else 128
        if case.group:
            step_bytes = 256
            assert kernel.count(WIDENED) == 2 * 128 // 4  # pairs of a thread, two channels of both
        count = 2 * step_bytes // 32  # of both operands, 32 bytes at a time
        if case.are_codes:
            count = (1 + (product == "grouped_gated")) * 128 // 32
        assert kernel.count(WGMMA) in (count, 2 * count, 3 * count)  # a loop may be unrolled
        assert kernel.count(TMA_LOAD) > 0
        staged = kernel.count(r"fence\.proxy\.async")  # what the interpreter does not miss
        assert (staged > 0) == (parts == 1 or case.are_codes)  # sums of parts leave from registers
        assert THREADS * kernel.registers <= SM_REGISTERS
    if not case.are_codes:  # a row of which is in registers
        assert kernels["grouped_collect"].registers <= 40
    stage = (2 * 128 + case.rows) * 128 + 4 * max(case.rows, 32) * case.are_codes
    if case.group:
        own = max(1, 128 // case.group) * (case.scale_dtype.dtype.itemsize + case.has_zeros)
        stage = 2 * 128 * (64 + own) + case.rows * 256
    shared = max(program.shared_memory_bytes)
    assert shared <= aot.SHARED_MEMORY_LIMIT
    assert shared + stage > aot.SHARED_MEMORY_LIMIT or shared >= MAX_STAGES * stage  # as fits
    check_what_is_made(case, program)


@pytest.mark.parametrize(("weight_dtype", "count"), [(jnp.bfloat16, 11), (FP8, 11)])
@pytest.mark.parametrize("parts", [(1, 1), (1, 3), (4, 3)])
def test_what_is_cut_is_a_launch_more_for_gate_and_up(parts, weight_dtype, count):
    """The parts of down are added up where XLA sums over a token's experts."""
    case = Case(2048, 768, 16, 8, 8, 16, weight_dtype, parts=parts)
    found = launches(compile_case(case).executable.as_text())
    assert len(found) == count + (parts[0] > 1)


def sums_bytes(case: Case) -> tuple[int, int]:
    """Bytes of a row's sums, of whole blocks of channels, where contractions are cut."""
    block = 128 if case.are_codes else 256  # of down's channels
    blocks = (2 * 128, case.width, 128), (block, case.hidden, block)
    gated, down = (4 * wide * -(-channels // block) for wide, channels, block in blocks)
    cut = [parts * (parts > 1) for parts in case.parts]
    return cut[0] * gated, cut[1] * down


def check_what_is_made(case: Case, program: aot.Compiled) -> None:
    """No weight is copied, no array of all pairs is made but for tiles, two of them at a time."""
    made = entry(program.executable.as_text())
    calls = [one for one in made if one.opcode == "custom-call"]
    assert len(calls) == 2 + len(case.beside)
    rows = case.rows * most_tiles(case.tokens * case.k, case.experts, case.rows)
    taken, inner, given = case.row_bytes(case.hidden), case.row_bytes(case.width), case.hidden * 2
    gated_sums, down_sums = sums_bytes(case)
    most = max(taken + (gated_sums or inner), gated_sums + inner, inner + (down_sums or given))
    if case.group:  # tokens in another order, too
        most += case.hidden * 2
    small = 32 * (rows + case.tokens * case.k) + 4096
    assert program.executable.memory_analysis().temp_size_in_bytes <= rows * most + small
