"""How a compiled step sums over devices: by XLA's own kernels, or by NCCL.

The two sums of a layer are most of what a small step waits for. XLA has kernels for small ones, in
which every device reads its peers' memory (one shot) or a share of it (two shot), a few
microseconds where NCCL takes some twelve (vLLM pull request 24111). It plans them for devices that
NVLink joins, a power of two of them, since jax 0.12.
"""

import logging
import re
from collections import Counter

from shiftjax.device.programs import Program
from shiftjax.parallel.grid import Mode

logger = logging.getLogger(__name__)
KINDS = {"ONE_SHOT": "one shot", "TWO_SHOT": "two shot"}  # of XLA's kernel_strategy
_ALL_REDUCE = re.compile(r"^.* all-reduce(?:-start)?\(.*$", re.MULTILINE)


def all_reduce_kind(line: str) -> str:
    """one shot, two shot or nccl, of an all-reduce in a compiled program's text."""
    return next((kind for key, kind in KINDS.items() if key in line), "nccl")


def all_reduce_kinds(text: str) -> Counter[str]:
    """How often a compiled program has all-reduces of each kind."""
    return Counter(all_reduce_kind(line) for line in _ALL_REDUCE.findall(text))


def warn_of_slow_all_reduces(program: Program, mode: Mode, num_devices: int) -> None:
    """Say so if the smallest step of a group sums by NCCL. A step on one device has no sums."""
    kinds = all_reduce_kinds(program.steps[mode].as_text() or "")
    if not kinds["nccl"]:
        return
    needed = "NVLink between the devices, and jax 0.12 or later"
    if num_devices & (num_devices - 1):
        needed = f"a power of two of devices, and these are {num_devices}"
    logger.warning(
        "%d all-reduces of a step of %d tokens go through NCCL: XLA's quicker kernels need %s",
        kinds["nccl"],
        program.bucket.tokens,
        needed,
    )
