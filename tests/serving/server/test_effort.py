"""An effort becomes the variables that a chat template has for it, at a level that it knows."""

import pytest

from serving.server.effort import effort_variables

GPT_OSS = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
    "{{ 'Reasoning: ' + reasoning_effort }}<|channel|>"
)
SWITCH = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
NAMED = """{{ reasoning_effort if reasoning_effort in ['low', "high"] else 'max' }}"""
TWO = "{% if reasoning_effort not in ('none', 'high') %}{{ raise_exception('no') }}{% endif %}"


@pytest.mark.parametrize(
    ("source", "effort", "wanted"),
    [
        (GPT_OSS, "low", {"reasoning_effort": "low"}),
        (GPT_OSS, "none", {"reasoning_effort": "low"}),
        (GPT_OSS, "xhigh", {"reasoning_effort": "high"}),
        (SWITCH, "none", {"enable_thinking": False}),
        (SWITCH, "low", {"enable_thinking": True}),
        (NAMED, "medium", {"reasoning_effort": "high"}),
        (NAMED, "xhigh", {"reasoning_effort": "max"}),
        (NAMED, "none", {"reasoning_effort": "low"}),
        (TWO, "none", {"reasoning_effort": "none"}),
        (TWO, "low", {"reasoning_effort": "high"}),
        (SWITCH + NAMED, "none", {"enable_thinking": False}),
        (SWITCH + NAMED, "high", {"enable_thinking": True, "reasoning_effort": "high"}),
        ("{{ reasoning_effort }}", "minimal", {"reasoning_effort": "minimal"}),
        ("{{ messages }}", "low", {}),
        (GPT_OSS, "huge", {}),
        (GPT_OSS, None, {}),
        (None, "low", {}),
    ],
)
def test_variables_of_a_template(source, effort, wanted):
    assert effort_variables(effort, source) == wanted
