"""Kernels are tried before they serve: each fault ends in the loops, with its reason.

In real processes, on the CPU, with kernels in Mosaic's interpreter (`faulty_attention.py`).
"""

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import engines
import faulty_attention
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spent import thorough

from pallas_kernels.decode_work import DecodeConfig
from pallas_kernels.window import Chunk
from shiftjax.arch.formats import Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.costs.buckets import Bucket
from shiftjax.deploy.deployment import Deployment
from shiftjax.device.attention_cases import Trial, tries_of, try_step, wrong_with
from shiftjax.device.attention_check import (
    FOLDER,
    MODULE,
    KernelCheck,
    check_attention,
    find_verdict,
    key_of,
    shape_of,
)
from shiftjax.device.attention_steps import Cases, Shape, Step, make_inputs, steps_of
from shiftjax.device.groups import attention_of
from shiftjax.device.write_cases import wrong_with_codes
from shiftjax.models.attention_backend import loops_of, pallas_attention
from shiftjax.models.expert_backend import ExpertShape
from shiftjax.models.product_backend import CodeShape
from shiftjax.models.products import Codes
from shiftjax.options import ConfigError
from shiftjax.parallel.layout import Layout

HOPPER = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
MODEL = replace(PRESETS["llama-8b"], num_heads=2, num_kv_heads=1, head_dim=64)
SHAPE = Shape(2, 1, 64, 16, (None,), "bfloat16", "bfloat16", (16, 8, 8))
LOOPS = loops_of(SHAPE.layout.model, SHAPE.block_size)
FEW = Cases((1, 16, 37), ((2, 2), (3, 20)), num_beside=1, in_largest=False, ring_bytes=20_000)


@pytest.fixture(autouse=True)
def same_devices(monkeypatch):
    """The other process has as many devices as this one, whatever was asked for in between.

    And what one of them has compiled, none of the others does.
    """
    count = f"--xla_force_host_platform_device_count={len(jax.devices())}"
    monkeypatch.setenv("XLA_FLAGS", f"{count} --xla_backend_optimization_level=0")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir)


def make_check(builder: str, directory=None, limit_seconds=60.0, cases=FEW) -> KernelCheck:
    builder = f"faulty_attention:{builder}"
    return KernelCheck(dict(os.environ), directory, limit_seconds, cases, builder)


def choose(check: KernelCheck, attention="auto", formats=None):
    """What a deployment on a Hopper GPU gets whose kernels are tried on the first CPU device."""
    deployment = Deployment(
        "checked",
        Layout(MODEL, 1, 1),
        formats or Formats(),
        dp=1,
        policy="threshold",
        threshold=8,
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        token_buckets=(8, 16),
        attention=attention,
    )
    tried = partial(check_attention, check, jax.devices()[:1])
    return attention_of(deployment, HOPPER, tried)


@pytest.mark.thorough
def test_right_kernels_serve_and_are_not_tried_again(tmp_path):
    check, devices = make_check("right", tmp_path), jax.devices()[:1]
    verdict = find_verdict(check, devices, SHAPE)
    assert (verdict.problem, verdict.was_kept) == (None, False)
    assert find_verdict(check, devices, SHAPE) == verdict._replace(was_kept=True)
    (path,) = (tmp_path / FOLDER).iterdir()
    assert json.loads(path.read_text())["key"]["trial"]["shape"]["head_dim"] == 64


@pytest.mark.costs(10)
@pytest.mark.parametrize(
    ("fault", "problem", "is_kept"),
    [
        ("wrong_mask", "is off by", True),
        *thorough(("wrong_scale", "is off by", True)),
        *thorough(("racy", "numbers change from run to run", True)),
        *thorough(("hangs", "no end in 6 s", False)),
        *thorough(("dies", "their process died of SIGSEGV", False)),
        ("absent", "their process ended with code 1", False),
    ],
)
def test_a_fault_ends_in_the_loops_with_its_reason(fault, problem, is_kept, tmp_path, caplog):
    limit = 6.0 if fault == "hangs" else 60.0
    chosen = choose(make_check(fault, tmp_path, limit))
    assert chosen.name == "xla"
    assert chosen.reason.startswith("the kernels failed their check: ")
    assert problem in chosen.reason
    error, warning = caplog.records
    assert error.levelname == "ERROR" and problem in error.getMessage()
    assert "jaxlib" in error.getMessage() and "driver" in error.getMessage()
    assert "XLA loops" in warning.getMessage()
    assert (tmp_path / FOLDER).exists() == is_kept


@pytest.mark.thorough
@pytest.mark.parametrize("fault", ["", "the next head's scale", "scales 6% too large"])
def test_an_output_of_codes_is_tried(fault):
    """Rows alone, and chunks beside rows; a scale of another head is off by more than a code."""
    shape = replace(SHAPE, head_dim=128, heads=4, codes=CodeShape((), "bfloat16", "silu"))
    config = faulty_attention.FEW_BLOCKS._replace(decode=DecodeConfig(64, 1, 90_000))
    given = shape.layout, config, shape.block_size
    kernels = pallas_attention(*given, interpret=faulty_attention.INTERPRETED)

    def attend(*args):
        out = kernels.attend(*args)
        assert isinstance(out, Codes)
        scale = {"": out.scale, "the next head's scale": jnp.roll(out.scale, 1, axis=0)}
        return out._replace(scale=scale.get(fault, 1.06 * out.scale))

    steps = [step for step in steps_of(shape, FEW) if step.codes]
    assert len(steps) == 2
    for step in steps:
        problem = try_step(step, shape, kernels._replace(attend=attend), jax.devices()[:1])
        assert (problem is None) == (not fault), problem
        assert not fault or "is off by" in problem.problem


@pytest.mark.thorough
def test_kernels_that_do_not_compile_are_not_used(tmp_path, caplog):
    """Nor tried again at the next start; an error where there is no way out."""
    check = make_check("does_not_compile", tmp_path)
    assert choose(check).reason.endswith("the kernels do not compile (ValueError)")
    caplog.clear()
    with pytest.raises(ConfigError, match=r"attention = pallas: NVIDIA H200 .* do not compile"):
        choose(check, "pallas")
    (record,) = caplog.records
    assert "in an earlier start (`shiftjax doctor` tries again)" in record.getMessage()
    assert "Only interpret mode is supported" in record.getMessage()  # the details
    (path,) = (tmp_path / FOLDER).iterdir()
    path.write_text(path.read_text().replace('"problem"', '"problems"'))
    caplog.clear()
    choose(check)  # a file that cannot be read counts for nothing
    assert "earlier" not in caplog.text and "do not compile" in caplog.text
    assert '"problem"' in path.read_text()


@pytest.mark.thorough
def test_one_bad_device_among_several_is_found():
    verdict = find_verdict(make_check("wrong_on_one"), jax.devices()[:3], SHAPE)
    assert "is off by" in (verdict.problem or "")
    assert verdict.detail == f"on device {jax.devices()[1].id} of 3"


def test_an_engine_tries_the_kernels_that_it_would_use(monkeypatch):
    """On a CPU that is taken for a GPU: kernels for one do not compile there."""
    monkeypatch.setattr("shiftjax.models.attention_backend.why_not", lambda device: None)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    directory, *_ = engines.checkpoint(num_hidden_layers=1, **sizes)
    options = {"dtype": "bfloat16", "block_size": 16, "attention": "pallas"}
    with pytest.raises(ConfigError, match=r"attention = pallas: .* check: 9 decodes .* compile"):
        engines.make(directory, 1, 1, **options)


@pytest.mark.thorough
def test_kernels_are_tried_with_the_scales_of_codes():
    shape = replace(SHAPE, kv_dtype="fp8")
    step, devices = next(steps_of(shape, FEW)), jax.devices()[:1]
    assert try_step(step, shape, faulty_attention.right(shape), devices) is None
    problem = try_step(step, shape, faulty_attention.swapped_scales(shape), devices)
    assert problem is not None and "is off by" in problem.problem


VARIED = replace(SHAPE, windows=(14, None), scale=0.1, soft_cap=50.0, has_sinks=True)


@pytest.mark.thorough
def test_kernels_are_tried_with_all_that_the_model_has():
    step, devices = next(steps_of(VARIED, FEW)), jax.devices()[:1]
    assert try_step(step, VARIED, faulty_attention.right(VARIED), devices) is None


@pytest.mark.parametrize(
    "ignored",
    [{"windows": (1000, None)}, {"scale": None}, {"soft_cap": None}, {"has_sinks": False}],
    ids=lambda change: next(iter(change)),
)
def test_what_a_kernel_ignores_is_found(ignored):
    """Loops in the place of kernels, of a model that has one thing less."""
    kernels = loops_of(replace(VARIED, **ignored).layout.model, VARIED.block_size)

    def attend(q, pool, metadata, terms):
        terms = replace(terms, sinks=None) if "has_sinks" in ignored else terms
        return kernels.attend(q, pool, metadata, terms)

    *_, step = steps_of(VARIED, Cases((1, 337), ((3, 100),), num_beside=1, in_largest=False))
    problem = try_step(step, VARIED, kernels._replace(attend=attend), jax.devices()[:1])
    assert problem is not None and "is off by" in problem.problem
    assert "windows" not in ignored or problem.problem.endswith("(window 14)")


def test_a_chunk_that_begins_late_is_found():
    """By a kernel whose windows slide, as wide as chunks are; and one whose chunks are longer."""
    shape = replace(SHAPE, windows=(Chunk(12), None))
    for windows in (12, None), (Chunk(13), None):
        kernels = loops_of(replace(shape, windows=windows).layout.model, shape.block_size)
        *_, step = steps_of(shape, Cases((1, 37), ((3, 40),), num_beside=1, in_largest=False))
        problem = try_step(step, shape, kernels, jax.devices()[:1])
        assert problem is not None and problem.problem.endswith("(window Chunk(tokens=12))")


def test_contexts_outgrow_every_window_that_is_not_huge():
    for window, decode, chunk in ((14, 3000, 8200), (8192, 8257, 8407), (1 << 18, 3000, 8200)):
        decodes, _, chunks, _ = steps_of(replace(SHAPE, windows=(None, window)), Cases())
        assert decodes.contexts[-1] == chunks.contexts[1] == decode
        assert chunks.contexts[-1] == chunk


@pytest.mark.parametrize("tokens", [48, 1000, 8192])
def test_chunks_have_tokens_on_both_sides_of_a_jump(tokens):
    *_, step = steps_of(replace(SHAPE, windows=(Chunk(tokens), None)), Cases())
    end, new = step.contexts[-1], step.new[-1]
    assert end % tokens in range(1, new) and end - new > 0


def test_a_shape_has_what_the_models_layers_have():
    model, bucket = replace(PRESETS["gpt-oss-20b"], query_scale=0.1), Bucket(16, 8)
    shape = shape_of(Layout(model, 1, 8), Formats(), 16, bucket, False)
    assert shape.windows == model.windows == (128, None)
    assert (shape.scale, shape.soft_cap, shape.has_sinks) == (0.1, None, True)
    of_shape = shape.layout.model
    assert (of_shape.windows, of_shape.attention_scale) == (model.windows, 0.1)


def test_the_setting_xla_tries_nothing(tmp_path, caplog):
    chosen = choose(make_check("hangs", tmp_path), "xla")
    assert (chosen.name, chosen.reason) == ("xla", "the setting attention = xla")
    assert caplog.records == []


def test_the_process_ends_with_its_parent():
    kind, builder = jax.devices()[0].device_kind, "faulty_attention:hangs"
    trial = Trial(SHAPE, FEW, kind, (0,), builder)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", MODULE]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environ, **pipes) as process:
        try:
            print(json.dumps(dataclasses.asdict(trial)), file=process.stdin, flush=True)
            assert json.loads(process.stdout.readline()) == {"case": "3 decodes in 8"}
            process.stdin.close()
            assert process.wait(30) == 1
        finally:
            process.kill()


def test_another_gpu_than_the_parents_is_no_verdict(tmp_path):
    other = SimpleNamespace(local_hardware_id=0, device_kind="NVIDIA H200")
    verdict = find_verdict(make_check("right", tmp_path), [other], SHAPE)
    assert verdict.problem == "their process found 1 x cpu"
    assert not (tmp_path / FOLDER).exists()


# ------------------------------------------------------------------ without a process


def test_a_verdict_is_of_one_machine_and_one_kernel(monkeypatch):
    trial = Trial(SHAPE, FEW, "NVIDIA H200", (0,))
    key = key_of(trial)
    assert key == key_of(trial)
    others = [
        replace(trial, device_kind="NVIDIA H100"),
        replace(trial, device_ids=(0, 1)),
        replace(trial, shape=replace(SHAPE, windows=(8,))),
        replace(trial, shape=replace(SHAPE, windows=(None, 8))),
        replace(trial, shape=replace(SHAPE, windows=(Chunk(8),))),
        replace(trial, shape=replace(SHAPE, scale=0.1)),
        replace(trial, shape=replace(SHAPE, soft_cap=50.0)),
        replace(trial, shape=replace(SHAPE, has_sinks=True)),
        replace(trial, cases=replace(FEW, decodes=(1,))),
    ]
    assert all(key_of(other) != key for other in others)
    monkeypatch.setattr("shiftjax.models.gpu_software.driver_version", lambda: "570.1")
    assert key_of(trial) != key
    assert len(key["kernels"]) == 64


def test_a_trial_survives_its_way():
    trial = Trial(replace(SHAPE, windows=(None, 8, Chunk(8))), Cases(), "NVIDIA H200", (0, 1))
    assert Trial.read(json.dumps(dataclasses.asdict(trial))) == trial


def test_queries_are_activations_whatever_the_weights_are():
    layout, bucket = Layout(MODEL, 1, 1), Bucket(16, 8)
    shape = shape_of(layout, Formats("fp8", "fp8", "bfloat16"), 16, bucket, False)
    assert (shape.dtype, shape.kv_dtype) == ("bfloat16", "fp8")


def test_steps_have_padding_and_come_in_the_largest_bucket_too():
    shape = replace(SHAPE, bucket=(8192, 64, 64), has_late=True)
    steps = list(steps_of(shape, Cases()))
    assert [step.bucket for step in steps] == [
        (16, 16, 16),
        (8, 8, 8),
        (512, 8, 8),
        (8192, 64, 64),
        (64, 64, 64),
    ]
    assert steps[0].contexts == (1, 15, 16, 17, 63, 64, 65, 337, 3000)
    assert steps[2].new == (1, 1, 17, 130, 100, 150)
    assert steps[3].new == (1,) * 60 + (17, 130, 100, 150)
    assert steps[4].new == (1,) * 52 + (3,) * 4
    assert all(step.bucket[0] > sum(step.new) for step in steps[:-1])


EXPERTS_TRIED = ["experts of 20 tokens, cut", "experts of 20 tokens", "experts of 300 tokens"]


def test_codes_late_layers_and_experts_are_tried_where_the_model_has_them():
    names = ["3 decodes in 8", "4 decodes in 8", "chunks beside 1 decodes in 8"]
    experts = ExpertShape(128, 64, 2, "bfloat16", "bfloat16")
    for changes, more in (
        ({}, []),
        ({"kv_dtype": "fp8"}, ["a write of codes"]),
        ({"has_late": True}, ["rows alone in 8"]),
        ({"experts": experts}, EXPERTS_TRIED),
    ):
        trial = Trial(replace(SHAPE, **changes), FEW, "", ())
        assert [name for name, _ in tries_of(trial, LOOPS, [])] == names + more
    model = replace(PRESETS["llama-8b"], num_kv_layers=16)
    assert shape_of(Layout(model, 1, 1), Formats(), 16, Bucket(16, 8), False).has_late


def test_codes_that_are_off_are_found():
    right = np.random.default_rng(0).integers(0, 120, (2, 5, 1, 16, 64)).astype(np.uint8)
    right[0, 1] = 127  # NaN: nothing is written there

    def problem(change, runs=2):
        outputs = [right.copy() for _ in range(runs)]
        for number, out in enumerate(outputs):
            change(number, out)
        return wrong_with_codes(outputs, right)

    assert problem(lambda *_: None) is None
    assert problem(lambda _, out: out[:, 0].fill(3)) is None  # the null block
    assert problem(lambda _, out: out[1, 2, 0, 0, :3].__iadd__(1)) is None  # ties
    assert "otherwise" in (problem(lambda _, out: out[1, 2].__iadd__(1)) or "")
    assert problem(lambda _, out: out[1, 2, 0, 0, :3].fill(255)) == "3 of 8192 codes are wrong"
    assert problem(lambda _, out: out[0, 1, 0, 0, :3].fill(126)) == "3 of 8192 codes are wrong"
    changed = problem(lambda number, out: out[1, 2, 0, 0, :1].__iadd__(number))
    assert changed == "codes change from run to run"


def test_what_is_no_token_is_nan_and_blocks_are_shuffled():
    step = next(steps_of(SHAPE, FEW))
    inputs = make_inputs(SHAPE, step)
    k, v = (np.isnan(array.astype(np.float32)) for array in inputs.pool)
    assert (~k[:, 0, :, 0]).sum() == (~v[:, 0, :, 0]).sum() == sum(step.contexts)
    assert k[0].all()  # the null block
    used = inputs.tables[inputs.tables > 0]
    assert sorted(used) == list(range(1, len(used) + 1)) and (np.diff(used) < 0).any()


def test_numbers_that_are_off_are_found():
    step = Step("", (8, 8, 8), (1, 2), (5, 9), 1)
    rng = np.random.default_rng(0)
    right = rng.standard_normal((8, 2, 64)).astype(jax.numpy.bfloat16)
    right[3:] = 0

    def problem(change, runs=3):
        outputs = [right.copy() for _ in range(runs)]
        for number, out in enumerate(outputs):
            change(number, out)
        return wrong_with(outputs, right, step)

    assert problem(lambda *_: None) is None
    nan = problem(lambda _, out: out.__setitem__((0, 0, 0), np.nan))
    assert nan is not None and "a sequence of 5 tokens, 1 of them new" in nan
    assert "9 tokens, 2 of them new" in (problem(lambda _, out: out[1:3].fill(0)) or "")
    assert "padding" in (problem(lambda _, out: out[3:].fill(1e-9)) or "")
    changed = problem(lambda number, out: out[0, 0].fill(number) if number == 2 else None)
    assert changed == "64 of 1024 numbers change from run to run"
