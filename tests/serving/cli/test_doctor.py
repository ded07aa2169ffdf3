"""`shiftjax doctor`: what it finds here, and what it would advise elsewhere."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import jax
import pytest

from serving.cli.doctor import (
    MOST_SHARE,
    REDUCED_BYTES,
    advice,
    bytes_of_sums,
    has_idle_gpu,
    model_of,
    nvlinks,
    share_for_jax,
    shown,
    total_memory,
)
from serving.cli.main import main
from shiftjax.config import EngineConfig

H100 = {
    "id": 0,
    "platform": "gpu",
    "kind": "NVIDIA H100 80GB HBM3",
    "compute_capability": "9.0",
    "multiprocessors": 132,
    "memory_bytes_for_jax": 72 << 30,
    "memory_bytes": 80 << 30,
}
PASSED = {
    "width": 1,
    "mesh": "dp=1 sp=1 tp=1",
    "name": "pallas",
    "reason": "passed its check",
    "checked": True,
    "seconds": 31.0,
    "problem": None,
    "detail": "",
}
FOUND = {
    "devices": [H100],
    "nvlinks": {0: 18},
    "software": {"driver": "580.82.07", "plugin": "cuda12 0.12.0.1"},
    "assemblers": [{"name": "ptxas", "version": "12.9.86", "wheel": "", "path": "/bin/ptxas"}],
    "model": "llama-8b",
    "attention": [PASSED],
    "ceilings": {"bytes_per_second": 3e12, "flops_per_second": 7.8e14, "gemm_width": 8192},
    "all_reduce": [{"bytes": 16384, "seconds": 5e-6}],
    "sum_buffer_bytes": 0,
}
CPU = {"devices": [{"platform": "cpu", "kind": "cpu"}]}


def advised(config: EngineConfig | None = None, **changes) -> str:
    return "\n".join(advice(FOUND | changes, config or EngineConfig()))


def test_it_works_on_a_cpu(tmp_path, capsys):
    path = tmp_path / "doctor.json"
    assert main(["doctor", "--devices", "2", "--cache-dir", "none", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [device["platform"] for device in found["devices"]] == ["cpu", "cpu"]
    (attention,) = found["attention"]
    assert (attention["name"], attention["checked"]) == ("xla", False)
    assert attention["reason"] == "the kernels are for GPUs, not for cpu"
    assert [each["bytes"] for each in found["all_reduce"]] == list(REDUCED_BYTES)
    assert all(each["seconds"] > 0 for each in found["all_reduce"])
    assert found["ceilings"]["bytes_per_second"] > 0 < found["ceilings"]["flops_per_second"]
    assert found["software"]["jax"] and found["advice"]
    printed = capsys.readouterr().out
    assert "2 x cpu" in printed and "all-reduce, 4096 KB" in printed and "-> nothing" in printed


def test_a_setting_that_cannot_be_had_is_a_failure(capsys):
    code = main(["doctor", "--devices", "1", "--cache-dir", "none", "--attention", "pallas"])
    assert code == 1
    assert "attention = pallas: cpu cannot run the attention kernels" in capsys.readouterr().out


def test_a_backend_that_cannot_start_is_what_it_reports(tmp_path):
    path = tmp_path / "doctor.json"
    command = [sys.executable, "-m", "serving.cli.main", "doctor", "--json", str(path)]
    run = subprocess.run(
        command,
        env=os.environ | {"JAX_PLATFORMS": "cuda", "PYTHONPATH": ""},  # without plugins for GPUs
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1 and "Traceback" not in run.stderr
    found = json.loads(path.read_text())
    assert found["software"]["jax"] and found["advice"][0].startswith("JAX does not start: ")
    assert found["advice"][0] in run.stdout


def test_a_healthy_gpu_needs_nothing():
    assert advised() == ""
    rows = shown(FOUND)
    assert rows["NVLink links of a GPU"] == "18" and rows["ptxas"] == "/bin/ptxas"
    assert rows["its check"] == "passed, in 31.0 s"
    assert rows["copy"] == "3,000 GB/s" and rows["GEMM"] == "780.00 TFLOP/s (width 8192)"
    assert rows["all-reduce, 16 KB"] == "5.0 µs"


@pytest.mark.parametrize(
    ("driver", "plugin", "words"),
    [
        ("580.82.07", "none", "pip install 'shiftjax[cuda13]'"),
        ("535.104.05", "none", "pip install 'shiftjax[cuda12]'"),
        ("580.82.07", "cuda12 0.12.0.1", "unset JAX_PLATFORMS"),
        ("none", "none", "there is no NVIDIA driver here"),
    ],
)
def test_a_cpu_beside_an_idle_gpu_is_told_what_to_install(driver, plugin, words):
    software = {"driver": driver, "plugin": plugin}
    assert words in advised(software=software, **CPU)
    assert has_idle_gpu(FOUND | CPU | {"software": software}) == (driver != "none")


def test_a_failed_check_is_advised_upon():
    failed = PASSED | {"name": "xla", "problem": "9 decodes in 16: no end in 60 s"}
    assert "update driver, JAX and CUDA wheels" in advised(attention=[failed])
    assert "attention = xla" in advised(attention=[failed])


def test_memory_links_and_caches_are_advised_upon():
    starved = H100 | {"memory_bytes_for_jax": 60 << 30}
    assert "75% of a GPU's memory: XLA_PYTHON_CLIENT_MEM_FRACTION=0.90" in advised(
        devices=[starved]
    )
    assert "no NVLink" in advised(devices=[H100] * 2, nvlinks={0: 0, 1: 0})
    assert advised(devices=[H100] * 2, nvlinks=None) == ""
    assert "every start compiles" in advised(EngineConfig.from_options(cache_dir="none"))
    assert "brings one" in advised(assemblers=[])
    a100 = H100 | {"kind": "NVIDIA A100", "compute_capability": "8.0"}
    assert "NVIDIA A100 has no attention kernels" in advised(devices=[a100])


def test_sums_have_buffers_beside_jax():
    """161 sums of six small steps of a 70B on 8: JAX's usual share leaves too little."""
    sums = 161 * 16 * (2 << 20)
    usual = H100 | {"memory_bytes_for_jax": int(0.92 * H100["memory_bytes"])}
    assert advised(devices=[usual]) == ""
    said = advised(devices=[usual], sum_buffer_bytes=sums)
    assert "MEM_FRACTION=0.88 leaves" in said and "5.4 GB of buffers of sums" in said
    fitting = H100 | {"memory_bytes_for_jax": int(0.88 * H100["memory_bytes"])}
    assert advised(devices=[fitting], sum_buffer_bytes=sums) == ""
    assert share_for_jax(141 << 30, 0) == MOST_SHARE


def test_an_engines_sums_are_counted():
    config, devices = EngineConfig.from_options(sp=2, tp=2), jax.devices()[:4]
    model = model_of(config, None)
    fewer = replace(model, num_layers=model.num_layers // 2)
    whole, half = (bytes_of_sums(config, each, devices) for each in (model, fewer))
    assert whole > half > 0.5 * whole


def test_nvidia_smi_is_read():
    links = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)
\t Link 0: <inactive>
"""
    assert nvlinks(lambda *_: links) == {0: 2, 1: 0}
    assert nvlinks(lambda *_: None) is None
    assert total_memory(lambda *_: "0, 81559\n1, 81559\n") == {0: 81559 << 20, 1: 81559 << 20}
    assert total_memory(lambda *_: None) == {}
