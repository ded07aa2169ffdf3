"""Bytes and seconds of weights of four bits."""

from dataclasses import replace

import pytest

from shiftjax.arch.formats import formats_of
from shiftjax.arch.presets import PRESETS
from shiftjax.costs.machine_files import load_engine, load_machine
from shiftjax.costs.memory import weight_bytes
from shiftjax.costs.step_costs import CostModel
from shiftjax.options import ConfigError
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.stored import with_packed_codes

GPT_OSS = PRESETS["gpt-oss-120b"]


@pytest.mark.parametrize(("name", "gib"), [("gpt-oss-120b", 60.8), ("gpt-oss-20b", 12.8)])
def test_gpt_oss_takes_what_it_is_published_with(name, gib):
    """Its model card, arXiv 2508.10925, section 2.1: checkpoints of 60.8 and 12.8 GiB."""
    num_bytes = weight_bytes(Layout(PRESETS[name], 1, 1), formats_of("mxfp4"))
    assert num_bytes / 2**30 == pytest.approx(gib, rel=0.005)


def test_int4_takes_half_a_byte_and_its_scales():
    model = with_packed_codes(PRESETS["llama-3.3-70b"], "int4")
    plain = weight_bytes(Layout(model, 1, 1), formats_of("bfloat16"))
    packed = weight_bytes(Layout(model, 1, 1), formats_of("int4"))
    matrices = 80 * (8192 * 8192 * 2 + 2 * 8192 * 1024 + 3 * 8192 * 28_672)
    assert plain - packed == matrices * (2 - 0.5 - 4 / 128)
    zeros = replace(model, codes=replace(model.codes, has_zeros=True))
    more = weight_bytes(Layout(zeros, 1, 1), formats_of("int4")) - packed
    assert more == matrices // 128


def test_devices_have_equal_parts():
    model = with_packed_codes(PRESETS["llama-3.3-70b"], "int4")
    layers = replace(model, num_layers=1), replace(model, num_layers=2)
    one, eight = (
        [weight_bytes(Layout(each, 1, tp), formats_of("int4")) for each in layers] for tp in (1, 8)
    )
    norms = 2 * 2 * 8192
    assert (eight[1] - eight[0] - norms) * 8 == one[1] - one[0] - norms


def test_a_plain_checkpoint_has_no_four_bits():
    with pytest.raises(ConfigError, match="the checkpoint has no int4, and none is made"):
        weight_bytes(Layout(PRESETS["llama-3.1-8b"], 1, 1), formats_of("int4"))


def test_a_decode_step_reads_what_is_stored():
    """Of gpt-oss experts alone become quicker; of others all matrices do."""
    machine, engine = load_machine("h200x8"), load_engine("shiftjax")

    def product(model, weights: str) -> float:
        costs = CostModel(Layout(model, 1, 1), machine, engine, formats_of(weights))
        return costs.kernels.product(1, 16_384, 65_536)

    dense = with_packed_codes(PRESETS["llama-3.1-8b"], "int4")
    assert product(dense, "int4") / product(dense, "bfloat16") == pytest.approx(0.266, abs=0.05)
    assert product(GPT_OSS, "mxfp4") == product(GPT_OSS, "bfloat16")
