"""Tables of measured kernels: what a file of them says, and what the cost model says. No JAX.

A row is a kernel, with its sizes and `us`, the microseconds that it took. A .csv file has a header,
a .jsonl file an object a line; of `gpu_run.json`, which `scripts/gpu_run.py` writes, the rows of
such kernels are taken. Columns, by `kernel`:

    product         rows, inner, columns: one of a layer's weights, M x K by K x N
    experts         tokens, hidden, width, experts, own, k: a whole layer of those of one device,
                    which has `own` of them; its products, what permutes and sums rows, activation
    decode          seqs, context, heads, kv_heads, head_dim: one token of each
    prefill         tokens, context, heads, kv_heads, head_dim: one chunk of `seqs` prompts after
                    `context` tokens of each
    all-reduce, all-gather, all-to-all, reduce-scatter      devices, bytes: of a device's result

and of any kernel that has use for it

    format          of weights, of KV for attention; bfloat16 where it is not said
    launches        of kernels that `us` holds, 1 where it is not said; of collectives none
    quantises       launches that made codes of a product's input, 0 where it is not said
    window          that attention sees; 0 or not said: all
    chosen          of a device's experts those that any token has; 0 or not said: as by chance

A column may stay empty. `scripts/labs/kernel_tables.py` writes such a file from tables that others
publish.
"""

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from shiftjax.arch.cache import keys_and_values
from shiftjax.arch.formats import ALIASES, AUTO, FORMATS, Formats
from shiftjax.costs.collectives import Collective
from shiftjax.costs.expert_load import Load
from shiftjax.costs.kernel_costs import KernelCosts, expert_numbers
from shiftjax.costs.levels import transfer_seconds, ways_of
from shiftjax.costs.machine import Machine
from shiftjax.costs.work import Work
from shiftjax.options import ConfigError, shown, unknown_name

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter")
_ATTENTION = ("context", "heads", "kv_heads", "head_dim")
SIZES: Mapping[str, tuple[str, ...]] = {
    "product": ("rows", "inner", "columns"),
    "experts": ("tokens", "hidden", "width", "experts", "own", "k"),
    "decode": ("seqs", *_ATTENTION),
    "prefill": ("tokens", *_ATTENTION),
    **{kind: ("devices", "bytes") for kind in COLLECTIVES},
}
OPTIONAL = {"launches": 1, "quantises": 0, "window": 0, "seqs": 1, "chosen": 0}
NUMPY_FORMATS = {"float8_e4m3fn": "fp8"}  # as `gpu_run.json` calls them


class Measured(NamedTuple):
    """One measured kernel."""

    kernel: str
    format: str
    sizes: Mapping[str, int]
    seconds: float

    @property
    def part(self) -> tuple[str, str]:
        """What is judged together."""
        return self.kernel, "" if self.kernel in COLLECTIVES else self.format


def read_kernels(path: Path) -> list[Measured]:
    """The rows of a file. Raises ConfigError for one that cannot be read, with the row at fault."""
    try:
        text = path.read_text(encoding="utf-8")
        rows = list(_objects(path.suffix, text))
    except (OSError, UnicodeDecodeError, ValueError, csv.Error) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from None
    found = kernels_of(rows, str(path))
    if not found:
        raise ConfigError([f"{path}: has no row of {', '.join(SIZES)}"])
    return found


def kernels_of(rows: Iterable[Any], where: str) -> list[Measured]:
    """Kernels out of rows, which are `where`. Raises ConfigError, naming the row at fault."""
    return [_measured(row, f"{where}: row {number}") for number, row in enumerate(rows, 1)]


def kernel_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Those rows of `gpu_run.json` that are such kernels: it measures much else."""
    return [
        {"format": row["shape"].get("dtype"), **row, **row["shape"]}
        for row in rows
        if row.get("kernel") in SIZES and "us" in row and "shape" in row
    ]


def _objects(suffix: str, text: str) -> Iterable[Mapping[str, Any]]:
    if suffix == ".csv":
        return csv.DictReader(text.splitlines())
    if suffix == ".json":
        return kernel_rows(json.loads(text))
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _measured(row: Any, where: str) -> Measured:
    """One row. Raises ConfigError."""
    if not isinstance(row, dict):
        raise ConfigError([f"{where} is no table of columns"])
    kernel, fmt = str(row.get("kernel")), row.get("format") or AUTO
    if kernel not in SIZES:
        raise ConfigError([f"{where}: {unknown_name(kernel, SIZES, 'kernel')}"])
    fmt = NUMPY_FORMATS.get(fmt, ALIASES.get(fmt, fmt))
    if fmt not in FORMATS:
        raise ConfigError([f"{where}: {unknown_name(str(fmt), FORMATS, 'format')}"])
    sizes = {name: _number(row.get(name), name, where, at_least=0) for name in SIZES[kernel]}
    for name, default in OPTIONAL.items():
        if row.get(name) not in (None, ""):
            sizes[name] = _number(row[name], name, where, at_least=0)
        sizes.setdefault(name, default)
    seconds = _number(row.get("us"), "us", where, at_least=1e-3) * 1e-6
    return Measured(kernel, fmt, {name: int(size) for name, size in sizes.items()}, seconds)


def _number(value: Any, name: str, where: str, at_least: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not at_least <= number < 1e18:
        raise ConfigError([f"{where}: {name} must be a number, got {shown(value)}"])
    return number


def predicted_seconds(machine: Machine, row: Measured) -> float:
    """What the cost model says of a measured kernel, its launches included.

    Kernels are measured alone: nothing of what chips lose when they run hot.
    """
    machine = replace(machine, sustained_efficiency=1.0)
    sizes = row.sizes
    if row.kernel in COLLECTIVES:
        move = Collective(row.kernel, sizes["devices"], sizes["bytes"], 1)  # type: ignore[arg-type]
        return transfer_seconds(ways_of(machine, move.kind), move)
    launches = sizes["launches"] * machine.kernel_seconds
    if row.kernel in ("decode", "prefill"):
        kernels = KernelCosts(machine, Formats(AUTO, row.format, AUTO))
        work = _work(row.kernel, sizes).within(sizes["window"] or None)
        cache = keys_and_values(sizes["kv_heads"], sizes["head_dim"])
        attention = kernels.attention(sizes["heads"], sizes["head_dim"], cache)
        return launches + attention.seconds(work, work.num_rows)
    formats = Formats(row.format, AUTO, AUTO if FORMATS[row.format].has_scales else row.format)
    kernels = KernelCosts(machine, formats)
    if row.kernel == "experts":
        return launches + _experts(kernels, sizes)
    codes = sizes["rows"] * sizes["inner"] * (formats.activation_bytes + formats.weight_bytes)
    quantising = sizes["quantises"] * (machine.kernel_seconds + kernels.moved(codes))
    return launches + quantising + kernels.product(*(sizes[name] for name in SIZES["product"]))


def _work(kernel: str, sizes: Mapping[str, int]) -> Work:
    if kernel == "decode":
        return Work.decode(sizes["seqs"], sizes["context"])
    one, n = Work.prefill(sizes["tokens"], sizes["context"]), sizes["seqs"]
    return Work(*(n * each for each in one))


def _experts(kernels: KernelCosts, sizes: Mapping[str, int]) -> float:
    tokens, hidden, width = sizes["tokens"], sizes["hidden"], sizes["width"]
    own, every, k = sizes["own"], sizes["experts"], sizes["k"]
    pairs = tokens * k * own / every
    chosen = sizes["chosen"] or own * (1 - (1 - k / every) ** tokens)
    load = Load(max(pairs, 1.0), max(1.0, chosen))
    numbers = expert_numbers(load.pairs, tokens, k, hidden, width)
    moved = kernels.moved(numbers * kernels.formats.activation_bytes)
    return kernels.experts(load, hidden, width) + moved
