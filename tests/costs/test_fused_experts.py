"""Experts of engines that divide each over the devices, in Triton's kernels, beside measured."""

from dataclasses import replace

import pytest

from shiftjax.arch.config import Experts
from shiftjax.arch.formats import Formats
from shiftjax.costs.expert_load import most_loaded
from shiftjax.costs.expert_part import expert_part
from shiftjax.costs.kernel_costs import KernelCosts
from shiftjax.costs.machine_files import load_engine, load_machine
from shiftjax.costs.tuned_experts import TUNED, tuned_rate
from shiftjax.parallel.layout import Layout
from shiftjax.sim.models import MODELS

BF16, FP8 = Formats("bfloat16", "bfloat16", "bfloat16"), Formats("fp8", "bfloat16", "bfloat16")
MXFP4 = Formats("mxfp4", "bfloat16", "bfloat16")
LAUNCHES = 5
MEASURED = {
    # (machine, model, format, devices): milliseconds by tokens, as ai-dynamo/aiconfigurator has
    # them of vLLM 0.14 with routing by a power law.
    ("h100x8", "qwen3-235b-a22b", BF16, 4): {128: 0.430, 1024: 0.754, 4096: 1.700, 8192: 3.128},
    ("h100x8", "qwen3-30b-a3b", BF16, 1): {128: 0.428, 1024: 0.710, 4096: 1.635, 8192: 2.982},
    ("h100x8", "qwen3-235b-a22b", FP8, 4): {128: 0.272, 1024: 0.556, 4096: 1.620, 8192: 3.055},
    ("h200x8", "qwen3-235b-a22b", BF16, 8): {128: 0.193, 1024: 0.319, 4096: 0.658, 8192: 1.159},
    ("a100x8", "qwen3-235b-a22b", BF16, 4): {128: 0.726, 1024: 1.317, 4096: 2.949, 8192: 5.791},
}


def experts_of(model: str) -> Experts:
    experts = MODELS[model].experts
    assert experts is not None
    return experts


def seconds_of(machine, model, formats, devices, tokens):
    """All that the tables time: products, what goes between them, and launches."""
    chip = replace(load_machine(machine), sustained_efficiency=1.0)  # one kernel alone
    kernels, layout = KernelCosts(chip, formats), Layout(MODELS[model], 1, devices)
    modes = (layout.shift, layout.shift)
    part = expert_part(kernels, load_engine("vllm"), layout, modes, tokens)
    router = kernels.product(tokens, MODELS[model].hidden_size, experts_of(model).num)
    moved = kernels.moved(part.numbers * formats.activation_bytes)
    return part.products - router + moved + LAUNCHES * chip.kernel_seconds


def test_experts_take_about_what_was_measured():
    off = [
        1e3 * seconds_of(*case, tokens) / milliseconds - 1
        for case, row in MEASURED.items()
        for tokens, milliseconds in row.items()
    ]
    assert all(abs(error) < 0.7 for error in off)
    assert sum(map(abs, off)) / len(off) < 0.25


@pytest.mark.parametrize("machine", ["h100x8", "a100x8"])
def test_tuned_shapes_are_as_quick_as_measured(machine: str):
    """Milliseconds of vLLM 0.12, 128 experts of 1,536 over 8 devices; default tiles take longer."""
    measured = {"h100x8": {2048: 0.469, 8192: 1.233}, "a100x8": {2048: 0.808, 8192: 2.482}}
    for tokens, milliseconds in measured[machine].items():
        seconds = seconds_of(machine, "qwen3-235b-a22b", BF16, 8, tokens)
        assert 1e3 * seconds == pytest.approx(milliseconds, rel=0.2)
    assert tuned_rate(machine, 128, 192, "bfloat16") > 1.6
    assert tuned_rate(machine, 128, 192, "fp8") == tuned_rate(machine, 160, 192, "bfloat16") == 1


def test_every_device_has_all_pairs_and_a_part_of_every_expert():
    layout, engine = Layout(MODELS["qwen3-235b-a22b"], 1, 8), load_engine("vllm")
    experts, hidden = experts_of("qwen3-235b-a22b"), layout.model.hidden_size
    kernels = KernelCosts(load_machine("h100x8"), BF16)
    part = expert_part(kernels, engine, layout, (layout.shift, layout.shift), 512)
    load = most_loaded(experts, 1, 512)
    assert load.pairs == 512 * 8
    assert part.numbers == 4096 * (3 * 192 + hidden) + 512 * hidden
    products = kernels.fused_experts(load, hidden, 1536 // 8, TUNED["h100x8", 128, 192])
    assert part.products == pytest.approx(products + kernels.product(512, hidden, 128))


def test_wide_experts_have_the_rate_of_tuned_kernels():
    layout = Layout(MODELS["mixtral-8x7b"], 1, 2)
    kernels, modes = KernelCosts(load_machine("h100x8"), BF16), (layout.shift, layout.shift)
    part = expert_part(kernels, load_engine("vllm"), layout, modes, 4096)
    load = most_loaded(experts_of("mixtral-8x7b"), 1, 4096)
    products = kernels.experts(load, 4096, 14_336 // 2)
    assert part.products == pytest.approx(products + kernels.product(4096, 4096, 8))
    assert products < 0.6 * kernels.fused_experts(load, 4096, 14_336 // 2)


def test_a_machine_without_measured_ones_has_its_own_rate():
    kernels = KernelCosts(load_machine("l4x8"), MXFP4)
    load = most_loaded(experts_of("gpt-oss-20b"), 1, 512)
    assert kernels.fused_experts(load, 2880, 2880) == kernels.experts(load, 2880, 2880)
