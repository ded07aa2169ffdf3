"""Puts what `gpu_run.py` has measured into the file of the machine, which predictions come from.

    python scripts/gpu_measured.py A/gpu_run.json B/gpu_run.json [--out FILE.yaml]

The rows of a stage or several, on one kind of GPU. The time of a launch is taken as it is; the
constants of products, of decodes and of prompts are fitted to these kernels as
`shiftjax plan --kernels` fits them. The rest of the file stays. `shiftjax plan` says from then on
what was measured, and when. Printed are the numbers on which predictions hang most.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from option_table import parsed

from shiftjax.costs.machine import Machine
from shiftjax.costs.machine_files import load_machine, machine_of, machine_path, renewed
from shiftjax.options import ConfigError
from shiftjax.sim.kernel_fit import fit_kernels
from shiftjax.sim.measured_kernels import kernel_rows, kernels_of

FITTED = ("product", "decode", "prefill")  # kernels whose launches are known
LAUNCH = ("ceilings", "launch", "us")  # part, row and field of a number
COPY = ("ceilings", "copy", "rate")
CODES = ("products", "codes, 8 tokens, 16,384 wide", "of_copy")
DECODE = ("decode", "64 x 2,048, 8 KV heads", "rate")
PREFILL, TORCH = ("prefill", "8,192, 8 KV heads", "rate"), ("torch", "SDPA, 8,192", "rate")

Rows = Sequence[Mapping[str, Any]]


def value_of(rows: Rows, place: tuple[str, str, str]) -> float | None:
    """Return the last number that rows have in a place; None: it was not measured."""
    part, name, field = place
    found = [
        row[field] for row in rows if (row["part"], row.get("row")) == (part, name) if field in row
    ]
    return found[-1] if found else None


def environment_of(rows: Rows) -> Mapping[str, Any]:
    """Return what all rows were measured on. Raises ConfigError for dry runs and several kinds."""
    found = [row for row in rows if "device" in row]
    if not found or len({row["device"] for row in found}) > 1:
        raise ConfigError(["the rows must be of one kind of device"])
    if any(row["dry"] for row in found):
        raise ConfigError(["the times of a dry run mean nothing: run it on a GPU"])
    return found[-1]


def machine_with(machine: Machine, rows: Rows) -> Machine:
    """Return the machine with the constants that the rows show."""
    if launch := value_of(rows, LAUNCH):
        machine = replace(machine, kernel_seconds=launch * 1e-6)
    kernels = kernels_of(kernel_rows(rows), "gpu_run.json")
    return fit_kernels(machine, [row for row in kernels if row.kernel in FITTED])


def changes(before: Machine, after: Machine) -> dict[str, Any]:
    """Return the constants that differ, by number format those of the format."""
    found = {}
    for name in (each.name for each in fields(Machine)):
        old, new = getattr(before, name), getattr(after, name)
        if new != old:
            is_map = isinstance(new, Mapping)
            found[name] = {f: v for f, v in new.items() if v != old.get(f)} if is_map else new
    return found


def numbers(rows: Rows) -> Iterator[str]:
    """Yield what predictions hang on, in words; a number that is missing has none."""
    copy, prefill, torch = (value_of(rows, place) for place in (COPY, PREFILL, TORCH))
    yield _in_words("a launch, us", value_of(rows, LAUNCH))
    yield _in_words("a product of codes reads, share of a copy", value_of(rows, CODES))
    yield _in_words("decode attention, GB/s", value_of(rows, DECODE), copy, "a copy")
    yield _in_words("prefill attention, TFLOP/s", prefill, torch, "PyTorch's SDPA")


def _in_words(name: str, value: float | None, beside: float | None = None, what: str = "") -> str:
    if value is None:
        return f"{name}: not measured"
    return f"{name}: {value:.4g}" + (f", {value / beside:.2f} of {what}" if beside else "")


def main() -> int:
    """Renew the file; 2 where the rows cannot be used."""
    options = {
        "rows": ([Path], "gpu_run.json of a stage"),
        "--out": (Path, "another file; default: that of the package"),
    }
    arguments = parsed(__doc__, options)
    try:
        rows = [row for file in arguments.rows for row in json.loads(file.read_text("utf-8"))]
        environment = environment_of(rows)
        name = machine_of(environment["device"])
        before = load_machine(name)
        found = changes(before, machine_with(before, rows))
    except (OSError, ValueError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 2
    measured = f"scripts/gpu_run.py on {environment['device']}, {environment['date']}"
    text = renewed(name, found, f"measured by {measured}", f"{measured}: {', '.join(found)}")
    file = arguments.out or machine_path(name)
    file.write_text(text, encoding="utf-8")
    print(*numbers(rows), f"wrote {', '.join(found)}: {file}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
