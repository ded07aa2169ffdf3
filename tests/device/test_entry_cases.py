"""Heads from their product to attention in one launch: whose, and how it is tried first."""

import dataclasses
import json
import logging
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from spent import thorough

from shiftjax.arch.config import QueryGrowth
from shiftjax.arch.formats import Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.costs.buckets import Bucket
from shiftjax.device import attention_cases
from shiftjax.device.attention_cases import Trial, judged
from shiftjax.device.attention_check import shape_of
from shiftjax.device.attention_steps import Cases
from shiftjax.device.entry_cases import (
    FEW,
    MANY,
    EntryStep,
    entry_steps,
    kernel,
    operations,
    outputs_of,
    wrong_with_heads,
)
from shiftjax.models.attention_backend import AttentionBackend, choose_attention, loops_of
from shiftjax.models.entry_backend import EntryShape, pallas_entry, tried_entry, why_not_entered
from shiftjax.parallel.layout import Layout

LLAMA = replace(PRESETS["llama-70b"], num_layers=1)
DEVICES = jax.devices()[:1]
PLAIN = EntryShape(2, 1, 64, 32, "bfloat16", "bfloat16")
CODES = EntryShape(4, 2, 64, 32, "bfloat16", "float8_e4m3fn", (1e-6, False, False))
HOPPER = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")


@pytest.fixture
def backend() -> AttentionBackend:
    def scales(terms):
        return (1.0, 1.0) if terms.kv_scales is None else terms.kv_scales

    interpreter = plgpu.InterpretGPUParams(detect_races=True)
    return loops_of(LLAMA, 16)._replace(enter=pallas_entry(interpreter))


def verdict_on(run, shape: EntryShape, step: EntryStep):
    """What the check says of what `run` gives."""
    right = outputs_of(operations, shape, step, DEVICES)()
    wrong = partial(wrong_with_heads, shape=shape, step=step)
    return judged(outputs_of(run, shape, step, DEVICES), right, wrong, DEVICES, 1)


@pytest.mark.parametrize(
    ("shape", "step"),
    [
        (PLAIN, EntryStep(FEW, "numbers", has_bias=True)),
        pytest.param(CODES, EntryStep(FEW, "turned parts"), marks=pytest.mark.costs(8)),
        *thorough((PLAIN, EntryStep(FEW, "parts")), (PLAIN, EntryStep(MANY, "joined numbers"))),
    ],
)
def test_the_kernel_gives_what_the_models_operations_do(backend, shape, step):
    assert verdict_on(partial(kernel, backend=backend), shape, step) is None


def test_what_is_lost_is_said():
    step = EntryStep(FEW, "parts")

    def without_a_head(shape, step):
        q, pool = operations(shape, step)
        return q.at[3, 1].mul(0.9), pool

    def in_other_slots(shape, step):
        q, (k, v) = operations(shape, step)
        return q, (k, v[::-1])

    assert "a query is off" in verdict_on(without_a_head, PLAIN, step).problem
    assert "a key or a value is off" in verdict_on(in_other_slots, CODES, step).problem


def test_a_deployments_heads_are_tried(backend):
    layout, largest = Layout(LLAMA, 1, 8), Bucket(64, 8)
    shape = shape_of(layout, Formats("fp8", "fp8"), 16, largest, deterministic=False)
    assert shape.entry == EntryShape(8, 1, 128, 64, "bfloat16", "float8_e4m3fn")
    trial = Trial(shape, Cases(), "a GPU", (0,))
    read = Trial.read(json.dumps(dataclasses.asdict(trial)))
    assert read.shape.entry == shape.entry
    normed = replace(trial, shape=replace(shape, entry=CODES))
    assert Trial.read(json.dumps(dataclasses.asdict(normed))).shape.entry == CODES
    names = [name for name, _ in attention_cases.tries_of(trial, backend, DEVICES)]
    assert {step.name for step in entry_steps()} <= set(names)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_interleaved": True}, "neighbours are rotated, not halves"),
        ({"qk_norm": True, "wide_qk_norm": True}, "norms of q and k are over all heads"),
        ({"query_growth": QueryGrowth(0.1, 64)}, "queries grow"),
        ({"value_unit_norm": True}, "values are normed"),
        ({"rotary_dim": 96}, "head_dim 128, of which 96 rotate: not in pieces of 32"),
    ],
)
def test_other_heads_are_left_to_xla_in_words(changes, reason, caplog):
    caplog.set_level(logging.INFO)
    model = replace(LLAMA, **changes)
    layout = Layout(model, 1, 8)
    assert tried_entry(layout, Formats()) is None
    chosen = choose_attention(layout, HOPPER, ("bfloat16", "bfloat16"), 16)
    assert chosen.name == "pallas"  # as before, but for this
    assert f"XLA rotates and writes heads: {reason}" in caplog.text


def test_most_llamas_enter_by_the_kernel(caplog):
    caplog.set_level(logging.INFO)
    for name in ("llama-8b", "qwen3-32b", "qwen3-235b-a22b"):
        model = PRESETS[name]
        assert not any(why_not_entered(model, kind) for kind in model.kinds)
        assert tried_entry(Layout(model, 1, 1), Formats()).norm == (
            (model.rms_norm_eps, False, False) if model.qk_norm else None
        )
    assert tried_entry(Layout(replace(LLAMA, rotary_dim=64), 1, 1), Formats()).half == 32
