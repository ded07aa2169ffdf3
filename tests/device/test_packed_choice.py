"""Products with matrices of four bits: which are chosen, and how they are tried first."""

import dataclasses
import json
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dense import dense_product
from pallas_kernels.grouped_problem import GroupedConfig
from shiftjax.arch.config import Codes
from shiftjax.arch.formats import Formats, formats_of
from shiftjax.arch.presets import PRESETS
from shiftjax.costs.buckets import Bucket
from shiftjax.device import attention_cases
from shiftjax.device.attention_cases import Trial
from shiftjax.device.attention_check import shape_of
from shiftjax.device.attention_steps import Cases
from shiftjax.device.packed_cases import (
    PackedStep,
    draw,
    loop,
    outputs_of,
    packed_steps,
    wrong_with_tokens,
)
from shiftjax.models import packed_backend
from shiftjax.models.attention_backend import loops_of
from shiftjax.models.four_bits import packed_blocks, packed_product
from shiftjax.models.packed_backend import PackedMatrix, PackedShape, choose_packed, packed_shape
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.stored import with_packed_codes

INT4 = formats_of("int4")
LLAMA = with_packed_codes(replace(PRESETS["llama-70b"], num_layers=2), "int4")
DEVICE: Any = SimpleNamespace(device_kind="a GPU", core_count=132)
MATRIX = PackedMatrix(2, 64, 128, 2)
SHAPE = PackedShape((MATRIX,), "bfloat16", "int4", has_zeros=True)


def chosen(model=LLAMA, formats: Formats = INT4, attention: str = "pallas"):
    return choose_packed(Layout(model, 8, 1), formats, DEVICE, attention)


def test_kernels_see_the_matrices_of_every_mode():
    shape = packed_shape(Layout(LLAMA, 8, 1), INT4)
    assert shape is not None and not shape.has_zeros
    base = [(8, 8192, 1024, 8), (8, 8192, 3584, 28), (1, 28672, 8192, 64), (1, 8192, 8192, 64)]
    shift = [(1, 8192, 1024, 8), (1, 8192, 3584, 28), (1, 3584, 8192, 64), (1, 128, 8192, 64)]
    both = {(1, 1024, 8192, 64)}  # k and v of base, q of shift
    assert {*base, *shift} | both <= set(shape.matrices)


def test_kernels_run_where_attention_does(caplog):
    assert chosen().name == "pallas" and chosen().reason == ""
    assert not caplog.records
    assert chosen(attention="xla")[:1] == ("xla",)
    assert chosen(attention="xla").reason == "attention runs as xla"
    assert chosen(PRESETS["llama-70b"], Formats()).name == "xla"


@pytest.mark.parametrize(
    ("formats", "group", "words"),
    [
        (replace(INT4, activations="float32"), 128, "x of float32"),
        (INT4, 256, "not of groups of 32, 64, 128 inputs"),
    ],
)
def test_what_kernels_cannot_do_is_said(formats, group, words, caplog):
    model = replace(LLAMA, codes=Codes(format="int4", group=group))
    with caplog.at_level(logging.WARNING):
        backend = chosen(model, formats)
    assert backend.name == "xla" and words in backend.reason
    (record,) = caplog.records
    assert words in record.getMessage() and "several times slower" in record.getMessage()


def test_matrices_that_kernels_have_not_are_left_to_the_loop(caplog):
    """Heads of 72: q and o of a device are no multiple of 64; gate, up and down are."""
    model = replace(LLAMA, num_heads=8, num_kv_heads=8, head_dim=72)
    model = with_packed_codes(replace(model, codes=None), "int4")
    with caplog.at_level(logging.WARNING):
        backend = chosen(model)
    assert backend.name == "pallas" and "must be multiples of 64" in backend.reason
    assert "72 x 8192" in caplog.text and "28672" not in caplog.text


def test_the_backend_gives_the_kernels_what_they_want(monkeypatch):
    """Column-parallel scales are turned; both ways are XLA's loop in other words."""
    monkeypatch.setattr("pallas_kernels.dense.dense_product", lambda x, w, _: packed_blocks(x, *w))
    backend = packed_backend.pallas_packed(DEVICE)
    x, weights = draw(SHAPE, PackedStep(MATRIX, 5))
    assert (backend.into(x, *weights) == packed_blocks(x, *weights)).all()
    codes, scales, zeros = (each[0] for each in weights if each is not None)
    column = codes, scales.T, zeros.T
    found = backend.out(x[:, :128], *column)
    assert (found == packed_product(x[:, :128], *column)).all()


# ------------------------------------------------------------------ the check at the start


def judged(multiply) -> str | None:
    devices, step = jax.devices()[:1], PackedStep(MATRIX, 9)
    run, right = (outputs_of(each, SHAPE, step, devices) for each in (multiply, loop))
    found = attention_cases.judged(run, right(), wrong_with_tokens, devices, 1)
    return None if found is None else found.problem


def test_the_kernels_are_right():
    interpreter = plgpu.InterpretGPUParams(detect_races=False)
    config = GroupedConfig(16, 2, 2, joins=True)
    assert judged(lambda x, weights: dense_product(x, weights, config, interpreter)) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w._replace(codes=(w.codes >> 4) | (w.codes << 4)),
        lambda w: w._replace(codes=w.codes[::-1]),
        lambda w: w._replace(scale=jnp.roll(w.scale, 1, axis=1)),
        lambda w: w._replace(zero=None),
    ],
    ids=["halves of bytes", "blocks", "the next group", "zero points"],
)
def test_what_is_wrong_is_found(change):
    assert "is off by" in (judged(lambda x, weights: loop(x, change(weights))) or "")


def test_a_deployment_tries_every_matrix_that_kernels_multiply():
    layout = Layout(LLAMA, 8, 1)
    shape = shape_of(layout, INT4, 16, Bucket(64, 64), False)
    assert shape.packed == packed_shape(layout, INT4)
    trial = Trial(shape, Cases(), "a GPU", (0,))
    assert Trial.read(json.dumps(dataclasses.asdict(trial))) == trial
    loops = loops_of(LLAMA, 16)
    names = [name for name, _ in attention_cases.tries_of(trial, loops, [])]
    words = "20 tokens with a matrix of "
    assert {name.removeprefix(words) for name in names if name.startswith(words)} == {
        "128 x 8192",
        "28672 x 8192",
        *(f"{blocks}8192 x {inputs}" for blocks in ("", "8 blocks of ") for inputs in (1024, 3584)),
    }
    odd = SHAPE._replace(matrices=(MATRIX, PackedMatrix(1, 72, 128, 2)))
    assert {step.matrix for step in packed_steps(odd)} == {MATRIX}
