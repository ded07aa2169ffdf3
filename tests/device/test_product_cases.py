"""Products of codes: how their kernels are tried before they serve."""

import dataclasses
import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from spent import thorough

from shiftjax.arch.formats import formats_of
from shiftjax.arch.presets import PRESETS
from shiftjax.costs.buckets import Bucket
from shiftjax.device import attention_cases
from shiftjax.device.attention_cases import Trial
from shiftjax.device.attention_check import shape_of
from shiftjax.device.attention_steps import Cases
from shiftjax.device.product_cases import (
    TOKENS,
    CodeStep,
    code_steps,
    kernels,
    operations,
    outputs_of,
    wrong_with_products,
)
from shiftjax.models.attention_backend import loops_of
from shiftjax.models.product_backend import (
    XLA_CODES,
    CodeMatrix,
    CodeShape,
    code_shape,
    pallas_codes,
)
from shiftjax.parallel.layout import Layout

FP8 = formats_of("fp8")
LLAMA = replace(PRESETS["llama-70b"], num_layers=2)
DEVICE: Any = SimpleNamespace(device_kind="a GPU", core_count=2)
COLUMN, ROW = CodeMatrix(128, 256, 0, 0), CodeMatrix(128, 256, 128, 0)
SHAPE = CodeShape((COLUMN, ROW), "bfloat16")
FEW, MANY = 9, 72  # of two multiprocessors, the latter has tiles of 128 rows where it may
STEPS = {
    "a column-parallel one": CodeStep(COLUMN, FEW),
    "a row-parallel one of square scales, many rows": CodeStep(ROW._replace(scales=1), MANY),
    "joined ones": CodeStep(COLUMN, FEW, "joined matrices"),
    "gate and up to codes": CodeStep(COLUMN, FEW, "gate and up"),
    "half a block of channels, many rows": CodeStep(
        COLUMN._replace(outputs=64), MANY, "gate and up"
    ),
}


def judged(step: CodeStep, multiply) -> str | None:
    devices = jax.devices()[:1]
    run, right = (
        outputs_of(each, SHAPE, step, devices) for each in (multiply, operations(SHAPE, step))
    )
    wrong = partial(wrong_with_products, step=step)
    found = attention_cases.judged(run, right(), wrong, devices, 1)
    return None if found is None else found.problem


@pytest.mark.parametrize(
    "name", [name if name.endswith("codes") else thorough(name)[0] for name in STEPS]
)
def test_the_kernels_are_right(name):
    interpreted = pallas_codes(DEVICE, interpret=plgpu.InterpretGPUParams(detect_races=False))
    assert judged(STEPS[name], kernels(SHAPE, STEPS[name], interpreted)) is None


@pytest.mark.parametrize("name", list(STEPS)[1:4])
@pytest.mark.parametrize(
    "change",
    [
        lambda x, w: (x._replace(scale=x.scale[::-1]), w),
        lambda x, w: (x, [each._replace(scale=each.scale[::-1]) for each in w]),
        lambda x, w: (x, [each._replace(values=each.values[..., ::-1]) for each in w]),
        lambda x, w: (x._replace(values=jnp.roll(x.values, 1, axis=0)), w),
    ],
    ids=["another block of tokens", "another scale", "inputs", "another token"],
)
def test_what_is_wrong_is_found(name, change):
    step = STEPS[name]
    right = operations(SHAPE, step)

    def changed(x, matrices):
        x, matrices = change(x, matrices)
        return right(x, tuple(matrices))

    assert "a token's product is off by" in (judged(step, changed) or "")


def test_what_is_left_to_xla_is_no_product_of_kernels():
    multiply = kernels(SHAPE, STEPS["joined ones"], XLA_CODES)
    with pytest.raises(ValueError, match="no kernel for codes of 9 tokens with joined matrices"):
        outputs_of(multiply, SHAPE, STEPS["joined ones"], jax.devices()[:1])


def test_a_deployment_tries_every_kind_of_matrix_that_kernels_multiply():
    layout = Layout(LLAMA, 8, 1)
    shape = shape_of(layout, FP8, 16, Bucket(64, 64), False)
    assert shape.codes == code_shape(layout, FP8) and shape.codes is not None
    trial = Trial(shape, Cases(), "a GPU", (0,))
    assert Trial.read(json.dumps(dataclasses.asdict(trial))) == trial
    tries = attention_cases.tries_of(trial, loops_of(LLAMA, 16), [])
    names = [name for name, _ in tries if name.startswith("codes of")]
    wanted = {
        *("a matrix of 128 x 8192", "a matrix of 28672 x 8192"),
        *("joined matrices of 128 x 8192", "gate and up of 28672 x 8192"),
        *(f"a matrix of 8192 x {n} in blocks" for n in (1024, 3584, 8192, 28672)),
    }
    assert {f"codes of {n} tokens with {each}" for n in TOKENS for each in wanted} <= set(names)
    odd = SHAPE._replace(matrices=(COLUMN, COLUMN._replace(outputs=72)))
    assert {step.matrix for step in code_steps(odd)} == {COLUMN}
    assert not list(code_steps(SHAPE._replace(matrices=())))
