"""Which kernels a step's time goes to, by JAX's own profiler.

While it records, XLA launches what a CUDA graph holds kernel by kernel, so kernels have their
names, and gaps between them are longer than in a graph: the sum of the kernels counts, not the
time from the first to the last.
"""

import re
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

MOST = 20  # kernels that are told apart; the others are one row
NUMBER = re.compile(r"[._]\d+(?=$|[._])")  # by which XLA tells fusions of one kind apart
HOST_LINE, DEVICE_PLANE, DEVICE_LINE = "XLA", "/device:GPU", "Stream"  # as the profiler names them


def profile(run: Callable[[], Any], steps: int, keep: Path) -> dict[str, Any]:
    """Return microseconds and launches of a step by kernel, largest first.

    `run` makes `steps` steps. The recording stays in the file `keep`, for XProf or Perfetto.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.enable_hlo_proto = False  # most of a recording otherwise: every loaded program
    jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        (recording,) = Path(folder).rglob("*.xplane.pb")
        shutil.copyfile(recording, keep)
    return summed(kernels_of(jax.profiler.ProfileData.from_file(str(keep))), steps)


def kernels_of(recording: Any) -> Iterator[tuple[str, float]]:
    """Yield name and nanoseconds of what has run: kernels of GPUs, else operations of the CPU."""
    planes = list(recording.planes)
    of_gpus = [plane for plane in planes if plane.name.startswith(DEVICE_PLANE)]
    wanted = DEVICE_LINE if of_gpus else HOST_LINE
    for plane in of_gpus or planes:
        for line in plane.lines:
            if wanted in line.name:
                yield from ((event.name, event.duration_ns) for event in line.events)


def summed(kernels: Iterator[tuple[str, float]], steps: int) -> dict[str, Any]:
    """Sum what differs in a number alone; the totals count every kernel."""
    time: defaultdict[str, float] = defaultdict(float)
    count: Counter[str] = Counter()
    for name, duration in kernels:
        kind = NUMBER.sub("", name)
        time[kind] += duration / 1e3 / steps
        count[kind] += 1
    total, longest = sum(time.values()), sorted(time.items(), key=lambda item: -item[1])
    rows = [
        {"kernel": kind, "us": us, "launches": count[kind] / steps, "percent": 100 * us / total}
        for kind, us in longest[:MOST]
    ]
    return {"us": total, "launches": count.total() / steps, "kernels": rows}
