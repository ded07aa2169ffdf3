"""Everything that only Hopper GPUs can tell, in under 10 minutes; JSON after every row.

    python scripts/gpu_run.py --out OUT              on H100s or H200s
    python scripts/gpu_run.py --out OUT --tune       settings of the kernels instead: OUT/tuned.json
    python scripts/gpu_run.py --out OUT --dry-run    anywhere: tiny sizes, kernels interpreted
    python scripts/gpu_run.py --predict h100 h200    what the rows should say

Every part (`gpu_parts.py`) has a process and a limit of its own: a kernel that hangs, or an error
that the GPU's context does not survive, costs one part and is a row. Rows carry what was predicted
of them (`benchmarks/gpu_predictions.json`). The exit code is 1 if a part failed or found something
wrong, and 2 where there are no Hopper GPUs: then nothing is run.

With the same weights on the same GPU, after this: `scripts/peers/hf_gpu.py OUT/hf_config.json`.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from gpu_parts import CEILINGS, DRY, PARTS, RESULTS, Part, Row, tuning_parts

SECONDS, SECONDS_OF_SEVERAL = 570.0, 1140.0  # of one GPU, of several
LEAST_SECONDS = 15.0  # a part that has less is not begun
PREDICTIONS = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu_predictions.json"
CHIPS = {"H100": "h100", "H200": "h200"}  # by what a device's kind contains
LAST_LINES = 12  # of what a process that died has said


def child_rows(
    command: Sequence[str], limit: float, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Row]:
    """Yield the rows that a process prints, a JSON object a line; what else it says goes to `log`.

    After `limit` seconds it is killed, with all processes that it has started. The last row says
    so, or by which signal or with which code it ended, if that was not 0.
    """
    killed = threading.Event()
    options = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with (
        log.open("w", encoding="utf-8") as other,
        subprocess.Popen(command, stderr=other, env=environment, **options) as child,
    ):

        def kill() -> None:
            killed.set()
            os.killpg(child.pid, signal.SIGKILL)

        timer = threading.Timer(limit, kill)
        timer.start()
        try:
            for line in child.stdout or ():
                if line.startswith("{"):
                    yield json.loads(line)
                else:
                    other.write(line)
            code = child.wait()
        finally:
            timer.cancel()
            if child.poll() is None:  # the caller wants no more
                kill()
    if killed.is_set():
        yield {"failed": f"killed after {limit:.0f} s"} | last_lines(log)
    elif code:
        ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        yield {"failed": ended} | last_lines(log)


def last_lines(log: Path) -> Row:
    """Return the last words of a process."""
    return {"log": log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]}


def with_predictions(row: Row, predictions: Sequence[Row]) -> Row:
    """Return a row with what was predicted of its fields, and whether that came true."""
    mine = [p for p in predictions if (p["part"], p["row"]) == (row["part"], row.get("row"))]
    found = {
        p["field"]: p | {"came_true": p["low"] <= row[p["field"]] <= p["high"]}
        for p in mine
        if p["field"] in row
    }
    return row | ({"predictions": found} if found else {})


def predictions_for(device: str) -> list[Row]:
    """Return the committed predictions for a device; for one that has none, nothing."""
    chip = next((chip for name, chip in CHIPS.items() if name in device), None)
    return json.loads(PREDICTIONS.read_text(encoding="utf-8")).get(chip, [])


def is_right(row: Row) -> bool:
    """Whether a row found nothing wrong."""
    return row.get("right", True) and "failed" not in row


class Log:
    """The rows so far, which are on disk and on the screen by then."""

    def __init__(self, out: Path):
        self.rows: list[Row] = []
        self.start = time.monotonic()
        self._file = out / RESULTS
        self._predictions: list[Row] = []

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    def add(self, row: Row) -> None:
        """Write a row down; that of the environment says which predictions apply."""
        if "device" in row:
            self._predictions = predictions_for(row["device"])
        row = with_predictions(row, self._predictions) | {"at_seconds": round(self.elapsed, 1)}
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        self._file.write_text(json.dumps(self.rows, indent=1), encoding="utf-8")


Start = Callable[[Sequence[Part], float], Iterator[Row]]  # runs parts in one process


def run_parts(parts: Sequence[Part], start: Start, log: Log, seconds: float | None) -> None:
    """Run parts one after the other until the time is up; the first one decides if there is a run.

    `seconds` None: what suits the number of GPUs, which the first part tells.
    """
    for row in start(parts[:1], parts[0].limit):
        log.add({"part": parts[0].name} | row)
    if not all(map(is_right, log.rows)):
        return
    devices = log.rows[0]["devices"]
    if seconds is None:
        seconds = SECONDS if devices == 1 else SECONDS_OF_SEVERAL
    for nth, part in enumerate(parts[1:], 1):
        if part.gpus > devices:
            continue
        left = seconds - log.elapsed
        if left < LEAST_SECONDS:
            names = [part.name for part in parts[nth:]]
            log.add({"part": "end", "stopped": f"{seconds:.0f} s are over", "not_run": names})
            return
        for row in start([part], min(part.limit, left)):
            log.add({"part": part.name} | row)


def starter(out: Path, dry: bool) -> Start:
    """Return what starts processes for parts; they share compiled programs and chosen GEMMs."""
    environment = {**os.environ}
    if not dry:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(out / "cache")
    else:
        flag = "--xla_force_host_platform_device_count=2"  # so that there is a mode to change to
        flags = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    script = str(Path(__file__).with_name("gpu_parts.py"))

    def start(parts: Sequence[Part], limit: float) -> Iterator[Row]:
        names = [part.name for part in parts]
        log = out / f"{names[0].replace(': ', '-').replace(', ', '-').replace(' ', '_')}.log"
        command = [sys.executable, script, *names, "--out", str(out), *["--dry-run"] * dry]
        yield from child_rows(command, limit, log, environment)

    return start


def tuned(rows: Sequence[Row], out: Path) -> Row:
    """Write the best settings that a tuning run has found, if both kernels have some."""
    from tune_kernels import KERNELS, write_best

    found = [row for row in rows if "score" in row]
    if {row["kernel"] for row in found} != set(KERNELS):
        return {"part": "tuning", "failed": "not both kernels have a candidate that runs"}
    return {"part": "tuning", "best": write_best(rows[0]["device"], found, out / "tuned.json")}


def main() -> int:
    """Run; 1 if a part failed or found something wrong, 2 if there is nothing to run on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help=f"folder for {RESULTS} and what parts say")
    what.add_argument("--predict", nargs="+", choices=sorted(CHIPS.values()), metavar="CHIP")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--dry-run", action="store_true", help="tiny sizes, on a CPU")
    how.add_argument("--tune", action="store_true", help="find the kernels' settings instead")
    parser.add_argument("--seconds", type=float, help="stop after these; default: 570 for one GPU")
    arguments = parser.parse_args()
    if arguments.predict:
        from gpu_predictions import shown

        print(shown(arguments.predict))
        return 0
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / CEILINGS).unlink(missing_ok=True)  # of an earlier run
    log, start = Log(out), starter(out, arguments.dry_run)
    if arguments.dry_run:  # in one process, which saves its starts
        for row in start([*PARTS, DRY], arguments.seconds or SECONDS):
            log.add({"part": "dry run"} | row)
    else:
        parts = tuning_parts() if arguments.tune else PARTS
        run_parts(parts, start, log, arguments.seconds)
    if arguments.tune and len(log.rows) > 1:
        log.add(tuned(log.rows, out))
    wrong = [row for row in log.rows if not is_right(row)]
    print(f"{len(log.rows)} rows, {len(wrong)} wrong: {out / RESULTS}")
    return 2 if len(log.rows) == len(wrong) else bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
