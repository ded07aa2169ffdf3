"""Which wrong programs do the tests find? Applies each mutant of the table and runs its tests.

    python tests/mutants/run.py --size quick --area scheduler --output found.jsonl

Works on a copy of the tracked files. Beforehand the tests of a mutant have to pass there without
it, once for every set of tests. Prints a row a mutant and a sum by area; `--output` takes one line
of JSON for each. Ends with 1 if a mutant survives.

    found      a test fails, or
    timeout    takes several times as long as without the mutant, or
    broken     what they import does not: found, but by accident
    survived   all of its tests pass
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from mutant import Mutant
from mutant_table import MUTANTS

ROOT = Path(__file__).parents[2]
SIZES = {"quick": ["--quick"], "all": []}
PASSED, FAILED, NO_TESTS = 0, 1, 5  # what pytest ends with
LEAST_SECONDS, SLOWER = 300, 5  # a run hangs that takes longer, and so many times its baseline
FIRST = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)


class Run(NamedTuple):
    """What came of running tests."""

    outcome: str
    test: str  # the first that failed
    cpu_seconds: float  # of all processes
    seconds: float
    output: str


def copy_tracked(target: Path) -> None:
    """Copy what git tracks, as it is now."""
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, names):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_tests(tree: Path, tests: tuple[str, ...], size: str, limit: float | None = None) -> Run:
    """Run tests in the copy up to the first that fails; the same examples in every run."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", *SIZES[size]]
    path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
    env = {"PYTEST_COMPILED": f"{tree}.compiled", **os.environ, "PYTHONPATH": path}
    env |= {"CI": "false"}  # where a run fails by what it costs, too
    before, begin = _cpu_seconds(), time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=tree,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that servers that tests have started end with it
    )
    try:
        output, is_late = process.communicate(timeout=limit)[0], False
    except subprocess.TimeoutExpired:
        _end(process)
        output, is_late = process.communicate()[0], True
    finally:
        _end(process)
    shutil.rmtree(tree / ".hypothesis", ignore_errors=True)  # no hints from one run to the next
    outcomes = {PASSED: "survived", NO_TESTS: "survived", FAILED: "found"}
    outcome = "timeout" if is_late else outcomes.get(process.returncode, "broken")
    first = FIRST.search(output)
    test = first[1] if first and outcome != "survived" else ""
    return Run(outcome, test, _cpu_seconds() - before, time.monotonic() - begin, output)


def _end(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def mutated(mutant: Mutant, text: str) -> str:
    """The text of its file with the mutant in it. Raises ValueError where it does not fit."""
    if (count := text.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.name}: {mutant.file} has {mutant.old!r} {count} times, not once")
    return text.replace(mutant.old, mutant.new)


def try_mutant(
    tree: Path, mutant: Mutant, sizes: list[str], limits: dict[str, float]
) -> tuple[str, Run]:
    """Run its tests with the mutant, in one size after the other until one, the first, finds it."""
    file = tree / mutant.file
    text = file.read_text()
    try:
        file.write_text(mutated(mutant, text))
        cpu_seconds = 0.0
        for size in sizes:
            Path(importlib.util.cache_from_source(file)).unlink(missing_ok=True)
            run = run_tests(tree, mutant.tests, size, limits[size])
            cpu_seconds += run.cpu_seconds
            if run.outcome != "survived":
                break
        return size, run._replace(cpu_seconds=cpu_seconds)
    finally:
        file.write_text(text)
        Path(importlib.util.cache_from_source(file)).unlink(missing_ok=True)


def main() -> int:
    """Try the mutants that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="all", help="quick: not the thorough ones")
    parser.add_argument("--then-all", action="store_true", help="tests of all sizes on survivors")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--area", nargs="+")
    parser.add_argument("--all-tests", action="store_true", help="all of tests/, not those named")
    parser.add_argument("--output", type=Path, help="a line of JSON for each mutant")
    asked = parser.parse_args()
    for names, kind in ((asked.only, "name"), (asked.area, "area")):
        if unknown := set(names or ()) - {getattr(mutant, kind) for mutant in MUTANTS}:
            parser.error(f"no mutant has the {kind} {', '.join(sorted(unknown))}")
    chosen = [
        m._replace(tests=("tests",)) if asked.all_tests else m
        for m in MUTANTS
        if (not asked.only or m.name in asked.only) and (not asked.area or m.area in asked.area)
    ]
    sizes = list(dict.fromkeys([asked.size, "all"] if asked.then_all else [asked.size]))
    for mutant in chosen:
        mutated(mutant, (ROOT / mutant.file).read_text())  # all of them, before anything takes long
    baselines: dict[tuple[tuple[str, ...], str], Run] = {}
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / "tree"
        copy_tracked(tree)
        for mutant in chosen:
            limits = {}
            for size in sizes:
                key = mutant.tests, size
                if key not in baselines:
                    baselines[key] = run_tests(tree, mutant.tests, size)
                    if baselines[key].outcome != "survived":
                        print(baselines[key].output)
                        raise SystemExit(f"{mutant.tests} fail without any mutant.")
                limits[size] = max(LEAST_SECONDS, SLOWER * baselines[key].seconds)
            size, run = try_mutant(tree, mutant, sizes, limits)
            place = f"{run.outcome:9} {size:5} {mutant.area:18} {mutant.name:52}"
            print(f"{place} {run.cpu_seconds:6.1f}  {run.test}", flush=True)
            sums[mutant.area][run.outcome] += 1
            sums[mutant.area][size] += run.outcome != "survived"  # by accident, too
            sums[mutant.area]["cpu"] += run.cpu_seconds
            if asked.output:
                line = mutant._asdict() | {"size": size} | run._asdict()
                line.pop("output")
                with asked.output.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    _print_sums(sums, sum(run.cpu_seconds for run in baselines.values()))
    return int(any(each["survived"] for each in sums.values()))


def _print_sums(sums: dict[str, dict[str, float]], baseline: float) -> None:
    columns = (*SIZES, "timeout", "broken", "survived", "cpu")
    print(f"\n{'found by':18}" + "".join(f"{name:>9}" for name in columns))
    total = {name: sum(each[name] for each in sums.values()) for name in columns}
    for area, each in [*sums.items(), ("all", total)]:
        print(f"{area:18}" + "".join(f"{each[name]:9.0f}" for name in columns))
    print(f"and {baseline:.0f} CPU seconds for tests without mutants")


if __name__ == "__main__":
    sys.exit(main())
