"""What a start says of itself while it lasts."""

import logging
import time

import pytest

from serving.run.progress import shown_phases
from serving.server.errors import ServeError
from serving.server.metrics import Metrics
from serving.server.options import ServerOptions
from serving.server.service import Service
from serving.server.start_phases import Phases


class Clock:
    """Seconds, as a test says."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_phases_follow_each_other_and_come_back(clock):
    phases, times = Phases(clock), iter((2.0, 3.0, 4.0))
    assert phases.state() is None
    for name in ("open", "compile", "open"):
        phases(name, 0, 1)
        clock.now += next(times)
    phases.end()
    assert dict(phases.seconds) == {"open": 6.0, "compile": 3.0}
    assert phases.state() is None


def test_the_rest_of_a_phase_is_expected_from_what_is_done(clock):
    """It falls with time, but not below what the pieces after the next one take."""
    phases = Phases(clock)
    phases("open", 0, 1)
    clock.now += 1.0
    phases("compile", 0, 5)
    assert phases.state() == {
        **{"phase": "compile", "done": 0, "total": 5},
        **{"phase_seconds": 0.0, "seconds": 1.0, "expected_seconds": None},
    }
    clock.now += 20.0
    phases("compile", 2, 5)
    for waited, expected in ((0.0, 30.0), (4.0, 26.0), (100.0, 20.0)):
        clock.now += waited
        state = phases.state()
        assert state is not None
        assert state["expected_seconds"] == expected
    assert phases.words() == "compile, 2 of 5, 124 s so far, about 20 s left"
    clock.now += 1.0
    phases("compile", 5, 5)
    assert phases.words() == "compile, 5 of 5, 125 s so far"


def test_the_log_has_a_line_for_every_phase_and_one_now_and_then(clock, caplog, monkeypatch):
    monkeypatch.setattr("serving.run.progress.LOG_SECONDS", 0.01)
    phases = Phases(clock)
    with caplog.at_level(logging.INFO), shown_phases(phases):
        phases("weights", 0, 3)
        for _ in range(1000):
            if any("starting:" in line for line in caplog.messages):
                break
            time.sleep(0.01)
        clock.now += 2.0
        phases("weights", 3, 3)
        phases("first step", 0, 1)
        clock.now += 0.5
        phases.end()
    lines = [line for line in caplog.messages if "starting:" not in line]
    assert lines == [
        "started: weights, 3 of 3 in 2.0 s",
        "started: first step, 0.5 s",
        "ready after 2.5 s",
    ]
    assert "starting: weights, 0 of 3, 0 s so far" in caplog.messages


def test_metrics_have_the_start_before_there_is_an_engine(clock):
    phases = Phases(clock)
    metrics = Metrics(start=phases)
    phases("open", 0, 1)
    clock.now += 2.0
    phases("compile", 1, 4)
    text = metrics.text().decode()
    assert 'shiftjax:start_phase_seconds{phase="open"} 2.0' in text
    assert 'shiftjax:start_phase_progress{phase="compile"} 0.25' in text
    phases.end()
    assert "start_phase_progress{" not in metrics.text().decode()


def test_whoever_comes_too_early_hears_what_the_start_does():
    service = Service(ServerOptions())
    service.phases("compile", 1, 2)
    with pytest.raises(ServeError, match="still loading its model: compile, 1 of 2, 0 s so far"):
        service.model_named(None)
