"""Targets of requests: what the settings say, whose they are, and when they are met."""

import math

import pytest

from shiftjax.config import EngineConfig
from shiftjax.options import ConfigError
from shiftjax.targets import NO_TARGETS, Target, Targets, make_targets, parse_classes


def test_classes_are_spelled_with_their_first_priority():
    found = parse_classes("1000:none/none, 1:2.5/0.2,-5:0.2/none")
    assert found == ((-5, Target(0.2)), (1, Target(2.5, 0.2)), (1000, Target()))


@pytest.mark.parametrize("text", ["1", "1:2", "1:2/3/4", "x:1/1", "1:0/1", "1:-1/1", "1:a/1", ""])
def test_what_is_no_class_is_refused(text):
    with pytest.raises(ValueError, match="must be PRIORITY:TTFT/TPOT"):
        parse_classes(text)


def test_a_priority_has_one_target():
    with pytest.raises(ValueError, match=r"got .1:3/0"):
        parse_classes("1:2/0.2,1:3/0.3")


def test_a_class_begins_at_its_priority():
    targets = make_targets(0.5, 0.05, "1:2/0.2,1000:none/none")
    whose = [targets.of(priority) for priority in (-3, 0, 1, 999, 1000, 1 << 20)]
    usual, slow = Target(0.5, 0.05), Target(2.0, 0.2)
    assert whose == [usual, usual, slow, slow, Target(), Target()]


def test_a_target_that_is_not_given_is_always_met():
    assert make_targets(None, None, None) == NO_TARGETS and NO_TARGETS.are_none
    assert not Targets(by_priority=((1, Target(1.0)),)).are_none
    assert Target().is_met(1e9, 1e9)
    assert Target(1.0, 0.1).is_met(1.0, None)
    assert not Target(1.0, 0.1).is_met(1.1, None)
    assert not Target(1.0, 0.1).is_met(0.5, 0.11)
    assert Target(1.0).is_met(1.0, math.inf)


def test_settings_come_to_targets():
    options = {"target_ttft": 1, "target_tpot": 0.05, "targets_by_priority": "1:none/1"}
    config = EngineConfig.from_options(**options)
    assert config.scheduler.targets == Targets(Target(1.0, 0.05), ((1, Target(tpot=1.0)),))
    with pytest.raises(ConfigError, match="targets_by_priority: must be PRIORITY:TTFT/TPOT"):
        EngineConfig.from_options(targets_by_priority="batch")


def test_the_names_of_before_are_told():
    with pytest.raises(ConfigError, match="it is now called target_ttft"):
        EngineConfig.from_options(ttft_target=1.0)
