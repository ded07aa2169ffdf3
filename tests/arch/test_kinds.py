"""Which layers attend in which way, of whole models and of stages."""

import pytest

from shiftjax.arch.config import stages_of
from shiftjax.arch.presets import PRESETS

GEMMA = PRESETS["tiny-gemma3"]  # five layers with a window, then one without


@pytest.mark.parametrize("pp", [2, 3, 4, 6])
def test_stages_have_the_kinds_of_their_layers_and_the_windows_of_the_model(pp):
    stages = stages_of(GEMMA, pp)
    assert sum((stage.kinds for stage in stages), ()) == GEMMA.kinds
    assert {stage.windows for stage in stages} == {GEMMA.windows} == {(16, None)}


def test_kinds_repeat_over_the_layers():
    kinds = PRESETS["gemma-3-1b"].kinds
    assert [i for i, kind in enumerate(kinds) if kind.sliding_window is None] == [5, 11, 17, 23]
    assert [theta for theta, *_ in PRESETS["gemma-3-1b"].ropes] == [1e4, 1e6]
