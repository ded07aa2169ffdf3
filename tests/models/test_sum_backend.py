"""Which sums over devices a deployment has, and what is said of those that are XLA's."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from shiftjax.arch.formats import Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.device.sum_cases import (
    CHAIN,
    SumStep,
    all_reduce,
    outputs_of,
    sum_steps,
    wrong_with_sums,
)
from shiftjax.models.sum_backend import SumNeeds, SumShape, choose_sums
from shiftjax.parallel.layout import Layout

MODEL = PRESETS["llama-70b"]


def devices(*ids: int, hosts: int = 1) -> list[SimpleNamespace]:
    return [SimpleNamespace(id=id_, process_index=id_ % hosts) for id_ in ids]


NEEDS = SumNeeds(devices(0, 2, 1, 3, 7, 6, 5, 4), "pallas", check=lambda shape: None)
REASONS = {
    "attention runs as xla": (MODEL, NEEDS._replace(attention="xla")),
    "several groups share the devices": (MODEL, NEEDS._replace(devices=())),
    "as deterministic asks": (MODEL, NEEDS._replace(deterministic=True)),
    "not devices 0 to 7": (MODEL, NEEDS._replace(devices=devices(*range(8, 16)))),
    "several hosts": (MODEL, NEEDS._replace(devices=devices(*range(8), hosts=2))),
    "subtract the mean": (replace(MODEL, norm_centred=True), NEEDS),
    "2880 is not a multiple of 512": (replace(MODEL, hidden_size=2880), NEEDS),
    "the kernel was not tried": (MODEL, NEEDS._replace(check=None)),
    "a switch that errs": (MODEL, NEEDS._replace(check=lambda shape: "a switch that errs")),
}
needs_counters = pytest.mark.skipif(
    not hasattr(plgpu, "alloc_semaphore"), reason="jax before 0.12 leaves sums to XLA"
)
SHAPE, STEP = SumShape(256, "bfloat16"), SumStep(2)


@needs_counters
@pytest.mark.parametrize("reason", REASONS)
def test_what_stays_with_xla_is_said(reason, caplog):
    caplog.set_level(logging.INFO, logger="shiftjax.models.sum_backend")
    model, needs = REASONS[reason]
    chosen = choose_sums(Layout(model, 4, 2), Formats(), needs)
    assert chosen.name == "xla"
    assert reason in chosen.reason
    assert (reason in caplog.text) == (needs.attention == "pallas")


@needs_counters
def test_a_switch_that_passes_its_check_serves():
    asked = []
    needs = NEEDS._replace(check=asked.append)
    assert choose_sums(Layout(MODEL, 4, 2), Formats(), needs).name == "multimem"
    assert asked == [SumShape(8192, "bfloat16", splits_rows=True)]
    assert choose_sums(Layout(MODEL, 1, 1), Formats(), needs).name == "xla"  # and has no sums
    few = choose_sums(Layout(MODEL, 2, 2), Formats(), needs)
    assert few.reason == "fewer than 6 read each other's memory sooner"
    assert len(asked) == 1


def test_both_protocols_are_tried_at_their_edges():
    steps = list(sum_steps(SumShape(8192, "bfloat16"), 8))
    assert steps == [SumStep(1), SumStep(15), SumStep(8, 2), SumStep(2048, 2)]
    whole = SumShape(8192, "bfloat16", splits_rows=False)
    assert list(sum_steps(whole, 8)) == [SumStep(1), SumStep(16)]


def test_an_older_jax_leaves_sums_to_xla(monkeypatch):
    monkeypatch.delattr(plgpu, "alloc_semaphore", raising=False)
    assert "0.12 has" in choose_sums(Layout(MODEL, 4, 2), Formats(), NEEDS).reason


def test_chains_tell_wrong_sums():
    devices = jax.devices()[:2]
    right = outputs_of(all_reduce, SHAPE, STEP, devices)()[0]
    assert wrong_with_sums([right] * 2, right) is None
    assert "change from run to run" in wrong_with_sums([right, right * 1.001], right)
    ahead = np.stack([right[0], right[0] * 1.001])
    assert "devices come to different numbers" in wrong_with_sums([ahead], right)

    def stale(partial, x, weight, meeting):  # one device of two is read as it was before
        return all_reduce(partial * 1.05, x, weight, meeting)

    wrong = outputs_of(stale, SHAPE, STEP, devices)()[0]
    assert "a row of a chain of sums is off" in wrong_with_sums([wrong] * 2, right)
    assert CHAIN % 2 == 0  # both buffers are used as often
