"""Everything that only Hopper GPUs can tell, in stages of under 10 minutes.

    python scripts/gpu_run.py --out OUT --stage A    kernels, a Llama-8B and where its time goes
    python scripts/gpu_run.py --out OUT --stage B    an engine of e4m3 codes; PyTorch beside it
    python scripts/gpu_run.py --out OUT --stage C    an engine with experts; settings of the kernels
    python scripts/gpu_run.py --out OUT --stage T    all cases of what starts try
    python scripts/gpu_run.py --out OUT --stage L    adapters: these cases, tokens, engines
    python scripts/gpu_run.py --out OUT --stage D    several GPUs: all-reduces, a Llama-70B
    python scripts/gpu_run.py --out OUT --dry-run    all of it anywhere: tiny, kernels interpreted
    python scripts/gpu_run.py --predict h100 h200    what the rows should say

OUT has three files then: `gpu_run.json`, renewed after every row; `profile.json`, the kernels that
steps are made of; `logs.tar.gz`, what parts have said and left. `scripts/gpu_bundle.sh` packs what
a machine without a network needs; `scripts/gpu_measured.py` puts what was measured into the file
of the machine, for `shiftjax plan`.

Every part (`gpu_stages.py`) has a process and a limit of its own: a kernel that hangs, or an error
that the GPU's context does not survive, costs one part and is a row. Rows carry what was predicted
of them (`benchmarks/gpu_predictions.json`). The exit code is 1 if a part failed or found something
wrong, and 2 where there are no Hopper GPUs: then nothing is run.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from gpu_parts import MEMORY_SHARE, RESULTS, Part, Row
from gpu_stages import DRY, PARTS, STAGES

PROFILE, LOGS = "profile.json", "logs.tar.gz"
CACHE = Path(tempfile.gettempdir()) / "shiftjax_gpu_run"  # compiled programs, for later stages
MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(MEMORY_SHARE)}
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
        self._out = out
        self._predictions: list[Row] = []
        self._profiles: list[Row] = []
        self._write()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    def add(self, row: Row) -> None:
        """Write a row down, its kernels apart; that of the environment says what is predicted."""
        if "device" in row:
            self._predictions = predictions_for(row["device"])
        if "kernels" in row:
            names = {"part": row["part"], "row": row["row"]}
            self._profiles.append(names | {"kernels": row.pop("kernels")})
        row = with_predictions(row, self._predictions) | {"at_seconds": round(self.elapsed, 1)}
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        self._write()

    def _write(self) -> None:
        for name, rows in ((RESULTS, self.rows), (PROFILE, self._profiles)):
            (self._out / name).write_text(json.dumps(rows, indent=1), encoding="utf-8")


Start = Callable[[Sequence[Part], float], Iterator[Row]]  # runs parts in one process


def run_parts(parts: Sequence[Part], start: Start, log: Log, seconds: float) -> None:
    """Run parts one after the other until the time is up; the first one decides if there is a run.

    Parts for more GPUs than it tells of are left out.
    """
    for row in start(parts[:1], parts[0].limit):
        log.add({"part": parts[0].name} | row)
    if not all(map(is_right, log.rows)):
        return
    devices = log.rows[0]["devices"]
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


def starter(work: Path, dry: bool) -> Start:
    """Return what starts processes for parts; they share compiled programs and chosen GEMMs."""
    if not dry:
        environment = MEMORY | os.environ | {"JAX_COMPILATION_CACHE_DIR": str(CACHE)}
    else:
        flag = "--xla_force_host_platform_device_count=2"  # so that there is a mode to change to
        flags = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    script = str(Path(__file__).with_name("gpu_stages.py"))

    def start(parts: Sequence[Part], limit: float) -> Iterator[Row]:
        names = [part.name for part in parts]
        log = work / f"{names[0].replace(': ', '-').replace(', ', '-').replace(' ', '_')}.log"
        command = [sys.executable, script, *names, "--out", str(work), *["--dry-run"] * dry]
        yield from child_rows(command, limit, log, environment)

    return start


def tuned(rows: Sequence[Row], work: Path) -> Row:
    """Write the best settings that were found, if both kernels have some."""
    from tune_kernels import KERNELS, write_best

    found = [row for row in rows if "score" in row]
    if {row["kernel"] for row in found} != set(KERNELS):
        return {"part": "tuning", "failed": "not both kernels have a candidate that runs"}
    return {"part": "tuning", "best": write_best(rows[0]["device"], found, work / "tuned.json")}


def run_stage(arguments: argparse.Namespace, work: Path, out: Path) -> Log:
    """Run the parts of a stage, or all in one process, which saves its starts; return the rows."""
    stage = STAGES[arguments.stage]
    log, start = Log(out), starter(work, arguments.dry_run)
    seconds = arguments.seconds or stage.seconds
    if arguments.dry_run:
        for row in start([*PARTS.values(), DRY], seconds):
            log.add({"part": "dry run"} | row)
        return log
    run_parts(stage.parts, start, log, seconds)
    if any("score" in row for row in log.rows):
        log.add(tuned(log.rows, work))
    return log


def main() -> int:
    """Run; 1 if a part failed or found something wrong, 2 if there is nothing to run on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help=f"folder for {RESULTS}, {PROFILE} and {LOGS}")
    what.add_argument("--predict", nargs="+", choices=sorted(CHIPS.values()), metavar="CHIP")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--stage", choices=STAGES, default="A")
    how.add_argument("--dry-run", action="store_true", help="all stages, tiny, on a CPU")
    parser.add_argument("--seconds", type=float, help="stop after these; default: the stage's")
    arguments = parser.parse_args()
    if arguments.predict:
        from gpu_predictions import shown

        print(shown(arguments.predict))
        return 0
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        try:
            log = run_stage(arguments, work, out)
        finally:
            with tarfile.open(out / LOGS, "w:gz") as archive:
                for each in sorted(work.iterdir()):  # what parts have said and left
                    archive.add(each, each.name)
    wrong = [row for row in log.rows if not is_right(row)]
    print(f"{len(log.rows)} rows, {len(wrong)} wrong: {out / RESULTS}")
    return 2 if len(log.rows) == len(wrong) else bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
