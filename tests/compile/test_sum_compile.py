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
from serving.bench.thunks import top_level  # noqa: E402
from shiftjax.device.all_reduces import all_reduce_kinds  # noqa: E402
from shiftjax.device.sum_cases import CHAIN, SumStep, kernel, lowered  # noqa: E402
from shiftjax.models.sum_backend import SumShape  # noqa: E402
from shiftjax.parallel.grid import Mode  # noqa: E402

AXES = "unit", "device"
ROWS = 16  # as many as a switch sums, of 8 devices that have 8,192 columns
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


@pytest.mark.parametrize(
    ("chip", "hidden", "rows", "codes"),
    [("h100", 8192, 8, True), ("h200", 3584, 64, False), ("h200", 16384, 1, True)],
)
def test_a_sum_and_its_norm_are_one_kernel(chip, hidden, rows, codes, capsys):
    mesh = aot.make_mesh(chip, (1, 8), AXES)
    sizes = (rows, hidden), (8, 2, hidden, hidden), (hidden,)
    specs = P(), P("device"), P()
    arrays = [
        jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=jax.sharding.NamedSharding(mesh, spec))
        for size, spec in zip(sizes, specs, strict=True)
    ]
    step = two_sums(NormKind(1e-5, codes=codes))
    on_each = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    with capsys.disabled():  # Mosaic prints what it takes
        program = aot.compile_for(mesh, on_each, *arrays)
    (kernel,) = (kernel for kernel in program.kernels if kernel.name.startswith("sum_norm"))
    assert kernel.registers <= REGISTERS * (1 + (hidden > 8192))
    assert kernel.count(r"multimem\.ld_reduce\S*\.add\S*\.bf16x2") == -(-hidden // 1024)
    assert kernel.count(r"multimem\.red\.release\.sys") == 1
    assert kernel.count(r"fence\.acquire\.sys") == 1
    text = program.executable.as_text()
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 4
    assert text.count("skip_device_barrier = true") == 2  # devices meet before the first alone
    assert " copy(" not in text


@pytest.mark.thorough
def test_the_chain_of_the_check_compiles_for_devices_in_another_order():
    devices = list(aot.make_mesh("h200", (8,), ("x",)).devices.flat)
    text = lowered(kernel, SumShape(8192, "bfloat16"), SumStep(ROWS), devices).compile().as_text()
    assert len(_sums(text)) == CHAIN
    assert 'xla_replica_ids = "0,1,2,3,4,5,6,7"' in text


@pytest.fixture(scope="module")
def compiled() -> Compiler:
    return Compiler()


@pytest.mark.parametrize(("sp", "tp", "size"), [(8, 1, "bf16"), (1, 8, "fp8")])
@pytest.mark.thorough
def test_a_step_sums_in_launches_of_their_norms(sp, tp, size, compiled):
    own, xlas = (
        compiled(Case(sp, tp, Mode(sp, 1), size, num_decodes=ROWS, sums=sums))
        for sums in ("multimem", "xla")
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


def _sums(text: str) -> list[list[str]]:
    """Return the operands of every sum, in the order of the program."""
    lines = (line for line in text.splitlines() if "/sum_norm/" in line and "custom-call(" in line)
    found = (re.search(r"custom-call\((.*?)\), custom_call_target", line) for line in lines)
    return [re.findall(r"%([\w.-]+)", call[1]) for call in found if call]
