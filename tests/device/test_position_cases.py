"""The check of kernels of devices that split positions: all places in turn, on one device."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from faulty_attention import INTERPRETED
from regime import reached

from pallas_kernels.decode import ROW_TILE, count_stages
from pallas_kernels.decode_work import DecodeConfig
from pallas_kernels.prefill_work import PrefillConfig
from pallas_kernels.step_work import KernelConfig, StepWork
from pallas_kernels.tuned import safe_config
from shiftjax.arch.formats import FORMATS, Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.costs.buckets import Bucket
from shiftjax.device.attention_cases import Trial, tries_of, try_step
from shiftjax.device.attention_check import shape_of
from shiftjax.device.attention_steps import Cases, Shape, steps_of
from shiftjax.device.position_cases import in_turn
from shiftjax.models.position_backend import RowKernels
from shiftjax.parallel.layout import Layout

CONFIG = KernelConfig(PrefillConfig(64, 2, 1), DecodeConfig(64, 1, 45_000))
FEW = Cases((1, 16, 77), ((2, 2), (3, 40)), num_beside=1, in_largest=False, ring_bytes=20_000)
SHAPE = Shape(4, 1, 64, 32, (None,), "bfloat16", "bfloat16", (16, 8, 8), has_late=True, ways=2)


def test_a_device_tries_the_heads_of_all_its_neighbours():
    layout = Layout(PRESETS["llama-70b"], 8, 2, by_position=True)
    bucket = Bucket(8192, 64, 64)
    shape = shape_of(layout, Formats(), 32, bucket, deterministic=False)
    assert (shape.heads, shape.kv_heads, shape.block_size, shape.ways) == (8, 1, 32, 2)
    assert shape.entry is not None and shape.entry.heads == 4  # what it takes to attention: its own
    assert not replace(shape, codes=None).gives_codes


@pytest.mark.costs(15)
@pytest.mark.parametrize("fault", ["", "a place's last block is not seen"])
def test_rows_of_all_places_are_tried(fault, monkeypatch):
    states = RowKernels.states

    def short(self, q, pool, block_tables, work, terms):
        shorter = jax.numpy.maximum(work.row_length - 16, 0)
        return states(self, q, pool, block_tables, work._replace(row_length=shorter), terms)

    if fault:
        monkeypatch.setattr(RowKernels, "states", short)
    edges = next(steps_of(SHAPE, FEW))
    problem = try_step(edges, SHAPE, in_turn(SHAPE, CONFIG, INTERPRETED), jax.devices()[:1])
    assert (problem is None) == (not fault), problem
    assert not fault or "is off by" in problem.problem


@pytest.mark.thorough
def test_every_step_can_be_tried():
    kernels = in_turn(SHAPE, CONFIG, INTERPRETED)
    for step in steps_of(SHAPE, FEW):
        assert try_step(step, SHAPE, kernels, jax.devices()[:1]) is None, step.name


@pytest.mark.thorough
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8"])
def test_latents_are_tried(kv_dtype):
    """Of many heads; the loops write their codes, and so no write of them is tried."""
    sizes = {"heads": 20, "head_dim": 192, "values_in_keys": 128, "kv_dtype": kv_dtype}
    shape = replace(SHAPE, **sizes, has_late=False)
    trial = Trial(shape, FEW, "", (), "")
    decode = CONFIG.decode._replace(shared_memory_bytes=100_000)
    kernels = in_turn(shape, CONFIG._replace(decode=decode), INTERPRETED)
    (_, edges), *others = tries_of(trial, kernels, jax.devices()[:1])
    assert "a write of codes" not in dict(others)
    assert (problem := edges()) is None, problem


@pytest.mark.parametrize("ways", [2, 4, 8])
def test_a_long_context_fills_the_rings_of_every_place_again(ways):
    shape = replace(SHAPE, heads=8 * ways, head_dim=128, block_size=16 * ways, ways=ways)
    config = safe_config(128, shape.heads)
    _, step, *_ = steps_of(shape, Cases())
    lens = np.array([*step.contexts, *[0] * (step.bucket[2] - len(step.contexts))], np.int32)
    starts = np.minimum(np.arange(step.bucket[2] + 1), len(step.new)).astype(np.int32)
    tables = np.zeros((len(lens), -(-max(lens) // shape.block_size)), np.int32)
    contexts = tables, lens, starts, step.num_decodes
    (work,) = in_turn(shape, config).divide(*contexts, num_tokens=None, num_rows=step.bucket[1])
    rows = -(-shape.heads // ROW_TILE) * ROW_TILE
    stages = count_stages(rows, 128, FORMATS["bfloat16"].dtype, config.decode)
    found = reached(StepWork(None, work.rows), stages).names
    assert found >= {"rings_again", "queries_again", "turns"}
