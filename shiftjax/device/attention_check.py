"""Whether this machine's kernels compute what they should: asked before a deployment relies on it.

A compiler that errs, a driver that is too old, a GPU that is broken: none of them raises anything
where attention is chosen. So the kernels are tried first (`attention_cases`), in a process of
their own with a time limit, on every device and in the shapes of the deployment; before weights
are placed, since the other process needs memory, too. A fresh interpreter: CUDA cannot be forked.

What the other process finds is kept beside the compilation cache, under everything that it can
depend on; a failure, too, until `shiftjax doctor` asks again. Where the process hangs or dies, the
next start tries again: the machine may have been busy.
"""

import dataclasses
import hashlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pallas_kernels
from shiftjax.arch.formats import Formats
from shiftjax.costs.buckets import Bucket
from shiftjax.device import kept
from shiftjax.device.attention_cases import Trial
from shiftjax.device.attention_steps import Cases, Shape
from shiftjax.models.entry_backend import tried_entry
from shiftjax.models.expert_backend import expert_shape
from shiftjax.models.gpu_software import versions
from shiftjax.models.norm_backend import norm_shape
from shiftjax.models.packed_backend import packed_shape
from shiftjax.models.product_backend import code_shape
from shiftjax.parallel.grid import Device
from shiftjax.parallel.layout import Layout

logger = logging.getLogger(__name__)
MODULE = "shiftjax.device.attention_cases"
LIMIT_SECONDS = 60.0  # without a word: the start, or one case, two kernels of it
MOST_DETAIL = 4000  # characters of a log
FOLDER = "attention_checks"
BACKENDS = "attention", "entry", "expert", "norm", "packed", "position", "product", "sum", "tile"


class KernelCheck(NamedTuple):
    """How kernels are checked: what the assembly root knows of the process's surroundings."""

    environ: Mapping[str, str]  # of the process that tries them
    directory: Path | None = None  # of the compilation cache; None: nothing is kept
    limit_seconds: float = LIMIT_SECONDS
    cases: Cases = Cases()
    builder: str = ""  # of other kernels than those that serve: for tests alone
    reads_kept: bool = True  # false: try again, whatever was found before


class Verdict(NamedTuple):
    """What came out. `problem` is for people and metrics, `detail` for a log."""

    problem: str | None  # None: the kernels are right
    detail: str = ""
    seconds: float = 0.0
    is_final: bool = True  # trying again would find the same
    was_kept: bool = False


def shape_of(
    layout: Layout, formats: Formats, block_size: int, largest: Bucket, deterministic: bool
) -> Shape:
    """What one device of a deployment computes."""
    model, types = layout.model, (formats.activations, formats.kv)
    ways = layout.position_ways
    heads = ways * layout.heads_per_device, layout.kv_heads_per_device, model.head_dim
    bucket = largest.tokens, largest.rows, largest.seqs
    if model.latent is not None:  # beside which nothing else is a kernel
        own = {"ways": ways, "values_in_keys": model.values_in_keys}
        return Shape(*heads, block_size, model.windows, *types, bucket, deterministic, **own)
    own = deterministic, expert_shape(model, formats)
    scores = model.attention_scale, model.attention_soft_cap, model.attention_sinks
    more = {"has_late": model.num_late_layers > 0, "packed": packed_shape(layout, formats)}
    more |= {"codes": code_shape(layout, formats), "norm": norm_shape(model, formats)}
    more |= {"entry": tried_entry(layout, formats), "ways": ways}
    return Shape(*heads, block_size, model.windows, *types, bucket, *own, *scores, **more)


def check_attention(check: KernelCheck, devices: Sequence[Device], shape: Shape) -> str | None:
    """Try the kernels on these devices, or recall it; returns what is wrong, for people.

    What was found is logged: a failure with case, details and versions.
    """
    verdict = find_verdict(check, devices, shape)
    kernels = "attention kernels" if shape.sums is None else "kernel of sums by the switch"
    kernels = kernels if shape.plain is None else "products of numbers"
    machine = f"{len(devices)} x {devices[0].device_kind}"
    when = "in an earlier start" if verdict.was_kept else f"in {verdict.seconds:.1f} s"
    if verdict.problem is None:
        logger.info("the %s passed the check on %s, %s", kernels, machine, when)
        return None
    logger.error(
        "the %s failed the check on %s, %s: %s; %s; %s",
        kernels,
        machine,
        f"{when} (`shiftjax doctor` tries again)" if verdict.was_kept else when,
        verdict.problem,
        ", ".join(f"{name} {version}" for name, version in versions().items()),
        verdict.detail.strip()[-MOST_DETAIL:] or "no details",
    )
    return f"the kernels failed their check: {verdict.problem}"


def find_verdict(check: KernelCheck, devices: Sequence[Device], shape: Shape) -> Verdict:
    """Recall the verdict on these kernels, or find and keep it."""
    ids = tuple(device.local_hardware_id for device in devices)  # as a process alone counts
    trial = Trial(shape, check.cases, devices[0].device_kind, ids, check.builder)
    key = key_of(trial)
    known = _read(check, key) if check.reads_kept else None
    if known is not None:
        return known
    logger.info("trying the attention kernels, once for this machine and these shapes")
    verdict = try_kernels(trial, check)
    if verdict.is_final:
        _keep(check, key, verdict)
    return verdict


# ------------------------------------------------------------------ what is kept


def key_of(trial: Trial) -> dict[str, Any]:
    """Everything that a verdict depends on."""
    return {
        **versions(),
        "kernels": sources_hash(),
        "trial": json.loads(json.dumps(dataclasses.asdict(trial))),
    }


def sources_hash() -> str:
    """SHA-256 of the kernels' sources and settings, of the check and of what calls them."""
    kernels, here = Path(pallas_kernels.__path__[0]), Path(__file__).parent
    files = [path for path in kernels.iterdir() if path.suffix in (".py", ".json")]
    files += [*here.glob("*_cases.py"), here / "attention_steps.py"]
    files += [here.parent / "models" / f"{name}_backend.py" for name in BACKENDS]
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return total.hexdigest()


def _read(check: KernelCheck, key: Mapping[str, Any]) -> Verdict | None:
    """What was kept under a key; None for nothing, and for what is no verdict."""
    fields = kept.read(check.directory, FOLDER, key)
    try:
        problem, detail, seconds = (fields[name] for name in ("problem", "detail", "seconds"))
        is_right = isinstance(problem, str | None)
        return Verdict(problem, str(detail), float(seconds), was_kept=True) if is_right else None
    except (ValueError, LookupError, TypeError):
        return None


def _keep(check: KernelCheck, key: Mapping[str, Any], verdict: Verdict) -> None:
    found = {"problem": verdict.problem, "detail": verdict.detail, "seconds": verdict.seconds}
    kept.keep(check.directory, FOLDER, key, found)


# ------------------------------------------------------------------ the other process


def try_kernels(trial: Trial, check: KernelCheck) -> Verdict:
    """Run a trial in a fresh interpreter, and end it when it says nothing for too long."""
    begin = time.monotonic()
    command = [sys.executable, "-P", "-m", MODULE]  # -P: nothing is imported from where we are
    places = (place or os.getcwd() for place in sys.path)
    environ = {**check.environ, "PYTHONPATH": os.pathsep.join(places)}
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environ,
            start_new_session=True,  # so that its assembler ends with it
        )
        try:
            verdict = _heard(process, trial, check.limit_seconds)
        finally:
            _end(process)
        if verdict.problem is not None and not verdict.detail:
            log.seek(0)
            verdict = verdict._replace(detail=log.read()[-MOST_DETAIL:])
    return verdict._replace(seconds=time.monotonic() - begin)


def _heard(process: "subprocess.Popen[str]", trial: Trial, limit_seconds: float) -> Verdict:
    """Follow what the process says until it is known what comes of it."""
    assert process.stdin is not None
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_listen, args=(process, lines), daemon=True).start()
    with suppress(BrokenPipeError):  # it has ended: that is heard below
        print(json.dumps(dataclasses.asdict(trial)), file=process.stdin, flush=True)
    case = ""
    while True:
        limit = limit_seconds if case else max(limit_seconds, LIMIT_SECONDS)
        where = f"{case}: " if case else ""
        try:
            line = lines.get(timeout=limit)
        except queue.Empty:
            return Verdict(f"{where}no end in {limit:.0f} s", is_final=False)
        if line is None:
            return Verdict(f"{where}their process {_ended(process)}", is_final=False)
        said = json.loads(line)
        if said.get("passed"):
            return Verdict(None)
        case = said.get("case", case)
        if "problem" in said:
            return Verdict(f"{where}{said['problem']}", said["detail"], is_final=said["is_final"])


def _listen(process: "subprocess.Popen[str]", lines: "queue.Queue[str | None]") -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.put(line)
    lines.put(None)


def _ended(process: "subprocess.Popen[str]") -> str:
    code = process.wait()
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _end(process: "subprocess.Popen[str]") -> None:
    """End the process and what it started; one that a driver holds is left to the driver."""
    assert process.stdin is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with suppress(BrokenPipeError):
        process.stdin.close()
