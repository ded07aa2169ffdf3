"""Seconds of a compiled step from its text: what every kind of launch reads, writes and costs."""

import pytest

from serving.bench.compiled_cost import Attention, Kernel, Prices, kernels_of, step_seconds
from serving.bench.thunks import dumped_thunks, read_thunks, top_level
from shiftjax.costs.kernel_costs import matmul_seconds
from shiftjax.costs.machine_files import load_machine

H200 = load_machine("h200x8")
RATE = H200.memory_bytes_per_second * H200.memory_efficiency
LAUNCH = H200.kernel_seconds

TEXT = """HloModule jit_step

%take (param_0: bf16[1000,64], param_1: s32[8]) -> bf16[8,64] {
  %param_0 = bf16[1000,64]{1,0} parameter(0)
  %param_1 = s32[8]{0} parameter(1)
  ROOT %gather.1 = bf16[8,64]{1,0} gather(%param_0, %param_1), offset_dims={1}
}

%put (p0: bf16[4000,64], p1: bf16[8,64], p2: s32[8]) -> bf16[4000,64] {
  %p0 = bf16[4000,64]{1,0} parameter(0)
  %p1 = bf16[8,64]{1,0} parameter(1)
  %p2 = s32[8]{0} parameter(2)
  ROOT %scatter.1 = bf16[4000,64]{1,0} scatter(%p0, %p2, %p1), to_apply=%region
}

%sum_inside (r0: bf16[512]) -> bf16[512] {
  %r0 = bf16[512]{0} parameter(0)
  ROOT %psum.1 = bf16[512]{0} all-reduce(%r0), \
replica_groups=mesh['tp'=4,'shift'=2,'sp'=1] {'tp','shift'}, \
backend_config={"kernel_strategy":"KERNEL_STRATEGY_TRITON_ONE_SHOT"}
}

%dot_inside (q0: bf16[8,64], q1: bf16[64,32]) -> f32[4,8,32] {
  %q0 = bf16[8,64]{1,0} parameter(0)
  %q1 = bf16[64,32]{1,0} parameter(1)
  %q2 = bf16[8,4,16]{2,1,0} bitcast(%q0)
  %q3 = bf16[32,4,16]{2,1,0} bitcast(%q1)
  ROOT %dot.1 = f32[4,8,32]{2,1,0} dot(%q2, %q3), lhs_batch_dims={1}, lhs_contracting_dims={2}
}

%codes_inside (c0: f8e4m3fn[4096,4096], c1: f8e4m3fn[4096,4096]) -> f32[4096,4096] {
  %c0 = f8e4m3fn[4096,4096]{1,0} parameter(0)
  %c1 = f8e4m3fn[4096,4096]{1,0} parameter(1)
  ROOT %dot.2 = f32[4096,4096]{1,0} dot(%c0, %c1), lhs_contracting_dims={1}
}

ENTRY %main (a: bf16[1000,64], pool: bf16[4000,64]) -> bf16[4000,64] {
  %table = bf16[1000,64]{1,0} parameter(0)
  %pool = bf16[4000,64]{1,0} parameter(1)
  %ids = s32[8]{0} parameter(2)
  %weight = bf16[64,128]{1,0} parameter(3)
  %small = bf16[64,32]{1,0} parameter(4)
  %embedding.7 = bf16[8,64]{1,0} fusion(%table, %ids), kind=kLoop, calls=%take
  %gemm.1 = (bf16[8,128]{1,0}, s8[4096]{0}) custom-call(%embedding.7, %weight), \
custom_call_target="__cublas$gemm"
  %out = bf16[8,128]{1,0} get-tuple-element(%gemm.1), index=0
  %gemm_fusion = f32[4,8,32]{2,1,0} fusion(%embedding.7, %small), kind=kCustom, calls=%dot_inside
  %codes = f8e4m3fn[4096,4096]{1,0} parameter(5)
  %codes_fusion = f32[4096,4096]{1,0} fusion(%codes, %codes), kind=kCustom, calls=%codes_inside
  %fusion-start.1 = ((bf16[512]{0}), bf16[512]{0}) fusion-start(%embedding.7), kind=kCustom, \
calls=%sum_inside
  %sum = bf16[512]{0} fusion-done(%fusion-start.1)
  %gather-start = (f32[2]{0}, f32[16]{0}) all-gather-start(%sum), replica_groups=[1,8]<=[8]
  %gather-done = f32[16]{0} all-gather-done(%gather-start)
  %choice = bf16[8,64]{1,0} conditional(%ids, %sum, %sum), true_computation=%a, \
false_computation=%b
  %call.3 = bf16[8,64]{1,0} custom-call(%sum, %pool, %ids), \
custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(attend)/decode_attention/mpmd_map"}
  %call.4 = bf16[8,64]{1,0} custom-call(%sum, %pool, %ids), \
custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(attend)/decode_combine/mpmd_map"}
  %codes = f8e4m3fn[8,64]{1,0} parameter(5)
  %matrix = f8e4m3fn[2,4096,32]{2,1,0} parameter(6)
  %scale = f32[2,8]{1,0} parameter(7)
  %call.5 = bf16[8,4096]{1,0} custom-call(%codes, %scale, %matrix), \
custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/block_product_few/mpmd_map"}
  %gate = bf16[2048,64]{1,0} parameter(8)
  %call.7 = (bf16[8,2048]{1,0}, f32[3,16,2,2,64,16]{5,4,3,2,1,0}) custom-call(\
%embedding.7, %gate, %gate), \
custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/block_gated_few/mpmd_map"}
  %call.6 = (bf16[8,64]{1,0}, f8e4m3fn[8,64]{1,0}) custom-call(%embedding.7), \
custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/add_norm_codes/mpmd_map"}
  ROOT %written.2 = bf16[4000,64]{1,0} fusion(%pool, %call.3, %ids), kind=kLoop, calls=%put
}
"""


@pytest.fixture(scope="module")
def kernels() -> dict[str, Kernel]:
    attention = {"decode": Attention(1 << 20, 7, 5e-6)}
    found = kernels_of(TEXT, Prices(H200, "bfloat16", attention))
    assert set(found.values()) == {1}
    assert step_seconds(found) == pytest.approx(sum(kernel.seconds for kernel in found))
    return {kernel.name: kernel for kernel in found}


def test_every_launch_is_one(kernels):
    products = {"gemm", "gemm_fusion", "codes_fusion"}
    products |= {"block_product_few", "block_gated_few"}
    ours = {"decode_attention", "decode_combine", "add_norm_codes"}
    others = {"embedding", "written", "choice", "all-reduce", "all-gather"}
    assert set(kernels) == products | ours | others
    assert {name for name, one in kernels.items() if one.kind == "product"} == products


def test_a_gather_reads_what_it_takes(kernels):
    moved = 8 * 64 * 2 * 2 + 8 * 4  # rows, read and written, and their numbers
    assert kernels["embedding"].num_bytes == moved
    assert kernels["embedding"].seconds == pytest.approx(LAUNCH + moved / RATE)


def test_a_write_in_place_does_not_touch_the_rest(kernels):
    assert kernels["written"].num_bytes == 8 * 64 * 2 * 2 + 8 * 4


def test_a_product_is_its_operations_or_its_weights(kernels):
    gemm, fused = kernels["gemm"], kernels["gemm_fusion"]
    assert gemm.flops == 2 * 8 * 64 * 128 and fused.flops == 2 * 8 * 64 * 32
    computing = matmul_seconds(H200, 8, 64, 128, "bfloat16")
    fixed = LAUNCH + H200.product_seconds
    assert gemm.seconds == pytest.approx(fixed + max(computing, gemm.num_bytes / RATE))
    assert fused.num_bytes == 2 * (8 * 64 + 64 * 32) + 4 * 4 * 8 * 32  # in four partial sums


def test_a_product_of_codes_is_as_quick_as_these_are(kernels):
    sizes = 4096, 4096, 4096
    expected = matmul_seconds(H200, *sizes, "fp8")
    assert expected < 0.6 * matmul_seconds(H200, *sizes, "bfloat16")
    assert kernels["codes_fusion"].seconds == pytest.approx(
        LAUNCH + H200.product_seconds + expected
    )


def test_own_kernels_read_and_write_their_arrays_once(kernels):
    product, norm = kernels["block_product_few"], kernels["add_norm_codes"]
    assert product.flops == 2 * 8 * 64 * 4096
    assert product.num_bytes == 64 * 4096 + 8 * 64 + 2 * 8 * 4 + 2 * 8 * 4096
    computing = matmul_seconds(H200, 8, 64, 4096, "fp8")
    fixed = LAUNCH + H200.product_seconds
    assert product.seconds == pytest.approx(fixed + max(computing, product.num_bytes / RATE))
    gated, sums = kernels["block_gated_few"], 3 * 16 * 2 * 2 * 64 * 16
    assert gated.flops == 2 * 8 * 64 * 4096
    assert gated.num_bytes == 2 * (64 * 4096 + 8 * 64 + 8 * 2048) + 4 * sums
    computing = matmul_seconds(H200, 8, 64, 4096, "bfloat16")
    assert gated.seconds == pytest.approx(fixed + max(computing, gated.num_bytes / RATE))
    assert (norm.kind, norm.num_bytes) == ("kernel", 8 * 64 * (2 + 2 + 1))
    assert norm.seconds == pytest.approx(LAUNCH + norm.num_bytes / RATE)


def test_a_sum_costs_what_its_algorithm_does(kernels):
    one_shot = next(way for way in H200.all_reduce if way.volume == "one_shot")
    expected = one_shot.latency_seconds + 7 * 1024 / one_shot.bytes_per_second
    assert kernels["all-reduce"].kind == "all-reduce, one shot"
    assert kernels["all-reduce"].seconds == pytest.approx(expected)
    (way,) = H200.all_gather
    expected = way.latency_seconds + 7 / 8 * 64 / way.bytes_per_second
    assert kernels["all-gather"].seconds == pytest.approx(expected)


def test_a_branch_is_a_launch(kernels):
    assert kernels["choice"] == Kernel("branch", "choice", "bf16[8,64]{1,0}", 0, 0, LAUNCH)


def test_a_kernel_over_the_context_costs_what_the_formulas_say(kernels):
    assert kernels["decode_attention"] == Kernel(
        "attention", "decode_attention", "bf16[8,64]{1,0}", 1 << 20, 7, LAUNCH + 5e-6
    )
    assert kernels["decode_combine"].seconds == LAUNCH


# ------------------------------------------------------------------------ thunks

THUNKS = """\
000: kCommandBuffer \tcommand_buffer
  001: kKernel \tloop_fusion
  002: kConditional\tconditional
    branch 0:
      003: kKernel\tinner
004: kAllReduceStart all-reduce
005: kWhile while
"""


def test_what_the_host_does_stands_at_the_top():
    thunks = read_thunks(THUNKS)
    assert top_level(thunks) == ["CommandBuffer", "AllReduceStart", "While"]
    assert [thunk.kind for thunk in thunks if thunk.depth] == ["Kernel", "Conditional", "Kernel"]


def test_a_program_without_thunks_is_refused():
    with dumped_thunks() as (_, read), pytest.raises(FileNotFoundError, match="no thunks"):
        read()
