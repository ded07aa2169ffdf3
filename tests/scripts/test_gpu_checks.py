"""The checks of a run on a GPU: their steps reach what serving reaches, and they find faults."""

import sys
from pathlib import Path

import numpy as np
import pytest
from regime import reached

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import gpu_checks
from gpu_cases import FP8_DTYPE, SMALL, SMALL_KERNEL, STEPS, Kernel, kernels
from gpu_checks import attention_rows, fitted
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import kv_write
from pallas_kernels.decode import ROW_TILE, count_stages
from pallas_kernels.decode_work import JOBS_AT_ONCE, most_jobs
from shiftjax.device import write_cases

INTERPRETER = plgpu.InterpretGPUParams(detect_races=False)
CODES = SMALL_KERNEL._replace(kv_dtype=FP8_DTYPE, scales=(0.5, 2.0))


def names_reached(kernel: Kernel, name: str) -> set[str]:
    """What a step makes the kernels do on a GPU."""
    step = dict(fitted(STEPS, kernel))[name]
    new, lens = (np.array(each, np.int32) for each in zip(*step, strict=True))
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    num_decodes = len(step) if name == "long" else 0
    work = gpu_checks.divided(kernel, lens, starts, num_decodes, int(new.sum()))
    rows = -(-kernel.heads[0] // kernel.heads[1] // ROW_TILE) * ROW_TILE
    config = gpu_checks.config_of(kernel).decode
    return reached(work, count_stages(rows, kernel.head_dim, kernel.kv_dtype, config)).names


def test_every_configuration_is_tried_as_it_serves():
    """Under a window of 100 tokens no context is long."""
    for kernel in kernels():
        config = gpu_checks.config_of(kernel)
        can_turn = most_jobs(config.decode, kernel.heads[1]) > JOBS_AT_ONCE
        wanted = {"rings_again", "queries_again"} | ({"turns"} if can_turn else set())
        if kernel.window is None:
            assert names_reached(kernel, "long") >= wanted, kernel.described()
            assert "split_tiles" in names_reached(kernel, "chunk"), kernel.described()


def test_pools_are_no_larger_than_the_largest_step():
    for kernel in kernels():
        _, _, columns, blocks = gpu_checks.padded(fitted(STEPS, kernel), kernel.block_size)
        assert columns < blocks < 1.1 * columns + 100


@pytest.mark.costs(20)
def test_rows_alone_and_codes_are_tried_too():
    rows = list(attention_rows([CODES], SMALL, INTERPRETER))
    assert [row["step"] for row in rows] == ["mixed", "rows alone", "write"]
    assert all(row["right"] for row in rows)


def test_what_is_off_is_found():
    right = np.random.default_rng(0).standard_normal((5, 2, 64))
    out = np.concatenate([right, np.zeros((2, 2, 64))])

    def found(change, runs=2) -> dict:
        outputs = [out.copy() for _ in range(runs)]
        for number, each in enumerate(outputs):
            change(number, each)
        return gpu_checks.judgement(outputs, right, 1e-2)

    assert found(lambda *_: None)["right"]
    assert not found(lambda _, each: each[1, 1].__imul__(1.05))["right"]
    assert found(lambda _, each: each[5].fill(1e-9))["error"] == np.inf
    assert found(lambda _, each: each[0, 0].fill(np.nan))["error"] == np.inf
    changed = found(lambda number, each: each[0, 0, :1].__imul__(1 + number / 1e6))
    assert not changed["same_bits"] and not changed["right"]


def test_codes_that_are_off_are_found(monkeypatch):
    def write(pool, k, v, slots, *, scales, interpret):
        return kv_write.write_kv(pool, k, v, slots, scales=scales[::-1], interpret=interpret)

    faulty = type(kv_write)("faulty")
    faulty.write_kv = write
    monkeypatch.setattr(gpu_checks, "kv_write", faulty)
    found = gpu_checks.judged_write(CODES, INTERPRETER)
    assert not found["right"] and "codes are wrong" in found["wrong"]
    assert write_cases.MOST_TOKENS > gpu_checks.SMALL_WRITE
