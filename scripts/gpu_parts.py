"""What the parts of `gpu_run.py` share, and those that are no kernel and no engine.

`gpu_stages.py` has the table of parts: functions that yield rows. No JAX before one runs.
"""

import datetime
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
RESULTS, CEILINGS = "gpu_run.json", "ceilings.json"
HEAD_DIM, BLOCK_SIZE = 128, 16
MEMORY_SHARE = 0.9  # of a GPU's memory that JAX takes; docs/gpu.md says why
TORCH = Path(__file__).with_name("peers") / "torch_rows.py"
SLICES = 6  # of the configurations of the kernels, so that one that hangs costs few others
LAUNCHES = {"decode": 3, "prefill": 3}  # of a call: queries are padded, parts are combined
GRAPH = {"gpu_options": "auto"}  # a step is one CUDA graph
DEFAULTS = {"gpu_options": "none"}  # XLA's own
PACKAGES = re.compile(r"jax|jaxlib|jax-cuda.*|nvidia-(cuda-nvcc|cuda-runtime|nccl|cudnn|cublas).*")
DRIVER = "driver_version,clocks.sm,clocks.max.sm,clocks.max.mem,power.limit,memory.total"


class Run(NamedTuple):
    """What parts share."""

    dry: bool
    out: Path  # a folder for what they leave to others, and for what goes with the logs

    @property
    def effort(self) -> Any:
        """How much to measure: a dry run only shows that everything runs."""
        from pallas_kernels.measure import Effort

        if not self.dry:
            return Effort()
        from jax.experimental.pallas import mosaic_gpu as plgpu

        interpret = plgpu.InterpretGPUParams(detect_races=False)
        return Effort(1, 1, copy_bytes=1 << 16, gemm_width=64, cache_bytes=0, interpret=interpret)

    @property
    def ceilings(self) -> Any:
        """What the part `ceilings` has measured: on disk, since it was another process."""
        from pallas_kernels.measure import Ceilings

        return Ceilings(**json.loads((self.out / CEILINGS).read_text(encoding="utf-8")))


class Part(NamedTuple):
    """A part: how long it should take on an H100 with a quick host, and when it is ended."""

    name: str
    rows: Callable[[Run], Iterator[Row]]
    expected: float  # seconds, with the start of its process
    limit: float
    gpus: int = 1  # at least
    has_jax: bool = True  # False: JAX must leave the GPU's memory alone


# ---------------------------------------------------------------------- what is there


def environment(run: Run) -> Iterator[Row]:
    """What a number depends on."""
    import jax

    device = jax.devices()[0]
    packages = {
        str(one.metadata["Name"]): one.version for one in importlib.metadata.distributions()
    }
    yield {
        "device": device.device_kind,
        "date": datetime.date.today().isoformat(),
        "devices": jax.device_count(),
        "core_count": getattr(device, "core_count", None),
        "compute_capability": getattr(device, "compute_capability", None),
        "platform_version": device.client.platform_version.splitlines()[0],
        "packages": {n: packages[n] for n in sorted(packages) if PACKAGES.fullmatch(n)},
        "ptxas": _said("ptxas", "--version"),
        "driver": _said("nvidia-smi", f"--query-gpu={DRIVER}", "--format=csv,noheader"),
        "nvlink": _said("nvidia-smi", "nvlink", "--status"),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "dry": run.dry,
    }


def _said(*command: str) -> list[str]:
    """Return what a program says, by line; of one that is not there, nothing."""
    path = shutil.which(command[0])
    if path is None:
        return []
    found = subprocess.run(
        [path, *command[1:]], capture_output=True, text=True, check=False, timeout=20
    )
    return (found.stdout or found.stderr).strip().splitlines()


def attempted(row: Row, call: Callable[[], Row]) -> Row:
    """Return a row with what a call adds, or why it failed: the other rows are wanted, too."""
    try:
        return row | call()
    except Exception as error:  # the compiler's, or the chip's
        return row | {"failed": f"{type(error).__name__}: {error}".strip()[:400]}


def ceilings(run: Run) -> Iterator[Row]:
    """The rates of a copy and of a GEMM of 8192, and the time of a launch in a recorded program."""
    from pallas_kernels.measure import launch_seconds, measure_ceilings

    found = measure_ceilings(run.effort)
    (run.out / CEILINGS).write_text(json.dumps(found._asdict()), encoding="utf-8")
    yield {"row": "copy", "rate": found.bytes_per_second / 1e9, "unit": "GB/s"}
    yield {"row": "GEMM", "rate": found.flops_per_second / 1e12, "unit": "TFLOP/s"}
    yield {"row": "launch", "us": launch_seconds(run.effort) * 1e6}


def torch(run: Run) -> Iterator[Row]:
    """What PyTorch reaches on the same GPU."""
    if importlib.util.find_spec("torch") is None:
        yield {"skipped": "torch is not installed"}
        return
    command = [sys.executable, str(TORCH), *["--dry-run"] * run.dry]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        yield from (json.loads(line) for line in child.stdout or () if line.startswith("{"))
    if child.returncode:
        yield {"failed": f"{TORCH.name} ended with code {child.returncode}"}


def tuning(kernel: str, nth: int, run: Run) -> Iterator[Row]:
    """Time one candidate of the tuning of a kernel; `traces` has those of a dry run."""
    import tune_kernels as tuner

    if run.dry:
        return

    shapes = {"decode": tuner.DECODE_SHAPES, "prefill": tuner.PREFILL_SHAPES}[kernel]
    settings = tuner.candidates_for(kernel, HEAD_DIM, BLOCK_SIZE)[nth]
    sizes: dict[str, int] = {"head_dim": HEAD_DIM, "block_size": BLOCK_SIZE}
    yield from tuner.tune(kernel, [settings], sizes, shapes, run.effort._replace(repeats=3))


FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
ENGINES = {
    "pallas, one graph": {"attention": "pallas"} | GRAPH,
    "fp8, one graph": {"attention": "pallas"} | GRAPH | FP8,
    "xla, one graph": {"attention": "xla"} | GRAPH,
    "pallas, XLA's options": {"attention": "pallas"} | DEFAULTS,
}
SERVED = "pallas, one graph", "fp8, one graph"  # of which more is measured
LARGE = {name: options for name, options in ENGINES.items() if "pallas" in name}
SMOKE = {"1 KV head": (8, 1), "8 KV heads": (32, 8)}  # of a GPU: Llama-70B at TP = 8, Llama-8B

LARGEST: dict[str, tuple[Any, ...]] = {  # models, a tiny one, settings; batches, context, prompts
    "fp8": (("llama-70b", "llama-8b"), "tiny", FP8, (1, 16, 64), 1024, (8192,)),
    "experts": (("qwen-30b-a3b",), "tiny-qwen3-moe", {}, (1, 64), 1024, ()),
}
