"""What the parts of `gpu_run.py` do: functions that yield rows. No JAX before one runs.

`gpu_stages.py` has the table of them.
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


def views(_: Run) -> Iterator[Row]:
    """Views of device buffers."""
    from gpu_checks import view_rows

    yield from view_rows()


# ---------------------------------------------------------------------- kernels


def smoke(heads: tuple[int, int], run: Run) -> Iterator[Row]:
    """Three steps of one configuration, three times each: right, and always the same bits."""
    from gpu_cases import SMALL, SMALL_KERNEL, STEPS, Kernel
    from gpu_checks import attention_rows

    if run.dry and heads != SMOKE["1 KV head"]:
        yield {"skipped": "an interpreter is slow"}
        return
    if run.dry:
        yield from attention_rows([SMALL_KERNEL], SMALL, run.effort.interpret)
        return
    yield from attention_rows([Kernel(heads)], {name: STEPS[name] for name in list(STEPS)[:3]})


def ceilings(run: Run) -> Iterator[Row]:
    """The rates of a copy and of a GEMM of 8192, and the time of a launch in a recorded program."""
    from pallas_kernels.measure import launch_seconds, measure_ceilings

    found = measure_ceilings(run.effort)
    (run.out / CEILINGS).write_text(json.dumps(found._asdict()), encoding="utf-8")
    yield {"row": "copy", "rate": found.bytes_per_second / 1e9, "unit": "GB/s"}
    yield {"row": "GEMM", "rate": found.flops_per_second / 1e12, "unit": "TFLOP/s"}
    yield {"row": "launch", "us": launch_seconds(run.effort) * 1e6}


def products(run: Run) -> Iterator[Row]:
    """Products of codes."""
    from gpu_products import product_rows

    yield from product_rows(run.effort, run.ceilings, dry=run.dry)


def writes(run: Run) -> Iterator[Row]:
    """Keys and values written into a pool of codes: right, and how fast."""
    from gpu_writes import write_rows

    yield from write_rows(run.effort, run.ceilings, dry=run.dry)


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


def kernel_times(kind: str, run: Run) -> Iterator[Row]:
    """The shapes that are deployed, against the ceilings."""
    import jax
    from gpu_cases import DRY_SHAPES, SHAPES, SMALL_CONFIG

    from pallas_kernels.measure import kernel_seconds, row_of
    from pallas_kernels.tuned import config_for

    device = jax.devices()[0]
    cores = getattr(device, "core_count", None)  # not every device says
    config, is_tuned = config_for(device.device_kind, HEAD_DIM, BLOCK_SIZE, cores=cores)
    if run.dry:
        config = SMALL_CONFIG
    for name, (shape, settings) in (DRY_SHAPES if run.dry else SHAPES)[kind].items():
        changed = config._replace(**{kind: getattr(config, kind)._replace(**settings)})
        row: Row = {"row": name, "tuned": is_tuned}
        try:
            seconds = kernel_seconds(shape, changed, run.effort)
            yield row | row_of(shape, seconds, run.ceilings) | {"launches": LAUNCHES[kind]}
        except Exception as error:  # the other shapes' times are wanted all the same
            yield row | {"failed": f"{type(error).__name__}: {error}"[:400]}


def experts(run: Run) -> Iterator[Row]:
    """Experts of one device: right against float64 in tiles of every size, then how fast."""
    from gpu_cases import DRY_EXPERTS, EXPERTS, SMALL_TILES
    from gpu_checks import expert_rows

    from pallas_kernels.measure import row_of
    from pallas_kernels.measure_experts import experts_seconds

    yield from expert_rows(run.effort, dry=run.dry)
    for name, shape in (DRY_EXPERTS if run.dry else EXPERTS).items():
        try:
            seconds = experts_seconds(shape, SMALL_TILES if run.dry else None, run.effort)
            yield {"row": name} | row_of(shape, seconds, run.ceilings)
        except Exception as error:  # the other shapes' times are wanted all the same
            yield {"row": name, "failed": f"{type(error).__name__}: {error}"[:400]}


def correctness(nth: int, run: Run) -> Iterator[Row]:
    """Every configuration of the kernels against float64."""
    from gpu_cases import kernels
    from gpu_checks import attention_rows

    if not run.dry:
        yield from attention_rows(kernels()[nth::SLICES])


def traces(_: Run) -> Iterator[Row]:
    """Trace all that a run and its tuning would run: what a GPU's time must not be spent on."""
    from gpu_cases import EXPERTS, SHAPES, kernels
    from gpu_checks import refusal

    from pallas_kernels.measure import trace
    from pallas_kernels.measure_experts import trace_experts
    from pallas_kernels.tuned import safe_config

    for kernel in kernels():
        yield {"kernel": kernel.described()} | refusal(kernel)
    config = safe_config(HEAD_DIM)
    for kind, shapes in SHAPES.items():
        for name, (shape, settings) in shapes.items():
            trace(shape, config._replace(**{kind: getattr(config, kind)._replace(**settings)}))
            yield {"row": name}
    for name, shape in EXPERTS.items():
        trace_experts(shape)
        yield {"row": name}


def tuning(kernel: str, nth: int, run: Run) -> Iterator[Row]:
    """Time one candidate of the tuning of a kernel; `traces` has those of a dry run."""
    import tune_kernels as tuner

    if run.dry:
        return

    shapes = {"decode": tuner.DECODE_SHAPES, "prefill": tuner.PREFILL_SHAPES}[kernel]
    settings = tuner.candidates_for(kernel, HEAD_DIM, BLOCK_SIZE)[nth]
    sizes: dict[str, int] = {"head_dim": HEAD_DIM, "block_size": BLOCK_SIZE}
    yield from tuner.tune(kernel, [settings], sizes, shapes, run.effort._replace(repeats=3))


# ---------------------------------------------------------------------- the engine


def goldens(run: Run) -> Iterator[Row]:
    """A small model's greedy tokens."""
    from gpu_goldens import golden_rows

    yield from golden_rows({} if run.dry else ENGINES["pallas, one graph"])


def engine(options: dict[str, str], run: Run) -> Iterator[Row]:
    """Steps of a Llama-8B; with the kernels and one graph also serving and changes of mode."""
    from gpu_engine import Sizes, engine_rows

    from shiftjax.arch.presets import PRESETS
    from shiftjax.weights.hf_config import to_json

    model, users = PRESETS["llama-8b"], options == ENGINES["pallas, one graph"]
    sizes = Sizes((1, 64), 1024, (8192,), (64, 512, 128), 20)
    if not users:
        sizes = sizes._replace(prompts=(), serve=(1, 16, 16))
    if run.dry and not users:
        yield {"skipped": "a CPU has neither the kernels nor the options of GPUs"}
        return
    if run.dry:
        sizes, model, options = Sizes((2,), 64, (32,), (3, 20, 4), 2), PRESETS["tiny"], {}
    if users:
        described = json.dumps(to_json(model, "bfloat16"))
        (run.out / "hf_config.json").write_text(described, encoding="utf-8")
    profiles = run.out if users else None
    yield from engine_rows(model, sizes, run.ceilings, options, users=users, profiles=profiles)


def large_engine(kind: str, run: Run) -> Iterator[Row]:
    """Steps of the first model of a list that fits the device, and where their time goes."""
    import jax
    from gpu_engine import Sizes, engine_rows, largest_model

    from shiftjax.arch.presets import PRESETS
    from shiftjax.device.sizing import measure

    names, dry_name, formats, *counts = LARGEST[kind]
    memory_bytes = measure(jax.devices()[:1]).total_bytes
    model = PRESETS[dry_name] if run.dry else largest_model(names, formats, memory_bytes)
    if model is None:
        yield {"skipped": f"{memory_bytes / 1e9:.0f} GB are too few for {' and '.join(names)}"}
        return
    sizes = Sizes(*counts, serve=(1, 16, 16), repeats=10)
    if run.dry:
        sizes = Sizes((2,), 64, (32,) if sizes.prompts else (), (1, 16, 16), 2)
    options = formats if run.dry else ENGINES["pallas, one graph"] | formats
    yield from engine_rows(model, sizes, run.ceilings, options, profiles=run.out)


def all_reduces(run: Run) -> Iterator[Row]:
    """All-reduces of small messages by NCCL and by XLA's own kernels."""
    from gpu_collectives import all_reduce_rows

    yield from all_reduce_rows(run.effort)


def large_model(options: dict[str, str], run: Run) -> Iterator[Row]:
    """Steps of a Llama-70B over all GPUs, in BASE and in SHIFT, which must agree."""
    import jax
    from gpu_engine import Sizes, mode_rows

    from shiftjax.arch.presets import PRESETS

    model, sizes = PRESETS["llama-70b"], Sizes((64,), 1024, (), (64, 512, 128), 10)
    if run.dry and options == ENGINES["pallas, XLA's options"]:
        yield {"skipped": "a CPU has no options of GPUs"}
        return
    if run.dry:
        model, sizes, options = PRESETS["tiny"], Sizes((2,), 64, (), (3, 20, 4), 2), {}
    yield from mode_rows(model, sizes, run.ceilings, options, jax.device_count())


ENGINES = {
    "pallas, one graph": {"attention": "pallas"} | GRAPH,
    "xla, one graph": {"attention": "xla"} | GRAPH,
    "pallas, XLA's options": {"attention": "pallas"} | DEFAULTS,
}
LARGE = {name: options for name, options in ENGINES.items() if "pallas" in name}
SMOKE = {"1 KV head": (8, 1), "8 KV heads": (32, 8)}  # of a GPU: Llama-70B at TP = 8, Llama-8B

FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
LARGEST: dict[str, tuple[Any, ...]] = {  # models, a tiny one, settings; batches, context, prompts
    "fp8": (("llama-70b", "llama-8b"), "tiny", FP8, (1, 16, 64), 1024, (8192,)),
    "experts": (("qwen-30b-a3b",), "tiny-qwen3-moe", {}, (1, 64), 1024, ()),
}
