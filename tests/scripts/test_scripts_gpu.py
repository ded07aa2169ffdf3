"""The scripts for a GPU machine, as far as a machine without one can run them."""

import json
import math
import os
import re
import subprocess
import sys
import tarfile
import time
import zlib
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_cases  # noqa: E402
import gpu_engine  # noqa: E402
import gpu_goldens  # noqa: E402
import gpu_measured  # noqa: E402
import gpu_parts  # noqa: E402
import gpu_predictions  # noqa: E402
import gpu_products  # noqa: E402
import gpu_profile  # noqa: E402
import gpu_run  # noqa: E402
import gpu_stages  # noqa: E402
import gpu_writes  # noqa: E402
import tune_kernels  # noqa: E402
from gpu_weights import exponent, make_weight  # noqa: E402

from pallas_kernels.measure import (  # noqa: E402
    Calls,
    Ceilings,
    DecodeShape,
    Effort,
    chain_seconds,
    row_of,
)
from pallas_kernels.tuned import from_row, read_table  # noqa: E402
from serving.bench import kernels as bench_kernels  # noqa: E402
from serving.cli.main import main  # noqa: E402
from shiftjax.arch.formats import Formats  # noqa: E402
from shiftjax.arch.presets import PRESETS  # noqa: E402
from shiftjax.arch.weights import Weight  # noqa: E402
from shiftjax.costs.machine_files import load_machine  # noqa: E402
from shiftjax.models.attention import write_kv  # noqa: E402
from shiftjax.parallel.layout import Layout  # noqa: E402
from shiftjax.sim.measured_kernels import (  # noqa: E402
    kernel_rows,
    kernels_of,
    predicted_seconds,
)

BARE = ROOT / ".venv" / "bare" / "bin" / "python"  # as machines with GPUs often have it
STEPS = ["decode of 2", "prefill of 32"]
PROFILES = [f"profile of {name}" for name in STEPS]
USERS = ["greedy", "serve", "switch"]


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """The folder of what a dry run leaves on a bare Python, which has but what was bundled."""
    if not BARE.exists():
        pytest.skip("needs a bare Python: make .venv/.bare")
    folder = tmp_path_factory.mktemp("bare")
    pack = ["sh", "scripts/gpu_bundle.sh", str(folder / "bundle.tgz")]
    subprocess.run(pack, cwd=ROOT, env=os.environ | {"PYTHON": sys.executable}, check=True)
    assert (folder / "bundle.tgz").stat().st_size < 4e6
    with tarfile.open(folder / "bundle.tgz") as bundle:
        bundle.extractall(folder, filter="data")
    path = "shiftjax-gpu:shiftjax-gpu/packages"
    command = [str(BARE), "shiftjax-gpu/scripts/gpu_run.py", "--out", "out", "--dry-run"]
    kept = {name: value for name, value in os.environ.items() if name.startswith("JAX_")}
    environment = kept | {"PATH": os.environ["PATH"], "PYTHONPATH": path}
    options = {"env": environment, "capture_output": True, "text": True}
    run = subprocess.run(command, cwd=folder, check=False, **options)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder / "out"


@pytest.fixture(scope="module")
def dry_rows(dry_run):
    return json.loads((dry_run / "gpu_run.json").read_text())


def run_script(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/gpu_run.py", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.thorough
def test_a_dry_run_goes_through_every_part(dry_rows):
    empty = {name for name in gpu_stages.PARTS if name.startswith(("correctness", "tuning"))}
    parts = {*gpu_stages.PARTS, gpu_stages.DRY.name} - empty
    assert {row["part"] for row in dry_rows} == parts
    assert dry_rows[0]["devices"] == 2 and dry_rows[0]["packages"]["jax"] == "0.11.2"
    assert all(map(gpu_run.is_right, dry_rows))
    by_part = {name: [row for row in dry_rows if row["part"] == name] for name in parts}
    names = {name: [row.get("row") for row in rows] for name, rows in by_part.items()}
    assert names["engine: pallas, one graph"] == ["start", *STEPS, *USERS, *PROFILES]
    assert names["engine: fp8, one graph"] == names["engine: pallas, one graph"]
    assert names["engine: fp8"] == ["start", *STEPS, *PROFILES]
    assert names["engine: experts"] == ["start", STEPS[0], PROFILES[0]]
    smoke = by_part["smoke: 1 KV head"]
    assert smoke and all(row["right"] and row["same_bits"] for row in smoke)
    for name in ("decode", "prefill", "writes", "experts"):
        assert by_part[name][-1]["us"] > 0 and by_part[name][-1]["predicted_us"] > 0
    assert [row["right"] for row in by_part["experts"][:-1]] == [True] * 4  # every format
    assert by_part["goldens"] and by_part["torch"] == [by_part["torch"][0]]
    assert by_part["torch"][0]["skipped"] == "torch is not installed"
    switches = [row for row in dry_rows if row.get("row") == "switch"]
    assert [(row["sp"], row["tp"]) for row in switches] == [(1, 1), (1, 1), (2, 1)]
    assert all(row["same_tokens"] == row["batch"] for row in switches)


@pytest.mark.thorough
def test_a_dry_run_leaves_three_files(dry_run):
    assert sorted(file.name for file in dry_run.iterdir()) == sorted(
        ("gpu_run.json", "profile.json", "logs.tar.gz")
    )
    profiles = json.loads((dry_run / "profile.json").read_text())
    assert [profile["row"] for profile in profiles] == [*PROFILES * 3, PROFILES[0]]
    for kernels in (profile["kernels"] for profile in profiles):
        assert 5 < len(kernels) <= 20 and kernels[0]["us"] >= kernels[1]["us"] > 0
    with tarfile.open(dry_run / "logs.tar.gz") as logs:
        assert {"environment.log", "hf_config.json"} <= set(logs.getnames())
        config = json.loads(logs.extractfile("hf_config.json").read())
    assert config["num_hidden_layers"] == 2


@pytest.mark.thorough
def test_a_dry_run_traces_all_that_a_run_would_compile(dry_rows):
    """The candidates of the tuning, too; the kernels refuse none of them."""
    traced = [row for row in dry_rows if row["part"] == gpu_stages.DRY.name]
    shapes = [name for some in gpu_cases.SHAPES.values() for name in some]
    shapes += gpu_cases.EXPERTS
    assert [row["row"] for row in traced if "row" in row] == shapes
    configurations = [row for row in traced if "kernel" in row]
    assert len(configurations) == len(gpu_cases.kernels())
    candidates = sum(
        len(tune_kernels.candidates_for(kernel, 128, 16)) for kernel in ("decode", "prefill")
    )
    assert sum("config" in row["kernel"] for row in configurations) == candidates > 5
    assert not any("refused" in row for row in configurations)


def test_rich_and_gguf_are_imported_where_they_are_used():
    modules = "serving.bench.kernels, serving.run.progress, shiftjax.text.tokenizer"
    code = f"import sys; sys.modules |= dict(rich=None, gguf=None); import {modules}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_goldens_are_what_numpy_computes():
    """Some of them: a token of the shortest prompts, without adapters and with."""
    from oracle.make_gpu_goldens import cases

    known = json.loads(gpu_goldens.GOLDENS.read_text())
    num = len(gpu_goldens.PROMPTS)
    assert [case["prompt"] for case in known] == 2 * list(gpu_goldens.PROMPTS)
    some = known[:4] + known[num : num + 4]
    for got, want in zip(cases(gpu_goldens.PROMPTS[:4], 1), some, strict=True):
        assert got.get("adapter", -1) == want.get("adapter", -1)
        assert got["token_ids"] == want["token_ids"][:1] and got["margins"] == want["margins"][:1]


def kernel_times(*events: tuple[str, str, str, float]) -> list[tuple[str, float]]:
    """What is read of a recording of events: plane, line, name, nanoseconds."""
    planes = [
        SimpleNamespace(name=plane, lines=[SimpleNamespace(name=line, events=[event])])
        for plane, line, name, time in events
        for event in [SimpleNamespace(name=name, duration_ns=time)]
    ]
    return list(gpu_profile.kernels_of(SimpleNamespace(planes=planes)))


def test_kernels_are_those_of_a_gpus_streams_where_there_is_one():
    gpu = [
        ("/host:CPU", "tf_XLAEigen", "dot.1", 5.0),
        ("/device:GPU:0", "XLA Modules", "jit_step", 70.0),
        ("/device:GPU:0", "Stream #16(compute)", "gemm_fusion_dot_3", 40.0),
    ]
    assert kernel_times(*gpu) == [("gemm_fusion_dot_3", 40.0)]
    assert kernel_times(gpu[0]) == [("dot.1", 5.0)]


def test_kernels_that_differ_in_a_number_are_summed():
    kernels = [("add_fusion_1", 3e3), ("decode", 8e3), ("add_fusion.22", 5e3), ("write", 2e3)]
    found = gpu_profile.summed(iter(kernels), steps=2)
    assert (found["us"], found["launches"]) == (9.0, 2.0)
    assert [(row["kernel"], row["us"], row["launches"]) for row in found["kernels"]] == [
        ("add_fusion", 4.0, 1.0),
        ("decode", 4.0, 0.5),
        ("write", 1.0, 0.5),
    ]


def test_a_model_is_chosen_by_the_memory_of_the_device():
    names, _, formats, *_ = gpu_parts.LARGEST["fp8"]
    found = {gb: gpu_engine.largest_model(names, formats, gb * 1e9) for gb in (135, 77, 8)}
    assert [one and one.name for one in found.values()] == ["llama-3.3-70b", "llama-3.1-8b", None]


def test_a_decode_step_reads_every_weight_but_the_embedding_and_of_experts_some():
    """By the published sizes: 70.6e9 parameters, half of 151936 x 2048 x 2 of Qwen's are a table"""
    plain, codes = Formats(), Formats("fp8", "fp8", "bfloat16")
    llama, qwen = (Layout(PRESETS[name], 1, 1) for name in ("llama-70b", "qwen-30b-a3b"))
    table = 128_256 * 8192
    assert gpu_engine.decode_bytes(llama, plain, 1, 0) == 2 * (70_553_706_496 - table)
    reads = gpu_engine.decode_bytes(llama, codes, 64, 1024) - gpu_engine.decode_bytes(
        llama, codes, 64, 0
    )
    assert reads == 64 * 1024 * 2 * 80 * 8 * 128
    every = gpu_engine.decode_bytes(qwen, plain, 10_000, 0)
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    assert every - gpu_engine.decode_bytes(qwen, plain, 1, 0) == pytest.approx(experts * 120 / 128)


def test_codes_are_what_their_description_says():
    """Of a matrix of codes the bytes, and in their units about the numbers of a plain one."""
    shape = (32, 64)
    weight = Weight("up", shape, ("intermediate", None), "w", kind="codes")
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    codes = np.asarray(make_weight(weight, np.dtype(jnp.float8_e4m3fn), place), np.float64)
    plain = np.asarray(
        make_weight(weight._replace(kind="matrix"), np.dtype(np.float32), place), np.float64
    )
    np.testing.assert_allclose(codes * 2.0 ** exponent(64), plain, rtol=2**-4)
    assert len(np.unique(codes)) > 60


@pytest.mark.parametrize("wrong", ["", "scale", "slot"])
def test_a_write_of_codes_is_judged(wrong):
    def write(pool, k, v, slots, *, scales):
        factors = jnp.array([[1.0], [1.13 if wrong == "scale" else 1.0]])
        by_head = jnp.asarray(scales * factors, jnp.float32)
        return write_kv(pool, k, v, slots.at[0].add(wrong == "slot"), by_head)

    assert gpu_writes.is_right(gpu_writes.DRY["dry"], write) is not bool(wrong)


def test_a_cpu_is_refused_before_anything_runs(tmp_path):
    run = run_script("--out", str(tmp_path), JAX_PLATFORMS="cpu")
    assert run.returncode == 2
    (row,) = json.loads((tmp_path / "gpu_run.json").read_text())
    assert "needs a Hopper GPU (H100, H200): JAX sees only cpu here" in row["failed"]


def test_every_row_of_a_run_has_a_prediction_and_the_file_is_the_commands():
    text = gpu_predictions.shown(["h100", "h200"])
    assert text + "\n" == gpu_run.PREDICTIONS.read_text()
    for rows in json.loads(text).values():
        assert all(row["low"] <= row["predicted"] <= row["high"] for row in rows)
        for kind, shapes in gpu_cases.SHAPES.items():
            assert [row["row"] for row in rows if row["part"] == kind] == list(shapes)
        experts = [row["row"] for row in rows if row["part"] == "experts"]
        assert experts == list(gpu_cases.EXPERTS)
        parts = {row["part"] for row in rows}
        assert parts <= gpu_stages.PARTS.keys()
        assert {f"engine: {name}" for name in (*gpu_parts.ENGINES, *gpu_parts.LARGEST)} <= parts
        assert [row["row"] for row in rows if row["part"] == "writes"] == list(gpu_writes.WRITES)


def test_a_row_says_whether_what_was_predicted_came_true():
    (rate,) = (
        row
        for row in gpu_run.predictions_for("NVIDIA H200")
        if (row["part"], row["row"]) == ("ceilings", "copy")
    )
    for factor, came_true in ((1.0, True), (0.5, False), (2.0, False)):
        row = {"part": "ceilings", "row": "copy", "rate": rate["predicted"] * factor}
        found = gpu_run.with_predictions(row, [rate])
        assert found["predictions"]["rate"]["came_true"] is came_true
    assert gpu_run.with_predictions({"part": "views", "right": True}, [rate]) == {
        "part": "views",
        "right": True,
    }
    assert gpu_run.predictions_for("NVIDIA A10") == []


def test_a_stage_is_done_in_its_time():
    """Of stages that only one GPU is needed for, in 9.5 minutes."""
    for stage in gpu_stages.STAGES.values():
        assert sum(part.expected for part in stage.parts) <= stage.seconds
        assert all(part.expected < part.limit <= 300 for part in stage.parts)
        names = [part.name for part in stage.parts]
        assert names[:2] == ["environment", "ceilings"] and len(set(names)) == len(names)
        assert stage.seconds == 570 or {part.gpus for part in stage.parts[2:]} == {2, 4}


@pytest.mark.parametrize("transposed", [False, True])
def test_the_weights_are_what_their_description_says(transposed):
    """Another program makes the same ones from the same words."""
    shape, name = (12, 64), "model.layers.0.mlp.down_proj.weight"
    axes = ("intermediate", None)
    weight = Weight("down", shape, axes, name, transposed=transposed)
    stored = make_weight(
        weight, np.dtype(jnp.bfloat16), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )
    got = np.asarray(stored, np.float64)
    got = got.T if transposed else got
    start, columns = zlib.crc32(name.encode()), got.shape[1]
    for i, value in enumerate(got.ravel()):
        h = (i * 0x9E3779B1 + start) % 2**32
        h = (h ^ (h >> 15)) * 0x85EBCA77 % 2**32
        h ^= h >> 13
        k = round(math.log2(columns**-0.5 / 73.9))
        assert value == ((h >> 24) - 127.5) * 2.0**k


def rows_of(code: str, tmp_path: Path, limit: float = 60.0) -> list[dict]:
    """The rows of a process that prints one, then does what `code` says."""
    text = f"import os, sys, time\nprint('{{\"number\": 1}}', flush=True)\n{code}"
    return list(gpu_run.child_rows([sys.executable, "-c", text], limit, tmp_path / "log"))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("os.abort()", "ended by SIGABRT"),
        ("os.kill(os.getpid(), 11)", "ended by SIGSEGV"),
        ("print('no such kernel', file=sys.stderr); sys.exit(3)", "ended with code 3"),
    ],
)
def test_a_part_that_dies_is_a_row(code, reason, tmp_path):
    one, died = rows_of(code, tmp_path)
    assert one == {"number": 1} and died["failed"] == reason
    assert not gpu_run.is_right(died) and gpu_run.is_right(one)
    assert not gpu_run.is_right({"right": False})
    if "kernel" in code:
        assert died["log"] == ["no such kernel"]


def test_a_part_that_hangs_is_killed_with_what_it_has_started(tmp_path):
    """As it would hang in a kernel: it does not listen to signals that it may ignore."""
    code = """
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print('{"child": %d}' % child.pid, flush=True)
time.sleep(600)
"""
    one, child, killed = rows_of(code, tmp_path, limit=3.0)
    assert one == {"number": 1} and killed["failed"] == "killed after 3 s"
    status = Path(f"/proc/{child['child']}/stat")
    for _ in range(300):  # a process that is killed still needs the processor to go
        if not status.exists() or status.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError("the part's own process is still there")


def test_what_is_no_row_goes_to_the_log(tmp_path):
    assert rows_of("print('ptxas says\\nmuch')", tmp_path) == [{"number": 1}]
    assert (tmp_path / "log").read_text() == "ptxas says\nmuch\n"


PART = gpu_parts.Part("environment", gpu_parts.environment, 1, 9)


def run_of(answers: dict[str, list[dict]], tmp_path: Path, seconds: float, *more) -> list:
    """Run parts that answer with these rows; the limits that they were started with go along."""
    limits = {}

    def start(parts, limit):
        limits[parts[0].name] = limit
        yield from answers[parts[0].name]

    log = gpu_run.Log(tmp_path)
    gpu_run.run_parts((PART, *more), start, log, seconds)
    assert json.loads((tmp_path / "gpu_run.json").read_text()) == log.rows
    return [log.rows[1:], limits]


def test_parts_that_fail_do_not_keep_the_next_ones_from_running(tmp_path):
    one, two = PART._replace(name="one"), PART._replace(name="two", limit=1000)
    answers = {"environment": [{"device": "A", "devices": 1}], "one": [{"failed": "killed"}]}
    rows, limits = run_of(answers | {"two": [{"n": 2}]}, tmp_path, 100.0, one, two)
    assert [(row["part"], row.get("n")) for row in rows] == [("one", None), ("two", 2)]
    assert limits["one"] == 9 and 99 < limits["two"] <= 100  # no part outlasts the run


def test_parts_for_several_gpus_need_them_and_get_their_time(tmp_path):
    many = PART._replace(name="many", gpus=2, limit=900)
    for devices, names in ((1, []), (2, ["many"])):
        answers = {"environment": [{"device": "A", "devices": devices}], "many": [{}]}
        rows, limits = run_of(answers, tmp_path, 1000.0, many)
        assert [row["part"] for row in rows] == names
    assert limits["many"] == 900


def test_the_run_ends_when_the_time_is_up(tmp_path):
    one = PART._replace(name="one")
    rows, limits = run_of({"environment": [{"device": "A", "devices": 1}]}, tmp_path, 10.0, one)
    assert "10 s are over" in rows[0]["stopped"] and rows[0]["not_run"] == ["one"]
    assert list(limits) == ["environment"]


def test_nothing_runs_where_the_environment_is_wrong(tmp_path):
    rows, limits = run_of({"environment": [{"failed": "no GPU"}]}, tmp_path, 100.0, PART)
    assert rows == [] and list(limits) == ["environment"]


def test_a_chain_lowers_its_call_once():
    """Lowering a kernel takes seconds."""
    traced = []

    def call(x, y):
        traced.append(y)
        return x + y

    turns = [(jnp.float32(1),), (jnp.float32(2),)]
    assert chain_seconds(Calls(call, jnp.zeros(()), turns), Effort(repeats=1, calls=16)) > 0
    assert len(traced) == 1


def test_an_alternative_that_does_not_run_says_so(capsys):
    """The rows of `bench kernels` as people see them."""
    shape, ceilings = DecodeShape(64, 2048), Ceilings(3e12, 8e14)

    def no_cudnn():
        raise RuntimeError("cuDNN is not found\nstack")

    times = {"fast": lambda: 1e-3, "cuDNN": no_cudnn}
    rows = [row_of(shape, 2e-4, ceilings)]
    rows += bench_kernels._alternatives(shape, times, ceilings)
    bench_kernels.print_rows("kernels", rows)
    out = capsys.readouterr().out
    first, fast, cudnn = (re.split(r"  +", line.strip()) for line in out.splitlines()[2:])
    assert first == ["decode", "64 x 2048", "200.0", "2,684", "GB/s", "89"]
    assert fast[:3] == ["fast", "64 x 2048", "1,000.0"]
    assert "cuDNN is not found" in cudnn and "stack" not in out


def test_bench_kernels_needs_a_gpu(capsys):
    assert main(["bench", "kernels"]) == 2
    assert "needs a Hopper GPU (H100, H200): JAX sees only cpu here" in capsys.readouterr().err


def test_measured_kernels_renew_a_machine_file(tmp_path):
    rows = [
        {"kernel": "ceilings", "device": "NVIDIA H200", "flops_per_second": 0.8 * 989.5e12},
        *({"kernel": "decode", "rate": rate} for rate in (2400, 3600, 4000)),
        {"kernel": "  cuDNN", "rate": 1.0},
        {"kernel": "prefill", "rate": 494.75},
    ]
    file = tmp_path / "here.yaml"
    file.write_text(bench_kernels.machine_file("h200x8", rows))
    renewed = {"matmul_efficiency": 0.8, "attention_efficiency": 0.5}
    machine = load_machine("h200x8")
    kv = {"kv_efficiency": machine.kv_efficiency | {"bfloat16": 0.75}}
    found = load_machine(str(file))
    assert found == replace(machine, **renewed, **kv, measured=found.measured)
    assert found.measured == f"`shiftjax bench kernels` on NVIDIA H200, {date.today()}"


TRUTH = {  # of an H200 that nobody has
    "kernel_seconds": 1.1e-6,
    "product_seconds": 0.9e-6,
    "memory_efficiency": 0.7,
    "attention_seconds": 4e-6,
    "attention_efficiency": 0.45,
}


def measured_rows(device: str = "NVIDIA H200", *, dry: bool = False) -> dict[str, list[dict]]:
    """What stages would say of a machine with these constants: their own rows, with its times."""
    truth = replace(load_machine("h200x8"), **TRUTH, kv_efficiency={"bfloat16": 0.7, "fp8": 0.4})
    begin = {"part": "environment", "device": device, "dry": dry, "date": "2030-02-01"}
    launch = {"part": "ceilings", "row": "launch", "us": truth.kernel_seconds * 1e6}
    copy = {"part": "ceilings", "row": "copy", "rate": 4000.0}
    ceilings = Ceilings(4e12, 8e14)
    rows = [begin, copy, launch]
    for kind, shapes in gpu_cases.SHAPES.items():
        for name, (shape, _) in shapes.items():
            row = row_of(shape, 1.0, ceilings) | {"launches": gpu_parts.LAUNCHES[kind]}
            rows.append({"part": kind, "row": name} | row)
    products = [{"part": "torch", "row": "SDPA, 8,192", "rate": 500.0}]
    for name, shape in gpu_products.PRODUCTS.items():
        row = {"part": "products", "row": name, "us": 1.0, "of_copy": 0.5}
        products.append(row | gpu_products._as_kernel(shape))
    for row in [*rows, *products]:
        for kernel in kernels_of(kernel_rows([row]), "a test"):
            row["us"] = predicted_seconds(truth, kernel) * 1e6
            if "rate" in row:  # as if it had taken a second
                row["rate"] *= 1e6 / row["us"]
    tuned = {"part": "tuning: decode 0", "kernel": "decode", "us": [1.0], "score": 1.0}
    return {"a": rows, "b": [begin, *products], "c": [begin, tuned]}


def run_measured(tmp_path: Path, rows: dict[str, list[dict]]) -> tuple[int, Path]:
    files = [tmp_path / f"{name}.json" for name in rows]
    for file, some in zip(files, rows.values(), strict=True):
        file.write_text(json.dumps(some))
    out = tmp_path / "here.yaml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gpu_measured.py", *map(str, files), "--out", str(out)])
        return gpu_measured.main(), out


def test_what_was_measured_renews_the_machine_and_plan_says_so(tmp_path, capsys):
    code, file = run_measured(tmp_path, measured_rows())
    assert code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a launch, us: 1.1"
    assert lines[1] == "a product of codes reads, share of a copy: 0.5"
    assert re.fullmatch(r"decode attention, GB/s: 3\d\d\d, 0\.\d\d of a copy", lines[2])
    assert re.fullmatch(r"prefill .*: 4\d\d(\.\d)?, 0\.\d\d of PyTorch's SDPA", lines[3])
    before, found = load_machine("h200x8"), load_machine(str(file))
    for name, value in TRUTH.items():
        assert getattr(found, name) == pytest.approx(value, rel=0.05), name
    assert found.kv_efficiency == pytest.approx({"bfloat16": 0.7, "fp8": 0.4}, rel=0.05)
    kept = ("memory_bytes", "all_reduce", "expert_efficiency", "tile_rows", "compute_units")
    assert all(getattr(found, name) == getattr(before, name) for name in kept)
    where = "scripts/gpu_run.py on NVIDIA H200, 2030-02-01"
    assert found.measured.startswith(f"{where}: ") and "kernel_seconds" in found.measured
    source = yaml.safe_load(file.read_text())["kernel_seconds"]
    assert source == {"value": 1.1, "unit": "us", "source": f"measured by {where}"}
    for machine, words in ((str(file), f"measured by {where}"), ("h200x8", "predicted, from")):
        assert main(["plan", "--model", "llama-8b", "--machine", machine]) == 0
        assert f"constants of h200x8: {words}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (measured_rows(dry=True), "the times of a dry run mean nothing"),
        (measured_rows("NVIDIA K80"), "there is no machine file for 'NVIDIA K80'"),
        ({"a": measured_rows()["a"], "b": measured_rows("x")["b"]}, "must be of one kind"),
        ({"c": []}, "must be of one kind"),
    ],
)
def test_rows_of_no_gpu_renew_nothing(rows, reason, tmp_path, capsys):
    code, file = run_measured(tmp_path, rows)
    assert code == 2 and not file.exists()
    assert reason in capsys.readouterr().err


def test_constants_that_were_not_measured_stay(tmp_path, capsys):
    rows = measured_rows()["a"]
    code, file = run_measured(tmp_path, {"a": rows[:3]})
    assert code == 0 and "decode attention, GB/s: not measured" in capsys.readouterr().out
    before, found = load_machine("h200x8"), load_machine(str(file))
    assert found == replace(before, kernel_seconds=1.1e-6, measured=found.measured)
    assert found.measured.endswith(": kernel_seconds")


@pytest.mark.parametrize("head_dim", tune_kernels.HEAD_DIMS)
@pytest.mark.parametrize("block_size", tune_kernels.BLOCK_SIZES)
def test_every_shape_has_candidates_of_both_kernels(head_dim, block_size):
    every = list(tune_kernels.all_candidates([head_dim], [block_size]))
    for kernel in ("prefill", "decode"):
        kept = tune_kernels.candidates_for(kernel, head_dim, block_size)
        tried = [one.settings for one in every if one.kernel == kernel]
        assert kept and all(settings in tried for settings in kept)


def test_what_does_not_fit_shared_memory_is_pruned():
    deepest = {"kv_tile": 128, "stages": 4}
    for settings in tune_kernels.candidates_for("prefill", 128, 16):
        assert not deepest.items() <= settings.items()


def test_the_table_that_is_shipped_can_be_read():
    for row in json.loads(read_table()):
        from_row(row)


def tuned_row(kernel: str, score: float, **settings) -> dict:
    return {"kernel": kernel, "head_dim": 128, "block_size": 16} | {
        "settings": settings,
        "score": score,
    }


def test_the_best_settings_replace_those_of_the_same_gpu_and_shape(tmp_path):
    table = tmp_path / "tuned.json"
    rows = [
        tuned_row("prefill", 2.0, kv_tile=64),
        tuned_row("prefill", 1.0, kv_tile=128),
        tuned_row("decode", 3.0, num_blocks=264),
        tuned_row("decode", 4.0, num_blocks=132),
    ]
    tune_kernels.write_best("GPU A", rows, table)
    tune_kernels.write_best("GPU B", rows, table)
    rows[0]["score"] = 0.5
    tune_kernels.write_best("GPU A", rows, table)
    b, a = json.loads(table.read_text())
    assert (a["gpu"], b["gpu"]) == ("GPU A", "GPU B")
    assert (from_row(a).prefill.kv_tile, from_row(b).prefill.kv_tile) == (64, 128)
    assert from_row(a).decode.num_blocks == 264
