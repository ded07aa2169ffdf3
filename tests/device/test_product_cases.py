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

from shiftjax.arch.config import LoraSlots
from shiftjax.arch.formats import Formats, formats_of
from shiftjax.arch.presets import PRESETS
from shiftjax.costs.buckets import Bucket
from shiftjax.device import attention_cases
from shiftjax.device.attention_cases import Trial
from shiftjax.device.attention_check import shape_of
from shiftjax.device.attention_steps import Cases
from shiftjax.device.product_cases import (
    GROUPS,
    PARTS,
    PLAIN_TOKENS,
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
    plain_shape,
)
from shiftjax.parallel.layout import Layout

FP8 = formats_of("fp8")
LLAMA = replace(PRESETS["llama-70b"], num_layers=2)
DEVICE: Any = SimpleNamespace(device_kind="a GPU", core_count=2)
MORE: Any = SimpleNamespace(device_kind="a GPU", core_count=8)
COLUMN, ROW = CodeMatrix(128, 256, 0, 0), CodeMatrix(128, 256, 128, 0)
LONG = COLUMN._replace(inputs=512)
SHAPE = CodeShape((COLUMN, ROW), "bfloat16", slots=3, rank=16)
PLAIN = SHAPE._replace(is_plain=True)
FEW, MANY = 9, 72  # of two multiprocessors, the latter has tiles of 128 rows where it may
STEPS = {
    "a column-parallel one": CodeStep(COLUMN, FEW),
    "a row-parallel one of square scales, many rows": CodeStep(ROW._replace(scales=1), MANY),
    "joined ones": CodeStep(COLUMN, FEW, "joined matrices"),
    "gate and up to codes": CodeStep(COLUMN, FEW, "gate and up"),
    "half a block of channels, many rows": CodeStep(
        COLUMN._replace(outputs=64), MANY, "gate and up"
    ),
    "numbers, gate and up": CodeStep(COLUMN, FEW, "gate and up", is_plain=True),
    "numbers, joined ones": CodeStep(COLUMN, FEW, "joined matrices", is_plain=True),
    "numbers, a row-parallel one": CodeStep(ROW, FEW, is_plain=True),
    "joined ones, in parts": CodeStep(LONG, FEW, PARTS),
    "numbers, joined ones, in parts": CodeStep(LONG, FEW, PARTS, is_plain=True),
    "groups": CodeStep(COLUMN, FEW, GROUPS, is_plain=True),
    "groups, row-parallel": CodeStep(ROW, FEW, GROUPS, is_plain=True),
}
STEPS |= {
    f"{name}, and adapters": step._replace(is_added_to=True)
    for name, step in STEPS.items()
    if step.kind != GROUPS and step.tokens == FEW
}


def shape_for(step: CodeStep) -> CodeShape:
    return PLAIN if step.is_plain else SHAPE


def of_next(step: CodeStep, x, matrices):
    """What is added to a token, or its group, is that of the next one."""
    if step.kind == GROUPS:
        return x, [each._replace(values=jnp.roll(each.values, 8, axis=0)) for each in matrices]
    added = [each.added for each in matrices]
    inner = jnp.roll(added[0].inner, 1, axis=0)
    pairs = zip(matrices, added, strict=True)
    return x, [each._replace(added=one._replace(inner=inner)) for each, one in pairs]


def judged(step: CodeStep, multiply) -> str | None:
    devices, shape = jax.devices()[:1], shape_for(step)
    run, right = (
        outputs_of(each, shape, step, devices) for each in (multiply, operations(shape, step))
    )
    wrong = partial(wrong_with_products, step=step)
    found = attention_cases.judged(run, right(), wrong, devices, 1)
    return None if found is None else found.problem


@pytest.mark.parametrize(
    "name", [name if name.endswith("codes") else thorough(name)[0] for name in STEPS]
)
def test_the_kernels_are_right(name):
    step = STEPS[name]
    cores = MORE if step.kind == PARTS else DEVICE  # which cut a contraction
    interpreted = pallas_codes(cores, interpret=plgpu.InterpretGPUParams(detect_races=False))
    assert judged(step, kernels(shape_for(step), step, interpreted)) is None


@pytest.mark.parametrize("name", [n for n, s in STEPS.items() if s.is_added_to] + ["groups"])
def test_what_is_wrong_with_what_is_added_is_found(name):
    step = STEPS[name]
    right = operations(shape_for(step), step)

    def changed(x, matrices):
        x, matrices = of_next(step, x, matrices)
        return right(x, tuple(matrices))

    assert "a token's product is off by" in (judged(step, changed) or "")


@pytest.mark.parametrize("name", [name for name in STEPS if name.startswith("numbers")])
@pytest.mark.parametrize(
    "change",
    [
        lambda x, w: (x, [each._replace(values=jnp.roll(each.values, 1, axis=-1)) for each in w]),
        lambda x, w: (jnp.roll(x, 64, axis=1), w),
        lambda x, w: (jnp.roll(x, 1, axis=0), w),
    ],
    ids=["a row or column of the next", "half a block", "another token"],
)
def test_what_is_wrong_with_numbers_is_found(name, change):
    right = operations(PLAIN, STEPS[name])

    def changed(x, matrices):
        x, matrices = change(x, matrices)
        return right(x, tuple(matrices))

    assert "a token's product is off by" in (judged(STEPS[name], changed) or "")


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
        *(f"{PARTS} of {n} x 8192" for n in (128, 28672)),
        *(f"a matrix of 8192 x {n} in blocks" for n in (1024, 3584, 8192, 28672)),
    }
    assert {f"codes of {n} tokens with {each}" for n in TOKENS for each in wanted} <= set(names)
    plain = plain_shape(layout, Formats())
    assert plain is not None
    alone = dataclasses.replace(trial, shape=dataclasses.replace(shape, plain=plain))
    assert Trial.read(json.dumps(dataclasses.asdict(alone))) == alone
    names = [name for name, _ in attention_cases.tries_of(alone, loops_of(LLAMA, 16), [])]
    own = {f"numbers of {n} tokens with {each}" for n in PLAIN_TOKENS for each in wanted}
    assert own <= set(names) and all(name.startswith("numbers of") for name in names)
    adapted = replace(trial, shape=replace(shape, plain=PLAIN, codes=SHAPE))
    assert Trial.read(json.dumps(dataclasses.asdict(adapted))) == adapted
    names = {step.name for step in code_steps(PLAIN)} | {step.name for step in code_steps(SHAPE)}
    for what in ("numbers of 64", "codes of 64"):
        assert f"{what} tokens with a matrix of 128 x 256 in blocks and adapters" in names
        assert f"{what} tokens with gate and up of 128 x 256 and adapters" in names
    assert f"numbers of 64 tokens with {GROUPS} of 128 x 256 in blocks" in names
    assert plain_shape(Layout(replace(LLAMA, lora=LoraSlots(8, 16)), 8, 1), Formats()) == (
        plain._replace(slots=8, rank=16)
    )
    odd = SHAPE._replace(matrices=(COLUMN, COLUMN._replace(outputs=72)))
    assert {step.matrix for step in code_steps(odd)} == {COLUMN}
    assert not list(code_steps(SHAPE._replace(matrices=())))
