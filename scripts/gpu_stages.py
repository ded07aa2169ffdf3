"""The parts of `gpu_run.py` by stage; each runs in a process of its own, and prints JSON lines.

    python scripts/gpu_stages.py PART... --out OUT [--dry-run]

What decides most comes first: whether the kernels are right at all, the ceilings, an engine and
where its time goes, the shapes that are deployed; in later stages engines of other formats and
models. A part that raises is a row, too. No JAX before a part runs: the table is the parent's as
well.
"""

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from gpu_parts import (
    BLOCK_SIZE,
    ENGINES,
    HEAD_DIM,
    LARGE,
    SLICES,
    SMOKE,
    Part,
    Row,
    Run,
    ceilings,
    environment,
    torch,
    tuning,
)
from option_table import parsed

from shiftjax.options import ConfigError

CANDIDATES = Path(__file__).with_name("kernel_candidates.json")


class Stage(NamedTuple):
    """Parts that one command runs, in this order, until its time is up."""

    parts: tuple[Part, ...]
    seconds: float = 570.0


def rows_of(place: str, *arguments: Any) -> Callable[[Run], Iterator[Row]]:
    """Return a function of a module, with its first arguments, that is imported when it runs."""
    module, name = place.split(".")
    return lambda run: getattr(import_module(module), name)(*arguments, run)


BEGIN = (Part("environment", environment, 8, 45), Part("ceilings", ceilings, 12, 60))


def engine_part(name: str, expected: float, limit: float) -> Part:
    """A Llama-8B with these settings."""
    return Part(f"engine: {name}", rows_of("gpu_engine.engine", ENGINES[name]), expected, limit)


def adapters_part(name: str) -> Part:
    """Return the part of an engine with adapters."""
    return Part(f"adapters: {name}", rows_of("gpu_adapters.adapter_rows", name), 110, 200)


def tuning_parts() -> tuple[Part, ...]:
    """A part for each candidate of either kernel."""
    shapes = [list(row.values())[:3] for row in json.loads(CANDIDATES.read_text("utf-8"))]
    return tuple(
        Part(f"tuning: {kernel} {i}", partial(tuning, kernel, i), 29, 90)
        for kernel in ("decode", "prefill")
        for i in range(shapes.count([kernel, HEAD_DIM, BLOCK_SIZE]))
    )


WITH_ADAPTERS = (
    *("llama-8b, adapters, 1 GPU", "llama-70b, adapters", "llama-70b, fp8, adapters"),
    "llama-8b, adapters of rank 8",
)
TRIALS = (
    *("llama-8b, 1 GPU", "llama-8b, fp8, 1 GPU", "llama-70b", "llama-70b, fp8"),
    *("llama-70b, deterministic", "qwen3-30b-a3b", "qwen3-30b-a3b, fp8"),
    *("qwen3-30b-a3b, by position", "gpt-oss-120b", "gemma-3-27b", "deepseek-v3"),
)  # deployments of `gpu_trials.py`


def trial_parts(names: Sequence[str]) -> tuple[Part, ...]:
    """A part for each deployment whose kernels are tried."""
    return tuple(
        Part(f"trial: {name}", rows_of("gpu_trials.trial_rows", name), 40, 120) for name in names
    )


STAGES: dict[str, Stage] = {
    "A": Stage(
        (
            *BEGIN,
            *(
                Part(f"smoke: {n}", rows_of("gpu_checks.smoke", heads), 20, 60)
                for n, heads in SMOKE.items()
            ),
            Part("views", rows_of("gpu_checks.view_rows"), 8, 30),
            engine_part("pallas, one graph", 105, 180),
            Part("decode", rows_of("gpu_checks.kernel_times", "decode"), 45, 90),
            Part("prefill", rows_of("gpu_checks.kernel_times", "prefill"), 52, 100),
            Part("writes", rows_of("gpu_writes.write_rows"), 20, 60),
            Part("goldens", rows_of("gpu_goldens.golden_rows"), 35, 90),
            Part("experts", rows_of("gpu_checks.experts"), 43, 120),
            *(
                Part(f"correctness {i}", rows_of("gpu_checks.correctness", i), 25, 60)
                for i in range(SLICES)
            ),
        )
    ),
    "B": Stage(
        (
            *BEGIN,
            Part("products", rows_of("gpu_products.product_rows"), 20, 60),
            engine_part("fp8, one graph", 130, 200),
            Part("engine: fp8", rows_of("gpu_engine.large_engine", "fp8"), 240, 300),
            Part("torch", torch, 45, 90, has_jax=False),
            engine_part("xla, one graph", 45, 90),
            engine_part("pallas, XLA's options", 45, 90),
        )
    ),
    "C": Stage(
        (
            *BEGIN,
            Part("engine: experts", rows_of("gpu_engine.large_engine", "experts"), 110, 200),
            *tuning_parts(),
        )
    ),
    "T": Stage((*BEGIN, *trial_parts(TRIALS))),
    "L": Stage(
        (
            *BEGIN,
            *trial_parts(WITH_ADAPTERS[:1]),
            Part("goldens", rows_of("gpu_goldens.golden_rows"), 60, 120),
            adapters_part("bf16"),
            *trial_parts(WITH_ADAPTERS[1:]),
            adapters_part("fp8"),
        )
    ),
    "D": Stage(
        (
            *BEGIN,
            Part("all-reduce", rows_of("gpu_collectives.all_reduce_rows"), 25, 60, gpus=2),
            *(
                Part(f"llama-70b: {n}", rows_of("gpu_engine.large_model", o), 160, 300, 4)
                for n, o in LARGE.items()
            ),
        ),
        seconds=1140.0,
    ),
}
PARTS: dict[str, Part] = {part.name: part for stage in STAGES.values() for part in stage.parts}
DRY = Part("traces", rows_of("gpu_checks.traces"), 30, 120)


def main() -> int:
    """Run parts and print their rows; nothing but rows goes to the standard output from here."""
    options = {"parts": [str], "--out": (Path, {"required": True}), "--dry-run": False}
    arguments = parsed("parts of gpu_run.py, which starts them", options)
    known = PARTS | {DRY.name: DRY}
    run = Run(arguments.dry_run, arguments.out)
    for name in arguments.parts:
        try:
            if known[name].has_jax:
                require_gpu(run)
            for row in known[name].rows(run):
                print(json.dumps({"part": name} | row), flush=True)
        except ConfigError as error:
            print(json.dumps({"part": name, "failed": str(error)}), flush=True)
        except Exception:  # the other parts' numbers are wanted all the same
            print(json.dumps({"part": name, "failed": traceback.format_exc(limit=-4)}), flush=True)
    return 0


def require_gpu(run: Run) -> None:
    """Raise ConfigError where JAX has fallen back to a CPU, or the kernels are for other GPUs."""
    import jax

    from serving.bench.kernels import require_hopper

    if not run.dry:
        require_hopper(jax.devices()[0])


if __name__ == "__main__":
    sys.exit(main())
