"""The base and shift steps of Llama-70B, compiled for 8 H200s on a machine that has none.

What the compiler plans is checked, and exactly: aliasing, copies, collectives, bytes, launches.
What only a chip can tell is not: whether the numbers are right, and how long they take.
"""

import math
import re
from collections import Counter

import aot
import jax
import numpy as np
import pytest
from hlo import (
    Instruction,
    collectives,
    counted,
    entry,
    expected_collectives,
    instructions,
    launches,
    matrices,
    moves,
    shape_bytes,
    sizes_of,
    weight_moves,
)
from spent import exhaustive, thorough

from serving.bench.hlo import Computation, computations
from serving.bench.thunks import top_level
from shiftjax.arch.formats import formats_of
from shiftjax.arch.weights import num_parameters
from shiftjax.costs.machine_files import load_engine
from shiftjax.costs.memory import kv_token_bytes
from shiftjax.deploy.resolve import base_rule
from shiftjax.device.all_reduces import all_reduce_kinds
from shiftjax.device.sampling import sample
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout

aot.require()

from steps import (  # noqa: E402
    BLOCK_SIZE,
    DECODE,
    FLEETS,
    KERNEL,
    NUM_DEVICES,
    NUM_LAYERS,
    PREFILL,
    Case,
    CompiledStep,
    Compiler,
    cases,
    define_step,
    device_bytes,
    fleet_cases,
    llama_70b,
    modes_of,
    predicted_collectives,
    resident_bytes,
    sampler_collectives,
)

H200_BYTES = 141e9  # what is sold; the driver keeps a part of it
MEMORY_FRACTION = 0.9  # the engine's default
LONGEST = 64 * 8192  # tokens of KV cache that a deployment should have room for
BF16_BYTES = 2
TWO_SHOT_BYTES = 4 << 20  # of 8 devices; of fewer, larger sums take XLA's kernels, too
# Of a layer: decode, its combination, two norms; fp8: the KV write and four products, too.
KERNELS = {"bf16": 5, "fp8": 9}
FEW_ROWS, PRODUCTS = 64, {"bf16": 4, "fp8": 0}  # bf16: four products more of few rows
TILES = {PREFILL: 2, DECODE: 0}  # more of them, for tiles of chunks: prefill, its combination
# Of a layer, and beside the layers; TP = 1 has no all-reduces, which shapes what fuses.
MAX_LAUNCHES = {"base": (19, 46), "shift": (16, 44)}

FLEET = [case for (units, tp), widths in FLEETS.items() for case in fleet_cases(units, tp, widths)]
ALIAS = Case(4, 2, Mode(4, 1))
NO_BRANCHES = "xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,COLLECTIVES"
WHOLE = [Case(4, 2, mode, sampler=sample) for mode in modes_of(4)]  # as the engine has them
SLICE, MORE_LAYERS = ALIAS._replace(strategy="slice"), ALIAS._replace(num_layers=4)
XLA = ALIAS._replace(attention="xla", num_layers=1)
XLA_FP8 = XLA._replace(size="fp8")
PLAIN = ALIAS._replace(gpu_options=NO_BRANCHES, num_layers=1, sampler=sample)
LATE = [Case(4, 2, mode, late_layers=1) for mode in modes_of(4)]
OTHERS = ("bf16", 8), ("bf16", 2), ("fp8", 4), ("fp8", 2)
EVERY = [*WHOLE, *cases("bf16"), *cases("fp8"), *FLEET]


def name_of(case: Case) -> str:
    kind = f"{case.units}-units-" if case.units else ""
    kind += "whole-" if case.sampler is sample else ""
    return f"{kind}{case.size}-{case.sp}x{case.tp}-{case.mode.label}"


# Of a format, degrees that the other has.
TWICE = [(each,) for each in EVERY if (each.size, each.sp) in OTHERS]
ONCE = [(each,) for each in EVERY if each != ALIAS and (each,) not in TWICE]
every_case = pytest.mark.parametrize(
    ("case",), [(ALIAS,), *thorough(*ONCE), *exhaustive(*TWICE)], ids=name_of
)


@pytest.fixture(scope="module")
def compiled() -> Compiler:
    return Compiler()


def pool_moves(one: CompiledStep) -> list[Instruction]:
    """What makes an array as large as K of all layers, or of one, but the writes in place."""
    sizes = one.pool_bytes, device_bytes(one.pools[0][0])
    kinds = ("copy", "copy-start", "transpose", "convert", "concatenate", "pad", "slice")
    return [i for i in moves(one.text, kinds) if shape_bytes(i.shape) in sizes]


def kernel_calls(text: str) -> list[Instruction]:
    """Launches of Mosaic kernels, those that take a slice of an operand included."""
    bodies = computations(text)
    return [
        one
        for one in entry(text)
        if KERNEL in one.rest or any(KERNEL in each.rest for each in body_of(one, bodies))
    ]


def body_of(one: Instruction, bodies: dict[str, Computation]) -> list[Instruction]:
    called = re.search(r"calls=%([\w.-]+)", one.rest)
    return bodies[called[1]].instructions if called else []


def sources(call: Instruction, text: str) -> list[Instruction]:
    """Where the operands of a launch come from, seen through what does nothing."""
    by_name, found = {one.name: one for one in entry(text)}, []
    waiting = list(call.operands)
    while waiting:
        one = by_name[waiting.pop()]
        if one.opcode in ("bitcast", "get-tuple-element"):
            waiting += one.operands
        else:
            found.append(one)
    return found


@pytest.mark.costs(10)
@every_case
def test_the_pool_is_written_in_place(case, compiled):
    one = compiled(case)
    leaves = jax.tree.leaves(one.pools)
    assert one.aliased_bytes == device_bytes(one.pools)
    assert one.text.splitlines()[0].count("may-alias") == len(leaves) == 2
    assert one.temporary_bytes < one.pool_bytes  # no room for a copy of any layer's
    assert pool_moves(one) == []


@every_case
def test_collectives_are_the_papers_to_the_byte(case, compiled):
    one = compiled(case)
    sizes = *case.bucket[:2], BF16_BYTES, 128 if case.size == "fp8" else 0
    expected = expected_collectives(one.step.layout, case.mode, *sizes)
    assert collectives(one.text) == expected + counted(sampler_collectives(one))


@every_case
def test_weights_are_read_where_they_are(case, compiled):
    one = compiled(case)
    assert weight_moves(one.text, matrices(one.step, one.shards), "bf16") == []
    if case.mode.sp == 1:  # few tokens: there is no room for one of three large matrices
        model = one.step.layout.model
        devices = one.step.layout.num_devices
        gate = model.intermediate_size * model.hidden_size * BF16_BYTES // devices
        assert one.temporary_bytes < gate


@pytest.mark.thorough
def test_slicing_in_the_step_copies_every_weight(compiled):
    """The control: a copy is seen where there is one, in the text and in the temporaries."""
    alias, sliced = compiled(ALIAS), compiled(SLICE)
    moves = weight_moves(sliced.text, matrices(alias.step, alias.shards), "bf16")
    assert len(moves) >= 7 * ALIAS.num_layers  # q, k, v, o, gate, up, down
    model = llama_70b(1)
    heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    layer = model.hidden_size * (heads + 3 * model.intermediate_size) * BF16_BYTES // NUM_DEVICES
    assert sliced.temporary_bytes - alias.temporary_bytes > layer // 2


@pytest.mark.thorough
def test_a_second_copy_of_the_weights_is_for_the_same_program(compiled):
    alias, second = (
        define_step(ALIAS._replace(strategy=strategy), compiled.devices)[0]
        for strategy in ("alias", "replicate")
    )
    shift = ALIAS.mode
    apart = alias.weights._replace(is_joined=False)  # copies are not joined
    assert apart.abstract(shift, alias.mesh) == second.weights.abstract(shift, second.mesh)


@every_case
def test_every_layer_has_its_kernels_and_few_launches(case, compiled):
    one = compiled(case)
    each = KERNELS[case.size] + TILES[case.bucket]
    if case.bucket.tokens <= FEW_ROWS * case.mode.sp:
        each += PRODUCTS[case.size]
    assert one.text.count(KERNEL) == case.num_layers * each
    found, (each, beside) = launches(one.text), MAX_LAUNCHES[case.mode.label]
    assert len(found) <= case.num_layers * each + beside
    assert not [i for i in found if i.opcode == "while"]


@every_case
def test_the_host_launches_a_step_at_once(case, compiled):
    """One CUDA graph holds all of it: no branch or loop makes the host wait, nothing is beside."""
    assert top_level(compiled(case).thunks) == ["CommandBuffer"]


@pytest.mark.thorough
def test_with_branches_left_out_of_graphs_the_host_waits_in_every_step(compiled):
    """The control: the sampler's branch is the host's, and what it cuts are several launches."""
    kinds = top_level(compiled(PLAIN).thunks)
    assert "Conditional" in kinds and len(kinds) > 3


@every_case
def test_sums_of_small_steps_take_kernels(case, compiled):
    """Those of shift all; of base those above 4 MB may be NCCL's, as the size of a group has it."""
    one = compiled(case)
    found = collectives(one.text)
    sums = {size: n for (kind, size), n in found.items() if kind == "all-reduce"}
    kinds = all_reduce_kinds(one.text)
    assert kinds.total() == sum(sums.values())
    assert kinds["nccl"] <= sum(n for size, n in sums.items() if size > TWO_SHOT_BYTES)
    if case.mode.sp == 1:
        assert kinds["nccl"] == 0


@pytest.mark.thorough
def test_nccl_has_no_part_in_a_decode_step(compiled):
    """What NCCL does in a graph is captured again at every step: kernels do all of it.

    Those that the sampler's branches add are in no loop: a kernel counts its calls when it is
    recorded, so what is recorded once must run once.
    """
    one = compiled(Case(1, 8, Mode(1, 1), sampler=sample))
    kinds = Counter(thunk.kind for thunk in one.thunks)
    sums = predicted_collectives(one)
    assert collectives(one.text) == sums and {kind for kind, _ in sums} == {"all-reduce"}
    assert kinds["CollectiveKernel"] == sums.total()
    assert not [kind for kind in kinds if kind.startswith(("All", "Reduce", "Ragged"))]
    assert "While" not in kinds


@every_case
def test_kernels_take_nothing_whose_address_changes(case, compiled):
    """But the pools: else XLA changes the graph before every launch, kernel by kernel.

    Weights stay where they are: kernels read norms there, codes of every matrix, and scales; or
    numbers, of few rows.
    """
    one = compiled(case)
    pool = device_bytes(one.pools[0][0])
    taken = [each for call in kernel_calls(one.text) for each in sources(call, one.text)]
    arguments = [each for each in taken if each.opcode == "parameter"]
    found = {shape_bytes(each.shape) for each in arguments}
    norms = case.num_layers * case.layout.model.hidden_size * BF16_BYTES
    codes = {device_bytes(each) for each in one.params if each.dtype == "float8_e4m3fn"}
    multiply = case.size == "fp8" or case.bucket.tokens <= FEW_ROWS * case.mode.sp
    others = {device_bytes(each) for each in one.params} if multiply else {norms}
    assert {norms} | codes <= found <= {pool} | others
    assert len(found - {pool, norms}) >= 3 * multiply  # heads, KV heads, and MLPs
    assert bool(codes) == (case.size == "fp8")
    assert len(taken) >= 6 * case.num_layers


@pytest.mark.thorough
def test_a_step_of_a_fleet_needs_what_it_needs_without_one(compiled):
    """Whatever a block holds: of every size there is a kernel (see above), and no table grows."""
    assert {case.pool.block_size for case in FLEET} == {16, 32, 64, 128}
    twins = [case for case in FLEET if case.sp == case.units]
    assert [(case.sp, case.tp) for case in twins] == list(FLEETS)
    for case in twins:
        one, alone = compiled(case), compiled(case._replace(units=0))
        assert case.pool.block_size > BLOCK_SIZE == alone.case.pool.block_size
        assert one.temporary_bytes <= alone.temporary_bytes
        assert len(launches(one.text)) == len(launches(alone.text))
        assert one.aliased_bytes == alone.aliased_bytes == device_bytes(alone.pools)


@pytest.mark.thorough
@pytest.mark.parametrize("case", LATE, ids=name_of)
def test_late_layers_read_the_pools_where_they_are(case, compiled):
    """SwiftKV: a layer of each kind. The branch without rows has no copy of a pool either."""
    one = compiled(case)
    assert one.aliased_bytes == device_bytes(one.pools) and pool_moves(one) == []
    late = KERNELS["bf16"] - 1 + PRODUCTS["bf16"]  # which has no tiles, and writes nothing
    first = KERNELS["bf16"] + TILES[case.bucket]
    if case.bucket.tokens <= FEW_ROWS * case.mode.sp:
        first += PRODUCTS["bf16"] + 1  # keys and values of late layers: a product of few rows
    assert one.text.count(KERNEL) == first + late
    assert " conditional(" in one.text
    assert collectives(one.text) == predicted_collectives(one)


@pytest.mark.thorough
def test_the_xla_path_compiles_for_a_gpu_too(compiled):
    """What a GPU without kernels gets: loops, but the pool stays where it is."""
    one = compiled(XLA)
    assert KERNEL not in one.text
    assert one.temporary_bytes < one.pool_bytes
    expected = expected_collectives(one.step.layout, XLA.mode, *XLA.bucket[:2], BF16_BYTES)
    assert collectives(one.text) == expected + counted(sampler_collectives(one))


# ------------------------------------------------------------------------------- memory


@every_case
def test_the_arguments_are_weights_pools_and_inputs(case, compiled):
    """So the arguments of all 80 layers are known from their shapes, too."""
    one = compiled(case)
    assert one.argument_bytes == device_bytes((one.params, one.pools, one.inputs))


@pytest.mark.thorough
def test_temporaries_hardly_grow_with_the_layers(compiled):
    """But for the table of the pools' addresses: 80 layers take less than 4 MB more than two."""
    few, more = compiled(ALIAS), compiled(MORE_LAYERS)
    layers = MORE_LAYERS.num_layers - ALIAS.num_layers
    assert 0 <= more.temporary_bytes - few.temporary_bytes < layers * (4 << 20) // NUM_LAYERS
    assert (
        len(launches(more.text)) - len(launches(few.text))
        <= layers * MAX_LAUNCHES[ALIAS.mode.label][0]
    )


@pytest.mark.thorough
@pytest.mark.parametrize("case", cases("fp8"), ids=name_of)
def test_codes_are_multiplied_as_they_are(case, compiled):
    """No program has them in a wider format; `weight_moves` above finds what turns or copies."""
    one = compiled(case)
    pairs = zip(one.step.model.declared, one.shards, strict=True)
    shards = {x.sharding.shard_shape(x.shape) for weight, x in pairs if weight.kind == "codes"}
    assert len(shards) > 3
    for *outer, rows, columns in shards:
        for sizes in (f"{rows},{columns}", f"{rows * math.prod(outer)},{columns}"):
            assert not re.search(rf"(f32|bf16|f16)\[(\d+,)?{sizes}\]", one.text), sizes


@pytest.mark.thorough
@pytest.mark.parametrize("case", [*cases("fp8"), XLA_FP8], ids=name_of)
def test_a_pool_of_codes_is_never_held_in_a_wider_format(case, compiled):
    """By kernels nor by loops; its scales are arrays of the table."""
    one = compiled(case)
    assert sum(weight.kind == "kv_scale" for weight in one.step.model.declared) == case.num_layers
    codes = one.pools[0][0]
    assert codes.dtype == "float8_e4m3fn"
    sizes = {math.prod(codes.sharding.shard_shape(codes.shape)), one.pool_bytes}
    shapes = [i.shape for i in instructions(one.text) if not i.shape.startswith(("(", "f8e4m3fn"))]
    assert not sizes & {math.prod(sizes_of(shape)) for shape in shapes}


@pytest.mark.thorough
def test_the_simulators_preset_has_as_many_kernels(compiled):
    """Beside the layers, in SHIFT; those of a layer are in test_launches.py."""
    engine, layers = load_engine("shiftjax"), MORE_LAYERS.num_layers
    cases = (one._replace(sampler=sample) for one in (ALIAS, MORE_LAYERS))
    few, more = (len(launches(compiled(case).text)) for case in cases)
    each = (more - few) / (layers - ALIAS.num_layers)  # every second layer may have one more
    moves = 2  # beside the layers: two sums
    assert abs(more - layers * each - moves - engine.kernels_per_step) <= 2


def kv_tokens(case: Case, compiled: Compiler) -> int:
    """The tokens whose KV fits beside the weights of 80 layers and the temporaries."""
    steps = [compiled(case._replace(mode=mode)) for mode in modes_of(case.sp)]
    temporaries = max(one.temporary_bytes for one in steps)
    layout = Layout(llama_70b(NUM_LAYERS), case.sp, case.tp)
    each = BLOCK_SIZE * kv_token_bytes(
        layout, formats_of(kv="fp8" if case.size == "fp8" else "auto")
    )
    room = int(MEMORY_FRACTION * H200_BYTES) - resident_bytes(case, compiled.devices)
    return BLOCK_SIZE * max(0, (room - temporaries) // each)


@pytest.mark.thorough
@pytest.mark.parametrize("size", ["bf16", "fp8"])
def test_what_fits_an_h200(size, compiled):
    """Only bf16 weights whole on every device, 139 GB of 141, leave no room."""
    for case in (one for one in cases(size) if one.mode.sp == 1):
        alias, second = (
            kv_tokens(case._replace(strategy=strategy), compiled)
            for strategy in ("alias", "replicate")
        )
        if (size, case.sp) == ("bf16", 8):
            assert alias == second == 0
        else:
            assert alias >= second > LONGEST
            assert (alias > second) == (case.sp > 1)


def test_the_rule_chooses_the_mesh_that_the_paper_does():
    weight_bytes = num_parameters(llama_70b(NUM_LAYERS)) * BF16_BYTES
    assert base_rule(weight_bytes, int(H200_BYTES), NUM_DEVICES) == (4, 2)
    assert base_rule(weight_bytes // 2, int(H200_BYTES), NUM_DEVICES) == (8, 1)


@pytest.mark.thorough
def test_the_formula_of_the_weights(compiled):
    """w / TP for BASE, and w / P more for a second copy (arXiv 2509.16495, section 3.3.2)."""
    case = Case(4, 2, Mode(4, 1))
    weights = num_parameters(llama_70b(NUM_LAYERS)) * BF16_BYTES
    alias, second = (
        resident_bytes(case._replace(strategy=strategy), compiled.devices)
        for strategy in ("alias", "replicate")
    )
    # the LM head is split over all devices, where the formula has it over TP
    np.testing.assert_allclose(alias, weights / 2, rtol=0.02)
    np.testing.assert_allclose(second - alias, weights / NUM_DEVICES, rtol=0.02)
