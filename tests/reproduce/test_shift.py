"""Shift Parallelism's evaluation: what is run, and how near it is."""

from pathlib import Path

import pytest

from shiftjax.reproduce import shift, shift_traces
from shiftjax.reproduce.figures import Curve, Figure, Options, count, published
from shiftjax.reproduce.run import results_of
from shiftjax.sim.trace import TraceRequest

QUICK = Options(quick=True)


def figures_of(*parts, options=QUICK):
    found = results_of("shift", options, parts)
    return [each for each in found if isinstance(each, Figure)]


def test_ratios_are_those_that_were_published():
    """Closed forms and single requests: what the simulator claims to be good at."""
    found = count(figures_of("contexts"))
    assert found.compared == 6
    assert found.near >= 4
    text = [each for each in figures_of("tradeoff") if each.read == "text"]
    assert len(text) == 8
    assert count(text).fair >= 6


def test_every_published_figure_has_a_row():
    """Traces are lacking here, so their rows say what is missing."""
    rows = figures_of()
    names = {(each.number, each.what) for each in rows}
    known = published("shift").figures
    lacking = {key for key, each in known.items() if (each["figure"], each["what"]) not in names}
    others = {f"ulysses-{metric}" for metric in ("ttft", "tokens")}
    assert {key for key in lacking if not key.startswith(tuple(others))} == set()
    assert len(lacking) == 24  # of the other four contexts, which only the full run has
    not_run = [each for each in rows if each.ours is None]
    assert len(not_run) == 8
    assert all("needs --traces" in each.note for each in not_run)


def test_mooncakes_requests_come_on_its_ticks():
    requests = [TraceRequest(at, 10, 10) for at in (0.0, 0.3, 2.7, 3.0, 5.9, 9.0)]
    ticks = [shift_traces.on_tick(each).arrival_seconds for each in requests]
    assert ticks == [0.0, 0.0, 0.0, 3.0, 3.0, 9.0]


def test_traces_are_cut_to_the_published_requests(tmp_path, monkeypatch):
    line = '{"timestamp": %d, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}'
    lines = [line % (3000 * (number // 9)) for number in range(80)]
    (tmp_path / "conversation_trace.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(shift_traces, "MOONCAKE_REQUESTS", 45)
    rows = figures_of("mooncake", options=Options(traces=Path(tmp_path)))
    minutes = {each.what: each.ours for each in rows if each.unit == "min"}
    assert len(minutes) == 4
    for value in minutes.values():  # nine requests on each of five ticks
        assert value == pytest.approx(12 / 60, rel=0.05)
    quick = figures_of("mooncake", options=Options(quick=True, traces=Path(tmp_path)))
    assert [each.ours for each in quick if each.unit == "min"] == [None] * 4


def test_curves_are_of_all_models_and_contexts():
    curves = [each for each in results_of("shift", QUICK, ["contexts"]) if isinstance(each, Curve)]
    assert len(curves) == 3 * len(shift.LABELS)
    for each in curves:
        assert set(each.lines) == {"dp", "tp", "shift"}
        assert all([x for x, _ in line] == [2048, 32_768] for line in each.lines.values())
