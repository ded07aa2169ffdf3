"""Tables of published figures, and the bands that their errors make."""

import csv
from pathlib import Path

import pytest

from shiftjax.options import ConfigError
from shiftjax.sim import error_bands
from shiftjax.sim.error_bands import METRICS, band
from shiftjax.sim.published import COLUMNS, read_figures, replay_of, requests_of, runs_of

TABLES = Path(__file__).parents[2] / "benchmarks" / "published"
FIT, CHECK = (read_figures(TABLES / f"{name}.csv") for name in ("fit", "check"))


def test_no_source_is_fitted_and_checked():
    fitted, checked = ({figure.run.source for figure in table} for table in (FIT, CHECK))
    assert not fitted & checked
    assert len(FIT) + len(CHECK) >= 60


def test_every_checked_figure_is_in_the_bands():
    counts = [band(metric).figures for metric in METRICS]
    assert 30 <= sum(counts) <= len(CHECK)


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
