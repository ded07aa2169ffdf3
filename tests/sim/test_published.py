"""Tables of published figures, and the bands that their errors make."""

import csv
from pathlib import Path

import pytest

from shiftjax.options import ConfigError
from shiftjax.sim import error_bands
from shiftjax.sim.error_bands import METRICS, band
from shiftjax.sim.published import (
    COLUMNS,
    error_rows,
    read_figures,
    replay_of,
    requests_of,
    runs_of,
)
from shiftjax.sim.published import METRICS as FIGURES

TABLES = Path(__file__).parents[2] / "benchmarks" / "published"
BANDS = [0.6, 0.75]  # shares of the checked figures within 15% and within 25%
FIT, CHECK = (read_figures(TABLES / f"{name}.csv") for name in ("fit", "check"))


def test_no_source_is_fitted_and_checked():
    fitted, checked = ({figure.run.source for figure in table} for table in (FIT, CHECK))
    assert not fitted & checked
    assert len(FIT) + len(CHECK) >= 60


def test_every_checked_figure_is_in_the_bands():
    counts = [band(metric).figures for metric in METRICS]
    assert sum(counts) == len(CHECK)


@pytest.mark.parametrize("metric", METRICS)
def test_a_band_holds_two_thirds(metric):
    found = band(metric)
    assert found.figures - found.further >= 2 / 3 * found.figures
    assert str(found).startswith(f"+-{found.limit:.0%}: {found.further} of {found.figures}")


def test_a_system_without_figures_has_the_band_of_all():
    assert band("tpot", "no such system") == band("tpot")
    with pytest.raises(ValueError, match="metric must be one of ttft"):
        band("latency")


def test_the_narrowest_band_is_taken(monkeypatch, tmp_path):
    file = tmp_path / "bands.csv"
    errors = (0.01, -0.04, 0.12, 0.18, -0.19, 0.9)
    rows = [f"vllm,tpot,{error},x" for error in errors]
    file.write_text("\n".join(["system,metric,error,what", *rows]))
    monkeypatch.setattr(error_bands, "FILE", file)
    error_bands._errors.cache_clear()
    try:
        assert band("tpot", "vllm") == (0.2, 1, 6, "vllm")
    finally:
        error_bands._errors.cache_clear()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"metric": "speed"}, "metric"),
        ({"api": "speech"}, "an api is one of chat, completions"),
        ({"load": "often"}, "a load is one of offline, all, users, rate"),
        ({"value": "0"}, "a value above 0"),
        ({"input": "many"}, "invalid literal"),
    ],
)
def test_what_is_no_figure_is_refused_with_its_line(tmp_path, change, words):
    file = tmp_path / "table.csv"
    first = FIT[0]
    row = dict(first.run._asdict(), metric=first.metric, value=first.value) | change
    with file.open("w", encoding="utf-8", newline="") as out:
        csv.writer(out).writerows([COLUMNS, [row[name] for name in COLUMNS]])
    with pytest.raises(ConfigError, match=words) as error:
        read_figures(file)
    assert "table.csv:2" in str(error.value)


def test_lengths_that_vary_keep_their_means():
    run = next(run for run in runs_of(FIT) if run.cv)
    requests = requests_of(run)
    prompts = [each.num_prompt_tokens for each in requests]
    assert sum(prompts) / len(prompts) == pytest.approx(run.input, rel=0.01)
    assert max(prompts) < 7 * run.input


def test_users_of_a_closed_loop_find_a_long_run():
    run = next(run for run in runs_of(FIT) if run.load == "users:4")
    found = replay_of(run, 24)
    later = [each for each in found.requests if each.arrival > 0]
    assert len(later) == 20
    assert len({each.arrival for each in later}) > 10  # one by one, not all together
    ttft = [1e3 * each.ttft for each in later]
    assert FIGURES["ttft_mean_ms"](found) == pytest.approx(sum(ttft) / 20)


def test_users_of_equal_lengths_stay_in_step_where_the_client_starts_them_so():
    run = next(run for run in runs_of(CHECK) if run.load == "users:10")
    short = run._replace(output=20, requests=30)
    found = replay_of(short)
    assert len({round(each.arrival, 3) for each in found.requests}) == 7  # rounds of three steps
    apart = replay_of(short._replace(system="nim"))
    assert len({round(each.arrival, 3) for each in apart.requests}) == 15


def shares(rows):
    """Of figures within 15% and within 25%."""
    off = [abs(row["error"]) for row in rows]
    return [sum(error <= limit for error in off) / len(off) for limit in (0.15, 0.25)]


def recorded_errors():
    with error_bands.FILE.open(newline="") as file:
        return {row["what"]: float(row["error"]) for row in csv.DictReader(file)}


def some(figures, *words):
    return [figure for figure in figures if any(word in figure.run.label for word in words)]


@pytest.mark.costs(20)
def test_figures_that_nothing_was_fitted_to_are_as_near_as_is_said():
    """A part of the table that takes seconds; the bands have them all."""
    rows = list(error_rows(some(CHECK, "rate:8 ", "rate:16 ")))
    assert len(rows) == 8 and shares(rows) == [7 / 8, 1.0]
    recorded = recorded_errors()
    assert all(row["error"] == pytest.approx(recorded[row["what"]], abs=0.02) for row in rows)


@pytest.mark.costs(20)
def test_figures_that_constants_were_fitted_to_are_near():
    rows = list(error_rows(some(FIT, "offline (8)", "offline (32)", "tp=2, users:5 ", "rate:16 ")))
    assert len(rows) == 18
    within = shares(rows)
    assert within[0] >= 0.6 and within[1] >= 0.85


def test_what_is_recorded_is_within_the_bands():
    recorded = recorded_errors()
    assert set(recorded) == {f"{each.run.label}: {each.metric}" for each in CHECK}
    of_bursts = [error for what, error in recorded.items() if "glm" in what and "a100" in what]
    assert sum(abs(error) <= 0.25 for error in of_bursts) >= 11
    within = shares({"error": error} for error in recorded.values())
    assert within[0] >= BANDS[0] and within[1] >= BANDS[1]


@pytest.mark.costs(20)
@pytest.mark.parametrize(
    ("words", "limit"), [("128 in, 4 out", 0.05), ("1996 in, 100 out", 0.1)], ids=str
)
def test_bursts_of_chats_take_what_was_published(words, limit):
    """Of Qwen3-14B on A100: the front end's template, and decodes beside prompts."""
    chosen = [f for f in some(FIT, words) if f.run.model == "qwen3-14b" and "a100" in f.run.machine]
    rows = list(error_rows(chosen))
    assert len(rows) == 3
    assert all(abs(row["error"]) < limit for row in rows), rows


@pytest.mark.thorough
def test_nearly_all_figures_are_as_near_as_is_said():
    """But for the longest runs, whose models and servers have others."""
    short = [f for f in CHECK if f.run.requests * f.run.output < 400_000]
    assert len(short) >= 0.8 * len(CHECK)
    recorded = recorded_errors()
    for row in error_rows(short):
        assert row["error"] == pytest.approx(recorded[row["what"]], abs=0.02), row
