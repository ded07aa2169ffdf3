"""What is still to come of a start, and when it will be complete, from the last one."""

import pytest

from serving.run.last_start import keep_last_start, plan_of, read_last_start
from serving.server.options import ServerOptions
from serving.server.start_phases import Phases
from shiftjax.config import EngineConfig

LAST = {"open": 1.0, "import JAX": 2.0, "weights": 10.0, "compile": 60.0, "warm up": 0.5}


@pytest.fixture
def config(tmp_path) -> EngineConfig:
    return EngineConfig.from_options(model="random:tiny", cache_dir=str(tmp_path))


def test_the_last_start_is_found_by_its_settings(config, tmp_path):
    assert read_last_start(config) == {}
    keep_last_start(config, LAST)
    assert read_last_start(config) == LAST
    other = EngineConfig.from_options(model="random:tiny", cache_dir=str(tmp_path), max_num_seqs=3)
    assert read_last_start(other) == {}
    keep_last_start(EngineConfig.from_options(model="random:tiny", cache_dir="none"), LAST)


@pytest.mark.parametrize("text", ["", "[]", "[1]", "{", '{"open": "x"}', "\x00", '{"open": null}'])
def test_what_cannot_be_read_is_no_guess(config, tmp_path, text):
    keep_last_start(config, LAST)
    (place,) = (tmp_path / "starts").iterdir()
    place.write_text(text)
    assert read_last_start(config) == {}


def test_a_start_says_what_comes_and_when_it_ends():
    now = [100.0]
    phases = Phases(lambda: now[0])
    plan = plan_of(EngineConfig(), ServerOptions())
    phases.plan(plan, LAST | {"first step": 0.1})
    assert [name for name, _ in phases.coming()] == list(plan)
    phases("open", 0, 1)
    now[0] += 1.0
    phases("weights", 0, 4)  # JAX was there already
    now[0] += 4.0
    assert phases.coming() == [("compile", 60.0), ("warm up", 0.5), ("first step", 0.1)]
    assert phases.end_seconds() == pytest.approx(6.0 + 60.6)
    now[0] += 1.0
    phases("weights", 1, 4)  # five seconds each: this start says it better
    assert phases.end_seconds() == pytest.approx(15.0 + 60.6)
    phases("try attention", 0, 1)  # not planned: what follows is still to come
    assert [name for name, _ in phases.coming()] == ["compile", "warm up", "first step"]
    phases("first step", 0, 1)
    assert phases.coming() == []
    phases.end()
    assert phases.end_seconds() is None


def test_without_a_last_start_no_end_is_told():
    phases = Phases()
    phases.plan(plan_of(EngineConfig(), ServerOptions(simulate="h200x8")), {})
    phases("open", 0, 1)
    assert phases.coming() == [("first step", None)]
    assert phases.end_seconds() is None
