"""How figures are compared and counted, and what every paper must have."""

import importlib
import math

import pytest

from shiftjax.options import ConfigError
from shiftjax.reproduce import figures, run
from shiftjax.reproduce.figures import Curve, Figure, count, published
from shiftjax.reproduce.papers import PAPERS


def figure(published, ours, note=""):
    return Figure("shift", "table 5", "TPOT", published, ours, "ms", note, "plot")


def test_the_error_is_ours_over_theirs():
    assert figure(10.0, 12.0).error == pytest.approx(0.2)
    assert figure(10.0, 5.0).error == pytest.approx(-0.5)
    assert figure(None, 5.0).error is None
    assert figure(10.0, None).error is None


def test_counts_are_of_what_can_be_compared():
    """A near one is fair, too; what is ours alone and what was not run are told, not counted."""
    ours = (11.49, 8.51, 12.4, 7.51, 20.0)
    found = count([*(figure(10.0, each) for each in ours), figure(None, 1.0), figure(10.0, None)])
    assert found == (5, 2, 4, 1, 1, pytest.approx(0.24))
    assert str(found) == (
        "within 15%: 2 of 5, within 25%: 4, median error 24%; 1 of ours alone; 1 not run"
    )
    assert count([]).compared == 0


def test_a_table_says_what_is_far_off_and_what_was_read_off_a_plot():
    rows = [figure(10.0, 11.0, "as is"), figure(10.0, 8.0), figure(1234.5, None, "as is")]
    head, _, near, far, lacking, _, note = run.markdown(rows).splitlines()
    assert head == "| figure | what | published | ours | error | note |"
    assert near == "| table 5 | TPOT | 10 ms (read off a plot) | 11 ms | +10% | 1 |"
    assert far == "| table 5 | TPOT | 10 ms (read off a plot) | 8 ms | **-20%** |  |"
    assert lacking == "| table 5 | TPOT | 1,234 ms (read off a plot) | - | - | 1 |"
    assert note == "1. as is"


@pytest.mark.parametrize("paper", PAPERS)
def test_a_paper_has_a_row_a_file_and_parts(paper):
    known = published(paper)
    assert known.title and known.arxiv.count(".") == 1
    assert all(math.isfinite(each["value"]) for each in known.figures.values())
    assert run.parts_of(paper) == importlib.import_module(f"shiftjax.reproduce.{paper}").PARTS


def test_unknown_parts_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"rate'.*there are .*rates"):
        run.parts_of("shift", ["rate"])


def test_a_value_without_its_source_is_refused(monkeypatch, tmp_path):
    folder = tmp_path / "published"
    folder.mkdir()
    monkeypatch.setattr(figures.resources, "files", lambda _: tmp_path)
    (folder / "made.yaml").write_text(
        "title: T\narxiv: '1.2'\nfigures: {one: {figure: 1, what: w, unit: s, value: 1}}"
    )
    with pytest.raises(ConfigError, match=r"made\.yaml: one lacks read"):
        published.__wrapped__("made")


def test_a_report_has_tables_pictures_and_rows(tmp_path):
    curve = Curve("by rate", "requests/s", "s", {"dp": [(1.0, 2.0), (2.0, 4.0)]})
    run.write({"shift": [figure(10.0, 12.0), figure(None, 3.0), curve]}, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "Shift Parallelism (arXiv 2509.16495)" in page
    assert "within 15%: 0 of 1, within 25%: 1, median error 20%; 1 of ours alone" in page
    names = {"shift-ours-over-published.svg", "shift-by-rate.svg", "figures.csv", "figures.jsonl"}
    assert names <= {each.name for each in tmp_path.iterdir()}
    written = (tmp_path / "reproduce.md").read_text()
    assert "| **+20%** |" in written
    assert "| 3 ms |" not in written  # nothing stands beside it
    assert "1 of ours alone" in written


def test_an_axis_of_many_sizes_is_logarithmic():
    for last, scale in ((9.0, "linear"), (10.0, "log")):
        (axes,) = run.lines(Curve("t", "x", "y", {"dp": [(1.0, 5.0), (last, 6.0)]})).axes
        assert (axes.get_xscale(), axes.get_yscale()) == (scale, "linear")
    (axes,) = run.lines(Curve("t", "s", "units", {"dp": [(0.0, 1.0), (60.0, 8.0)]})).axes
    assert axes.get_xscale() == "linear"
