"""The versions of what stands between a kernel and a GPU: plugin, assembler, driver.

A kernel is PTX until an assembler makes machine code of it, and an assembler can be wrong. XLA and
Mosaic take the first of these that is there (openxla/xla, `assemble_compilation_provider.cc`):

    nvJitLink    a library, a wheel of its own; JAX's CUDA wheels bring it
    ptxas        a program, in the wheel of nvcc, in CUDA's folder or on the path

The CUDA runtime's version does not tell: `cudaRuntimeGetVersion` is 1000 * major + 10 * minor and
has no patch level, so that it says 12090 of 12.9.0 and of 12.9.1, one of which is wrong.
"""

import importlib.metadata
import logging
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)
Version = tuple[int, ...]

# Versions as `ptxas --version` and the wheels have them; 12.8.61 is of CUDA 12.8.0, 12.9.86 of
# CUDA 12.9 Update 1. JAX's own attention kernel (`attention_mgpu.py`) names the same releases.
MISCOMPILES = ((12, 8), (12, 9, 86))  # from the first on, up to before the second
# Since this driver's CUDA, 12.9, XLA records as part of a graph what reads a slice of an array
# (`SupportsMovedChildCommands` in command_buffer_conversion_pass.cc); before, each cuts the graph.
DRIVER_OF_SLICES = (575,)
DRIVER_FILE = Path("/proc/driver/nvidia/version")
CUDA_FOLDER = Path("/usr/local/cuda")
_PLUGINS = {13: "jax-cuda13-plugin", 12: "jax-cuda12-plugin"}  # in the order that JAX looks
_WHEELS = {
    13: ("nvidia-nvjitlink", "nvidia-cuda-nvcc"),
    12: ("nvidia-nvjitlink-cu12", "nvidia-cuda-nvcc-cu12"),
}


def what_tracing_says(trace: Callable[[], Any]) -> str | None:
    """Trace kernels; return what they cannot do, in their own words. None: they can."""
    try:
        trace()
    except ValueError as error:
        return str(error)
    except Exception as error:  # of a compiler under development: the loops serve as well
        logger.exception("the kernels cannot be traced")
        return f"the kernels cannot be traced ({type(error).__name__})"
    return None


def left_to_xla[Size](
    sizes: Sequence[Size], why_not: Callable[[Size], str | None], what: str
) -> tuple[str, bool]:
    """Return why kernels lack some sizes of matrices, and whether they lack all; "" if none.

    Warns of those that XLA multiplies beside kernels; `what` says on which device, and how.
    """
    reasons = {size: why_not(size) for size in sizes}
    left = {size: reason for size, reason in reasons.items() if reason is not None}
    if not left:
        return "", False
    reason = next(iter(left.values()))
    logger.warning(
        "%d of %d sizes of matrices of %s, several times slower than by the kernels: %s: %s",
        *(len(left), len(reasons), what, ", ".join(map(str, left)), reason),
    )
    return reason, len(left) == len(reasons)


class Assembler(NamedTuple):
    """One of those that may make machine code; a `version` of () is unknown."""

    name: str
    version: Version
    wheel: str  # that has it, or would have it
    path: str = ""  # of a program

    def __str__(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version)) or 'of unknown version'}"

    @property
    def miscompiles(self) -> bool:
        """Whether this version is known to get causal masks wrong."""
        first, repaired = MISCOMPILES
        return first <= self.version < repaired


def installed(package: str) -> str | None:
    """Return the version of an installed package; None: it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def plugin() -> tuple[int, str] | None:
    """Return the major version of CUDA that JAX was built for, and that of its plugin."""
    found = ((cuda, installed(package)) for cuda, package in _PLUGINS.items())
    return next(((cuda, version) for cuda, version in found if version), None)


def assemblers() -> list[Assembler]:
    """Return what may assemble kernels here, in the order in which XLA asks."""
    cuda, _ = plugin() or (max(_PLUGINS), "")
    library, compiler = _WHEELS[cuda]
    found, version = [], installed(library)
    if version:
        found.append(Assembler("nvJitLink", parse_version(version), library))
    path = find_ptxas()
    if path is not None:
        found.append(Assembler("ptxas", ptxas_version(path), compiler, str(path)))
    return found


def why_not_assembled() -> str | None:
    """Return which assembler of those here is known to miscompile, and the cure; else None.

    An unknown version is no reason: whether its code is right, the check of the kernels shows.
    """
    wrong = [assembler for assembler in assemblers() if assembler.miscompiles]
    if not wrong:
        return None
    wheels = " ".join(f"'{each.wheel}>={_shown(MISCOMPILES[1])}'" for each in wrong)
    names = " and ".join(map(str, wrong))
    return f"{names} can miscompile causal masks; pip install -U {wheels}"


def find_ptxas() -> Path | None:
    """Return the assembler that XLA finds: of JAX's CUDA wheels, of CUDA's folder, on the path."""
    from jax._src import lib  # JAX has no public name for where its CUDA is

    folders = [Path(lib.cuda_path)] if lib.cuda_path else []
    for folder in (*folders, CUDA_FOLDER):
        if (folder / "bin" / "ptxas").is_file():
            return folder / "bin" / "ptxas"
    found = shutil.which("ptxas")
    return Path(found) if found else None


def ptxas_version(path: Path) -> Version:
    """Ask it: `Cuda compilation tools, release 12.9, V12.9.86`; () where it does not say."""
    try:
        run = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"\bV(\d+(?:\.\d+)+)", run.stdout)
    return parse_version(found[1]) if found else ()


def parse_version(text: str) -> Version:
    """`12.9.86` as numbers; what comes after them is left out."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def driver_version() -> str | None:
    """Return the version of NVIDIA's kernel module; None: there is none."""
    try:
        text = DRIVER_FILE.read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", text)
    return found[1] if found else "unknown"


def records_slices() -> bool:
    """Return whether a CUDA graph may hold what reads slices: not with a driver that is too old."""
    version = parse_version(driver_version() or "")
    return not version or version >= DRIVER_OF_SLICES


def versions() -> dict[str, str]:
    """Return everything that can change what a kernel becomes, by name."""
    cuda = plugin()
    return {
        "driver": driver_version() or "none",
        "jax": installed("jax") or "unknown",
        "jaxlib": installed("jaxlib") or "unknown",
        "plugin": f"cuda{cuda[0]} {cuda[1]}" if cuda else "none",
        "assembled by": ", ".join(map(str, assemblers())) or "nothing that was found",
    }


def _shown(version: Version) -> str:
    return ".".join(map(str, version))
