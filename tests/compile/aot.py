"""Compile for Hopper GPUs on a machine that has none: devices that can be compiled for, not run on.

XLA's CUDA plugin takes a description of a chip (`serving/targets/`) in place of a chip and goes all
the way to machine code; `ptxas` comes from CUDA or from the wheel `nvidia-cuda-nvcc`. What the
compiler says of itself (registers, spills, shared memory) is as true here as on the chip; speed is
not visible.

What is asked of a program is kept between runs (`kept.py`) under all that it depends on, because
JAX cannot read programs for absent devices out of its compilation cache.
"""

import functools
import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import kept
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.mosaic.gpu import core as mosaic
from jax.sharding import Mesh

TARGETS = Path(__file__).parent.parent.parent / "serving" / "targets"
SHARED_MEMORY_LIMIT = 227 * 1024  # bytes that one block of an H100 or H200 can have
NO_SPILLS = {
    "xla_gpu_fail_ptx_compilation_on_register_spilling": True,
    "xla_backend_optimization_level": 3,  # programs of the CPU have 0 in tests (conftest.py)
}
SPILLS = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
NEEDS = (
    "jax-cuda13-plugin, jax-cuda13-pjrt (of jaxlib's version) and nvidia-cuda-nvcc: make test "
    "installs them into .venv/gpu, which PYTHONPATH has to name"
)
PTXAS_FOLDERS = ("cu13/bin", "cuda_nvcc/bin")  # of the wheels of CUDA 13 and 12


class MosaicKernel(NamedTuple):
    """What the compiler said of one Mosaic GPU kernel, for one thread block."""

    name: str
    ptx: str
    registers: int  # of one thread, at the launch: setmaxnreg moves them between warpgroups later

    def count(self, pattern: str) -> int:
        """Count the instructions that match a regular expression."""
        return len(re.findall(pattern, self.ptx))


class Compiled(NamedTuple):
    """One program for a chip."""

    executable: jax.stages.Compiled
    kernels: list[MosaicKernel]
    shared_memory_bytes: list[int]  # of one thread block of each Mosaic kernel, in tracing order


def unavailable() -> str | None:
    """Return why nothing can be compiled for a GPU here; None if it can."""
    for package in packages(cuda()):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"{package} is not installed; compiling for a GPU needs {NEEDS}"
        if version != importlib.metadata.version("jaxlib"):
            return f"{package} {version} is not of jaxlib's version"
    if find_ptxas() is None:
        return f"no ptxas of CUDA {cuda()}; compiling for a GPU needs {NEEDS}"
    return None


def cuda() -> int:
    """The version of CUDA whose plugin is here; 13 where none is."""
    return 12 if importlib.util.find_spec("jax_cuda12_plugin") else 13


def packages(version: int) -> tuple[str, str]:
    """The wheels of JAX's plugin for a version of CUDA."""
    return f"jax-cuda{version}-plugin", f"jax-cuda{version}-pjrt"


def find_ptxas() -> Path | None:
    """Return CUDA's assembler: the wheel's, then CUDA's own; XLA looks in the same places."""
    spec = importlib.util.find_spec("nvidia")
    wheels = list(spec.submodule_search_locations or []) if spec else []
    folders = [Path(wheel) / folder for wheel in wheels for folder in PTXAS_FOLDERS]
    for path in [*folders, Path("/usr/local/cuda/bin")]:
        if (path / "ptxas").is_file():
            return path / "ptxas"
    found = shutil.which("ptxas")
    return Path(found) if found else None


def require() -> None:
    """Skip the calling test module where nothing can be compiled for a GPU.

    Raises RuntimeError with the same reason where CI=true: there, these tests cannot vanish.
    """
    if reason := unavailable():
        if os.environ.get("CI") == "true":
            raise RuntimeError(reason)
        pytest.skip(reason, allow_module_level=True)


def make_mesh(
    chip: str, shape: tuple[int, ...], axis_names: tuple[str, ...], hosts: int = 1
) -> Mesh:
    """Return a mesh of compile-only devices; `chip` names a file in `serving/targets/`."""
    return mesh_of((TARGETS / f"{chip}.txtpb").read_text(), shape, axis_names, hosts)


def mesh_of(
    target: str, shape: tuple[int, ...], axis_names: tuple[str, ...], hosts: int = 1
) -> Mesh:
    """Return a mesh of compile-only devices of a description, as many on each of the hosts.

    A topology is domains x hosts x devices: NVLink joins those of a domain, and no two hosts here.

    JAX writes their programs to its compilation cache but cannot read them: until the end of the
    calling test module there is none (conftest.py).
    """
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # whether there is one is asked once
    joined = f"{hosts}x1x{np.prod(shape) // hosts}"
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology=joined)
    mesh = topologies.make_mesh(topology, shape, axis_names)
    DESCRIBED[mesh.devices.flat[0].client] = f"{joined} {target}"
    return mesh


def on_device(mesh: Mesh, tree: Any) -> Any:
    """Return shapes and types of `tree`, replicated over `mesh`, to lower a program with."""
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), tree)


def compile_for(mesh: Mesh, function: Callable, *arguments: Any, **jit_options: Any) -> Compiled:
    """Compile `function` for the devices of `mesh`; a register spill is an error.

    `arguments` are shapes with shardings (`on_device`). Kernels come in the order of compilation;
    one that this test file has compiled before may be missing.
    """
    with jax.set_mesh(mesh), _mosaic_report() as report:
        executable = jax.jit(function, **jit_options).lower(*arguments).compile(NO_SPILLS)
        text = _printed(report)
    if "wgmma.mma_async instructions are serialized" in text:
        raise RuntimeError("ptxas waits for each matrix instruction before it begins the next")
    shared = [int(n) for n in re.findall(r"Resources\(smem_scratch_bytes=(\d+)", text)]
    return Compiled(executable, _read_kernels(text), shared)


def _read_kernels(report: str) -> list[MosaicKernel]:
    """Read what Mosaic printed: PTX, then ptxas' lines, of one kernel after the other."""
    kernels = []
    for ptx in report.split("// Generated by LLVM NVPTX Back-End")[1:]:
        stack, stores, loads = (int(n) for n in re.search(SPILLS, ptx).groups())
        if stack or stores or loads:
            raise RuntimeError(f"registers spill: {stack} bytes of stack, {stores} of stores")
        registers = int(re.search(r"Used (\d+) registers", ptx)[1])
        name = re.search(r"\.entry (\w+)", ptx)[1]
        kernels.append(MosaicKernel(name, ptx, registers))
    return kernels


@contextmanager
def _mosaic_report() -> Iterator[Path]:
    """Catch what Mosaic prints, from Python and from C++: PTX, and ptxas' report of it."""
    wanted = {f"MOSAIC_GPU_DUMP_{what}": "1" for what in ("PTX", "PTXAS", "RESOURCES")}
    before = {name: os.environ.get(name) for name in wanted}
    sys.stdout.flush()
    stdout = os.dup(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report"
        with path.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.environ.update(wanted)
            REPORTS.append(path)
            try:
                with path.open("a") as text, redirect_stdout(text):  # Python's part
                    yield path
            finally:
                REPORTS.remove(path)
                os.dup2(stdout, 1)
                os.close(stdout)
                for name, value in before.items():
                    os.environ.pop(name) if value is None else os.environ.update({name: value})


def _printed(report: Path) -> str:
    sys.stdout.flush()
    return report.read_text(errors="replace")


class HashesOfFile(SimpleNamespace):
    """`hashlib` for Mosaic, which compiles a kernel once a process and says nothing of it again.

    Its names of kernels depend on the test file, so that what one has compiled is new to others.
    """

    @staticmethod
    def sha256(data: bytes) -> Any:
        """The hash of a kernel as a file of tests has it."""
        file = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
        return hashlib.sha256(data + file.encode())


mosaic.hashlib = HashesOfFile()

# ---------------------------------------------------------------- kept between runs

DESCRIBED: dict[Any, str] = {}  # by the client of the devices: their topology and target
REPORTS: list[Path] = []  # where what Mosaic prints goes now
DUMP = "xla_dump_to"
MEMORY = ("argument", "output", "temp", "alias")
COMPILE = jax.stages.Lowered.compile


class KeptProgram(jax.stages.Compiled):
    """What an earlier run was told of a program; what it did not ask for is compiled after all."""

    def __init__(self, facts: Mapping[str, Any], compile_it: Callable[[], jax.stages.Compiled]):
        self._facts, self._compile_it = facts, compile_it

    def as_text(self) -> str | None:
        """The program after XLA's passes."""
        return self._facts["text"]

    def memory_analysis(self) -> Any:
        """Bytes on one device, as `*_size_in_bytes`."""
        sizes = self._facts["memory"]
        return SimpleNamespace(**{f"{name}_size_in_bytes": n for name, n in sizes.items()})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compile_it(), name)


def _compile_or_read(
    lowered: jax.stages.Lowered, compiler_options: Mapping[str, Any] | None = None
) -> jax.stages.Compiled:
    """`Lowered.compile`, with the facts of programs for GPUs from an earlier run."""
    client = lowered._lowering._device_list[0].client
    options = dict(compiler_options or {})
    if client not in DESCRIBED:
        return COMPILE(lowered, compiler_options)
    dump = options.pop(DUMP, None)
    key = _key(lowered, DESCRIBED[client], options, dump is not None, bool(REPORTS))
    files = kept.Files(kept.folder() / "gpu")
    if (found := files.get(key)) is not None:
        facts = json.loads(gzip.decompress(found))
        for name, text in facts["dumped"].items():
            (Path(dump) / name).write_text(text)
        if REPORTS:
            with REPORTS[-1].open("a") as report:
                report.write(facts["printed"])
        return KeptProgram(facts, functools.cache(lambda: COMPILE(lowered, compiler_options)))
    before = _printed(REPORTS[-1]) if REPORTS else ""
    compiled = COMPILE(lowered, compiler_options)
    memory = compiled.memory_analysis()
    sequences = Path(dump).glob("*thunk_sequence*.txt") if dump else ()
    facts = {
        "text": compiled.as_text(),
        "memory": {name: getattr(memory, f"{name}_size_in_bytes") for name in MEMORY},
        "dumped": {path.name: path.read_text(errors="replace") for path in sequences},
        "printed": _printed(REPORTS[-1])[len(before) :] if REPORTS else "",
    }
    files.put(key, gzip.compress(json.dumps(facts).encode(), 1))
    return compiled


def _key(lowered: jax.stages.Lowered, *beside: Any) -> str:
    """A name for all that a program depends on."""
    text, everything = lowered.as_text(), [*_versions(), os.environ.get("XLA_FLAGS"), *beside]
    return hashlib.sha256(f"{json.dumps(everything)}\n{text}".encode()).hexdigest()


@functools.cache
def _versions() -> tuple[str, ...]:
    """Of the compilers."""
    wheels = ("jaxlib", *packages(cuda()))
    ptxas = subprocess.run([find_ptxas(), "--version"], capture_output=True, text=True, check=True)
    return (*(importlib.metadata.version(wheel) for wheel in wheels), ptxas.stdout)


jax.stages.Lowered.compile = _compile_or_read
