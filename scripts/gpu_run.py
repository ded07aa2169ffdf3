"""Everything that only a Hopper GPU can tell, in under 10 minutes; JSON after every row.

    python scripts/gpu_run.py --out OUT             on an H100 or H200
    python scripts/gpu_run.py --out OUT --dry-run   anywhere: tiny sizes, kernels interpreted

Parts, in order of importance: ceilings; views of device buffers; kernels against float64; the table
of `shiftjax bench kernels`; SmolLM2's greedy tokens; steps, serving and changes of mode of a
Llama-8B with random weights; tuning. Each row that can be predicted from the two ceilings carries
the prediction. A part that fails is a row, too, and the next one
begins; the exit code is then 1. Once the time is up the remaining parts are rows that say so.

With the same weights on the same GPU, after this: `scripts/peers/hf_gpu.py OUT/hf_config.json`.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

DEFAULT_SECONDS = 570.0


class Run(NamedTuple):
    """What parts share."""

    effort: Any  # pallas_kernels.measure.Effort
    ceilings: Any  # pallas_kernels.measure.Ceilings
    dry: bool
    out: Path


Part = Callable[[Run], Iterator[dict[str, Any]]]


def views(run: Run) -> Iterator[dict[str, Any]]:
    """Views of device buffers."""
    from gpu_checks import view_rows

    yield from view_rows()


def correctness(run: Run) -> Iterator[dict[str, Any]]:
    """The kernels against float64."""
    from gpu_checks import SMALL, SMALL_KERNEL, attention_rows, kernels

    if run.dry:
        yield from attention_rows([SMALL_KERNEL], SMALL, run.effort.interpret)
        return
    yield from attention_rows(kernels())


def goldens(run: Run) -> Iterator[dict[str, Any]]:
    """SmolLM2's greedy tokens."""
    from gpu_engine import golden_rows

    if run.dry:
        yield {"part": "goldens", "skipped": "tests/test_oracle.py does it on a CPU"}
        return
    yield from golden_rows()


def engine(run: Run) -> Iterator[dict[str, Any]]:
    """Steps, serving and changes of mode of a Llama-8B."""
    from gpu_engine import Sizes, rows_of

    from shiftjax.arch.presets import PRESETS
    from shiftjax.weights.hf_config import to_json

    sizes = Sizes((1, 8, 64, 256), 1024, (2048, 8192), (64, 512, 128), 20)
    model = PRESETS["llama-8b"]
    if run.dry:
        sizes, model = Sizes((2,), 64, (32,), (3, 20, 4), 2), PRESETS["tiny"]
    (run.out / "hf_config.json").write_text(
        json.dumps(to_json(model, "bfloat16")), encoding="utf-8"
    )
    yield from rows_of(model, sizes, run.ceilings)


def kernels(run: Run) -> Iterator[dict[str, Any]]:
    """The table of `shiftjax bench kernels`."""
    import jax
    from gpu_checks import SMALL_CONFIG

    from pallas_kernels import measure
    from serving.bench import kernels as bench_kernels

    if not run.dry:
        yield from bench_kernels.measure(jax.devices()[0].device_kind, 128, 16)
        return
    small = {"kv_heads": 2, "head_dim": 64}
    shapes = (
        measure.DecodeShape(2, 64, heads=4, **small),
        measure.PrefillShape(32, 16, heads=4, **small),
        measure.WriteShape(8, **small),
    )
    for shape in shapes:
        seconds = measure.kernel_seconds(shape, SMALL_CONFIG, run.effort)
        yield measure.row_of(shape, seconds, run.ceilings)


def tuning(run: Run) -> Iterator[dict[str, Any]]:
    """Both kernels' candidates; the best go to a table in the output folder."""
    import jax
    from tune_kernels import (
        DECODE_SHAPES,
        PREFILL_SHAPES,
        candidates_for,
        tune,
        write_best,
    )

    sizes: dict[str, int] = {"head_dim": 128, "block_size": 16}
    found = []
    for kernel, shapes in (("decode", DECODE_SHAPES), ("prefill", PREFILL_SHAPES)):
        candidates = candidates_for(kernel, 128, 16)
        if run.dry:
            yield {"part": "tuning", "kernel": kernel, "candidates": len(candidates)}
            continue
        for row in tune(kernel, candidates, sizes, shapes, run.effort._replace(repeats=3)):
            found.append(row)
            yield {"part": "tuning"} | row
    if found:
        best = write_best(jax.devices()[0].device_kind, found, run.out / "tuned.json")
        yield {"part": "tuning", "best": best}


PARTS: tuple[Part, ...] = (views, correctness, kernels, goldens, engine, tuning)


def run_all(out: Path, dry: bool, seconds: float) -> list[dict[str, Any]]:
    """Run every part until the time is up; returns the rows, which are on disk by then."""
    import jax

    start, rows = time.monotonic(), []

    def log(row: dict[str, Any]) -> None:
        rows.append(row | {"at_seconds": round(time.monotonic() - start, 1)})
        print(json.dumps(rows[-1]), flush=True)
        (out / "gpu_run.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")

    device = jax.devices()[0]
    log({"part": "environment", "jax": jax.__version__, "device": device.device_kind, "dry": dry})
    run = Run(effort_of(dry), None, dry, out)
    from pallas_kernels.measure import measure_ceilings

    run = run._replace(ceilings=measure_ceilings(run.effort))
    log({"part": "ceilings"} | run.ceilings._asdict())
    for part in PARTS:
        name = part.__name__
        try:
            for row in part(run):
                log({"part": name} | row)
                if time.monotonic() - start > seconds:
                    break
        except Exception:  # the other parts' numbers are wanted all the same
            log({"part": name, "failed": traceback.format_exc(limit=-4)})
        if time.monotonic() - start > seconds:
            left = [part.__name__ for part in PARTS[PARTS.index(part) + 1 :]]
            log({"part": name, "stopped": f"{seconds:.0f} s are over", "not_run": left})
            break
    return rows


def effort_of(dry: bool) -> Any:
    """How much to measure: a dry run only shows that everything runs."""
    from pallas_kernels.measure import Effort

    if not dry:
        return Effort()
    from jax.experimental.pallas import mosaic_gpu as plgpu

    interpret = plgpu.InterpretGPUParams(detect_races=False)
    return Effort(repeats=1, calls=1, copy_bytes=1 << 16, gemm_width=64, interpret=interpret)


def is_right(row: dict[str, Any]) -> bool:
    """Whether a row found nothing wrong."""
    return row.get("right", True) and "failed" not in row


def main() -> int:
    """Run; 1 if a part failed or found something wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_run.json")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, on a CPU")
    parser.add_argument("--seconds", type=float, default=DEFAULT_SECONDS, help="stop after these")
    arguments = parser.parse_args()
    if arguments.dry_run:
        os.environ["JAX_PLATFORMS"] = "cpu"
        flag = "--xla_force_host_platform_device_count=2"  # so that there is a mode to change to
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = run_all(arguments.out, arguments.dry_run, arguments.seconds)
    wrong = [row for row in rows if not is_right(row)]
    print(f"{len(rows)} rows, {len(wrong)} wrong: {arguments.out / 'gpu_run.json'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
