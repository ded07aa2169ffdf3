"""Sums by a switch, compiled for 8 Hopper GPUs: kernels, and steps that have them.

Where memory lies shows in a layout: `S(7)` is what peers may read.
"""

import re

import aot
import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

aot.require()
if not hasattr(plgpu, "alloc_semaphore"):
    pytest.skip("jax before 0.12 leaves sums to XLA", allow_module_level=True)

from steps import Case, Compiler  # noqa: E402

from pallas_kernels.norm_codes import NormKind  # noqa: E402
from pallas_kernels.sum_norm import Meeting, open_meetings, sum_norm  # noqa: E402
from pallas_kernels.sum_rows import open_rows, sum_norm_rows, sum_whole  # noqa: E402
from serving.bench.thunks import top_level  # noqa: E402
from shiftjax.device.all_reduces import all_reduce_kinds  # noqa: E402
from shiftjax.device.sum_cases import CHAIN, SumStep, kernel, lowered  # noqa: E402
from shiftjax.models.sum_backend import SumShape  # noqa: E402
from shiftjax.parallel.grid import Mode  # noqa: E402

AXES = "unit", "device"
ROWS = 16  # as many as a switch sums in one shot, of 8 devices that have 8,192 columns
REGISTERS = 128  # of a thread: four thread blocks of a sum fit a multiprocessor
SHARED = re.compile(r"^  %(\S+) = bf16\[16,8192\]\{1,0:S\(7\)\}", re.M)
BITCAST = re.compile(r"^  %(\S+) = bf16\S+ bitcast\(%([\w.-]+)\)", re.M)


def two_sums(norm: NormKind):
    """Return a program: products, each summed over devices, and the norm behind it."""

    def step(x, matrix, weight):
        meeting = open_meetings(AXES, *x.shape)
        partial = jnp.dot(x, matrix[0, 0]).astype(x.dtype)
        x, normed, *_ = sum_norm(partial, x, (weight, None), norm, meeting)
        meeting = Meeting(AXES, meeting.counters, partial)
        partial = jnp.dot(normed.astype(x.dtype), matrix[0, 1]).astype(x.dtype)
        x, *_ = sum_norm(partial, x, (weight, None), norm, meeting)
        return jax.lax.psum(x, AXES)

    return step


def compiled_program(step, chip, hidden, rows, capsys):
    """Compile such a program for 8 devices; spills would fail."""
    mesh = aot.make_mesh(chip, (1, 8), AXES)
    sizes = (rows, hidden), (8, 2, hidden, hidden), (hidden,)
    specs = P(), P("device"), P()
    arrays = [
        jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=jax.sharding.NamedSharding(mesh, spec))
        for size, spec in zip(sizes, specs, strict=True)
    ]
    on_each = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    with capsys.disabled():  # Mosaic prints what it takes
        return aot.compile_for(mesh, on_each, *arrays)


@pytest.mark.parametrize(
    ("chip", "hidden", "rows", "codes"),
    [("h100", 8192, 8, True), ("h200", 3584, 64, False), ("h200", 16384, 1, True)],
)
def test_a_sum_and_its_norm_are_one_kernel(chip, hidden, rows, codes, capsys):
    program = compiled_program(two_sums(NormKind(1e-5, codes=codes)), chip, hidden, rows, capsys)
    (kernel,) = (kernel for kernel in program.kernels if kernel.name.startswith("sum_norm"))
    assert kernel.registers <= REGISTERS * (1 + (hidden > 8192))
    assert kernel.count(r"multimem\.ld_reduce\S*\.add\S*\.bf16x2") == -(-hidden // 1024)
    assert kernel.count(r"multimem\.red\.release\.sys") == 1
    assert kernel.count(r"fence\.acquire\.sys") == 1
    text = program.executable.as_text()
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 4
    assert text.count("skip_device_barrier = true") == 2  # devices meet before the first alone
    assert " copy(" not in text


def two_shots(norm: NormKind):
    """Return the same program in two shots."""

    def step(x, matrix, weight):
        group, own = open_rows(AXES, x)
        partial = jnp.dot(x, matrix[0, 0]).astype(x.dtype)
        own, normed, *_ = sum_norm_rows(partial, own, (weight, None), norm, group)
        partial = jnp.dot(normed.astype(x.dtype), matrix[0, 1]).astype(x.dtype)
        return sum_whole(partial, own, norm, group)

    return step


@pytest.mark.parametrize(
    ("chip", "hidden", "rows", "codes"),
    [("h100", 8192, 8, True), ("h200", 3584, 2048, False), ("h200", 16384, 16, True)],
)
def test_two_shots_store_rows_on_all_devices(chip, hidden, rows, codes, capsys):
    """Of a tile one store of a thread, and with codes one of scales."""
    program = compiled_program(two_shots(NormKind(1e-5, codes=codes)), chip, hidden, rows, capsys)
    by_name = {kernel.name.partition("_mosaic")[0]: kernel for kernel in program.kernels}
    normed, whole = by_name["sum_norm_rows"], by_name["sum_rows"]
    tiles = -(-hidden // 1024)
    for each in (normed, whole):
        assert each.registers <= REGISTERS * (1 + (hidden > 8192))
        assert each.count(r"multimem\.ld_reduce\S*\.add\S*\.bf16x2") == tiles
        assert each.count(r"multimem\.red\.release\.sys") == 2  # devices meet twice
        assert each.count(r"fence\.acquire\.sys") == 2
    assert whole.count(r"multimem\.st") == tiles
    assert normed.count(r"multimem\.st") == tiles * (1 + codes)
    text = program.executable.as_text()
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 4
    assert text.count("skip_device_barrier = true") == 2
    assert len(re.findall(r" copy\(", text)) == 1  # of what the program gives back
    assert "all-reduce" not in text


@pytest.mark.parametrize("shots", [1, 2])
@pytest.mark.thorough
def test_the_chain_of_the_check_compiles_for_devices_in_another_order(shots):
    devices = list(aot.make_mesh("h200", (8,), ("x",)).devices.flat)
    step = SumStep(ROWS, shots)
    text = lowered(kernel, SumShape(8192, "bfloat16"), step, devices).compile().as_text()
    assert len(_sums(text, ("sum_norm", "sum_norm_rows")[shots - 1])) == CHAIN
    assert 'xla_replica_ids = "0,1,2,3,4,5,6,7"' in text


@pytest.fixture(scope="module")
def compiled() -> Compiler:
    return Compiler()


@pytest.mark.parametrize(("sp", "tp", "size"), [(8, 1, "bf16"), (1, 8, "fp8")])
@pytest.mark.thorough
def test_a_step_sums_in_launches_of_their_norms(sp, tp, size, compiled):
    own, xlas = (
        compiled(Case(sp, tp, Mode(sp, 1), size, num_decodes=ROWS, sums=sums))
        for sums in ("one shot", "xla")
    )
    sums = 2 * 2 - 1  # the last is XLA's, as is the embedding's, and the sampler's
    calls = _sums(own.text)
    assert len(calls) == sums
    assert top_level(own.thunks) == ["CommandBuffer"]
    assert all_reduce_kinds(xlas.text).total() - all_reduce_kinds(own.text).total() == sums
    # Every sum is given the partial sums of the one before, whose memory is not used again until
    # all devices have met for this one; and peers may read all of them.
    partials, named = set(SHARED.findall(own.text)), dict(BITCAST.findall(own.text))
    before = None
    for operands in calls:
        assert before in (None, operands[-2])
        before = named.get(operands[1], operands[1])
        assert before in partials
    counters = {operands[-1] for operands in calls}
    assert len(counters) == 1  # zeros that nobody else has
    named = rf"%{re.escape(min(counters))}(?![\w.-])"
    assert len(re.findall(named, own.text)) == 1 + 1 + sums  # made, met, and each sum


@pytest.mark.parametrize(("sp", "tp", "size"), [(8, 1, "bf16"), (1, 8, "fp8")])
@pytest.mark.thorough
def test_a_step_sums_in_two_shots(sp, tp, size, compiled):
    """All of the layers, the last one, too. XLA has those of the embedding and of the sampler."""
    own, xlas = (
        compiled(Case(sp, tp, Mode(sp, 1), size, num_decodes=ROWS, sums=sums))
        for sums in ("multimem", "xla")
    )
    calls, last = _sums(own.text, "sum_norm_rows"), _sums(own.text, "sum_rows")
    assert (len(calls), len(last)) == (2 * 2 - 1, 1)
    assert top_level(own.thunks) == ["CommandBuffer"]
    assert all_reduce_kinds(xlas.text).total() - all_reduce_kinds(own.text).total() == 2 * 2
    assert len({operands[-1] for operands in (*calls, *last)}) == 1


def _sums(text: str, name: str = "sum_norm") -> list[list[str]]:
    """Return the operands of every sum, in the order of the program."""
    calls = (line for line in text.splitlines() if "custom-call(" in line)
    lines = (line for line in calls if f"/{name}/" in line)
    found = (re.search(r"custom-call\((.*?)\), custom_call_target", line) for line in lines)
    return [re.findall(r"%([\w.-]+)", call[1]) for call in found if call]
