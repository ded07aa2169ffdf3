"""The runner of benchmarks, without a benchmark."""

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench
from option_table import add_options


def made_up(rows, result=None):
    """A case that yields these rows."""

    def measure(arguments):
        yield from rows
        return result

    return SimpleNamespace(__doc__="A case.", OPTIONS={"--size": 1}, measure=measure)


@pytest.fixture
def run(monkeypatch):
    def run_case(case, *words):
        monkeypatch.setattr(importlib, "import_module", lambda _: case)
        return bench.main(["host", *words])

    return run_case


def test_every_case_says_how_it_is_run_and_has_its_options():
    for name in bench.CASES:
        case = importlib.import_module(bench.CASES[name])
        assert f"python scripts/bench.py {name} " in f"{case.__doc__}", name
        add_options(argparse.ArgumentParser(), case.OPTIONS)
        assert callable(case.measure)


def test_rounds_that_warm_up_are_dropped_and_the_last_line_is_the_result(run, capsys, tmp_path):
    rows = [{"round": -1, "ms": 9.0}, {"round": 0, "ms": 1.0}, {"round": 1, "ms": 2.0}]
    out = tmp_path / "rows.jsonl"
    assert run(made_up(rows, {"median_ms": 1.5}), "--size=3", f"--out={out}") == 0
    *kept, last = map(json.loads, out.read_text().splitlines())
    assert kept == rows[1:]
    assert (last["benchmark"], last["flags"], last["median_ms"]) == ("host", {"size": 3}, 1.5)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == last


def test_rows_of_several_kinds_are_several_tables(run, capsys):
    rows = [{"a": 1}, {"a": 2}, {"b": 3}]
    assert run(made_up(rows)) == 0
    *_, first, _, _, second, _, last = capsys.readouterr().out.splitlines()
    assert (first, second, json.loads(last)["rows"]) == ("a", "b", rows)


def test_failures_are_the_exit_code(run):
    assert run(made_up([{"a": 1}], {"failures": []})) == 0
    assert run(made_up([{"a": 1}], {"failures": ["tokens differ"]})) == 1


def test_an_unknown_case_is_refused_with_those_that_there_are(capsys):
    assert bench.main(["none"]) == 2 and bench.main([]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in bench.CASES)
