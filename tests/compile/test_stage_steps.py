"""Stages of pipelines, compiled for 8 H200s and for 8 cards of 24 GB on a machine without them."""

import functools
from collections.abc import Callable
from dataclasses import replace

import aot
import jax
import pytest
from hlo import collectives, instructions, shape_bytes

from shiftjax.arch.config import ModelConfig, stages_of
from shiftjax.arch.formats import formats_of
from shiftjax.costs.memory import kv_token_bytes, weight_bytes
from shiftjax.parallel.grid import Mode

aot.require()
pytestmark = pytest.mark.thorough

from steps import (  # noqa: E402
    Case,
    CompiledStep,
    compile_step,
    define_step,
    device_bytes,
    llama_70b,
    pools_of,
    predicted_collectives,
)

PP, TP = 4, 2
BF16_BYTES = 2
# Code Llama 34B's shapes (arXiv 2308.12950), whose weights do not fit two cards of 24 GB.
LLAMA_34B = replace(llama_70b(48), name="34b", intermediate_size=22_016, vocab_size=32_000)
MODELS = {"h200": (llama_70b(80), "pallas"), "a10": (LLAMA_34B, "xla")}
PLACES = {"first": 0, "middle": 1, "last": PP - 1}
every_stage = pytest.mark.parametrize(
    ("chip", "place"), [(chip, place) for chip in MODELS for place in PLACES]
)


def case_of(chip: str, place: str, num_layers: int | None = None) -> Case:
    """A decode step of one stage; `num_layers` are all of its own, or fewer to stand for them."""
    model, attention = MODELS[chip]
    if num_layers is not None:
        model = replace(model, num_layers=num_layers * PP)
    stage: ModelConfig = stages_of(model, PP)[PLACES[place]]
    mode = Mode(1, 1)
    return Case(1, TP, mode, attention=attention, num_layers=stage.num_layers, model=stage)


@pytest.fixture(scope="module")
def compiled() -> Callable[[str, str], CompiledStep]:
    """The program of a stage with one layer."""
    devices = {chip: list(aot.make_mesh(chip, (TP,), ("x",)).devices.flat) for chip in MODELS}
    return functools.cache(lambda chip, place: compile_step(case_of(chip, place, 1), devices[chip]))


@every_stage
def test_a_device_holds_what_the_costs_say_to_the_byte(chip, place):
    """All layers of the stage, which need no compiling to be counted."""
    case = case_of(chip, place)
    step, pool = define_step(case, list(aot.make_mesh(chip, (TP,), ("x",)).devices.flat))
    formats, layout = formats_of("bfloat16"), case.layout
    held = device_bytes(step.weights.abstract(case.mode, step.mesh))
    assert held == weight_bytes(layout, formats)
    tokens = pool.num_blocks * pool.block_size
    assert device_bytes(pools_of(step, pool)) == tokens * kv_token_bytes(layout, formats)


@every_stage
def test_a_stage_is_given_its_part_and_writes_its_pools_in_place(chip, place, compiled):
    one: CompiledStep = compiled(chip, place)
    case = one.case
    vectors, tables = one.inputs
    given = [one.params, one.pools]
    hidden = one.step.hidden(case.mode, case.bucket.tokens)
    # What a stage does not read is no argument: sampled tokens come to both ends, and to GPUs all
    # stages (a vector at an address of the program's own), tables to the last.
    given += [vectors, hidden, tables if place == "last" else ()]
    assert one.argument_bytes == device_bytes(given)
    width = one.step.layout.model.hidden_size * BF16_BYTES
    share = case.bucket.tokens * width // TP
    assert device_bytes(hidden) == (0 if place == "first" else share)
    leaves = jax.tree.leaves(one.pools)
    pool = device_bytes(leaves[0])
    assert one.aliased_bytes == device_bytes(one.pools)
    assert one.temporary_bytes < one.pool_bytes  # no room for a copy of any layer's
    assert not [
        i
        for i in instructions(one.text)
        if i.opcode in ("copy", "copy-start", "transpose", "convert")
        and shape_bytes(i.shape) in (pool, one.pool_bytes)
    ]


@every_stage
def test_a_stage_moves_what_the_costs_say(chip, place, compiled):
    """The ends alone embed and sample; the others gather what the stage before sends."""
    one: CompiledStep = compiled(chip, place)
    assert collectives(one.text) == predicted_collectives(one)
