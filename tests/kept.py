"""What was compiled is kept between runs, in the user's cache folder.

A program for CPUs lies in JAX's compilation cache, `programs`; what tests ask of one for GPUs,
which JAX can write but not read, in `gpu` (`compile/aot.py`); those of child processes in
`children`, and of servers, whose compilation cache is under test as well, in `served`. The folder
is named for all that makes programs differ and that their keys leave out.
Several workers and several runs use it at once: a file appears whole or not at all, and one that
another has just removed was not there. `PYTEST_COMPILED=DIR` names another folder,
`PYTEST_COMPILED=off` is one for this run alone.
"""

import atexit
import hashlib
import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import jax
from jax._src import cache_key, compilation_cache
from jax._src.compilation_cache_interface import CacheInterface

VARIABLE = "PYTEST_COMPILED"
LEAST_SECONDS = 0.2  # that compiling takes: reading what takes less saves little
MAX_BYTES = 1 << 29  # of all versions together; a run of every test writes a quarter of it


def folder() -> Path:
    """Where this run keeps what it compiles, which its children are told in the variable."""
    named = os.environ.get(VARIABLE, "")
    if named == "off":
        path = Path(tempfile.mkdtemp(prefix="shiftjax-compiled-"))
        atexit.register(shutil.rmtree, path, ignore_errors=True)
    elif named:
        path = Path(named)
    else:
        prune(root())
        path = root() / _machine()
    os.environ[VARIABLE] = str(path)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def root() -> Path:
    """The folder of all versions and machines."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "shiftjax" / "tests"


def _machine() -> str:
    """Versions, and the kind of CPU: a program for one may be no program for another."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    kind = hashlib.sha256(f"{platform.machine()} {flags}".encode()).hexdigest()[:12]
    return f"jaxlib-{importlib.metadata.version('jaxlib')}-{kind}"


def prune(directory: Path, limit: int = MAX_BYTES) -> None:
    """Remove what has not been used for longest, until no more than `limit` bytes are left."""
    files = sorted(_files(directory), key=lambda entry: entry[1].st_mtime_ns, reverse=True)
    total = 0
    for path, stat in files:
        total += stat.st_size
        if total > limit:
            path.unlink(missing_ok=True)


def _files(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in directory.rglob("*"):
        with suppress(OSError):  # another run has just removed it
            if path.is_file():
                yield path, path.stat()


class Files(CacheInterface):
    """Bytes under names; the time of a file is that of its last use.

    JAX's own cache, with a limit, reads the time of every entry for each one that it writes, under
    a lock for all processes; without a limit, others can read what is written in part.
    """

    def __init__(self, path: Path | str):
        self._path = Path(path)  # JAX logs it under this name
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def get(self, key: str) -> bytes | None:
        """What was put under the key."""
        with suppress(OSError):
            found = (self._path / key).read_bytes()
            os.utime(self._path / key)
            return found
        return None

    def put(self, key: str, value: bytes) -> None:
        """Keep it, whole or not at all."""
        with tempfile.NamedTemporaryFile(dir=self._path, prefix=".", delete=False) as file:
            file.write(value)
        os.replace(file.name, self._path / key)


def use() -> None:
    """Let JAX keep programs in the folder: here in files of ours, in child processes its own way.

    Children hold a lock while they write, which JAX does where there is a limit. Equal groups of
    devices have one program, which runs on the devices for which it is read: JAX knows it so on
    GPUs, and on CPUs would compile it for each group.
    """
    hash_options = cache_key._hash_serialized_compile_options
    cache_key._hash_serialized_compile_options = lambda hashed, options, **_: hash_options(
        hashed, options, strip_device_assignment=True
    )
    compilation_cache.get_file_cache = lambda path: (Files(path), path)
    jax.config.update("jax_compilation_cache_dir", str(folder() / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": str(folder() / "children"),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(MAX_BYTES),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": str(LEAST_SECONDS),
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
    }


@contextmanager
def lent(name: str, directory: Path) -> Iterator[None]:
    """Put what is kept under a name into a directory, and keep what has come to it by the end."""
    held = folder() / name
    if held.is_dir():
        shutil.copytree(held, directory, dirs_exist_ok=True)
    yield
    for path, _ in _files(directory):
        place = held / path.relative_to(directory)
        if not place.exists():
            Files(place.parent).put(place.name, path.read_bytes())
