"""Which compilers are trusted: what assembles is asked, and not the runtime."""

import jax
import pytest

from shiftjax.models import gpu_software
from shiftjax.models.gpu_software import parse_version, ptxas_version, why_not_assembled

PTXAS = """ptxas: NVIDIA (R) Ptx optimizing assembler
Copyright (c) 2005-2025 NVIDIA Corporation
Built on Tue_May_27_02:24:01_PDT_2025
Cuda compilation tools, release {release}, V{version}
Build cuda_{release}.r{release}/compiler.0_0
"""


@pytest.fixture
def wheels(monkeypatch, tmp_path):
    """Make an installation: wheels by name and version, and a ptxas that says its version."""

    def install(ptxas: str | None = None, **versions: str) -> None:
        found = {name.replace("_", "-"): version for name, version in versions.items()}
        monkeypatch.setattr(gpu_software, "installed", found.get)
        path = tmp_path / "ptxas"
        if ptxas is not None:
            text = PTXAS.format(release=".".join(ptxas.split(".")[:2]), version=ptxas)
            path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\n")
            path.chmod(0o755)
        monkeypatch.setattr(gpu_software, "find_ptxas", lambda: path if ptxas else None)

    return install


CUDA_12 = {"jax_cuda12_plugin": "0.12.0.1"}
CUDA_13 = {"jax_cuda13_plugin": "0.12.0.1"}


@pytest.mark.parametrize(
    ("ptxas", "versions"),
    [
        ("12.9.86", CUDA_12 | {"nvidia_nvjitlink_cu12": "12.9.86"}),
        ("13.5.37", CUDA_13 | {"nvidia_nvjitlink": "13.5.37"}),
        ("12.6.85", CUDA_12),  # before the error came in
        ("13.0.88", {}),
    ],
)
def test_compilers_without_the_error_are_used(wheels, ptxas, versions):
    wheels(ptxas, **versions)
    assert why_not_assembled() is None


def test_what_the_runtime_says_does_not_count(wheels, monkeypatch):
    """12.9.0 and 12.9.1 have one runtime version, 12090; the wheel of the latter is right."""
    runtime = type("Versions", (), {"cuda_runtime_get_version": staticmethod(lambda: 12090)})
    monkeypatch.setattr(jax._src.lib, "cuda_versions", runtime)
    wheels("12.9.86", **CUDA_12, nvidia_nvjitlink_cu12="12.9.86")
    assert why_not_assembled() is None
    wheels("12.9.41", **CUDA_12, nvidia_nvjitlink_cu12="12.9.41")
    assert why_not_assembled() is not None


@pytest.mark.parametrize("version", ["12.8.61", "12.8.93", "12.9.41"])
def test_a_compiler_with_the_error_is_named_with_the_wheel_that_repairs_it(wheels, version):
    wheels(version, **CUDA_12)
    assert why_not_assembled() == (
        f"ptxas {version} can miscompile causal masks; "
        "pip install -U 'nvidia-cuda-nvcc-cu12>=12.9.86'"
    )


def test_the_library_is_asked_before_the_program(wheels):
    wheels("12.9.86", **CUDA_12, nvidia_nvjitlink_cu12="12.8.93", nvidia_nvjitlink="13.5.37")
    assert [str(each) for each in gpu_software.assemblers()] == [
        "nvJitLink 12.8.93",
        "ptxas 12.9.86",
    ]
    assert "'nvidia-nvjitlink-cu12>=12.9.86'" in (why_not_assembled() or "")


def test_an_unknown_compiler_is_left_to_the_check_of_the_kernels(wheels, tmp_path):
    wheels(None, **CUDA_12)
    assert gpu_software.assemblers() == [] and why_not_assembled() is None
    assert gpu_software.versions()["assembled by"] == "nothing that was found"
    wheels("12.9.86")
    (tmp_path / "ptxas").write_text("#!/bin/sh\nexit 1\n")
    assert gpu_software.assemblers()[0].version == () and why_not_assembled() is None
    assert gpu_software.versions()["assembled by"] == "ptxas of unknown version"
    assert ptxas_version(tmp_path / "absent") == ()


def test_versions_of_wheels_are_read():
    assert parse_version("13.5.37") == (13, 5, 37)
    assert parse_version("12.9.86.post1") == (12, 9, 86)
    assert parse_version("unknown") == ()


def test_the_driver_is_asked_where_it_says_so(tmp_path, monkeypatch):
    path = tmp_path / "version"
    monkeypatch.setattr(gpu_software, "DRIVER_FILE", path)
    assert gpu_software.driver_version() is None
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.172.08  Release Build\n"
    path.write_text(line + "GCC version:  gcc version 12.3.0\n")
    assert gpu_software.driver_version() == "570.172.08"
