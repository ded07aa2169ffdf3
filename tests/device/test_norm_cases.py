"""Norms of the residual stream: which implementation is chosen, and how it is tried first."""

import dataclasses
import json
import logging
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from shiftjax.arch.formats import Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.costs.buckets import Bucket
from shiftjax.device import attention_cases
from shiftjax.device.attention_cases import Trial, judged
from shiftjax.device.attention_check import shape_of
from shiftjax.device.attention_steps import Cases
from shiftjax.device.norm_cases import (
    NormStep,
    kernels,
    norm_steps,
    operations,
    outputs_of,
    wrong_with_norms,
)
from shiftjax.models.attention_backend import loops_of
from shiftjax.models.norm_backend import NormShape, choose_norms, norm_shape, pallas_norms
from shiftjax.parallel.layout import Layout

BF16, FP8 = Formats(), Formats("fp8", "fp8")
SHAPE = NormShape(640, "bfloat16", 1e-5, offset=False, in_float32=False, scale=1.0, codes=True)
LLAMA = replace(PRESETS["llama-70b"], num_layers=1)
DEVICES = jax.devices()[:1]
INTERPRETER = plgpu.InterpretGPUParams(detect_races=True)


def chosen(model=LLAMA, formats: Formats = BF16, attention: str = "pallas", **options):
    return choose_norms(Layout(model, 8, 1), formats, attention, **options)


def test_the_kernel_runs_where_attention_does():
    assert chosen().name == "pallas" and chosen().add_norm is not None
    assert chosen(attention="xla") == ("xla", None, False, "attention runs as xla")


def test_codes_are_given_where_products_read_them():
    assert chosen(formats=FP8, gives_codes=True).gives_codes
    assert not chosen(gives_codes=True).gives_codes
    left = chosen(formats=FP8)
    assert left.name == "xla" and left.reason == "XLA makes codes, which it fuses with norms"


def test_other_norms_are_left_to_xla(caplog):
    caplog.set_level(logging.INFO)
    assert chosen(replace(LLAMA, norm_centred=True)).reason == "the model's norms subtract a mean"
    odd = chosen(replace(LLAMA, hidden_size=8200))
    assert odd.name == "xla" and odd.reason in caplog.text
    assert "rows of 8200: must be a multiple of 64" in odd.reason
    wide = chosen(formats=Formats("float32", "float32", "float32"))
    assert "rows of float32" in wide.reason


def test_a_trial_has_the_norms_of_the_deployment(monkeypatch):
    shape = shape_of(Layout(LLAMA, 8, 1), FP8, 16, Bucket(8, 8), False)
    assert shape.norm == norm_shape(LLAMA, FP8) and shape.norm.codes
    trial = Trial(shape, Cases((), ()), "a GPU", (0,))
    assert Trial.read(json.dumps(dataclasses.asdict(trial))) == trial
    monkeypatch.setattr(attention_cases, "steps_of", lambda *_: ())
    tries = attention_cases.tries_of(trial, loops_of(LLAMA, 16), [])
    assert {"norms", "codes of norms"} <= {name for name, _ in tries}


SHAPES = {
    "as Llama": SHAPE,
    "as Gemma, half a block": SHAPE._replace(width=576, offset=True, in_float32=True),
    "as Granite": SHAPE._replace(scale=0.22, codes=False),
}


@pytest.mark.costs(15)
@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_passes_its_check(name):
    """In the interpreter: the backend's function against the model's own operations."""
    shape = SHAPES[name]
    for step in norm_steps(shape):
        run = outputs_of(
            kernels(step, shape, pallas_norms(shape, interpret=INTERPRETER)), shape, DEVICES
        )
        right = outputs_of(operations(step, shape), shape, DEVICES)()
        wrong = partial(wrong_with_norms, step=step)
        assert judged(run, right, wrong, DEVICES, 1) is None


@pytest.mark.parametrize(
    "change",
    [
        {"eps": 1.0}, {"offset": True}, {"scale": 0.9},
    ],
    ids=str,
)  # fmt: skip
def test_another_norm_fails_the_check(change):
    for step in norm_steps(SHAPE):
        right = outputs_of(operations(step, SHAPE), SHAPE, DEVICES)()
        other = SHAPE._replace(**change)
        got = outputs_of(operations(step, other), SHAPE, DEVICES)()
        assert wrong_with_norms([got[0]], right[0], step)


def test_a_scale_of_the_next_block_fails_the_check():
    step = NormStep(codes=True)
    right = outputs_of(operations(step, SHAPE), SHAPE, DEVICES)()[0]
    wrong = right.copy()
    wrong[-1, :128] *= 1.5
    assert "a row's norm is off" in wrong_with_norms([wrong], right, step)
    nan = np.where(np.arange(right.shape[1]) == 3, np.nan, right)
    assert wrong_with_norms([nan], right, step)
